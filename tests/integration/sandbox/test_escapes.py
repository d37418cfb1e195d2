"""Programs that try to get out, or to take more than is theirs: each ends in a bounded result, the host unharmed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandbox_client import RunCodeRequest
from sandbox_client.isolation import Canary
from sandbox_client.settings import Limits, Settings
from tests.integration.sandbox import programs_host, programs_load
from tests.integration.sandbox.program import Program
from tests.support.sandbox import Loop, Runner

pytestmark = pytest.mark.usefixtures("bubblewrap")

PROGRAMS = [*programs_host.PROGRAMS, *programs_load.PROGRAMS]


def request_for(program: Program, told: dict[str, Any]) -> RunCodeRequest:
    return RunCodeRequest(
        code=program.code,
        language=program.language,
        stdin=json.dumps(told),
        run_timeout=program.seconds,
        memory_limit_MB=program.memory,
    )


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_contained(program: Program, runner: Runner, canary: Canary, told: dict[str, Any]) -> None:
    answer = runner.run(request_for(program, told))
    program.check(answer)
    assert runner.left() == []
    assert canary.harm() == {}


def test_the_suite_is_as_large_as_promised() -> None:
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS) >= 30


@pytest.mark.parametrize(
    "program", [program for program in PROGRAMS if program.leaks_bare], ids=lambda program: program.name
)
def test_programs_find_what_leaks_where_nothing_is_isolated(program: Program, loop: Loop) -> None:
    """The same programs as plain processes: they do report leaks, so their silence means something."""
    from sandbox_client.local import LocalSandbox

    async def run() -> str:
        with Canary() as canary:
            told = {**canary.parameters(), "project": __file__, "socket": "/", "secret": "-"}
            async with LocalSandbox(Settings(1, isolated=False, limits=Limits())) as sandbox:
                answer = await sandbox.run_code(request_for(program, told))
        assert answer.run_result is not None
        return answer.run_result.stdout or ""

    assert "LEAK" in loop.wait(run())
