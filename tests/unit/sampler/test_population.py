"""The prequential prior: a baseline that hardly ever hurts, its state, its traits, and the weights it gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from common.config import DataConfig, DataSource, RunTrackerConfig, TrackerConfig
from common.errors import UserError
from sampler.prompts.prompt_set import PromptSet, load_prompts
from sampler.tracker import ValueTracker
from sampler.values.population import BLOCK, GRID, Features, Population, PromptTraits
from sampler.values.selection import CRITERIA
from sampler.values.states import write_states
from sampler.values.traits import NGRAMS, count_ngrams, prompt_traits
from tests.support.sampler import flip_in_directory, write_rows

LOG: Any = structlog.get_logger()
BATCH = 128


def simulate(difficulty: np.ndarray, traits: PromptTraits | None = None, steps: int = 60) -> dict[str, float]:
    """Variance of each tracker's advantages over that of the rewards; prompts come in rounds.

    The success rate of a prompt at step t is logistic(-2 + 0.08 t + difficulty).
    """
    ids, rng = [str(i) for i in range(len(difficulty))], np.random.default_rng(0)
    trackers = {
        "paper": ValueTracker(ids, TrackerConfig()),
        "population": ValueTracker(ids, RunTrackerConfig()),
        "traits": ValueTracker(ids, RunTrackerConfig(), traits=traits),
    }
    if traits is None:
        del trackers["traits"]
    squares, without = dict.fromkeys(trackers, 0.0), 0.0
    order = np.empty(0, np.int64)
    for step in range(steps):
        if len(order) < BATCH:
            order = np.concatenate([order, rng.permutation(len(difficulty))])
        prompts, order = order[:BATCH], order[BATCH:]
        rates = 1 / (1 + np.exp(-(-2 + 0.08 * step + difficulty[prompts])))
        rewards = (rng.random(BATCH) < rates).astype(float)
        without += rewards.var()
        for name, tracker in trackers.items():
            pairs = zip(prompts.tolist(), rewards.tolist(), strict=True)
            squares[name] += np.var([reward - tracker.update(str(i), reward, rho=0.93) for i, reward in pairs])
    return {name: total / without for name, total in squares.items()}


@pytest.mark.parametrize(("sigma", "prompts"), [(0.0, 512), (1.0, 4096), (4.0, 512)])  # 15 or 1.9 visits a prompt
def test_the_baseline_is_never_worse_than_none_or_the_papers(sigma: float, prompts: int) -> None:
    ratios = simulate(sigma * np.random.default_rng(1).standard_normal(prompts))
    assert ratios["population"] <= min(1.02, ratios["paper"] + 0.01)


def families(column: bool, features: str | None) -> tuple[PromptTraits, np.ndarray]:
    """Prompts of eight families that differ in difficulty, and each prompt's difficulty; `features` text, or state."""
    rng = np.random.default_rng(2)
    family = np.arange(4096) % 8
    words = ("add", "multiply", "sort the letters of", "count bits of", "spell backwards", "divide", "square", "hash")
    rows = None
    if features == "text":
        rows = np.stack([count_ngrams(f"Please {words[f]} {rng.integers(10_000)}.") for f in family.tolist()])
    elif features == "state":
        vectors = rng.normal(size=(8, 16))[family] + rng.normal(size=(4096, 16))
        rows = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16)
    traits = PromptTraits(
        family if column else None,
        words if column else (),
        None if features is None or rows is None else Features(features, rows),
    )
    return traits, np.linspace(-3, 3, 8)[family]


@pytest.mark.parametrize(("column", "features"), [(True, None), (True, "text"), (False, "state")])
def test_traits_help_before_a_prompt_was_ever_answered(column: bool, features: str | None) -> None:
    traits, difficulty = families(column, features)
    ratios = simulate(difficulty, traits, steps=40)
    # An oracle of the families' success rates comes to 0.68 here.
    assert ratios["traits"] < 0.76 < 0.95 < min(ratios["population"], ratios["paper"])


def test_useless_traits_do_no_harm() -> None:
    rng = np.random.default_rng(3)
    ngrams = rng.integers(0, 3, (512, NGRAMS)).astype(np.uint8)
    traits = PromptTraits(rng.integers(0, 50, 512), tuple(map(str, range(50))), Features("text", ngrams))
    assert simulate(np.zeros(512), traits)["traits"] <= 1.02


def choose(population: Population, k: float) -> None:
    population.load_state_dict(population.state_dict() | {"population_errors": (k != GRID).astype(float)[None]})


def test_a_prediction_comes_before_its_reward() -> None:
    others = [f"b{i}" for i in range(BLOCK - 1)]
    tracker = ValueTracker(["a", *others], RunTrackerConfig())
    population = tracker.population
    assert population is not None
    for prompt_id in others:
        assert tracker.update(prompt_id, 0.0, rho=0.9) == 0.5  # the mean is not known yet
    assert tracker.update("a", 1.0, rho=0.9) == 0.5
    mean, number = population.total[0] / population.total[1], tracker.alpha[0] - tracker.prior[0]
    assert 0 < mean < 2 / BLOCK
    for k in (1.0, 8.0, math.inf):
        choose(population, k)
        expected = mean if k == math.inf else (1.0 + k * mean) / (number + k)
        assert tracker.value("a") == pytest.approx(expected)
        assert tracker.values()[0] == pytest.approx(expected)


def test_offline_scores_enter_as_rewards_of_the_prompt() -> None:
    tracker = ValueTracker(["a", "b"], RunTrackerConfig(rho_min=0.875))
    tracker.initialize({"a": [1, 1, 1, 0]})
    size = 8.0
    assert tracker.alpha[0] - tracker.prior[0] == pytest.approx(size * 3 / 5)
    assert tracker.beta[0] - tracker.prior[0] == pytest.approx(size * 1 / 5)
    assert tracker.population is not None
    choose(tracker.population, 0.5)
    assert tracker.value("a") == pytest.approx((size * 3 / 5 + 0.5 * 0.5) / (size * 4 / 5 + 0.5))


def random_population(traits: PromptTraits, rewards: int) -> Population:
    rng, population = np.random.default_rng(4), Population(traits)
    for _ in range(rewards):
        i = int(rng.integers(len(traits.groups))) if traits.groups is not None else 0
        population.learn(i, 1.5, 2.0, float(rng.random() < 0.3))
    return population


def test_the_state_comes_back_exactly_however_often_it_is_read() -> None:
    traits, _ = families(column=True, features="text")
    population, often = random_population(traits, 300), Population(traits)
    often.unpack(population.pack())
    for n in range(2 * BLOCK + 7):
        arguments = (n % 100, 0.7, 1.9 * (n % 3), float(n % 5 == 0))
        assert often.learn(*arguments) == population.learn(*arguments)
        often.pack()
    assert often.chosen == population.chosen
    assert often.pack() == population.pack()
    other = Population(PromptTraits())
    other.unpack(population.pack())
    assert other.pack() == Population(PromptTraits()).pack(), "a state of other traits is left out"


def test_a_checkpoint_serves_other_prompts_of_its_groups() -> None:
    traits = PromptTraits(np.array([0, 1, 2]), ("easy", "hard", "odd"))
    population = random_population(traits, 100)
    successor = Population(PromptTraits(np.array([0, 1]), ("hard", "new")))
    successor.load_state_dict(population.state_dict())
    assert successor.by_group[0].tolist() == population.by_group[1].tolist()
    assert successor.by_group[1].tolist() == [0.0, 0.0]
    assert successor.chosen == population.chosen


def of_posterior(a: float, b: float) -> float:
    return math.exp(math.lgamma(a + 0.5) + math.lgamma(b + 0.5) - math.lgamma(a) - math.lgamma(b) - math.log(a + b))


SPREAD: dict[Any, Callable[[float, float], float]] = {
    "std": lambda a, b: math.sqrt(a * b) / (a + b),
    "uniform": lambda a, b: 1.0,
    "posterior": of_posterior,
}


def test_a_prompts_weight_follows_its_spread() -> None:
    alpha, beta = np.array([[0.5, 0.5], [0.01, 3.0], [7.0, 1.0], [20.0, 5.0], [8.0, 8.0]]).T
    rng = np.random.default_rng(0)
    for criterion, expected in SPREAD.items():
        spreads = CRITERIA[criterion](alpha / (alpha + beta), alpha + beta, alpha, rng)
        assert spreads.tolist() == pytest.approx(list(map(expected, alpha.tolist(), beta.tolist())), rel=1e-8)
    drawn = CRITERIA["thompson"](np.full(20_000, 2 / 7), np.full(20_000, 7.0), alpha, rng)
    assert drawn.mean() == pytest.approx(of_posterior(2.0, 5.0), rel=0.01)
    assert drawn.std() > 0.05


def make_prompts(folder: Path, rows: list[dict[str, Any]]) -> PromptSet:
    path = write_rows(folder / "data.jsonl", *({"prompt": f"p{i}", "answer": "1"} | row for i, row in enumerate(rows)))
    return load_prompts(DataConfig(train=str(path)).sources("train"), LOG)


def test_groups_are_named_by_a_column_or_by_several_sources(tmp_path: Path) -> None:
    prompts = make_prompts(tmp_path, [{"level": 2}, {"level": "easy"}, {"level": 2}])
    traits = prompt_traits(prompts, RunTrackerConfig(group_column="level"), LOG)
    assert traits.group_names == ("2", "easy")
    assert traits.groups is not None
    assert traits.groups.tolist() == [0, 1, 0]
    for name in ("easy", "hard"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "p", "answer": "1"}\n{"prompt": "q", "answer": "2"}\n')
    data = DataConfig(train=[DataSource(path=str(tmp_path / f"{name}.jsonl")) for name in ("hard", "easy")])
    traits = prompt_traits(load_prompts(data.sources("train"), LOG), RunTrackerConfig(), LOG)
    assert traits.group_names == ("easy", "hard")
    assert traits.groups is not None
    assert traits.groups.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"level": 1}, {}], r"line 2 has no such column; its columns are none but prompt and answer"),
        ([{"level": 1}, {"level": None}], r"line 2 has None there, which is neither text nor a number"),
        ([{"task": 1}], r"'level'.*line 1 has no such column; its columns are task"),
        ([{"level": i} for i in range(4097)], r"'level' has 4,097 different values, and at most 4,096"),
    ],
)
def test_a_column_that_makes_no_groups_is_refused(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    prompts = make_prompts(tmp_path, rows)
    with pytest.raises(UserError, match=message):
        prompt_traits(prompts, RunTrackerConfig(group_column="level"), LOG)


VECTORS = np.array([[0.6, 0.8], [1.0, 0.0]], np.float16)


def write_arrays(path: Path, **arrays: np.ndarray) -> None:
    np.savez(path, **({"ids": np.array([b"a", b"b"]), "states": VECTORS} | arrays))  # type: ignore[arg-type]


def write_single_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, VECTORS)


def write_encrypted(path: Path) -> None:
    write_arrays(path)
    flip_in_directory(path, 8, 1)


def write_unknown_method(path: Path) -> None:
    write_arrays(path)
    flip_in_directory(path, 10, 99)


def test_states_are_found_by_the_prompts_ids(tmp_path: Path) -> None:
    prompts, path = make_prompts(tmp_path, [{}, {}, {}]), tmp_path / "new" / "states.npz"
    write_states(path, ["another", *prompts.ids[:0:-1]], np.stack([VECTORS[0], *VECTORS]))
    traits = prompt_traits(prompts, RunTrackerConfig(prompt_states=str(path)), LOG)
    assert traits.features is not None
    assert traits.features.name == "state"
    expected = [[0.0, 0.0], VECTORS[1].tolist(), VECTORS[0].tolist()]
    assert [traits.features[i].tolist() for i in range(3)] == expected
    assert traits.features.times(np.array([1.0, 2.0])).tolist() == pytest.approx([0.0, 1.0, 2.2], abs=1e-3)
    assert [file.name for file in path.parent.iterdir()] == ["states.npz"]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "does not exist; `spo values states CONFIG --output .*` writes it"),
        (lambda path: path.write_bytes(b"no archive"), "is not a file of `spo values states`"),
        (Path.mkdir, "cannot be read: Is a directory"),
        (write_single_array, "is not a file of"),
        (write_encrypted, "is not a file of"),
        (write_unknown_method, "is not a file of"),
        (lambda path: np.savez(path, states=VECTORS), "is not a file of"),
        (lambda path: np.savez(path, ids=np.array([None]), states=VECTORS), "is not a file of"),
        (lambda path: write_arrays(path, states=VECTORS[:1]), "it needs finite states"),
        (lambda path: write_arrays(path, states=VECTORS.astype(float)), "it needs finite states"),
        (lambda path: write_arrays(path, states=VECTORS + np.float16(np.nan)), "it needs finite states"),
        (write_arrays, "has 2 prompts, but none of data.train; make it with the same data"),
    ],
    ids=[
        "gone",
        "garbage",
        "folder",
        "one array",
        "encrypted",
        "unknown method",
        "no ids",
        "pickled",
        "too few",
        "float64",
        "nan",
        "other data",
    ],
)
def test_a_file_without_states_of_prompts_is_refused(tmp_path: Path, write: Callable[..., Any], message: str) -> None:
    write(path := tmp_path / "states.npz")
    with pytest.raises(UserError, match=rf"^sampler\.tracker\.prompt_states = .*{message}"):
        prompt_traits(make_prompts(tmp_path, [{}]), RunTrackerConfig(prompt_states=str(path)), LOG)


def test_numbers_of_the_same_length_look_alike() -> None:
    texts = ("3 + 17 = ?", "8 + 42 = ?", "3 + 170 = ?")
    short, alike, longer = (count_ngrams(text).tolist() for text in texts)
    assert short == alike != longer
    assert count_ngrams("ab").sum() == 0
    assert count_ngrams("x" * 10_000).max() == 255
