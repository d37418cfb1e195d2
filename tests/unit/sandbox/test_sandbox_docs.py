"""The tables of docs/sandbox.md: limits, fields of requests and answers, metrics, options."""

from __future__ import annotations

import re
from dataclasses import fields

import typer
from starlette.testclient import TestClient

from sandbox_client import RunCodeRequest, RunCodeResponse
from sandbox_client.cli import app
from sandbox_client.server import Service
from sandbox_client.settings import Limits
from sandbox_client.types import CommandRunResult
from tests.support.documented import DOCS, section
from tests.support.process_sandbox import ProcessSandbox

PAGE = (DOCS / "sandbox.md").read_text(encoding="utf-8")


def cells(title: str) -> list[list[str]]:
    """Rows of the tables in a section whose first cell is in code or plain."""
    lines = [line for line in section("sandbox.md", title).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_limit_is_there_with_its_default() -> None:
    written = {row[0].strip("`"): row[1] for row in cells("What a program gets") if row[0].startswith("`")}
    assert written == {field.name: f"{field.default:g}" for field in fields(Limits)}


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


def test_the_metrics_of_the_page_are_the_server_s() -> None:
    with TestClient(Service(ProcessSandbox(), None, concurrency=1, queue=1, max_bytes=1).app()) as client:
        served = set(re.findall(r"^spo_sandbox_\w+", client.get("/metrics").text, re.MULTILINE))
    documented = set(re.findall(r"spo_sandbox_\w+", PAGE))
    assert documented
    assert documented <= served


def test_the_options_that_the_page_names_are_the_command_s() -> None:
    known = {option for parameter in typer.main.get_command(app).params for option in parameter.opts}
    named = set(re.findall(r"(?:spo-sandbox |`)(--[a-z-]+)", PAGE)) - {"--security-opt", "--privileged"}
    assert named
    assert named <= known
