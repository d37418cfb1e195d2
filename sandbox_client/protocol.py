"""What a sandbox is to the rest of the system."""

from __future__ import annotations

from typing import Protocol

from sandbox_client.types import RunCodeRequest, RunCodeResponse


class Sandbox(Protocol):
    """Runs programs somewhere they can do no harm: on a server, or isolated on this machine."""

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        """Run one program.

        Raises:
            SandboxUnavailable: there is no result, for reasons that are not the program's.
        """
        ...

    async def close(self) -> None:
        """Give back connections and processes."""
        ...
