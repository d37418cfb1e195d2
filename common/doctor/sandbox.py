"""The sandbox server a configuration names: whether it answers, takes our token, and isolates programs."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

from common.config import Config
from common.doctor.case import Case
from common.doctor.finding import Finding, ok, problem, warning
from common.errors import UserError
from common.role import Role
from common.secret import read_secret

NAME = "sandbox"
SECONDS = 5.0
# What our own parts need it for; others may too, and ask when a generator starts.
USERS = {"code_interpreter", "code"}


def sandbox(case: Case, config: Config) -> Finding | None:
    """Ask /health, then /metrics with our token."""
    url = config.sandbox.url
    if case.role is not Role.GENERATOR or url is None:
        return None
    tell = problem if needs_sandbox(config) else warning
    base = url.rstrip("/").removesuffix("/run_code")
    try:
        token = _token(config, case)
    except UserError as error:
        return problem(NAME, str(error))
    try:
        status, body = _get(f"{base}/health", None)
        if status != 200:
            return tell(NAME, f"{base} answers /health with {status}; it is stopping, or no spo-sandbox")
        isolated = json.loads(body).get("isolated")
        status, _ = _get(f"{base}/metrics", token)
    except (OSError, ValueError, AttributeError) as error:
        reason = getattr(error, "reason", None) or error
        return tell(NAME, f"{base} does not answer ({reason}); start it (spo-sandbox), or set sandbox.url")
    if status == 401:
        given = "another token is given" if token else "no token is given"
        return problem(NAME, f"{base} wants a token, and {given}: name its file as sandbox.token_file")
    if not isolated:
        return warning(NAME, f"{base} runs programs without isolation: start it without --without-isolation")
    return ok(NAME, f"{base} isolates programs" + (", and takes the token" if token else ""))


def needs_sandbox(config: Config) -> bool:
    """Whether a tool or a reward of ours runs programs."""
    reward = config.episode.reward
    return bool(USERS & {*config.episode.tools, *([reward] if isinstance(reward, str) else reward)})


def _token(config: Config, case: Case) -> str | None:
    if config.sandbox.token_file is not None:
        return read_secret(config.sandbox.token_file, "sandbox.token_file")
    return config.sandbox.token or case.machine.environ.get("SPO_SANDBOX_TOKEN")


def _get(url: str, token: str | None) -> tuple[int, bytes]:
    """Status and body; raises `OSError` where there is no answer."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return answer.status, answer.read(1 << 16)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, b""
