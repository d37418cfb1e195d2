"""A hung tool, a hung reward and a sandbox killed in the middle, all in one run: others go on, none is scored 0.

All is real (Redis, sampler, generator, scoring processes, `spo-sandbox` with its isolation) but the engine, which says
what the prompts ask for, and the learner, which takes batches and learns nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.streams.broker import Broker
from tests.conftest import RedisServer
from tests.support.fault import BATCH, STEPS, FaultRun, fault_config, kind_of, programs_run
from tests.support.faulty_parts import Stuck
from tests.support.processes import ended
from tests.support.sampler_driving import audited
from tests.support.sandbox import SandboxServer
from tests.support.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("bubblewrap")]
FAULTY = {"stuck": 3, "scored": 3, "code": 12}
HANGING = FAULTY["stuck"] + FAULTY["scored"]
FAR = 600.0  # seconds; no such limit is reached while a test runs


@pytest.fixture
def sandbox() -> Iterator[SandboxServer]:
    server = SandboxServer("workers=2")
    yield server
    server.stop()


def scored(folder: Path) -> list[tuple[int, int]]:
    """(prompt number, process id) of every time the hanging reward was called."""
    names = [path.name.split(".") for path in (folder / "scored").iterdir()]
    return [(int(number), int(pid)) for number, pid in names]


@pytest.mark.slow
def test_while_some_hang_all_others_are_answered_and_trained_on(
    real_broker: Broker, redis_server: RedisServer, sandbox: SandboxServer, tmp_path: Path
) -> None:
    limits = {
        "tool_timeout": FAR,
        "reward_timeout": FAR,
        "tool_options": {"code_interpreter": {"run_timeout": FAR / 2}},
    }
    config = fault_config(tmp_path, redis_server.url, sandbox.url, FAULTY, episode=limits)
    run = FaultRun(config, real_broker)

    async def story(run: FaultRun) -> None:
        await programs_run(sandbox.url)
        sandbox.process.kill()
        await until(lambda: len(Stuck.calls) == FAULTY["stuck"])
        await until(lambda: len(scored(tmp_path)) == FAULTY["scored"])
        # As far as a run can get without the tasks that hang: no batch waits for them.
        await run.learner.reached((BATCH * STEPS - HANGING) // BATCH)
        await until(lambda: run.outstanding() == len(run.generator.leased) == HANGING)
        # Still the same ones, in their first attempt: they hold their places and no more.
        assert run.generator.slots_taken == HANGING
        assert {lease.delivery.attempt for lease in run.generator.leased} == {1}
        prompts = {str(lease.delivery.task.prompt) for lease in run.generator.leased}
        assert {prompt.split()[0] for prompt in prompts} == {"stuck", "scored"}
        assert len(set(scored(tmp_path))) == FAULTY["scored"]
        assert all(os.path.exists(f"/proc/{pid}") for _, pid in scored(tmp_path))

    run.play(story)
    rows = run.kept()
    aside = run.broker.counters()["set_aside"]
    assert Counter(row["status"] for row in rows.values()) == {"ok": BATCH * STEPS - HANGING, "set_aside": aside}
    assert {kind_of(row) for row in rows.values() if row["status"] == "set_aside"} == {"code"}
    assert not run.log.failures().keys() - run.letters().keys()
    assert all(ended(pid) for _, pid in scored(tmp_path)), "a generator that stops leaves no scoring process"


def test_a_failing_part_is_retried_then_its_task_is_skipped(
    real_broker: Broker, redis_server: RedisServer, sandbox: SandboxServer, tmp_path: Path
) -> None:
    limits = {"tool_timeout": 5, "reward_timeout": 3, "tool_options": {"code_interpreter": {"run_timeout": 4}}}
    config = fault_config(tmp_path, redis_server.url, sandbox.url, FAULTY, episode=limits)
    run = FaultRun(config, real_broker)

    async def story(run: FaultRun) -> None:
        await programs_run(sandbox.url)
        sandbox.process.kill()

    run.play(story, to_the_end=True)
    assert run.code == 0, run.output
    assert run.broker.finished()
    causes = {
        "stuck": "ToolUnavailable: tool stuck: no end within episode.tool_timeout = 5 s",
        "scored": "TimeoutError: reward 'tests.support.faulty_parts:seven' took longer than "
        "episode.reward_timeout = 3 s",
        "code": f"SandboxUnreachable: sandbox {sandbox.url.removeprefix('http://')}: no result in 2 attempts; "
        "last: ConnectError: All connection attempts failed",
    }
    each_task_once(run)
    rows = run.kept()
    aside = {task: row for task, row in rows.items() if row["status"] == "set_aside"}
    assert {kind_of(row) for row in aside.values()} == set(causes)
    kinds = {"stuck": "ToolUnavailable", "scored": "TimeoutError", "code": "SandboxUnavailable"}
    counted = Counter(kinds[kind_of(row)] for row in aside.values())
    assert {kind: run.broker.counters()[f"set_aside.{kind}"] for kind in counted} == counted
    for task, row in aside.items():
        assert row["reason"] == causes[kind_of(row)]
        failures = run.log.failures()[task]
        assert [failure["attempt"] for failure in failures] == [1, 2, 3], "generator.max_attempts"
        assert failures[-1]["error"] == row["reason"]
    assert run.log.failures().keys() == aside.keys()
    # Each hanging score had a process of its own, which is gone.
    calls = scored(tmp_path)
    assert len({pid for _, pid in calls}) == len(calls)
    assert len(calls) == 3 * sum(kind_of(row) == "scored" for row in aside.values())
    assert all(ended(pid) for _, pid in calls)


def each_task_once(run: FaultRun) -> None:
    """Every task is answered, counted and trained on, or skipped and kept as a dead letter; none is scored 0."""
    counters, rows = audited(run.broker, run.config), run.kept().values()
    assert (counters["counted"], counters["finished_twice"]) == (len(rows), 0)
    assert {(row["status"], row["reward"]) for row in rows} <= {("ok", 1.0), ("set_aside", None)}
    aside = {row["task_id"]: row["reason"] for row in rows if row["status"] == "set_aside"}
    assert run.letters() == aside
    assert {reward for batch in run.learner.noop.batches for reward in batch.rewards} == {1.0}
