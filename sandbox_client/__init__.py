"""Runs model-written code somewhere safe."""

from sandbox_client.client import SandboxClient
from sandbox_client.factory import make_sandbox, run_code
from sandbox_client.types import (
    CommandRunResult,
    CommandStatus,
    RequestRefused,
    RunCodeRequest,
    RunCodeResponse,
    Sandbox,
    SandboxUnavailable,
    SandboxUnreachable,
    Status,
)

__all__ = [
    "CommandRunResult",
    "CommandStatus",
    "RequestRefused",
    "RunCodeRequest",
    "RunCodeResponse",
    "Sandbox",
    "SandboxClient",
    "SandboxUnavailable",
    "SandboxUnreachable",
    "Status",
    "make_sandbox",
    "run_code",
]
