"""Tests that need GPUs, by `make test-gpu`: without one each says in a line that it is skipped; ends with a table."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpu_measures import TINY, Figures, Shape

STARTED = time.monotonic()
LAST_START = 480.0  # seconds after which no test begins, so that all of them take ten minutes
LONGEST = 240  # seconds of a test
ENOUGH = 70e9  # bytes of a GPU on which 1.7 billion parameters can be trained


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on-cpu", action="store_true", help="run what a CPU can of these tests, on tiny models")
    parser.addoption("--eager", action="store_true", help="have vLLM compile nothing")
    parser.addoption("--figures", type=Path, default=Path("gpu-figures.jsonl"), help="file that figures are added to")


def pytest_itemcollected(item: pytest.Item) -> None:
    """No test may use up the time of the others, except on a CPU."""
    if not item.config.getoption("--on-cpu"):
        item.add_marker(pytest.mark.timeout(LONGEST))


@pytest.hookimpl(tryfirst=True)  # before fixtures, which use the GPU
def pytest_runtest_setup(item: Any) -> None:
    """Skip what needs more GPUs than there are, and what would begin too late."""
    needed, there = item.get_closest_marker("gpus").args[0], torch.cuda.device_count()
    on_cpu = item.config.getoption("--on-cpu")
    if there < needed and not (on_cpu and needed == 1 and "shape" in item.fixturenames):
        pytest.skip(f"{item.name}: needs {needed} GPU{'s' * (needed > 1)}, torch sees {there}")
    if not on_cpu and time.monotonic() - STARTED > LAST_START:
        pytest.skip(f"{item.name}: {LAST_START:.0f} s are over")


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    """After a test the card is free for the processes of the next one."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def shape(request: pytest.FixtureRequest) -> Shape:
    """What is measured; a test that takes it can run on a CPU, too."""
    if request.config.getoption("--on-cpu"):
        return TINY
    whole = torch.cuda.get_device_properties(0).total_memory >= ENOUGH
    return replace(Shape() if whole else Shape(hidden=1024), eager=request.config.getoption("--eager"))


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Figures:
    return Figures(request.config.getoption("--figures").resolve())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table to paste into docs/gpu.md."""
    measured = Figures(config.getoption("--figures")).read()
    if not measured:
        terminalreporter.write_line("no GPU: nothing measured")
        return
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    terminalreporter.write_line(f"\n| {card}, torch {torch.__version__} | |\n|---|---|")
    for name, figure in measured.items():
        terminalreporter.write_line(f"| {name} | {figure:,.4g} |")
