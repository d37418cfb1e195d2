"""The interface of a sandbox: its one call, its requests and answers, and its errors.

Requests and answers use the names of SandboxFusion's `/run_code`; fields that are not defined here are ignored.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from pydantic import BaseModel, Field

from common.messages import Failure


class SandboxUnavailable(Exception):
    """The sandbox gave no result. This says nothing about the program: the task is tried again, never scored."""

    failure = Failure.SANDBOX_UNAVAILABLE


class RequestRefused(SandboxUnavailable):
    """The sandbox cannot run this request (its language, a path of its files, its token): retrying is useless."""


class SandboxUnreachable(SandboxUnavailable):
    """No connection to the server can be made."""


class Status(StrEnum):
    """What became of a request."""

    SUCCESS = "Success"
    FAILED = "Failed"
    SANDBOX_ERROR = "SandboxError"


class CommandStatus(StrEnum):
    """How one command ended."""

    FINISHED = "Finished"
    ERROR = "Error"
    TIME_LIMIT_EXCEEDED = "TimeLimitExceeded"


class RunCodeRequest(BaseModel):
    """A program to run.

    Attributes:
        compile_timeout, run_timeout: seconds.
        memory_limit_MB: MiB, of all processes of the program together.
        files: content in base64, by path.
        fetch_files: paths whose content is wanted afterwards.
    """

    code: str
    language: str = "python"
    stdin: str | None = None
    compile_timeout: float = Field(10.0, gt=0)
    run_timeout: float = Field(10.0, gt=0)
    memory_limit_MB: int = Field(1024, gt=0)
    files: dict[str, str | None] = Field(default_factory=dict)
    fetch_files: list[str] = Field(default_factory=list)


class CommandRunResult(BaseModel):
    """One command: how it ended, after how many seconds, and what it wrote."""

    status: CommandStatus
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeResponse(BaseModel):
    """The answer. `SandboxError` says that the sandbox failed, not the program: it is never a reward of 0."""

    status: Status
    message: str = ""
    compile_result: CommandRunResult | None = None
    run_result: CommandRunResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = Field(default_factory=dict)


class Sandbox(Protocol):
    """Runs programs where they can do no harm: on a server, or isolated on this machine."""

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        """Run one program.

        Raises:
            SandboxUnavailable: there is no result, for reasons that are not the program's.
        """
        ...

    async def close(self) -> None: ...
