"""Runs the model's programs in a sandbox, unchanged."""

from __future__ import annotations

import asyncio
from typing import Any

from common.messages import Task
from generator.tools.base import ToolError
from sandbox_client import CommandRunResult, CommandStatus, RunCodeRequest, RunCodeResponse, Sandbox, Status

MAX_CELLS = 1 << 18  # characters of the programs a session runs again


class CodeInterpreter:
    """Returns what a program prints, errors included. A program ends by itself or after `run_timeout`.

    Args:
        sandbox: where programs run.
        language: of the programs.
        run_timeout: seconds of wall time; the model is told when a program was cut.
        memory_mb: limit in MiB.
        persistent: Programs of one episode share their variables, as cells of a notebook do. Sandboxes keep no
            state, so the earlier programs that succeeded run again before each new one, with their output
            discarded. Their time counts, they must not depend on chance or on the clock, and what a program did
            before it failed is forgotten. Python only.
    """

    name = "code_interpreter"

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        language: str = "python",
        run_timeout: float = 10.0,
        memory_mb: int = 1024,
        persistent: bool = False,
    ) -> None:
        if persistent and language != "python":
            raise ValueError(f"persistent programs are Python, not {language!r}")
        if not run_timeout > 0:
            raise ValueError(f"run_timeout = {run_timeout!r} must be above 0")
        if memory_mb < 1:
            raise ValueError(f"memory_mb = {memory_mb!r} must be above 0")
        self._sandbox, self._language = sandbox, language
        self.waits_for = str(sandbox)
        self.run_timeout, self._memory_mb, self._persistent = run_timeout, memory_mb, persistent
        note = " Variables are kept between calls." if persistent else ""
        self.description = f"Runs a {language} program and returns what it prints.{note}"
        self.schema: dict[str, Any] = {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the program; print what you want to see"}},
            "required": ["code"],
            "additionalProperties": False,
        }

    async def open(self, task: Task) -> CodeInterpreter | Notebook:
        """A notebook for each episode if programs are persistent, else this object for all."""
        return Notebook(self) if self._persistent else self

    async def call(self, code: str) -> str:
        return self.shown(await self.run(code))

    async def run(self, program: str) -> RunCodeResponse:
        """Run one program; raises `SandboxUnavailable`."""
        return await self._sandbox.run_code(
            RunCodeRequest(
                code=program, language=self._language, run_timeout=self.run_timeout, memory_limit_MB=self._memory_mb
            )
        )

    def shown(self, response: RunCodeResponse) -> str:
        """A program's output, and how it failed if it failed."""
        compiled = response.compile_result
        if response.run_result is None:
            return _output(compiled, "error: it does not compile") if compiled else response.message
        return _output(response.run_result, f"error: no end within {self.run_timeout:g} s")


class Notebook:
    """The programs of one episode, as cells that share their variables."""

    def __init__(self, interpreter: CodeInterpreter) -> None:
        self._interpreter = interpreter
        self._cells: list[str] = []
        # Calls of one turn run in order: each may need the variables of the one before.
        self._turn = asyncio.Lock()

    async def call(self, code: str) -> str:
        async with self._turn:
            cells = [*self._cells, code]
            if sum(map(len, cells)) > MAX_CELLS:
                raise ToolError(f"error: the programs of this conversation are longer than {MAX_CELLS} characters")
            response = await self._interpreter.run(replay(cells))
            if response.status is Status.SUCCESS:
                self._cells = cells
            return self._interpreter.shown(response)


def _output(result: CommandRunResult, cut: str) -> str:
    parts = [(result.stdout or "").rstrip("\n"), (result.stderr or "").rstrip("\n")]
    if result.status is CommandStatus.TIME_LIMIT_EXCEEDED:
        parts.append(cut)
    elif result.return_code and not parts[1]:
        parts.append(f"error: exit code {result.return_code}")
    return "\n".join(part for part in parts if part)


_PROGRAM = """\
def _replay(cells):
    import linecache, os, sys, traceback, types

    main = sys.modules["__main__"] = types.ModuleType("__main__")
    speaking = [os.dup(1), os.dup(2)]
    silent = os.open(os.devnull, os.O_WRONLY)
    for number, cell in enumerate(cells, 1):
        last = number == len(cells)
        for stream, there in enumerate(speaking, 1):
            os.dup2(there if last else silent, stream)
        name = f"<program {number}>"
        linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
        try:
            exec(compile(cell, name, "exec", dont_inherit=True), main.__dict__)
        except SystemExit:
            if last:
                raise
        except BaseException as error:
            if not last:
                os.dup2(speaking[1], 2)
                print(f"program {number} failed when it was run again", file=sys.stderr)
            # The first frame is this function's.
            traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
            sys.exit(1)
        sys.stdout.flush()
        sys.stderr.flush()


_replay(CELLS)
"""


def replay(cells: list[str]) -> str:
    """A Python program that runs the cells in one namespace and prints what the last one prints.

    It fails as the last cell fails, with a traceback of the cells' own lines.
    """
    return _PROGRAM.replace("CELLS", repr(cells))
