"""The simulation of waiting for groups, in orders that are known, and the tool whose latencies it shares."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import slow_tool
from benchmarks.group_free import GROUP, STARTED, WANTED, batch_ends, first_batch, replayed, simulate
from benchmarks.group_free_run import write_config
from benchmarks.slow_tool import SlowTool
from common.config import load_config
from common.messages import Task
from generator.episode.episode import Episode
from generator.episode.parts import EpisodeParts
from generator.episode.runner import EpisodeRunner
from tests.support.episode import TOKENIZER, ScriptedEngine

IN_ORDER = np.arange(1.0, STARTED + 1)


def test_a_wave_waits_for_three_groups_or_for_single_episodes() -> None:
    assert first_batch(IN_ORDER, 1) == first_batch(IN_ORDER, GROUP) == WANTED
    slow_in_each_group = IN_ORDER.copy()
    slow_in_each_group[GROUP - 1 :: GROUP] = [100, 200, 300, 400, 500, 600]
    assert first_batch(slow_in_each_group, GROUP) == 300
    assert first_batch(slow_in_each_group, 1) == 27  # three of the first 27 are slow
    slow_in_one_group = np.ones(STARTED)
    slow_in_one_group[:GROUP] = 1000
    assert first_batch(slow_in_one_group, GROUP) == first_batch(slow_in_one_group, 1) == 1


def test_the_heavier_the_tail_the_more_groups_cost() -> None:
    speedups = [simulate(sigma, waves=500, runs=1, batches=40)["speedup"] for sigma in (0.5, 1.0, 2.0)]
    assert 1 < speedups[0] < speedups[1] < speedups[2]
    without = simulate(0.0, waves=10, runs=2, batches=40)
    assert without["speedup"] == without["three_groups"] == 1
    assert {continuous["speedup"] for continuous in without["continuous"].values()} == {1}


# Seconds of slow episodes by their number among others of one second, staleness, size of a group, ends of batches.
ENDS: list[tuple[dict[int, float], int, int, list[float]]] = [
    *(({}, staleness, GROUP, [1.0 + batch // (staleness + 1) for batch in range(12)]) for staleness in (0, 1, 4)),
    ({5: 100.0}, 2, 1, [1.0, 1.0, 100.0, 100.0]),  # it started at version 0, so batch 2 is its last one
    # Batches 0 and 1 are full at once; the slow episode comes with the first of them and so must be in batch 2.
    ({STARTED: 100.0}, 1, 1, [1.0, 1.0, 101.0, 101.0]),
    # Of those that come with the second, one may be as late as batch 3.
    ({STARTED + WANTED: 100.0}, 1, 1, [1.0, 1.0, 2.0, 101.0]),
]


@pytest.mark.parametrize(("slow", "staleness", "group", "ends"), ENDS)
def test_a_slow_episode_is_waited_for_by_its_last_batch(
    slow: dict[int, float], staleness: int, group: int, ends: list[float]
) -> None:
    seconds = [slow.get(number, 1.0) for number in range(40 * WANTED)]
    assert batch_ends(seconds, staleness, group, batches=len(ends)).tolist() == ends


def test_a_phase_is_simulated_with_its_own_latencies() -> None:
    row = {"sigma": 1.0, "staleness": 1, "ahead": 0, "first_task": 96, "free": [0.0], "grouped": [0.0]}
    tool = SlowTool([(96, 0.0), (48, 1.0)])
    turns = (slow_tool.CALLS + 1) * slow_tool.GENERATION
    seconds = np.array([turns + sum(tool.seconds(f"t{task:07d}")) for task in range(96, 96 + STARTED)])
    simulated = replayed(row)
    assert simulated["free"] == pytest.approx([slow_tool.SCALE * first_batch(seconds, 1)])
    assert simulated["grouped"] == pytest.approx([slow_tool.SCALE * first_batch(seconds, GROUP)])


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the tool sleeps, none of which takes any time; event loops in other threads sleep as ever."""
    seconds: list[float] = []

    async def note(delay: float) -> None:
        seconds.append(delay)

    monkeypatch.setattr(slow_tool, "asyncio", SimpleNamespace(sleep=note))
    return seconds


def test_the_tool_is_waited_for_between_turns(tmp_path: Path, slept: list[float]) -> None:
    config = load_config(write_config("free", tmp_path, "redis://localhost/0", 1, [(96, 1.0)]))
    engine = ScriptedEngine(*"q3é?", tokenizer=TOKENIZER)

    async def play() -> Episode:
        parts = EpisodeParts(config)
        try:
            runner = EpisodeRunner(config, engine, parts)  # type: ignore[arg-type]
            return await runner.run(Task(task_id="t0000003", prompt_id="p", prompt="7?"))
        finally:
            await parts.close()

    episode = asyncio.run(play())
    assert (episode.turns, episode.tool_calls) == (slow_tool.CALLS + 1, slow_tool.CALLS)
    expected = np.array(SlowTool([(96, 1.0)]).seconds("t0000003")) * slow_tool.SCALE
    np.testing.assert_allclose(slept, expected)


def test_the_two_runs_differ_in_their_method_alone(tmp_path: Path) -> None:
    free, grouped = (
        load_config(write_config(name, tmp_path, "redis://localhost/0", 1, [(96, 0.0)])) for name in ("free", "grouped")
    )
    assert (free.algorithm.responses, grouped.algorithm.responses) == (1, GROUP)
    assert free.model_copy(update={"run": grouped.run, "algorithm": grouped.algorithm}) == grouped
