"""Sets known by name, on small local copies of the same shape; Hugging Face configurations and splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog

from common.config import DataConfig
from common.config.data import KNOWN_SETS, misspelt_set
from common.errors import UserError
from common.messages import Task
from sampler.prompts import PromptSet, load_prompts
from sampler.rows import open_rows

datasets = pytest.importorskip("datasets")

LOG = structlog.get_logger()

DAPO_EXTRA = {"data_source": "math_dapo", "ability": "MATH", "extra_info": {"index": "9a9b6eb4"}}
INSTRUCTION = "Solve the following math problem step by step.\n\nWhat is 17 + 17?"

# Two rows of each set, as its card describes them, and what must be read from the first.
ROWS: dict[str, tuple[list[dict[str, Any]], Any, Any]] = {
    "dapo-math-17k": (
        [
            {
                "prompt": [{"content": INSTRUCTION, "role": "user"}],
                "reward_model": {"ground_truth": "34", "style": "r"},
            },
            {"prompt": [{"content": "2+2?", "role": "user"}], "reward_model": {"ground_truth": "4", "style": "r"}},
        ],
        [{"content": INSTRUCTION, "role": "user"}],
        "34",
    ),
    "dapo-math-17k-processed": (
        [
            {"prompt": "What is 17 + 17?", "solution": "34", "reward_model": {"ground_truth": "34", "style": "r"}},
            {"prompt": "2+2?", "solution": "4", "reward_model": {"ground_truth": "4", "style": "r"}},
        ],
        "What is 17 + 17?",
        "34",
    ),
    "aime24": (
        [
            {"ID": "2024-I-1", "Problem": "Find $m+n$.", "Solution": "...", "Answer": 204},
            {"ID": "2024-I-2", "Problem": "Find $xy$.", "Solution": "...", "Answer": 25},
        ],
        "Find $m+n$.",
        204,
    ),
    "aime25": (
        [
            {"id": 0, "problem": "Find the sum.", "answer": "70", "solution": "...", "year": "2025"},
            {"id": 1, "problem": "Find the area.", "answer": "588", "solution": "...", "year": "2025"},
        ],
        "Find the sum.",
        "70",
    ),
    "beyondaime": (
        [{"problem": "Count them.", "answer": 7}, {"problem": "Find the minimum.", "answer": 120}],
        "Count them.",
        7,
    ),
    "brumo25": (
        [
            {"problem_idx": 1, "problem": "How far?", "answer": "\\frac{9}{4}", "problem_type": ["Algebra"]},
            {"problem_idx": 2, "problem": "How many?", "answer": "12", "problem_type": ["Combinatorics"]},
        ],
        "How far?",
        "\\frac{9}{4}",
    ),
    "hmmt25": (
        [
            {"problem_idx": 1, "problem": "Compute the sum.", "answer": "103", "problem_type": ["Number Theory"]},
            {"problem_idx": 2, "problem": "Compute $n$.", "answer": "3375", "problem_type": ["Algebra"]},
        ],
        "Compute the sum.",
        "103",
    ),
    "gsm8k": (
        [
            {"question": "How many clips?", "answer": "She sold <<48/2=24>>24.\nAltogether 1,072.\n#### 1,072"},
            {"question": "How much?", "answer": "#### -3"},
        ],
        "How many clips?",
        "1072",
    ),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that datasets are looked for in by their names, in place of the hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    (tmp_path / "hub").mkdir()
    monkeypatch.chdir(tmp_path / "hub")
    return tmp_path / "hub"


def publish(hub: Path, path: str, rows: list[dict[str, Any]], split: str, config: str | None) -> None:
    """A dataset as it lies on the hub: Parquet, and a card that names configurations and splits."""
    folder = hub / path
    (folder / "data").mkdir(parents=True)
    datasets.Dataset.from_list(rows).to_parquet(folder / "data" / f"{split}.parquet")
    datasets.Dataset.from_list([{"other": 1}]).to_parquet(folder / "data" / "other.parquet")
    card = ["---", "configs:"]
    for name, file in ((config or "default", split), ("other", "other")):
        card += [f"- config_name: {name}", "  data_files:", f"  - split: {split}", f"    path: data/{file}.parquet"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))


def read(data: dict[str, Any]) -> PromptSet:
    return load_prompts(DataConfig.model_validate(data).sources("train"), LOG)


@pytest.mark.parametrize("name", KNOWN_SETS)
def test_a_known_set_is_found_and_read_by_its_name(hub: Path, name: str) -> None:
    rows, prompt, answer = ROWS[name]
    known = KNOWN_SETS[name]
    publish(
        hub, known.path, [row | (DAPO_EXTRA if "dapo" in name else {}) for row in rows], known.train_split, known.config
    )
    prompts = read({"train": name})
    assert (prompts[0].prompt, prompts[0].answer, len(prompts)) == (prompt, answer, 2)
    task = Task(task_id="t", prompt_id=prompts.ids[0], prompt=prompts[0].prompt, answer=answer, row=prompts[0].row)
    assert Task.unpack(task.pack()) == task, "the other columns can be sent"


@pytest.mark.parametrize("name", KNOWN_SETS)
def test_a_local_copy_is_read_by_its_format(tmp_path: Path, name: str) -> None:
    rows, prompt, answer = ROWS[name]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "copy.parquet")
    copy = read({"train": [{"path": str(tmp_path / "copy.parquet"), "format": name}]})
    assert (copy[0].prompt, copy[0].answer, len(copy)) == (prompt, answer, 2)
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "saved")
    saved = read({"train": [{"path": str(tmp_path / "saved"), "format": name}]})
    assert (saved[0].prompt, saved[0].answer, saved.ids) == (prompt, answer, copy.ids)


def test_a_row_without_the_mark_has_no_answer(tmp_path: Path) -> None:
    rows = [
        {"question": "a", "answer": "just 3"},
        {"question": "b", "answer": "#### 4"},
        {"question": "c", "answer": "5 ####"},
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "copy.parquet")
    prompts = read({"train": [{"path": str(tmp_path / "copy.parquet"), "format": "gsm8k"}]})
    assert [prompts[i].answer for i in range(len(prompts))] == ["4"]


def test_a_configuration_and_a_split_are_chosen_by_keys(hub: Path) -> None:
    publish(hub, "org/set", [{"prompt": "a", "answer": "1"}], "validation", "hard")
    assert read({"train": "org/set", "config": "hard", "train_split": "validation"})[0].prompt == "a"
    source = {"path": "org/set", "config": "hard", "split": "validation"}
    assert read({"train": [source]})[0].answer == "1"
    with pytest.raises(UserError, match=r"dataset org/set, configuration 'hrad' .*hard.*other"):
        read({"train": "org/set", "config": "hrad", "train_split": "validation"})
    with pytest.raises(UserError, match=r"split 'test'"):
        read({"train": [source | {"split": "test"}]})


def test_a_dataset_without_rows_is_one_line(hub: Path) -> None:
    (hub / "org/none").mkdir(parents=True)
    datasets.Dataset.from_dict({"prompt": [], "answer": []}).to_parquet(hub / "org/none/train.parquet")
    with pytest.raises(UserError, match=r"dataset org/none \(split 'train'\) cannot be loaded"):
        read({"train": "org/none"})
    with pytest.raises(UserError, match=r"data\.train: no prompts in org/none/train\.parquet: it is empty"):
        read({"train": "org/none/train.parquet"})


def test_saved_configurations_lie_in_folders_of_their_names(tmp_path: Path) -> None:
    for config in ("main", "socratic"):
        rows = datasets.Dataset.from_list([{"prompt": config, "answer": "1"}])
        datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "set" / config)
    assert open_rows(str(tmp_path / "set"), "train", config="socratic")[0]["prompt"] == "socratic"


def test_a_folder_of_files_is_read_offline(tmp_path: Path, hub: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text('{"prompt": "x", "answer": "y"}\n{"prompt": "z", "answer": ""}\n')
    prompts = read({"train": str(tmp_path / "files")})
    assert (len(prompts), prompts[0].prompt) == (1, "x")


def test_a_split_that_is_missing_or_empty_is_one_line(tmp_path: Path) -> None:
    empty = datasets.Dataset.from_dict({"prompt": [], "answer": []})
    full = datasets.Dataset.from_dict({"prompt": ["a"], "answer": ["b"]})
    datasets.DatasetDict({"train": full, "empty": empty}).save_to_disk(tmp_path / "set")
    with pytest.raises(UserError, match=r"has no split 'test'; there are train, empty"):
        read({"train": str(tmp_path / "set"), "train_split": "test"})
    with pytest.raises(UserError, match=r"dataset .*set: .*empty has no rows"):
        read({"train": str(tmp_path / "set"), "train_split": "empty"})


@pytest.mark.parametrize(("name", "near"), [("gsm-8k", "gsm8k"), ("AIME24", "aime24"), ("dapo-math", "dapo-math-17k")])
def test_a_name_near_a_known_one_is_refused_with_the_nearest(hub: Path, name: str, near: str) -> None:
    with pytest.raises(
        UserError, match=rf"{name!r} is no file, no folder and no set known by name; did you mean {near}\?"
    ):
        read({"train": name})
    (hub / name).mkdir()
    assert misspelt_set(name) is None, "a folder of that name is meant"


@pytest.mark.parametrize("path", ["gsm8k", "org/gsm-8k", "./gsm-8k", "gsm-8k.jsonl", "squad", "reasoning_gym:gsm8"])
def test_other_names_are_left_alone(path: str) -> None:
    assert misspelt_set(path) is None


def test_options_are_for_generated_sources(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.jsonl takes no options \(given: size\)"):
        open_rows(str(tmp_path / "a.jsonl"), "train", {"size": 5})
