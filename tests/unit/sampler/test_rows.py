"""Sources by name: known sets, Hugging Face datasets, reasoning-gym; files of scores, given to the tracker."""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from common import gym_families
from common.config import DataConfig, TrackerConfig
from common.config.data import KNOWN_SETS, misspelt_set
from common.errors import UserError
from common.gym_families import installed_families, score_answer
from sampler.prompts.gym_rows import GymRows
from sampler.prompts.prompt_set import PromptSet, load_prompts
from sampler.prompts.rows import open_rows
from sampler.scores import apply_initial_values, prompt_key, read_scores, recipe_key
from sampler.tracker import ValueTracker
from tests.support.golden import GOLDEN
from tests.support.sampler import sent

datasets = pytest.importorskip("datasets")

CHAT = [{"content": "Solve step by step.\n\nWhat is 17 + 17?", "role": "user"}]
TRUTH = {"ground_truth": "34", "style": "r"}
DAPO = {"data_source": "math_dapo", "ability": "MATH", "extra_info": {"index": "9a9b6eb4"}}
# A row of each set, as its card describes it, and what must be read from it.
SETS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "dapo-math-17k": ({"prompt": CHAT, "reward_model": TRUTH, **DAPO}, CHAT, "34"),
    "dapo-math-17k-processed": ({"prompt": "17 + 17?", "solution": "34", "reward_model": TRUTH}, "17 + 17?", "34"),
    "aime24": ({"ID": "2024-I-1", "Problem": "Find $m+n$.", "Solution": "...", "Answer": 204}, "Find $m+n$.", 204),
    "aime25": ({"id": 0, "problem": "Find it.", "answer": "70", "solution": "...", "year": "2025"}, "Find it.", "70"),
    "beyondaime": ({"problem": "Count them.", "answer": 7}, "Count them.", 7),
    "brumo25": ({"problem_idx": 1, "problem": "How far?", "answer": "9", "problem_type": ["A"]}, "How far?", "9"),
    "hmmt25": ({"problem_idx": 1, "problem": "Find $n$.", "answer": "3", "problem_type": ["N"]}, "Find $n$.", "3"),
    "gsm8k": ({"question": "How many?", "answer": "She sold <<48/2=24>>24.\n#### 1,072"}, "How many?", "1072"),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that datasets are looked for in by their names, in place of the hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    (tmp_path / "hub").mkdir()
    monkeypatch.chdir(tmp_path / "hub")
    return tmp_path / "hub"


def publish(hub: Path, path: str, row: dict[str, Any], split: str, config: str | None) -> None:
    """A dataset as it lies on the hub: Parquet, and a card that names configurations and splits."""
    folder = hub / path
    (folder / "data").mkdir(parents=True)
    datasets.Dataset.from_list([row]).to_parquet(folder / "data" / f"{split}.parquet")
    datasets.Dataset.from_list([{"other": 1}]).to_parquet(folder / "data" / "other.parquet")
    card = ["---", "configs:"]
    for name, file in ((config or "default", split), ("other", "other")):
        card += [f"- config_name: {name}", "  data_files:", f"  - split: {split}", f"    path: data/{file}.parquet"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))


def read(data: dict[str, Any]) -> PromptSet:
    return load_prompts(DataConfig.model_validate(data).sources("train"), structlog.get_logger())


@pytest.mark.parametrize("name", KNOWN_SETS)
def test_a_known_set_is_read_by_name_and_a_copy_by_its_format(hub: Path, name: str) -> None:
    row, prompt, answer = SETS[name]
    known = KNOWN_SETS[name]
    publish(hub, known.path, row, known.train_split, known.config)
    datasets.Dataset.from_list([row]).to_parquet(hub / "copy.parquet")
    datasets.DatasetDict({"train": datasets.Dataset.from_list([row])}).save_to_disk(hub / "saved")
    for train in (name, [{"path": "copy.parquet", "format": name}], [{"path": "saved", "format": name}]):
        prompts = read({"train": train})
        (task,) = sent(prompts)
        assert (task.prompt, task.answer, task.row) == (prompt, answer, prompts[0].row)


def test_a_row_without_the_mark_has_no_answer(tmp_path: Path) -> None:
    answers = ("just 3", "#### 4", "5 ####")
    rows = [{"question": answer, "answer": answer} for answer in answers]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "copy.parquet")
    prompts = read({"train": [{"path": str(tmp_path / "copy.parquet"), "format": "gsm8k"}]})
    assert [prompts[i].answer for i in range(len(prompts))] == ["4"]


def test_a_configuration_and_a_split_are_chosen_by_keys(hub: Path) -> None:
    publish(hub, "org/set", {"prompt": "a", "answer": "1"}, "validation", "hard")
    source = {"path": "org/set", "config": "hard", "split": "validation"}
    flat = {"train": [{"path": "org/set", "split": "validation"}], "config": "hard"}
    assert read(flat)[0].prompt == read({"train": [source]})[0].prompt == "a"
    with pytest.raises(UserError, match=r"dataset org/set, configuration 'hrad' .*hard.*other"):
        read(flat | {"config": "hrad"})
    with pytest.raises(UserError, match=r"split 'test'"):
        read({"train": [source | {"split": "test"}]})


def test_a_dataset_without_rows_or_split_is_one_line(hub: Path) -> None:
    (hub / "org/none").mkdir(parents=True)
    empty = datasets.Dataset.from_dict({"prompt": [], "answer": []})
    full = datasets.Dataset.from_dict({"prompt": ["a"], "answer": ["b"]})
    empty.to_parquet(hub / "org/none/train.parquet")
    datasets.DatasetDict({"train": full, "empty": empty}).save_to_disk(hub / "set")
    for data, words in (
        ({"train": "org/none"}, r"dataset org/none \(split 'train'\) cannot be loaded"),
        ({"train": "org/none/train.parquet"}, r"data\.train: no prompts in org/none/train\.parquet: it is empty"),
        ({"train": [{"path": "set", "split": "test"}]}, r"has no split 'test'; there are train, empty"),
        ({"train": [{"path": "set", "split": "empty"}]}, r"dataset set: .*empty has no rows"),
    ):
        with pytest.raises(UserError, match=words):
            read(data)


def test_folders_of_files_and_of_saved_configurations_are_read(hub: Path) -> None:
    rows = datasets.Dataset.from_list([{"prompt": "saved", "answer": "1"}])
    datasets.DatasetDict({"train": rows}).save_to_disk(hub / "set" / "socratic")
    assert open_rows("set", "train", config="socratic")[0]["prompt"] == "saved"
    (hub / "files").mkdir()
    (hub / "files" / "train.jsonl").write_text('{"prompt": "x", "answer": "y"}\n{"prompt": "z", "answer": ""}\n')
    prompts = read({"train": "files"})
    assert (len(prompts), prompts[0].prompt) == (1, "x")


@pytest.mark.parametrize(("name", "near"), [("gsm-8k", "gsm8k"), ("AIME24", "aime24")])
def test_a_name_near_a_known_one_is_refused_with_the_nearest(hub: Path, name: str, near: str) -> None:
    with pytest.raises(UserError, match=rf"{name!r} is not a file.*did you mean {near}\?"):
        read({"train": name})
    (hub / name).mkdir()
    for other in (name, "gsm8k", "org/gsm-8k", "gsm-8k.jsonl", "squad"):
        assert misspelt_set(other) is None, "a folder of that name is meant, or another set"


def gym(family: str, split: str = "train", **options: Any) -> list[dict[str, Any]]:
    rows = open_rows(f"reasoning_gym:{family}", split, options)
    items = [rows[i] for i in range(len(rows))]
    assert items == list(rows)
    return items


def test_an_item_has_a_prompt_an_answer_and_its_verifiers_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in gym("chain_sum", size=5, min_terms=3, max_terms=3, max_digits=1):
        expression = row["prompt"].partition(": ")[2].removesuffix(" =")
        assert len(expression.split()) == 5
        assert row["answer"] == str(eval(expression))
        assert score_answer("chain_sum", row["answer"], json.loads(row["entry"])) == 1.0
        assert score_answer("chain_sum", "0.5", json.loads(row["entry"])) < 1.0
    monkeypatch.setattr(installed_families()["chain_sum"][0], "score_answer", lambda *_: math.nan)
    assert score_answer("chain_sum", row["answer"], json.loads(row["entry"])) == 0
    (row,) = gym("decimal_arithmetic", size=1, min_num_decimal_places=5, max_num_decimal_places=5, precision=12)
    assert json.loads(row["entry"])["options"]["max_num_decimal_places"] == 5


def test_seeds_and_splits_have_items_of_their_own() -> None:
    both = [(split, seed) for split in ("train", "test") for seed in (0, 1)]
    sets = [{row["prompt"] for row in gym("chain_sum", split, size=50, min_terms=6, seed=seed)} for split, seed in both]
    assert len(set().union(*sets)) == 200


def test_the_prompts_of_a_run_can_come_from_a_family() -> None:
    prompts = read({"train": "reasoning_gym:chain_sum", "options": {"size": 80, "min_terms": 4}})
    assert len(prompts) == 80
    first = sent(prompts)[0]
    assert first.prompt == gym("chain_sum", size=80, min_terms=4)[0]["prompt"]
    assert first.row == prompts[0].row
    assert set(first.row) == {"family", "entry"}


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("chain_sun", {}, r"no family 'chain_sun'; the nearest of its \d+: chain_sum$"),
        ("composite", {}, "'composite' .* cannot be used: it mixes other families"),
        ("simple_integration", {}, "evaluates the model's answer as Python code"),
        ("ransom_note", {}, "its problems differ between processes"),
        ("rush_hour", {}, r"'rush_hour' .* cannot be used: its verifier gives 0\.01 for its own answer"),
        ("chain_sum", {"min_term": 2}, "unexpected keyword argument 'min_term'; allowed: min_terms, max_terms"),
        ("chain_sum", {"min_terms": "many"}, "min_terms = 'many': input should be a valid integer"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "max_terms must be >= min_terms"),
        ("chain_sum", {"size": 0}, "size must be positive"),
        ("chain_sum", {"seed": -1}, "seed = -1 is not an integer of 0 or more"),
    ],
)
def test_a_family_that_cannot_be_used_is_one_line(family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        open_rows(f"reasoning_gym:{family}", "train", options)
    assert f"reasoning_gym:{family}" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_options_are_for_generated_sources(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.jsonl takes no options \(given: size\)"):
        open_rows(str(tmp_path / "a.jsonl"), "train", {"size": 5})


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    installed_families()
    if isinstance(sys.modules["pycosat"], gym_families.Missing):
        with pytest.raises(UserError, match="item 1 cannot be generated .*the package pycosat is missing"):
            GymRows("reasoning_gym:zebra_puzzles", "train", {})
    installed_families.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"reasoning-gym package is missing; pip install 'spo-trainer\[gym\]'"):
        open_rows("reasoning_gym:chain_sum", "train")


LOG = structlog.get_logger()
TEXT = "user\nis a word\nassistant\n"


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def scores_of(path: Path, *lines: Any) -> tuple[dict[str, list[float]], list[str]]:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    scores: defaultdict[str, list[float]] = defaultdict(list)
    problems = []
    for row in read_scores(path):
        if row.problem:
            problems.append(f"{row.where}: {row.problem}".removeprefix(f"{path} "))
        else:
            scores[row.key] += row.scores
    return dict(scores), problems


def test_golden_m05_prompts_are_read_whole(tmp_path: Path) -> None:
    inputs, expected = GOLDEN["M05"]["inputs"], GOLDEN["M05"]["expected"]
    parsed, problems = scores_of(tmp_path / "a.jsonl", *inputs["rows"])
    merged, whole = expected["recipe_merged"], expected["wanted_second_key"]
    assert parsed == {whole if key == "said x" else key: scores for key, scores in merged.items()}
    assert problems == []


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("What is 1+1?", "What is 1+1?"),
        ("user\nWhat is\n\n1+1?\nassistant\n", "What is\n\n1+1?"),
        ("system\na user\nuser\nhi\nassistant\n<think>\n", "system\na user\nuser\nhi\nassistant\n<think>\n"),
        ("user\nWho is\nassistant\nof the king?\nassistant", "Who is\nassistant\nof the king?"),
        ("ask the user\nor not", "ask the user\nor not"),
        ("", ""),
    ],
)
def test_the_key_of_a_conversation_and_of_anything_else(text: str, key: str) -> None:
    assert recipe_key(text) == key


TURNS = [["user: 1+1?"], ["system: brief", "user: 1+1?"], ["user: hi", "assistant: yes?", "user: 1+1?"], ["system: x"]]


@pytest.mark.parametrize("turns", TURNS)
def test_chat_messages_have_the_key_of_the_recipes_row(turns: list[str]) -> None:
    prompt = [message(*turn.split(": ")) for turn in turns]
    row = "".join(turn.replace(": ", "\n") + "\n" for turn in turns) + "assistant\n"
    assert prompt_key(prompt) == recipe_key(row)
    assert prompt_key([message("user", " 1+1?\n")]) == "1+1?"


def test_our_rows_have_the_exact_prompt(tmp_path: Path) -> None:
    rows = [
        {"task_id": "values0-a", "input": TEXT, "score": 1},
        {"task_id": "values0-b", "input": [message("user", "chat")], "score": 0},
        {"input": TEXT, "score": 0.5},
    ]
    assert scores_of(tmp_path / "a.jsonl", *rows) == ({TEXT: [1], "chat": [0], "is a word": [0.5]}, [])
    assert prompt_key(TEXT) == TEXT


def test_rows_of_one_prompt_join_and_bad_ones_are_named(tmp_path: Path) -> None:
    good = [
        json.dumps({"input": "a", "score": 1, "step": 3, "output": "\u2028"}, ensure_ascii=False),
        {"input": "user\na\nassistant\n", "score": 0.5},
        {"input": "b", "scores": []},
    ]
    bad = [
        "{", "[" * 100_000, '{"score": 1}', '{"input": "a", "score": true}', '{"input": "a", "scores": [1, NaN]}', "7",
        '{"input": "a", "score": 1' + "0" * 400 + "}", '{"input": ["a"], "score": 1}', '{"input": "a", "sco',
    ]  # fmt: skip
    parsed, problems = scores_of(tmp_path / "a.jsonl", *good, "", *bad)
    assert parsed == {"a": [1, 0.5], "b": []}
    assert [problem.partition(":")[0] for problem in problems] == [f"line {number}" for number in range(5, 14)]
    assert "no `input`" in problems[2]
    assert "the score True is not a finite number" in problems[3]
    assert "neither text nor chat messages" in problems[7]
    assert problems[8].endswith("the line is cut short)")


class Pool:
    """Prompts, the tracker that scores are given to, and what was warned of."""

    def __init__(self, folder: Path) -> None:
        self.folder, path = folder, folder / "data.jsonl"
        asked = ("text", [message("system", "be brief"), message("user", "chat")], " padded ", "none")
        path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in asked))
        self.prompts = load_prompts(DataConfig(train=str(path)).sources("train"), LOG)
        self.tracker = ValueTracker(self.prompts.ids, TrackerConfig())

    def apply(self, name: str, text: str | None) -> tuple[int, list[Any]]:
        """The number of prompts with scores, and the warnings."""
        if text is not None:
            (self.folder / name).write_text(text)
        with capture_logs() as logs:
            found = apply_initial_values(str(self.folder / name), self.tracker, self.prompts, LOG)
        return found, [line for line in logs if line["log_level"] == "warning"]

    def values(self) -> list[float]:
        return [self.tracker.value(prompt_id) for prompt_id in self.prompts.ids]


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    return Pool(tmp_path)


def test_values_are_found_by_the_key_of_the_prompt(pool: Pool) -> None:
    scores = {"text": [1] * 8, "chat": [0, 0, 0, 1], "padded": [0], "gone": [1], "also gone": [0]}
    found, (line,) = pool.apply("values.json", json.dumps(scores))
    assert (found, line["prompts"], line["example"]) == (3, 2, "gone")
    assert pool.values() == pytest.approx([8.5 / 9, 1.5 / 5, 0.5 / 2, 0.5])
    pool.apply("values.json", json.dumps({"padded": [0] * 8, " padded ": [1] * 8}))
    assert pool.values()[2] == pytest.approx(8.5 / 9), "an exact key comes first"


def test_unreadable_rows_are_counted_and_named(pool: Pool) -> None:
    rows = [json.dumps({"input": "user\ntext\nassistant\n", "score": score}) for score in (1, 1, 0)]
    _, (line,) = pool.apply("scores.jsonl", "\n".join([*rows, '{"input": "text", "sc']))
    assert line["rows"] == 1
    assert line["first"].startswith(f"{pool.folder}/scores.jsonl line 4: not JSON")
    assert pool.values()[0] == pytest.approx(2.5 / 4)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("v.json", None, "cannot be read: No such file"),
        ("v.json", '{"a": [1', "is not JSON"),
        ("v.json", "[1]", "must be a JSON object"),
        ("v.json", '{"text": 1}', "prompt 'text': its scores are not a list"),
        ("v.json", '{"text": ["1"]}', "prompt 'text': the score 1 is not a finite number"),
        ("v.json", '{"text": [NaN]}', "the score nan is not a finite number"),
        ("v.json", '{"text": [5]}', "prompt 'text': reward 5 is outside .* --binarize"),
        ("v.jsonl", '{"input": "text", "score": 1}\n{"input": "text", "score": -1}', "line 2: reward -1 is outside"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(pool: Pool, name: str, content: str | None, words: str) -> None:
    with pytest.raises(UserError, match=rf"sampler\.initial_values: .*{words}"):
        pool.apply(name, content)


def test_scores_must_be_utf8_and_may_begin_with_a_bom(tmp_path: Path) -> None:
    mark, row = b"\xef\xbb\xbf", b'{"input": "user\\np", "score": 1.0}'
    lines, whole, latin = (tmp_path / name for name in ("a.jsonl", "b.json", "c.json"))
    lines.write_bytes(mark + row + b'\n{"input": "caf\xe9", "score": 1.0}\n')
    whole.write_bytes(mark + b'{"p": [1.0]}')
    latin.write_bytes(b'{"caf\xe9": [1.0]}')
    assert [row.problem for row in read_scores(lines)] == ["", "not UTF-8 text"]
    assert [row.scores for row in read_scores(whole)] == [[1.0]]
    with pytest.raises(UserError, match="is not UTF-8 text"):
        list(read_scores(latin))
