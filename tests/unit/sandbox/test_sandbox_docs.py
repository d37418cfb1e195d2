"""docs/sandbox.md says what the code does: limits, attempts, fields, switches, and where reality is asked again."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import typer

from common.config import SandboxConfig
from sandbox_client import RunCodeRequest, RunCodeResponse, SandboxClient, client, outage
from sandbox_client.attempts import ATTEMPTS
from sandbox_client.cli import app
from sandbox_client.isolation import CONTAINER, SWITCHES
from sandbox_client.server import Service
from sandbox_client.settings import Limits, Settings
from sandbox_client.types import CommandRunResult
from sandbox_client.worker import command, watch
from tests.support.documented import DOCS, section

PAGE = (DOCS / "sandbox.md").read_text(encoding="utf-8")


def cells(title: str) -> list[list[str]]:
    """Rows of the tables in a section whose first cell is in code or plain."""
    lines = [line for line in section("sandbox.md", title).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_limit_is_there_with_its_default() -> None:
    written = {row[0].strip("`"): row[1] for row in cells("What a program gets") if row[0].startswith("`")}
    assert written == {field.name: f"{field.default:g}" for field in fields(Limits)}


def test_every_attempt_is_there() -> None:
    written = [name.strip() for row in cells("Proof")[1:] for name in row[0].split(",")]
    assert sorted(written) == sorted(
        [*(attempt.__name__.replace("_", " ") for attempt in ATTEMPTS), "memory together", "bash"]
    )


def test_the_request_s_fields_and_the_answer_s_are_there() -> None:
    text = section("sandbox.md", "spo-sandbox")
    rows = {row[0].strip("`"): row[1].strip("`") for row in cells("spo-sandbox") if re.fullmatch(r"`\w+`", row[0])}
    defaults = {
        name: field.get_default(call_default_factory=True) for name, field in RunCodeRequest.model_fields.items()
    }
    assert rows.keys() == defaults.keys()
    for name, default in defaults.items():
        if name != "code":
            shown = f"{default:g}" if isinstance(default, float) else "null" if default is None else str(default)
            assert rows[name] == shown
    for name in (*RunCodeResponse.model_fields, *CommandRunResult.model_fields):
        assert f"`{name}`" in text


def test_the_server_s_paths_and_metrics_are_there() -> None:
    text = section("sandbox.md", "spo-sandbox")
    for name in re.findall(
        r"spo_sandbox_\w+(?=\{)|(?<=\(\")\w+(?=\", \"(?:counter|gauge))", inspect.getsource(Service.metrics)
    ):
        assert f"`spo_sandbox_{name.removeprefix('spo_sandbox_')}`" in text
    for path in ("/run_code", "/health", "/metrics"):
        assert f" {path}`" in text


def test_the_options_that_the_page_names_are_the_command_s() -> None:
    known = {option: parameter.default for parameter in typer.main.get_command(app).params for option in parameter.opts}
    named = set(re.findall(r"(?:spo-sandbox |`)(--[a-z-]+)", PAGE)) - {"--security-opt", "--privileged"}
    assert named
    assert named <= set(known)
    for option, shown in (("--queue", "(256)"), ("--grace", "(10)"), ("--max-request", "(32 MB)")):
        assert f"`{option}` {shown}" in PAGE
        assert known[option] == float(re.findall(r"\d+", shown)[0])


def test_what_a_machine_needs_is_what_the_proof_advises() -> None:
    flat = " ".join(PAGE.split())
    assert CONTAINER in flat
    for _, remedy in SWITCHES.values():
        setting = re.findall(r"[\w.]+=\w+", remedy)[0]
        assert setting in flat


def test_numbers_of_the_page_are_the_code_s() -> None:
    flat = " ".join(PAGE.split())
    for name in ("concurrency", "timeout", "attempts", "wait"):
        default = SandboxConfig.model_fields[name].default
        assert f"`sandbox.{name}` ({default:g})" in flat
    assert f"those limits and {inspect.signature(SandboxClient).parameters['deadline'].default:g} seconds more" in flat
    assert f"(above {client.MAX_ANSWER >> 20} MiB)" in flat
    assert (client.FIRST_PAUSE, client.LONGEST_PAUSE) == (0.5, 10.0)
    assert "after 0.5, 1, 2 ... 10 seconds" in flat
    assert f"one call every {outage.KNOCK:g} s" in flat
    assert f"looking every {1000 * watch.INTERVAL:g} ms" in flat
    assert f"{command.SHARED_MB} MB of `/dev/shm`" in flat
    assert f"user {command.UNNAMED} of a machine called `sandbox` in `{command.WORK}`" in flat
    assert f"({Settings().first_uid} and up)" in flat
