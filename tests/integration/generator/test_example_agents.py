"""The agents of examples/ that are built on agent packages, before an endpoint that replies as scripted."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from common.config import AgentConfig
from generator.agents.programs import make_program
from tests.support.agents import agent_task
from tests.support.documented import EXAMPLES
from tests.support.http_double import Double, Handler, raw, says, serve
from tests.support.waiting import eventually

FOLDER = EXAMPLES / "agents"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2*3+4"}}\n</tool_call>'


def responds(*output: dict[str, Any]) -> Callable[[Handler, Any], None]:
    """A reply of the Responses API."""
    reply = {"id": "r", "object": "response", "output": output, "created_at": 0, "model": "policy", "usage": None}
    return lambda handler, body: raw(handler, json.dumps(reply).encode(), Content_Type="application/json")


def calls(name: str, **arguments: str) -> Callable[[Handler, Any], None]:
    call = {"name": name, "arguments": json.dumps(arguments), "call_id": "c", "id": "f", "status": "completed"}
    return responds({"type": "function_call"} | call)


def writes(text: str) -> Callable[[Handler, Any], None]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return responds({"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content})


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path / "settings"))
    monkeypatch.syspath_prepend(FOLDER)


def played(agent: AgentConfig, endpoint: Double, folder: Path) -> object:
    task = agent_task(folder, base_url=f"{endpoint.url}/v1", prompt="2*3+4=")
    return asyncio.run(make_program(agent).run(task))


SCRIPTS = {
    "openai_agents": (calls("calculator", expression="2*3+4"), writes("10")),
    "mini_swe_agent": (says(CALL), says("10")),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_agent_as_a_function_uses_its_tool_and_answers(name: str, tmp_path: Path) -> None:
    with serve(*SCRIPTS[name]) as endpoint:
        assert played(AgentConfig(function=f"{name}:solve"), endpoint, tmp_path) == "10"
    first, second = (json.dumps(request) for request in endpoint.requests)
    assert "2*3+4=" in first
    assert "2*3+4=" in second
    assert '"10"' in second or "<tool_response>\\n10\\n</tool_response>" in second
    sent = [{name.lower(): value for name, value in headers.items()} for headers in endpoint.headers]
    assert [headers["authorization"] for headers in sent] == ["Bearer key"] * 2


def test_an_agent_as_a_program_writes_its_answer(tmp_path: Path) -> None:
    agent = AgentConfig(command=[sys.executable, str(FOLDER / "openai_agents.py")])
    with serve(*SCRIPTS["openai_agents"]) as endpoint:
        assert played(agent, endpoint, tmp_path) == "10"


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, *command], cwd=FOLDER) as process:
        try:
            yield process
        finally:
            process.kill()


def test_an_agent_in_another_process_gets_each_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    socket = tmp_path / "agent.sock"
    monkeypatch.setenv("AGENT_SOCKET", str(socket))
    with serve(*SCRIPTS["mini_swe_agent"]) as endpoint, running("served.py", str(socket), "mini_swe_agent:solve"):
        eventually(socket.exists)
        assert played(AgentConfig(function="served:solve"), endpoint, tmp_path) == "10"


def test_the_agent_for_containers_repairs_the_file(tmp_path: Path) -> None:
    (tmp_path / "calc.py").write_text("def add(a, b): return a @ b\n")
    (tmp_path / "prompt").write_text("Repair add.")
    with serve(calls("use", operator="+"), writes("repaired")) as endpoint:
        environment = {"OPENAI_BASE_URL": f"{endpoint.url}/v1", "OPENAI_API_KEY": "key", "SPO_MODEL": "policy"}
        environment |= {f"SPO_{name}_FILE": str(tmp_path / name.lower()) for name in ("PROMPT", "ANSWER")}
        program = [sys.executable, str(EXAMPLES / "harbor" / "sdk_agent.py")]
        subprocess.run(program, cwd=tmp_path, env=os.environ | environment, check=True, timeout=120)
    assert (tmp_path / "calc.py").read_text() == "def add(a, b): return a + b\n"
    assert (tmp_path / "answer").read_text() == "repaired"
