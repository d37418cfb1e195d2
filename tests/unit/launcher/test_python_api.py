"""The package `spo`: what it imports, what it refuses, and what it reads of a run folder."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest

import spo
from common.config import load_config
from tests.support.run_folder import finished_run, full_run

ARITHMETIC = Path(__file__).parents[3] / "configs" / "arithmetic.yaml"


@pytest.mark.integration
def test_importing_it_takes_no_library(tmp_path: Path) -> None:
    code = "import sys, spo; print([name for name in ('torch', 'vllm', 'numpy', 'pydantic') if name in sys.modules])"
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "[]\n"


def test_every_name_is_there() -> None:
    assert [name for name in spo.__all__ if not getattr(spo, name).__doc__] == []
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        spo.train  # noqa: B018


def test_overrides_are_values_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPO__RUN__SEED", "7")
    config = spo.config(ARITHMETIC, {"run.steps": 5, "learner.lora": {"rank": 4}, "run.output_dir": Path("elsewhere")})
    given = ["run.steps=5", "learner.lora={rank: 4}", "run.output_dir=elsewhere"]
    assert config == load_config(ARITHMETIC, given)
    changed = spo.config(config, {"run.steps": 6, "model.path": "012"})
    assert (changed.run.steps, changed.run.seed, changed.model.path, config.run.steps) == (6, 7, "012", 5)


REFUSED: list[tuple[Any, str]] = [
    (lambda: spo.config(ARITHMETIC, {"run.stepz": 5}), r"run\.stepz"),
    (lambda: spo.config(ARITHMETIC, {"run.steps": "many"}), r"run\.steps = 'many'"),
    (lambda: spo.config(ARITHMETIC, {"run.steps.most": 5}), r"override 'run\.steps\.most': run\.steps is a value"),
    (lambda: spo.config("missing.yaml"), r"cannot read configuration missing\.yaml"),
    (lambda: spo.run(ARITHMETIC, {"run.stepz": 5}), r"run\.stepz"),
    (lambda: spo.doctor(role="trainer"), r"role 'trainer' is unknown; allowed: sampler, "),
    (lambda: spo.evaluate("model", ARITHMETIC, output="answers.txt"), r"answers\.txt must be a file \*\.jsonl"),
    (lambda: spo.evaluate("model", ARITHMETIC, samples=0), r"samples 0 must be at least 1"),
    (lambda: spo.sft(ARITHMETIC, {"run.output_dir": ARITHMETIC}), r"arithmetic\.yaml/sft cannot be made: Not a direc"),
    (lambda: spo.load("runs/missing"), r"runs/missing does not exist"),
    (lambda: spo.export("runs/missing", "model"), r"runs/missing is not a run folder"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_cannot_be_used_is_a_user_error(
    call: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(spo.UserError, match=words):
        call()
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_is_read_as_tables(tmp_path: Path) -> None:
    run = spo.load(finished_run(tmp_path / "a"))
    metrics = pandas.DataFrame(run.metrics()).set_index("step")
    assert list(metrics.index) == [1, 2, 3, 4, 5, 6]
    assert metrics["reward/mean"][6] == pytest.approx(0.8)
    assert metrics["generator/tokens"][2] == 80
    assert list(pandas.DataFrame(run.metrics("learner")).columns[:2]) == ["step", "seconds/train"]
    evaluated = pandas.DataFrame(run.evaluations())
    assert evaluated["step"].tolist() == [0, 3, 6]
    assert evaluated["accuracy"].tolist() == [0.5, 0.75, 0.75]
    assert (evaluated["responses"] == 4).all()
    assert (evaluated["accuracy_low"] <= evaluated["accuracy"]).all()
    assert [one["prompt_id"] for one in run.episodes(kind="eval", step="6", reward="<1")] == ["b"]
    assert len(run.episodes(limit=2)) == 2
    with pytest.raises(spo.UserError, match="condition 'rewards' is unknown; allowed: text, kind"):
        run.episodes(rewards="<1")
    assert (run.state, run.config["run"]["name"]) == ("finished", "a")
    assert run.values() == {"prompt_id": [], "value": [], "count": [], "visits": []}


def test_a_metric_that_was_not_written_at_a_step_is_nan_and_values_come_from_the_checkpoint(tmp_path: Path) -> None:
    run = spo.load(full_run(tmp_path / "full" / "run"))
    metrics = run.metrics()
    accuracies = zip(metrics["step"], metrics["validation/accuracy"], strict=True)
    assert [step for step, value in accuracies if not math.isnan(value)] == [5, 10]
    assert run.values()["prompt_id"] == ["p-t1", "p-t2", "p-t3"]
    assert run.values()["value"] == pytest.approx([1 / 2, 1.5 / 2.5, 2 / 3])


def test_a_notebook_shows_state_and_curves(tmp_path: Path) -> None:
    run = spo.load(finished_run(tmp_path / "a").rename(tmp_path / "<b>"))
    html = run._repr_html_()
    assert html.count("<svg") == 2
    assert html.count("<polyline") == 2
    assert "&lt;b&gt;" in html
    assert "finished, step 6 of 6" in html
    empty = tmp_path / "new"
    (empty / "logs").mkdir(parents=True)
    assert "<svg" not in spo.load(empty)._repr_html_()
