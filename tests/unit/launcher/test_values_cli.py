"""`spo values` and `spo eval` as commands: what they print, and what is refused with one line and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.evaluate import command as eval_command
from launcher.evaluate.answer_run import AnswerCount
from launcher.quickstart.tiny_model import build_model, build_tokenizer, save
from sampler.answer_file import Request
from tests.support.sampler import make_config, write_prompts
from tests.support.spo_command import Spo, spo_here

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "arithmetic.yaml"


@pytest.fixture
def spo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Spo:
    """Runs the command in this process, in an empty folder with some files."""
    monkeypatch.chdir(tmp_path)
    write_prompts(tmp_path / "train.jsonl", "train", 5)
    (tmp_path / "good.jsonl").write_text('{"input": "a", "score": 1}\n{"input": "a", "score": 0}\n')
    (tmp_path / "minus.jsonl").write_text('{"input": "a", "score": 1}\n{"input": "b", "score": -1}\n')
    (tmp_path / "cut.jsonl").write_text('{"input": "a", "score": 1}\n{"input": "a", "sco')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "nothing").mkdir()

    return spo_here(capsys, monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["split", "gone.jsonl", "--parts", "2", "--output", "v"], "data file gone.jsonl does not exist"),
        (["split", "train.jsonl", "--parts", "6", "--output", "v"], "has 5 rows, and --parts is 6"),
        (["split", "empty.jsonl", "--parts", "1", "--output", "v"], "no rows in empty.jsonl: it is empty"),
        (["split", "train.jsonl", "--parts", "2", "--output", "good.jsonl"], "good.jsonl cannot be written"),
        (["merge", "none*.jsonl", "--output", "v.json"], "'none*.jsonl' matches no file"),
        (["merge", "good.jsonl", "--output", "good.jsonl"], "is one of the files that are read"),
        (["merge", "empty.jsonl", "--output", "v.json"], "no scores in 1 files"),
        (["merge", "*.jsonl", "--output", "v.json"], "minus.jsonl line 2: the score -1 is outside the reward range"),
        (["merge", "good.jsonl", "--output", "v.json", "--threshold", "0.5"], "no effect without --binarize"),
        (["merge", "good.jsonl", "--output", "v.json", "--reward-range", "1", "0"], "--reward-range 1 0 is empty"),
        (["estimate", str(CONFIG), "--output", "v.json"], "--output v.json must be a file *.jsonl"),
        (["estimate", "gone.yaml", "--output", "v.jsonl"], "cannot read configuration gone.yaml"),
        (["estimate", str(CONFIG), "--data", "empty.jsonl", "--output", "v.jsonl"], "no prompts in empty.jsonl"),
        (["estimate", str(CONFIG), "--data", "x=good.jsonl", "--output", "v.jsonl"], "data.train has train; say which"),
        (
            ["estimate", str(CONFIG), "--data", "train.jsonl", "--output", "good.jsonl"],
            "good.jsonl line 1 is no answer",
        ),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(arguments: list[str], message: str, spo: Spo) -> None:
    ran = spo("values", *arguments)
    errors = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert (ran.returncode, len(errors)) == (2, 1), ran.stderr
    assert message in errors[0]


def test_merge_writes_the_scores_and_names_the_rows_it_left_out(spo: Spo, tmp_path: Path) -> None:
    ran = spo("values", "merge", "good.jsonl", "cut.jsonl", "--output", "values.json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads((tmp_path / "values.json").read_text()) == {"a": [1, 1, 0]}
    assert "left out: cut.jsonl line 2: not JSON" in ran.stderr
    assert "3 kept of 3" in ran.stdout


def test_merge_binarizes_and_draws_as_told(spo: Spo, tmp_path: Path) -> None:
    ran = spo("values", "merge", "[gm]*.jsonl", "--output", "values.json", "--binarize", "--max-scores-per-prompt", "1")
    assert ran.returncode == 0, ran.stderr
    scores = json.loads((tmp_path / "values.json").read_text())
    assert scores["b"] == [0]
    assert len(scores["a"]) == 1


def test_split_says_what_it_wrote(spo: Spo) -> None:
    ran = spo("values", "split", "train.jsonl", "--parts", "2", "--output", "values")
    assert (ran.returncode, ran.stdout.splitlines()) == (
        0,
        ["values/subset_0.parquet: 2 rows", "values/subset_1.parquet: 3 rows"],
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./gone", "-c", str(CONFIG)], "there is no such folder"),
        (["nothing", "-c", str(CONFIG)], "neither a model folder (config.json) nor a checkpoint with an export"),
        (["Qwen/x", "-c", str(CONFIG), "-o", "data.heldout=null"], "there are no held-out prompts: give --data"),
        (["Qwen/x", "-c", str(CONFIG), "--data", "gone.jsonl"], "data file gone.jsonl does not exist"),
        (["Qwen/x", "-c", str(CONFIG), "--data", "train.jsonl", "--data", "train.jsonl"], "names 'train' twice"),
        (["Qwen/x", "-c", str(CONFIG), "--output", "x.txt"], "--output x.txt must be a file *.jsonl"),
    ],
)
def test_an_evaluation_that_cannot_work_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, spo: Spo
) -> None:
    ran = spo("eval", *arguments)
    errors = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert (ran.returncode, len(errors)) == (2, 1), ran.stderr
    assert message in errors[0]


def test_a_checkpoint_is_evaluated_by_its_export_and_json_has_the_figures(
    spo: Spo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build_tokenizer()
    save(build_model(tokenizer, seed=0), tokenizer, tmp_path / "step_4" / "hf")
    make_config(tmp_path, heldout=2)
    settings: list[Any] = []

    def answer(config: Any, request: Request, **_: Any) -> AnswerCount:
        settings.append(config)
        row = {"task_id": "eval0-a", "prompt_id": "a", "source": "x", "groups": ["level=1"], "answer": "7"}
        lines = [row | {"score": 1.0}, row | {"score": 0.0, "answer": "8"}]
        request.output.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return AnswerCount(3, 2, {"too long": 1})

    monkeypatch.setattr(eval_command, "answer", answer)
    options = ["--data", "x=heldout.jsonl", "--samples", "2", "--output", "answers.jsonl", "--json"]
    ran = spo("eval", "step_4", "-c", CONFIG, *options)
    assert ran.returncode == 0, ran.stderr
    assert settings[0].model.path == "step_4/hf"
    assert settings[0].data.sources("heldout")[0].name == "x"
    figures = json.loads(ran.stdout)
    assert (figures["accuracy"], figures["avg@2"], figures["pass@2"], figures["set_aside"]) == (0.5, 0.5, 1.0, 1)
    assert figures["level=1/accuracy"] == 0.5


def test_each_data_set_has_figures_of_its_own_also_where_prompts_are_the_same() -> None:
    def row(source: str, score: float) -> dict[str, Any]:
        return {"source": source, "groups": [source], "prompt_id": "p", "score": score, "answer": str(score)}

    figures = eval_command.evaluate([row("a", 1.0), row("a", 0.0), row("b", 0.0), row("b", 0.0)], 0, 2, 1.0)
    assert (figures["a/accuracy"], figures["b/accuracy"], figures["accuracy"]) == (0.5, 0.0, 0.25)
    assert (figures["a/pass@2"], figures["b/pass@2"], figures["pass@2"]) == (1.0, 0.0, 0.5)
