"""The sandbox: whether its server answers, accepts our token and isolates programs; or whether this machine can."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

from common.config import Config
from common.config.source_config import episodes_in_use
from common.errors import UserError
from common.files import read_secret
from common.network import without_password
from common.preflight.context import Context
from common.preflight.finding import Finding, ok, problem, warning
from common.process import Role

NAME = "sandbox"
TIMEOUT = 5.0  # seconds
# Tools and rewards of ours that run programs. Those of users may, too; a generator checks that when it starts.
RUN_PROGRAMS = {"code_interpreter", "code"}


def sandbox(context: Context, config: Config) -> Finding | None:
    """Ask /health, then /metrics with our token."""
    url = config.sandbox.url
    if context.role is not Role.GENERATOR or url is None:
        return None
    finding = problem if needs_sandbox(config) else warning
    base = url.rstrip("/").removesuffix("/run_code")
    shown = without_password(base)
    try:
        token = _token(config, context)
    except UserError as error:
        return problem(NAME, str(error))
    try:
        status, body = _get(f"{base}/health", None)
        if status != 200:
            return finding(NAME, f"{shown} answers /health with {status}; it is stopping, or no spo-sandbox")
        isolated = json.loads(body).get("isolated")
        status, _ = _get(f"{base}/metrics", token)
    except (OSError, ValueError, AttributeError) as error:
        reason = getattr(error, "reason", None) or error
        return finding(NAME, f"{shown} does not answer ({reason}); start it (spo-sandbox), or set sandbox.url")
    if status == 401:
        reason = "this is another one" if token else "there is none"
        return problem(NAME, f"{shown} asks for a token, and {reason}: name its file as sandbox.token_file")
    if not isolated:
        return warning(NAME, f"{base} runs programs without isolation: start it without --without-isolation")
    return ok(NAME, f"{base} isolates programs" + (", and accepts the token" if token else ""))


def local_isolation(config: Config) -> list[Finding]:
    """Where programs run on this machine: whether they can be isolated, by trying to break out."""
    if config.sandbox.url is not None or not needs_sandbox(config):
        return []
    from sandbox_client import make_sandbox  # imported late: it needs packages that not every role has

    try:
        make_sandbox(config.sandbox)
    except UserError as error:
        return [problem(NAME, str(error))]
    return [ok(NAME, "programs run isolated on this machine")]


def needs_sandbox(config: Config) -> bool:
    """Whether a tool or a reward of SPO's runs programs."""
    names: set[str] = set()
    for episode in episodes_in_use(config).values():
        names |= {*episode.tools, *([episode.reward] if isinstance(episode.reward, str) else episode.reward)}
    return bool(RUN_PROGRAMS & names)


def _token(config: Config, context: Context) -> str | None:
    if config.sandbox.token_file is not None:
        return read_secret(config.sandbox.token_file, "sandbox.token_file")
    return config.sandbox.token or context.machine.environ.get("SPO_SANDBOX_TOKEN")


def _get(url: str, token: str | None) -> tuple[int, bytes]:
    """Status and body; raises `OSError` where there is no answer."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return answer.status, answer.read(1 << 16)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""
