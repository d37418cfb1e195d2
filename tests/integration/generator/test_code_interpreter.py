"""The code interpreter: programs run as they were written, and notebooks keep their variables."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.config import EpisodeConfig
from common.errors import UserError
from common.messages import Task
from generator.tools import Toolbox, ToolError
from generator.tools.code_interpreter import CodeInterpreter
from sandbox_client import CommandRunResult, CommandStatus, RunCodeRequest, RunCodeResponse, Status
from tests.support.episode import END, ScriptedEngine, play, tool_texts
from tests.support.golden import GOLDEN
from tests.support.process_sandbox import ProcessSandbox

TASK = Task(task_id="t", prompt_id="p", prompt="hi")


class FixedSandbox(ProcessSandbox):
    def __init__(self, answer: RunCodeResponse) -> None:
        super().__init__()
        self.answer = answer

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        self.requests.append(request)
        return self.answer


def outputs(programs: list[str], sandbox: Any = None, **options: Any) -> list[str]:
    async def story() -> list[str]:
        session = await CodeInterpreter(sandbox or ProcessSandbox(), **options).open(TASK)
        return [await session.call(program) for program in programs]

    return asyncio.run(story())


def test_golden_m03_a_program_runs_as_the_model_wrote_it() -> None:
    sandbox = FixedSandbox(RunCodeResponse(status=Status.SUCCESS))
    outputs(GOLDEN["M03"]["inputs"]["code"], sandbox)
    assert [request.code for request in sandbox.requests] == GOLDEN["M03"]["inputs"]["code"]


@pytest.mark.parametrize(
    ("program", "start", "end"),
    [
        ("print(6 * 7)\nprint('b\\n')", "42\nb", ""),
        ("print(1)\n1 / 0", "1\nTraceback", "ZeroDivisionError: division by zero"),
        ("x = 1", "", ""),
        ("import sys; sys.exit(3)", "error: exit code 3", ""),
        ("", "", ""),
    ],
)
def test_a_programs_output_is_its_result(program: str, start: str, end: str) -> None:
    (output,) = outputs([program])
    assert output.startswith(start)
    assert output.endswith(end) if end else output == start


CUT = CommandRunResult(status=CommandStatus.TIME_LIMIT_EXCEEDED, stdout="half")
WRONG = CommandRunResult(status=CommandStatus.FINISHED, return_code=1, stderr="expected ;")


def test_a_cut_program_and_compile_errors_are_the_models_doing() -> None:
    sandbox = FixedSandbox(RunCodeResponse(status=Status.FAILED, run_result=CUT))
    limits = {"run_timeout": 2.5, "memory_mb": 77, "language": "bash"}
    assert outputs(["sleep 9"], sandbox, **limits) == ["half\nerror: no end within 2.5 s"]
    (request,) = sandbox.requests
    assert (request.run_timeout, request.memory_limit_MB, request.language) == (2.5, 77, "bash")
    compiled = FixedSandbox(RunCodeResponse(status=Status.FAILED, compile_result=WRONG))
    assert outputs(["int"], compiled, language="cpp") == ["expected ;"]


def test_programs_share_nothing_unless_configured_to() -> None:
    assigned, printed = outputs(["x = 1", "print(x)"])
    assert assigned == ""
    assert printed.endswith("NameError: name 'x' is not defined")


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        (
            [
                "import math\nprint('loud')",
                "def area(r):\n    return round(math.pi * r * r, 2)",
                "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int = 2",
                "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1)'], check=True)",
                "print(area(P().x))",
            ],
            ["loud", "", "", "1", "12.57"],
        ),
        (["x = 5\nimport sys\nsys.exit()\nx = 6", "print(x)"], ["", "5"]),
        (
            ["s = '''CELLS \"quotes\" \\\\ äöü\n'''", "print(ascii(s))"],
            ["", "'CELLS \"quotes\" \\\\ \\xe4\\xf6\\xfc\\n'"],
        ),
    ],
    ids=["keeps names, repeats no output", "leaves early", "any text"],
)
def test_a_notebook_keeps_what_its_programs_define(programs: list[str], expected: list[str]) -> None:
    assert outputs(programs, persistent=True) == expected


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


def test_a_program_that_does_not_run_twice_is_named(tmp_path: Any) -> None:
    once = f"import os\nos.mkdir({str(tmp_path / 'there')!r})"
    made, again = outputs([once, "print(1)"], persistent=True)
    assert made == ""
    assert again.startswith("program 1 failed when it was run again")
    assert "FileExistsError" in again


def test_a_notebook_has_an_end() -> None:
    with pytest.raises(ToolError, match="longer than"):
        outputs(["x = 1", "#" * (1 << 18)], persistent=True)


def test_calls_of_one_turn_run_in_a_notebook_in_their_order() -> None:
    config = EpisodeConfig(tools=["code_interpreter"], tool_options={"code_interpreter": {"persistent": True}})
    toolbox = Toolbox(config, {"sandbox": ProcessSandbox})
    engine = ScriptedEngine("<code>x = 20</code><code>x += 1</code><code>print(2 * x)</code>", f"42{END}")
    assert tool_texts(play(engine, toolbox=toolbox, call_format="code")) == ["", "", "42"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"persistent": True, "language": "bash"}, "persistent programs are Python, not 'bash'"),
        ({"run_timeout": 0}, "must be above 0"),
        ({"run_timeout": 30}, "limit of 30 s is never reached within episode.tool_timeout"),
        ({"persist": True}, "allowed: language, run_timeout, memory_mb, persistent"),
    ],
)
def test_options_that_cannot_work_are_user_errors(options: dict[str, Any], words: str) -> None:
    config = EpisodeConfig(tools=["code_interpreter"], tool_options={"code_interpreter": options})
    with pytest.raises(UserError, match=words):
        Toolbox(config, {"sandbox": ProcessSandbox})
