"""The code interpreter: programs run as they were written, and notebooks keep their variables."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from common.config import EpisodeConfig
from common.errors import UserError
from common.messages import Task
from generator.tools import Toolbox, ToolError
from generator.tools.code_interpreter import CodeInterpreter
from sandbox_client import CommandRunResult, CommandStatus, RunCodeRequest, RunCodeResponse, SandboxUnavailable, Status
from tests.support.episode import ScriptedEngine, runner
from tests.support.golden import GOLDEN

TASK = Task(task_id="t", prompt_id="p", prompt="hi")


class Subprocess:
    """A sandbox that isolates nothing: the tests' own programs only."""

    def __init__(self) -> None:
        self.requests: list[RunCodeRequest] = []

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        self.requests.append(request)
        done = subprocess.run([sys.executable, "-"], input=request.code, capture_output=True, text=True, check=False)
        return response(done.stdout, done.stderr, done.returncode)

    async def close(self) -> None: ...


def response(stdout: str, stderr: str = "", code: int = 0, status: CommandStatus = CommandStatus.FINISHED) -> Any:
    run = CommandRunResult(status=status, stdout=stdout, stderr=stderr, return_code=code)
    good = status is CommandStatus.FINISHED and code == 0
    return RunCodeResponse(status=Status.SUCCESS if good else Status.FAILED, run_result=run)


def outputs(interpreter: CodeInterpreter, *programs: str) -> list[str]:
    async def story() -> list[str]:
        session = await interpreter.open(TASK)
        return [await session.call(program) for program in programs]

    return asyncio.run(story())


@pytest.mark.parametrize("code", GOLDEN["M03"]["inputs"]["code"])
def test_golden_m03_a_program_is_run_as_the_model_wrote_it(code: str) -> None:
    sandbox = Subprocess()
    outputs(CodeInterpreter(sandbox), code)
    assert [request.code for request in sandbox.requests] == [code]


def test_a_program_s_output_is_its_result() -> None:
    (plain, failing, silent, exiting, nothing) = outputs(
        CodeInterpreter(Subprocess()),
        "print(6 * 7)\nprint('b\\n')",
        "print(1)\n1 / 0",
        "x = 1",
        "import sys; sys.exit(3)",
        "",
    )
    assert plain == "42\nb"
    assert failing.startswith("1\nTraceback")
    assert failing.endswith("ZeroDivisionError: division by zero")
    assert (silent, exiting, nothing) == ("", "error: exit code 3", "")


def test_limits_go_to_the_sandbox_and_a_cut_program_is_the_model_s_doing() -> None:
    class Cutting(Subprocess):
        async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
            self.requests.append(request)
            return response("half", status=CommandStatus.TIME_LIMIT_EXCEEDED)

    sandbox = Cutting()
    interpreter = CodeInterpreter(sandbox, run_timeout=2.5, memory_mb=77, language="bash")
    assert outputs(interpreter, "sleep 9") == ["half\nerror: no end within 2.5 s"]
    (request,) = sandbox.requests
    assert (request.run_timeout, request.memory_limit_MB, request.language) == (2.5, 77, "bash")


def test_a_program_that_does_not_compile_shows_why() -> None:
    class Compiling(Subprocess):
        async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
            compiled = CommandRunResult(status=CommandStatus.FINISHED, return_code=1, stderr="expected ;")
            return RunCodeResponse(status=Status.FAILED, compile_result=compiled)

    assert outputs(CodeInterpreter(Compiling(), language="cpp"), "int") == ["expected ;"]


def test_programs_share_nothing_unless_configured_to() -> None:
    first, second = outputs(CodeInterpreter(Subprocess()), "x = 1", "print(x)")
    assert first == ""
    assert second.endswith("NameError: name 'x' is not defined")


def notebook(*programs: str) -> list[str]:
    return outputs(CodeInterpreter(Subprocess(), persistent=True), *programs)


def test_a_notebook_keeps_variables_functions_and_imports_and_repeats_no_output() -> None:
    assert notebook(
        "import math\nprint('loud')",
        "def area(r):\n    return round(math.pi * r * r, 2)",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int = 2",
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1)'], check=True)",
        "print(area(P().x))",
    ) == ["loud", "", "", "1", "12.57"]


def test_a_failed_program_leaves_no_trace_in_a_notebook() -> None:
    first, second, third, fourth = notebook("x = 1", "x = 2\n1 / 0", "print(x)", "raise SystemExit(2)")
    assert first == ""
    lines = [line for line in second.splitlines() if line.strip("~^ ")]
    assert lines == [
        "Traceback (most recent call last):",
        '  File "<program 2>", line 2, in <module>',
        "    1 / 0",
        "ZeroDivisionError: division by zero",
    ]
    assert (third, fourth) == ("1", "error: exit code 2")


def test_a_program_that_leaves_early_without_an_error_is_part_of_the_notebook() -> None:
    assert notebook("x = 5\nimport sys\nsys.exit()\nx = 6", "print(x)") == ["", "5"]


def test_a_syntax_error_in_a_notebook_is_shown_with_its_line() -> None:
    (shown,) = notebook("for")
    assert 'File "<program 1>", line 1' in shown
    assert shown.endswith("SyntaxError: invalid syntax")


def test_a_program_that_does_not_run_twice_is_named(tmp_path: Any) -> None:
    once = f"import os\nos.mkdir({str(tmp_path / 'there')!r})"
    first, second = notebook(once, "print(1)")
    assert first == ""
    assert second.startswith("program 1 failed when it was run again")
    assert "FileExistsError" in second


def test_a_notebook_takes_text_of_any_kind() -> None:
    assert notebook("s = '''CELLS \"quotes\" \\\\ äöü\n'''", "print(ascii(s))") == [
        "",
        "'CELLS \"quotes\" \\\\ \\xe4\\xf6\\xfc\\n'",
    ]


def test_a_notebook_has_an_end() -> None:
    with pytest.raises(ToolError, match="longer than"):
        notebook("x = 1", "#" * (1 << 18))


def test_calls_of_one_turn_run_in_a_notebook_in_their_order() -> None:
    sandbox = Subprocess()
    options = {"code_interpreter": {"persistent": True}}
    config = EpisodeConfig(tools=["code_interpreter"], tool_options=options)
    turn = "<code>x = 20</code><code>x += 1</code><code>print(2 * x)</code>"
    rules = runner(
        ScriptedEngine(turn, "42<|im_end|>"), toolbox=Toolbox(config, {"sandbox": lambda: sandbox}), call_format="code"
    )
    episode = asyncio.run(rules.run(TASK))
    assert [entry.text for entry in episode.transcript.entries if entry.role == "tool"] == ["", "", "42"]


def test_a_sandbox_that_gives_no_result_is_no_result() -> None:
    class Gone(Subprocess):
        async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
            raise SandboxUnavailable("no server")

    with pytest.raises(SandboxUnavailable):
        outputs(CodeInterpreter(Gone()), "print(1)")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"persistent": True, "language": "bash"}, "persistent programs are Python, not 'bash'"),
        ({"run_timeout": 0}, "must be above 0"),
        ({"run_timeout": 30}, "limit of 30 s is never reached within episode.tool_timeout"),
        ({"persist": True}, "allowed: language, run_timeout, memory_mb, persistent"),
    ],
)
def test_options_that_cannot_work_are_user_errors(options: dict[str, Any], said: str) -> None:
    config = EpisodeConfig(tools=["code_interpreter"], tool_options={"code_interpreter": options})
    with pytest.raises(UserError, match=said):
        Toolbox(config, {"sandbox": Subprocess})
