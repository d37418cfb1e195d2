"""`spo values split` and `merge`, `spo eval`: what they write and print, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import structlog

from common.config import load_config
from common.errors import UserError
from launcher.evaluate import evaluation
from launcher.evaluate.answer_run import AnswerCount
from launcher.quickstart.tiny_model import build_model, build_tokenizer, save
from launcher.run.supervisor import EndedEarly
from launcher.values.command import ScoreRange, at_most, find_files, read_all, write_scores
from launcher.values.split import split_data
from sampler.files.answer_file import Request
from sampler.prompts.prompt_set import load_prompts
from sampler.values.traits import prompt_traits
from tests.support.sampler import make_config, write_prompts, write_rows
from tests.support.spo_command import Spo

LOG: Any = structlog.get_logger()
CONFIG = str(Path(__file__).parents[3] / "configs" / "arithmetic.yaml")


def row(prompt: str, score: float) -> dict[str, Any]:
    return {"task_id": "values0-x", "input": prompt, "score": score}


def read(paths: list[Path]) -> list[dict[str, Any]]:
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


@pytest.fixture
def spo(spo: Spo, tmp_path: Path) -> Spo:
    """Runs the command in a folder with some files."""
    write_prompts(tmp_path / "train.jsonl", "train", 5)
    write_rows(tmp_path / "good.jsonl", row("a", 1), row("a", 0))
    write_rows(tmp_path / "minus.jsonl", row("a", 1), row("b", -1))
    write_rows(tmp_path / "cut.jsonl", row("a", 1), '{"input": "a", "sco')
    return spo


def test_merge_writes_the_scores_and_names_the_rows_it_left_out(spo: Spo, tmp_path: Path) -> None:
    ran = spo("values", "merge", "good.jsonl", "cut.jsonl", "--output", "values.json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads((tmp_path / "values.json").read_text()) == {"a": [1, 1, 0]}
    assert "left out: cut.jsonl line 2: not JSON" in ran.stderr
    assert "3 kept of 3" in ran.stdout
    scores = {"a": [1, 1], "b": [0, 0, 0], "c": [0, 1], "d": [0.05]}
    write_rows(tmp_path / "some.json", scores)
    table = spo("values", "merge", "some.json", "--output", "values.json").stdout
    figures = dict(re.findall(r"│ (.+?) +│ (?:█+ )?(.+?) +│", table))
    assert (figures["prompts"], figures["scores"], figures["mean"]) == ("4", "8 kept of 8", "0.388")
    assert (figures["always solved"], figures["never solved"]) == ("1 (25.0%)", "1 (25.0%)")
    assert (figures["mean 0–0.1"], figures["mean 0.5–0.6"]) == ("2", "1")
    assert "1 prompts with 1, 2 prompts with 2, 1 prompts with 3" in table
    ran = spo("values", "merge", "[gm]*.jsonl", "--output", "values.json", "--binarize", "--max-scores-per-prompt", "1")
    assert ran.returncode == 0, ran.stderr
    scores = json.loads((tmp_path / "values.json").read_text())
    assert scores["b"] == [0]
    assert len(scores["a"]) == 1
    # The mean of three times 0.1 is more than 0.1 by a rounding error.
    write_rows(tmp_path / "tenths.jsonl", *[row("a", 0.1)] * 3)
    ran = spo("values", "merge", "tenths.jsonl", "--output", "values[a].json", "--reward-range", "0", "0.1")
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"always solved +│ 1 \(100.0%\)", ran.stdout)
    assert "-o sampler.initial_values=values[a].json" in ran.stdout


def test_scores_of_all_files_come_together_in_their_order(tmp_path: Path) -> None:
    paths = [write_rows(tmp_path / f"{i}.jsonl", row("a", i / 32), row(f"only {i}", 1)) for i in range(32)]
    paths.append(write_rows(tmp_path / "old.json", {"a": [0.25]}))
    bad = write_rows(tmp_path / "bad.jsonl", row("b", 0), "{", '{"input": 3}')
    scores, problems = read_all([*paths, bad], ScoreRange(0.0, 1.0))
    assert scores["a"] == [*(i / 32 for i in range(32)), 0.25]
    assert len(scores) == 34
    assert [problem.partition(":")[0] for problem in problems] == [f"{bad} line 2", f"{bad} line 3"]
    path = write_rows(tmp_path / "wide.jsonl", *(row("a", score) for score in (-1, 0, 0.5, 0.6, 7)))
    assert read_all([path], ScoreRange(0, 1, threshold=0.5))[0] == {"a": [0, 0, 0, 1, 1]}
    assert read_all([path], ScoreRange(-1, 1, threshold=0))[0] == {"a": [-1, -1, 1, 1, 1]}
    (tmp_path / "w.jsonl").mkdir()
    assert find_files([str(tmp_path / "w*.jsonl"), str(path)]) == [path]
    with pytest.raises(UserError, match="matches no file"):
        find_files([str(path), str(tmp_path / "w.jsonl")])


def test_a_file_is_read_once_and_its_name_may_have_brackets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "values[a].jsonl", row("a", 1))
    (tmp_path / "link.jsonl").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    assert find_files([str(path)]) == [path]
    assert find_files(["values[a].jsonl", str(path)]) == [Path("values[a].jsonl")]
    assert len(find_files(["*.jsonl"])) == 1


def test_at_most_so_many_scores_are_drawn_by_seed() -> None:
    scores = {"many": [float(i) for i in range(100)], "few": [1.0, 0.0]}
    kept = at_most(scores, 8, seed=3)
    assert kept == at_most(scores, 8, seed=3)
    assert kept["few"] == [1.0, 0.0]
    assert len(set(kept["many"])) == 8
    assert kept["many"] == sorted(kept["many"])
    assert kept["many"] != at_most(scores, 8, seed=4)["many"]


def test_the_file_is_written_whole_and_read_back(tmp_path: Path) -> None:
    scores: dict[str, list[float]] = {"é\nuser\n": [1, 0.5], "half \ud800": [0]}
    write_scores(scores, tmp_path / "new" / "values.json")
    assert json.loads((tmp_path / "new" / "values.json").read_text()) == scores
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["values.json"]


def test_every_row_is_in_one_subset_with_all_its_columns(spo: Spo, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"p{i}", "level": i if i % 2 else None} for i in range(11)]
    rows[5]["extra"] = {"ground_truth": "x"}
    data = str(write_rows(tmp_path / "a.jsonl", *rows[:4], "{broken", *rows[4:], "[1]"))
    paths, problems = split_data(data, "train", 4, tmp_path / "values")
    assert [path.name for path in paths] == [f"subset_{i}.parquet" for i in range(4)]
    assert [len(pq.read_table(path)) for path in paths] == [2, 3, 3, 3]
    assert read(paths) == [{"extra": None, **row} for row in rows]
    assert [problem.removeprefix(f"{data} ").partition(":")[0] for problem in problems] == ["line 5", "line 13"]
    contents = [path.read_bytes() for path in paths]
    split_data(data, "train", 4, tmp_path / "values")
    assert [path.read_bytes() for path in paths] == contents
    with pytest.raises(UserError, match=r"holds other subsets \(subset_2"):
        split_data(data, "train", 2, tmp_path / "values")
    for own in (paths[1], tmp_path / "values" / "*.parquet"):
        with pytest.raises(UserError, match="is one of the files that would be written"):
            split_data(str(own), "train", 3, tmp_path / "values")
    assert [path.read_bytes() for path in paths] == contents
    ran = spo("values", "split", "train.jsonl", "--parts", "2", "--output", "new")
    assert (ran.returncode, ran.stdout) == (0, "new/subset_0.parquet: 2 rows\nnew/subset_1.parquet: 3 rows\n")


def test_a_subset_is_a_configuration_of_the_dataset(spo: Spo, tmp_path: Path) -> None:
    for name in ("all", "en"):
        rows = datasets.Dataset.from_list([{"prompt": f"{name} {i}"} for i in range(4)])
        datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "maths" / name)
    ran = spo("values", "split", str(tmp_path / "maths"), "--subset", "en", "--parts", "2", "--output", "new")
    assert ran.returncode == 0
    assert [row["prompt"] for row in read(sorted((tmp_path / "new").glob("*.parquet")))] == [
        f"en {i}" for i in range(4)
    ]


def test_parquet_keeps_its_types_and_has_one_for_a_column(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a", "b"], "answer": pa.array([1, 2], pa.int32()), "tags": [["x"], []]})
    pq.write_table(table, tmp_path / "a.parquet")
    paths, _ = split_data(str(tmp_path / "a.parquet"), "train", 2, tmp_path)
    assert pa.concat_tables([pq.read_table(path) for path in paths]) == table
    mixed = [{"prompt": "a", "answer": 1}, {"prompt": "b"}, "", {"prompt": "c", "answer": "x"}]
    for rows, message in (
        (["{"], "no rows in .*line 1: not JSON"),
        (mixed, "line 4: column 'answer' has another type"),
    ):
        with pytest.raises(UserError, match=message):
            split_data(str(write_rows(tmp_path / "a.jsonl", *rows)), "train", 1, tmp_path / "values")
    assert not (tmp_path / "values").exists()


def test_a_checkpoint_is_evaluated_by_its_export(spo: Spo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer()
    save(build_model(tokenizer, seed=0), tokenizer, tmp_path / "step_4" / "hf")
    make_config(tmp_path, heldout=2)
    settings: list[Any] = []

    def answer(config: Any, request: Request, **_: Any) -> AnswerCount:
        settings.append(config)
        row = {"task_id": "eval0-a", "prompt_id": "a", "source": "x", "groups": ["level=1"], "answer": "7"}
        write_rows(request.output, row | {"score": 1.0}, row | {"score": 0.0, "answer": "8"})
        return AnswerCount(3, 2, {"too long": 1})

    monkeypatch.setattr(evaluation, "answer", answer)
    options = ["--data", "x=heldout.jsonl", "--samples", "2", "--output", "answers.jsonl", "--json"]
    ran = spo("eval", "step_4", "-c", CONFIG, *options)
    assert ran.returncode == 0, ran.stderr
    assert settings[0].model.path == "step_4/hf"
    assert settings[0].data.sources("heldout")[0].name == "x"
    figures = json.loads(ran.stdout)
    assert (figures["accuracy"], figures["avg@2"], figures["pass@2"], figures["set_aside"]) == (0.5, 0.5, 1.0, 1)
    assert figures["level=1/accuracy"] == 0.5


@pytest.mark.parametrize("output", [None, "answers.jsonl"])
def test_an_evaluation_that_was_stopped_says_how_to_continue_it(
    spo: Spo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str | None
) -> None:
    def answer(*_: Any, **__: Any) -> AnswerCount:
        raise EndedEarly("stopped", 130)

    monkeypatch.setattr(evaluation, "answer", answer)
    monkeypatch.setattr(evaluation, "model_path", str)
    make_config(tmp_path, heldout=2)
    ran = spo("eval", "m", "-c", CONFIG, *(["--output", output] if output else []))
    assert ran.returncode == 130
    how = "the same command continues" if output else r"--output \S+/spo-eval-\w+/answers.jsonl continues"
    assert re.search(f"stopped; {how} from here", ran.stdout)


def test_each_data_set_has_its_own_figures() -> None:
    answers = [("a", 1.0), ("a", 0.0), ("b", 0.0), ("b", 0.0)]
    rows = [{"source": of, "groups": [of], "prompt_id": "p", "score": score, "answer": ""} for of, score in answers]
    figures = evaluation.answer_figures(rows, 0, 2, 1.0)
    assert (figures["a/accuracy"], figures["b/accuracy"], figures["accuracy"]) == (0.5, 0.0, 0.25)
    assert (figures["a/pass@2"], figures["b/pass@2"], figures["pass@2"]) == (1.0, 0.0, 0.5)


def test_the_initial_model_reads_each_prompt_and_a_run_finds_its_states(spo: Spo, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    save(build_model(tokenizer, seed=0), tokenizer, tmp_path / "model")
    rows = [{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(40)]
    write_rows(tmp_path / "sums.jsonl", *rows, {"prompt": "1 + " * 200, "answer": "no"})
    options = ["-o", "data.train=sums.jsonl", "-o", f"model.path={tmp_path / 'model'}"]
    ran = spo("values", "states", CONFIG, "--output", "states.npz", *options)
    assert ran.returncode == 0, ran.stderr
    assert "the states of 40 prompts" in ran.stdout
    assert "1 are longer than data.max_prompt_tokens, and have none" in ran.stdout
    config = load_config(CONFIG, [*options[1::2], "sampler.tracker.prompt_states=states.npz"])
    prompts = load_prompts(config.data.sources("train"), LOG)
    features = prompt_traits(prompts, config.sampler.tracker, LOG).features
    assert features is not None
    vectors = np.stack([features[i] for i in range(41)])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1.0] * 40 + [0.0], abs=2e-3)
    assert len(np.unique(vectors.round(2), axis=0)) == 41, "no two prompts have the same state"
    ran = spo("values", "states", CONFIG, "--output", "states.npz", *options, "-o", "data.max_prompt_tokens=2")
    assert (ran.returncode, ran.stderr.count("error: ")) == (2, 1)
    assert "all 41 prompts of data.train are longer than data.max_prompt_tokens = 2" in ran.stderr
