"""The code interpreter: programs run as they were written, and notebooks keep their variables."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.config import EpisodeConfig
from common.messages import Task
from generator.tools import Toolbox, ToolError
from generator.tools.code_interpreter import CodeInterpreter
from tests.support.episode import END, ScriptedEngine, play, tool_texts
from tests.support.golden import GOLDEN
from tests.support.process_sandbox import FixedSandbox, ProcessSandbox


def outputs(programs: list[str], sandbox: Any = None, **options: Any) -> list[str]:
    async def story() -> list[str]:
        task = Task(task_id="t", prompt_id="p", prompt="hi")
        session = await CodeInterpreter(sandbox or ProcessSandbox(), **options).open(task)
        return [await session.call(program) for program in programs]

    return asyncio.run(story())


def test_golden_m03_a_program_runs_as_the_model_wrote_it() -> None:
    sandbox = FixedSandbox(status="Success")
    outputs(GOLDEN["M03"]["inputs"]["code"], sandbox)
    assert [request.code for request in sandbox.requests] == GOLDEN["M03"]["inputs"]["code"]


@pytest.mark.parametrize(
    ("program", "start", "end"),
    [
        ("print(6 * 7)\nprint('b\\n')", "42\nb", ""),
        ("print(1)\n1 / 0", "1\nTraceback", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "error: exit code 3", ""),
    ],
)
def test_a_programs_output_is_its_result(program: str, start: str, end: str) -> None:
    (output,) = outputs([program])
    assert output.startswith(start)
    assert output.endswith(end) if end else output == start
    assert outputs(["x = 1", "print(x)"])[1].endswith("NameError: name 'x' is not defined")


def test_a_cut_program_and_compile_errors_are_the_models_doing() -> None:
    sandbox = FixedSandbox(status="Failed", run_result={"status": "TimeLimitExceeded", "stdout": "half"})
    limits = {"run_timeout": 2.5, "memory_mb": 77, "language": "bash"}
    assert outputs(["sleep 9"], sandbox, **limits) == ["half\nerror: no end within 2.5 s"]
    (request,) = sandbox.requests
    assert (request.run_timeout, request.memory_limit_MB, request.language) == (2.5, 77, "bash")
    wrong = {"status": "Finished", "return_code": 1, "stderr": "expected ;"}
    compiled = FixedSandbox(status="Failed", compile_result=wrong)
    assert outputs(["int"], compiled, language="cpp") == ["expected ;"]


def test_a_notebook_keeps_what_its_programs_define() -> None:
    area = "def area(r):\n    return round(math.pi * r * r, 2)"
    cells = ["import math\nprint('loud')", area, "import sys\nx = 2\nsys.exit()\nx = 6", "print(area(x))"]
    assert outputs(cells, persistent=True) == ["loud", "", "", "12.57"]
    config = EpisodeConfig(tools=["code_interpreter"], tool_options={"code_interpreter": {"persistent": True}})
    engine = ScriptedEngine("<code>x = 20</code><code>x += 1</code><code>print(2 * x)</code>", f"42{END}")
    played = play(engine, toolbox=Toolbox(config, {"sandbox": ProcessSandbox}), call_format="code")
    assert tool_texts(played) == ["", "", "42"], "calls of one turn run in their order"
    with pytest.raises(ToolError, match="longer than"):
        outputs(["x = 1", "#" * (1 << 18)], persistent=True)


def test_a_program_that_does_not_run_twice_is_named(tmp_path: Any) -> None:
    _, again = outputs([f"import os\nos.mkdir({str(tmp_path / 'there')!r})", "print(1)"], persistent=True)
    assert again.startswith("program 1 failed when it was run again")
    assert "FileExistsError" in again


def test_a_failed_program_leaves_no_trace_in_a_notebook() -> None:
    programs = ["x = 1", "x = 2\n1 / 0", "print(x)", "raise SystemExit(2)", "for"]
    assigned, failed, printed, left, unread = outputs(programs, persistent=True)
    assert [line for line in failed.splitlines() if line.strip("~^ ")] == [
        "Traceback (most recent call last):",
        '  File "<program 2>", line 2, in <module>',
        "    1 / 0",
        "ZeroDivisionError: division by zero",
    ]
    assert (assigned, printed, left) == ("", "1", "error: exit code 2")
    assert 'File "<program 3>", line 1' in unread
    assert unread.endswith("SyntaxError: invalid syntax")
