"""Tests that need GPUs, by `make test-gpu`: without one each says in a line that it is skipped; ends with a table."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

ROWS: list[tuple[str, float]] = []


@pytest.fixture(autouse=True)
def gpus(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skip what needs more GPUs than there are; afterwards the card is free for the processes of the next test."""
    marker = request.node.get_closest_marker("gpus")
    needed, there = marker.args[0] if marker else 1, torch.cuda.device_count()
    if there < needed:
        pytest.skip(f"{request.node.name}: needs {needed} GPU{'s' * (needed > 1)}, torch sees {there}")
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def table() -> Callable[[dict[str, float]], None]:
    """Takes figures for the table."""
    return lambda measures: ROWS.extend(measures.items())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table to paste into docs/gpu.md."""
    if not ROWS:
        terminalreporter.write_line("no GPU: nothing measured")
        return
    terminalreporter.write_line(f"\n| {torch.cuda.get_device_name()}, torch {torch.__version__} | |\n|---|---|")
    for name, figure in ROWS:
        terminalreporter.write_line(f"| {name} | {figure:,.4g} |")
