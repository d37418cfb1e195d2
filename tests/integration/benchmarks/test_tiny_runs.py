"""Benchmarks at their smallest, as whole commands: they still fit what they measure, and print their tables."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.staleness import study
from benchmarks.staleness.simulation import Simulation
from benchmarks.staleness.variants import REGIME
from launcher.tasks.task import Problem
from tests.support.run_folder import full_run
from tests.support.whole_run import save_model

pytestmark = [pytest.mark.integration, pytest.mark.slow]

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Calls a benchmark's `main` in this process, with these arguments; what it prints."""

    def call(name: str, *arguments: str) -> str:
        module = importlib.import_module(f"benchmarks.{name}")
        monkeypatch.setattr(sys, "argv", [str(module.__file__), *arguments])
        module.main()
        return capsys.readouterr().out

    return call


def rows(table: str) -> dict[str, list[str]]:
    """The cells of a table in Markdown by the first one of their row, without the heading."""
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines[1:] if set(line[0]) != {"-"}]
    return {first: others for first, *others in cells}


def test_weights_go_every_way(run: Run) -> None:
    ways = rows(run("weights", "--mib", "1", "--rounds", "1"))
    assert list(ways) == ["shared memory", "ZeroMQ", "CURVE"]
    assert all(float(rate) > 0 for rate, *_ in ways.values())


def test_weights_go_through_relays(run: Run) -> None:
    out = run("relays", "--mib", "1", "--receivers", "1", "--gbit", "8", "--chains")
    sent = re.findall(r"^\| 1 \| (directly|one relay) \| ([\d.]+) \| ([\d.]+) \|", out, re.MULTILINE)
    # MB that the learner and the relay have sent.
    assert sent == [("directly", "1.0", "0.0"), ("one relay", "1.0", "1.0")]


def test_weights_arrive_whatever_is_killed(run: Run) -> None:
    output = run("deltas.__main__", "kill", "--kills", "1", "--mib", "1")
    assert "killed={'learner': 1}" in output
    assert "wrong=0" in output


def test_samples_go_through_streams_and_sampler(run: Run) -> None:
    figures = rows(run("streams", "--samples", "2048", "--tokens", "16", "--sync", "off"))
    assert set(figures) > {"samples/s", "CPU a sample, sampler, µs", "CPU a sample, redis, µs"}
    assert float(figures["samples/s"][0].replace(",", "")) > 0


def test_the_protocol_is_measured_at_any_scale(run: Run) -> None:
    figures = rows(run("protocol", "--prompts", "16384", "--in-flight", "8192", "--generators", "8"))
    assert len(figures) == 9
    assert float(figures["choose 1,024 tasks, ms"][0]) > 0


def test_the_learner_trains_beside_a_bare_loop(run: Run) -> None:
    assert re.search(
        r"learner / bare DeepSpeed: \d", run("learner", "--samples", "4", "--tokens", "16", "--rounds", "1")
    )


def test_the_correction_is_what_a_loop_over_rows_computes(run: Run) -> None:
    assert list(rows(run("correction", "--rows", "8", "32", "--rounds", "1"))) == ["8", "32"]


def test_episodes_are_played_without_an_engine(run: Run) -> None:
    lines = run("episodes", "--episodes", "2", "--turns", "3", "--tokens", "30").splitlines()
    assert [re.match(r"\w+: 2 episodes at once, \d+ turns", line) is not None for line in lines] == [True, True]


def test_prompts_are_selected(run: Run) -> None:
    assert len(run("selection", "--prompts", "7000").splitlines()) == 5


def test_runs_are_drawn(run: Run, tmp_path: Path) -> None:
    folder = full_run(tmp_path / "a-run", 5)
    run("plot_runs", str(folder), "-o", str(tmp_path / "runs.png"))
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_the_staleness_study_have_their_initial_answers_in_common(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(save_model(tmp_path / "model"))
    draws, play = [], Simulation._play

    def counted(self: Simulation, problems: list[Problem], source: Any, draw: int) -> Any:
        draws.append(draw)
        return play(self, problems, source, draw)

    monkeypatch.setattr(Simulation, "_play", counted)
    study.initial_answers.cache_clear()

    def results(age: int, variant: str, *more: str) -> dict[str, Any]:
        """Of three steps; draws of odd numbers are evaluations."""
        small = ["run.steps=3", "eval.every=3", "sampler.batch_size=8", "learner.mini_batches=1"]
        (job,) = study.jobs({age: [variant]}, [0], [*REGIME, *small, *more])
        draws.clear()
        return study.run(job, model) | {"seconds": 0, "answered": [draw // 2 for draw in draws if draw % 2 == 0]}

    alone = results(1, "dro")
    assert alone["answered"] == [0, 1, 2]
    study.initial_answers.cache_clear()
    assert results(4, "vespo")["answered"] == [0, 1, 2]
    assert results(1, "dro") == alone | {"answered": [2]}
    assert results(1, "dro", "generator.temperature=0.5")["answered"] == [0, 1, 2], "of other answers"


def test_the_results_of_the_studies_can_be_read(run: Run, tmp_path: Path) -> None:
    assert "| arithmetic | 128 | 10 |" in run("values.__main__", "table")
    assert len(rows(run("staleness.__main__", "--plot", str(tmp_path / "study.png")))) > 5
    assert (tmp_path / "study.png").exists()
