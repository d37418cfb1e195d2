"""The table of metrics: its page, and the names that code asks for."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from common.metrics import BATCH, STEP, TIME, Metric, metric
from launcher.folder.metrics import Metrics
from launcher.folder.run import Run
from launcher.folder.run_folder import find_runs
from launcher.metrics_reference import tables
from launcher.page.panels import panels
from tests.support.documented import section
from tests.support.run_folder import make_run, write_metrics

ROOT = Path(__file__).parents[3]
ROWS = (*BATCH, *STEP, *TIME)
PREFIXES = {row.name.partition("/")[0] for row in ROWS}
UNITS = {row.unit for row in ROWS}
FOLDERS = ("sampler", "generator", "learner", "relay", "launcher")


def names_in(path: Path) -> set[str]:
    """Texts in a file that look like a metric's name, except units."""
    texts = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    named = {text for text in texts if isinstance(text, str) and re.fullmatch(r"[a-z_]+/[\w@.]*\w", text)}
    return {text for text in named - UNITS if text.partition("/")[0] in PREFIXES}


def test_the_page_has_the_table() -> None:
    for title, table in tables().items():
        assert table in section("metrics.md", title), "run `spo docs-metrics` and copy its tables"


def test_the_code_names_only_metrics_of_the_table() -> None:
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for name in names_in(path):
            metric(name)


def test_panels_draw_what_the_table_says_they_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "mine")
    for row in filter(lambda row: row.panel, ROWS):
        of = row.name.partition("/")[0]
        process = "generator-1" if of == "generator" else "learner" if row in STEP else "sampler"
        for version, word in product((1, 2), "xy"):
            write_metrics(folder, version, {row.name.replace("…", word): 0.5}, process)
    run = Run(find_runs([folder])[0])
    run.update_metrics()
    asked: set[Metric] = set()

    def recorded(read: Callable[..., Any]) -> Callable[..., Any]:
        def reads(self: Metrics, name: str, *arguments: Any) -> Any:
            asked.add(metric(name))
            return read(self, name, *arguments)

        return reads

    for name in ("series", "timeline", "histogram", "last"):
        monkeypatch.setattr(Metrics, name, recorded(getattr(Metrics, name)))
    titles = {panel["title"] for panel in panels(run)}
    assert {row.panel for row in ROWS if row.panel} <= titles
    assert {row.name for row in ROWS if row.panel} - {row.name for row in asked} == set()
