"""The study of corrections: its table and figure from the rows of a results file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.staleness import __main__ as command
from benchmarks.staleness import results, study
from benchmarks.staleness.variants import REGIME

CURVE = [(0, 0.1), (20, 0.9), (40, 0.5), (60, 0.75)]


def test_an_unfinished_study_shows_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "study.png"
    done = {("vespo", 1, 0): 0.0, ("vespo", 16, 0): 0.0, ("vespo", 16, 1): 0.2, ("icepop", 16, 0): -0.3}
    for (variant, age, seed), more in done.items():
        (job,) = study.jobs({age: [variant]}, [seed], REGIME)
        results.append(rows, job, {"accuracy": [(step, accuracy + more) for step, accuracy in CURVE]})
    # A run of other settings is none of this study.
    (other,) = study.jobs({1: ["icepop"]}, [0], [*REGIME, "learner.lr=1e-3"])
    results.append(rows, other, {"accuracy": CURVE})

    monkeypatch.setattr(sys, "argv", ["staleness", "--results", str(rows), "--plot", str(picture)])
    command.main()
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| **weights and masks by token** | | | |",
        "| `icepop` | – | 0.33 | 0.20 |",
        "| **losses around the generating policy** | | | |",
        "| `vespo` | 0.62 | 0.72 (0.62–0.82) | 0.50 |",
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")
