"""The user's own advantages, tracker kinds and criteria: as good as SPO's, and refused with one line before a start."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from common import parts
from common.config import Config
from common.errors import UserError
from common.parts import find_parts
from common.streams.broker import Broker
from launcher.checks.rewards import check_parts
from sampler.advantages import methods
from sampler.values.kinds import KINDS
from sampler.values.selection import CRITERIA
from tests.support.documented import blocks, modules
from tests.support.plugin_package import announce
from tests.support.sampler import NoopGenerator, NoopLearner, make_config
from tests.support.sampler_driving import audited, committed_counts, drive, start, started

ROOT = Path(__file__).parents[3]


def z_score(rewards: Any, baselines: Any, groups: Any, tokens: Any, clip: float) -> Any:
    raw = rewards - baselines
    deviation = raw.std(ddof=1)
    return ((raw - raw.mean()) / (deviation + 1e-8)).clip(-clip, clip) if np.ptp(raw) else np.zeros(len(raw))


def compared(rewards: Any, baselines: Any, groups: Any, tokens: Any) -> Any:
    means = np.array([rewards[groups == group].mean() for group in groups])
    return (rewards - means) * 4 / 3


OWN: dict[str, Any] = {
    "z_score": z_score,
    "compared": compared,
    "beta": lambda alpha, beta, reward, rho, step=1.0: (rho * alpha + step * reward, rho * beta + step - reward),
    "std": lambda values, counts, visits, rng: np.sqrt(values * (1 - values)),
    "thompson": lambda values, counts, visits, rng: (
        (drawn := rng.beta(np.maximum(values * counts, 1e-3), np.maximum((1 - values) * counts, 1e-3))),
        np.sqrt(drawn * (1 - drawn)),
    )[1],
    "text": "no function",
    "few": lambda rewards, baselines: rewards,
    "summed": lambda *arrays: arrays[0].sum(),
    "words": lambda *arrays: ["high"] * len(arrays[0]),
    "divided": lambda rewards, *_: rewards if np.ptp(rewards) else np.full(len(rewards), np.inf),
    "broken": lambda *_: {}["missing\nkey"],
    "negative": lambda *arrays: -arrays[0],
    "one": lambda alpha, beta, reward, rho: alpha,
    "nothing": lambda alpha, beta, reward, rho: (0.0, 0.0),
}


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_parts")
    vars(module).update(OWN)
    monkeypatch.setitem(sys.modules, "own_parts", module)


def sections(part: parts.Part, name: str | None, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """The configuration that names a part, as sections of `make_config`."""
    *path, key = part.key.split(".")
    tree: dict[str, Any] = {key: name, f"{key}_options": options or {}}
    for section in reversed(path):
        tree = {section: tree}
    return tree


def outcome(broker: Broker, folder: Path, tree: dict[str, Any], method: dict[str, Any]) -> tuple[Any, ...]:
    """Batches and committed counts of a whole run that a second sampler continues."""
    algorithm = method | tree.get("algorithm", {})
    tracker = {"prior": "paper"} | tree.get("sampler", {}).get("tracker", {})
    sampler: dict[str, Any] = {"batch_size": 8, "max_staleness": 0, "drift": {"mode": "ledger"}}
    sampler |= tree.get("sampler", {}) | {"tracker": tracker, "advantage": {"clip": 1.5}}
    run = {"steps": 4, "deterministic": True}
    first, generator, learner = started(broker, folder, sampler=sampler, algorithm=algorithm, run=run)
    for _ in range(3):
        generator.work()
        generator.version = learner.version + learner.work()
        first.round()
    first.ledger.release()
    drive(start(first.config, broker), generator, learner)
    audited(broker, first.config)
    return [batch.model_dump() for batch in learner.batches], committed_counts(broker)


SAME: dict[str, tuple[parts.Part, str | None, str, dict[str, Any], dict[str, Any]]] = {
    "advantage": (parts.ADVANTAGE, None, "own_parts:z_score", {"clip": 1.5}, {}),
    "advantage in groups": (parts.ADVANTAGE, None, "own_parts:compared", {}, {"method": "rloo", "group_size": 4}),
    "kind": (parts.KIND, "beta", "own_parts:beta", {"step": 1.0}, {}),
    "criterion": (parts.CRITERION, "std", "own_parts:std", {}, {}),
    "random criterion": (parts.CRITERION, "thompson", "own_parts:thompson", {}, {}),
}


@pytest.mark.parametrize("case", SAME)
def test_spos_own_written_as_a_users_function_gives_the_same_run(case: str, broker: Broker, tmp_path: Path) -> None:
    part, builtin, own, options, method = SAME[case]
    runs = []
    for number, named in enumerate([(builtin, {}), (own, options)]):
        broker.redis.flushall()
        folder = tmp_path / str(number)
        folder.mkdir()
        runs.append(outcome(broker, folder, sections(part, *named), method))
    assert runs[0] == runs[1]
    assert len(runs[0][0]) == 4


FUNCTION = "a function of (rewards, baselines, groups, tokens)"


@pytest.mark.parametrize(
    ("part", "name", "options", "words"),
    [
        (parts.ADVANTAGE, "own", {}, ["algorithm.advantage = 'own' is unknown", "spo, grpo", "module:object"]),
        (parts.ADVANTAGE, "no_such_module:f", {}, ["cannot import no_such_module"]),
        (parts.ADVANTAGE, "own_parts:text", {}, [f"is not {FUNCTION}"]),
        (parts.ADVANTAGE, "own_parts:few", {}, [f"must be {FUNCTION}, followed"]),
        (parts.ADVANTAGE, "own_parts:z_score", {}, ["algorithm.advantage_options", "'clip'", "allowed: clip"]),
        (parts.ADVANTAGE, "own_parts:z_score", {"clip": "far"}, ["clip = 'far'"]),
        (parts.ADVANTAGE, "own_parts:summed", {}, ["finite numbers of the shape [4]; it returned the shape []"]),
        (parts.ADVANTAGE, "own_parts:words", {}, ["finite numbers of the shape [4]; it returned list"]),
        (parts.ADVANTAGE, "own_parts:divided", {}, ["finite numbers of the shape [4]; it returned inf"]),
        (parts.ADVANTAGE, "own_parts:broken", {}, ["'own_parts:broken' failed: KeyError"]),
        (parts.KIND, "gamma", {}, ["sampler.tracker.kind = 'gamma' is unknown", "beta, or"]),
        (parts.KIND, "beta", {"step": 1}, ["sampler.tracker.kind_options: 'beta' takes none; remove step"]),
        (parts.KIND, "own_parts:one", {}, ["finite numbers of the shape [2]"]),
        (parts.KIND, "own_parts:nothing", {}, ["returned [0.0, 0.0]", "not both 0"]),
        (parts.CRITERION, "stdd", {}, ["sampler.selection.criterion = 'stdd' is unknown; did you mean std?"]),
        (parts.CRITERION, "own_parts:negative", {}, ["returned -1; scores must be >= 0"]),
        (parts.CRITERION, "own_parts:summed", {}, ["finite numbers of the shape [4]"]),
    ],
)
def test_a_part_that_cannot_be_used_is_refused_before_a_start(
    part: parts.Part, name: str, options: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    config = make_config(tmp_path, **sections(part, name, options))
    with pytest.raises(UserError) as refusal:
        check_parts(config)
    message = str(refusal.value)
    assert [word for word in words if word not in message] == []


def test_a_part_that_fails_later_ends_the_run_with_one_line(broker: Broker, tmp_path: Path) -> None:
    calls: list[int] = []

    def tired(*arrays: np.ndarray) -> np.ndarray:
        calls.append(len(arrays[0]))
        return arrays[0] if len(calls) < 4 else arrays[0][:1]

    vars(sys.modules["own_parts"])["tired"] = tired
    sampler, generator, learner = started(broker, tmp_path, algorithm={"advantage": "own_parts:tired"})
    with pytest.raises(UserError, match=r"'own_parts:tired' must return .* shape \[8\]; it returned the shape \[1\]"):
        drive(sampler, generator, learner)


def test_names_and_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path)
    assert tuple(methods(config.sampler.advantage)) == ("spo", "none", "grpo", "dr_grpo", "rloo")
    assert {*methods(config.sampler.advantage)} == {*parts.ADVANTAGE.builtin}
    assert (tuple(KINDS), tuple(CRITERIA)) == (parts.KIND.builtin, parts.CRITERION.builtin)
    announce(tmp_path, monkeypatch, {"spo.trackers": {"ours": "own_parts:beta"}})
    named = make_config(tmp_path, **sections(parts.KIND, "ours"))
    find_parts(named)
    check_parts(named)


def test_the_documented_parts_train(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ranks.py", "average.py", "bonus.py"):
        (tmp_path / name).write_text(modules("extending.md")[name])
    monkeypatch.syspath_prepend(tmp_path)
    titles = ("An advantage", "A tracker's kind", "A criterion of selection")
    pages: list[Any] = [yaml.safe_load(*blocks("extending.md", title, "yaml")) for title in titles]
    sampler = {"batch_size": 8, **pages[1]["sampler"], **pages[2]["sampler"]}
    learner = run_through(broker, make_config(tmp_path, algorithm=pages[0]["algorithm"], sampler=sampler))
    advantages = np.array([batch.advantages for batch in learner.batches])
    assert (advantages.min(), advantages.max()) == (-1.0, 1.0)
    assert all(a + b == pytest.approx(1.0) for a, b in committed_counts(broker).values())


def test_the_example_balances_both_sides(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    config = make_config(tmp_path, algorithm={"advantage": "advantage:balanced", "advantage_options": {"force": 0.25}})
    for batch in run_through(broker, config).batches:
        advantages = np.array(batch.advantages)
        sides = [advantages[advantages > 0].sum(), -advantages[advantages < 0].sum()]
        assert sides == [pytest.approx(0.25 * len(advantages))] * 2


def run_through(broker: Broker, config: Config) -> NoopLearner:
    check_parts(config)
    generator, learner = NoopGenerator(broker), NoopLearner(broker)
    drive(start(config, broker), generator, learner)
    return learner
