"""Agents in the sandbox: they reach the endpoint and nothing else, and leave nothing."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from common.errors import UserError
from generator.agents.endpoint import Endpoint
from generator.agents.programs import AgentFailed, AgentTask
from generator.agents.sandboxed import URL, SandboxedCommand
from sandbox_client.worker import cgroup
from tests.support.agent_sessions import Rig
from tests.support.agents import agent_task
from tests.support.episode import TEMPLATE, configured
from tests.support.sandbox import programs_of
from tests.support.waiting import until

GROUPS = cgroup.find("auto")
pytestmark = [
    pytest.mark.usefixtures("bubblewrap"),
    pytest.mark.skipif(GROUPS is None, reason="no control group can be made here"),
]


class Scene:
    """An endpoint for the sandbox with sessions of it, an agent whose program changes, and their event loop."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runner, self.rig = folder, asyncio.Runner(), Rig()
        self.endpoint = Endpoint(self.rig.layer, TEMPLATE, 400, structlog.get_logger(), folder / "endpoint" / "socket")
        self.runner.run(self.endpoint._serve())
        self.program = folder / "agent.py"
        self.program.touch()
        command = {"command": ["python", str(self.program)], "sandbox": True}
        self.agent = SandboxedCommand(configured(agent=command), self.endpoint.socket)

    def play(self, code: str, **row: Any) -> Any:
        return self.runner.run(self.agent.run(self.task(code, **row)))

    def task(self, code: str, **row: Any) -> AgentTask:
        self.program.write_text(textwrap.dedent(code))
        session = self.rig.session()
        return agent_task(self.folder, base_url=f"{URL}/s/{session.key}/v1", api_key=session.key, row=row)

    def close(self) -> None:
        self.runner.run(self.agent.close())
        self.runner.run(self.endpoint.close())
        self.runner.close()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, bubblewrap: str) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("scene"))
    yield scene
    scene.close()


def test_an_agent_reaches_the_endpoint_and_nothing_else(scene: Scene, tmp_path: Path) -> None:
    program = """
        import json, os, socket, sys
        import openai
        task = json.load(sys.stdin)
        reached = []
        for family, kind, where in [(2, 1, ("127.0.0.1", port)) for port in task["row"]["ports"]] + [
            (2, 2, ("127.0.0.1", 9)), (2, 1, ("192.0.2.1", 80)), (10, 1, ("::1", 80)), (1, 1, task["row"]["unix"])
        ]:
            try:
                one = socket.socket(family, kind)
                one.settimeout(5)
                one.connect(where)
                reached.append(where)
            except OSError:
                pass
        body = {"messages": [{"role": "user", "content": task["prompt"]}]}
        said = [openai.OpenAI().post("/chat/completions", cast_to=object, body=body) for _ in range(2)]
        told = {"said": said, "reached": reached, "stdin": task, "file": json.load(open(os.environ["SPO_TASK_FILE"]))}
        told |= {"folder": sorted(os.listdir(".")), "environment": sorted(os.environ)}
        open(os.environ["SPO_ANSWER_FILE"], "w").write(json.dumps(told))
    """
    with socket.create_server(("127.0.0.1", 0)) as other, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "unix"))
        unix.listen()
        ports = [other.getsockname()[1], int(scene.endpoint.url.rpartition(":")[2])]
        told = json.loads(scene.play(program, ports=ports, unix=str(tmp_path / "unix")))
    assert [json.loads(said) for said in told["said"]] == [{"content": "yes"}] * 2
    assert told["reached"] == []
    assert len(scene.rig.app.prompts) == 2
    assert told["stdin"].pop("reward_url")
    assert told["stdin"] == told["file"]
    assert (told["file"]["prompt"], told["file"]["folder"]) == ("What is 1+1?", "/tmp/run")
    assert {"agent.py", "task.json"} <= set(told["folder"])
    own = {name for name in told["environment"] if name.startswith("SPO_")}
    assert own == {"SPO_MODEL", "SPO_TASK_FILE", "SPO_ANSWER_FILE"}


@pytest.mark.skipif(
    GROUPS is not None and (GROUPS / cgroup.LIMITS[0]).exists(), reason="version 2 counts them with all other memory"
)
def test_connections_take_no_memory_beyond_a_bound(scene: Scene) -> None:
    # Connections of its own, whose other ends are not read.
    program = """
        import os, socket
        listener = socket.create_server(("127.0.0.1", 0))
        held, kept = 0, []
        for _ in range(100):
            sender = socket.create_connection(listener.getsockname())
            kept += [sender, listener.accept()[0]]
            sender.setblocking(False)
            try:
                while True:
                    held += sender.send(bytes(1 << 16))
            except BlockingIOError:
                pass
        open(os.environ["SPO_ANSWER_FILE"], "w").write(str(held))
    """
    assert int(scene.play(program)) < 2 * cgroup.TCP_BYTES


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import sys; sys.exit('no more')", "python ended with exit code 1: no more"),
        ("import os; os.kill(os.getpid(), 9)", "exit code 137: it printed nothing"),
        ("block = bytearray(2 << 30)", "MemoryError"),
    ],
)
def test_a_failure_says_how_the_program_ended(scene: Scene, code: str, says: str) -> None:
    with pytest.raises(AgentFailed, match=says):
        scene.play(code)


def test_an_agent_whose_session_ends_is_killed(scene: Scene) -> None:
    asks = """
        import json, os, urllib.request
        body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
        urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    """

    async def end_it_while_it_waits() -> None:
        scene.rig.app.gate.clear()
        scene.rig.app.entered.clear()
        playing = asyncio.create_task(scene.agent.run(scene.task(asks)))
        await scene.rig.app.entered.wait()
        assert programs_of(os.getpid())
        playing.cancel()
        await asyncio.wait({playing})
        scene.rig.app.gate.set()
        await until(lambda: not programs_of(os.getpid()))

    scene.runner.run(end_it_while_it_waits())


def twice(folder: Path) -> list[str]:
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "x.py").touch()
    return ["python", str(folder / "a/x.py"), str(folder / "b/x.py")]


@pytest.mark.parametrize(
    ("command", "settings", "says"),
    [
        (lambda _: ["no-such-program"], {}, "there is no program 'no-such-program' in the sandbox"),
        (twice, {}, "two files have the same name"),
        (lambda _: ["python"], {"sandbox": {"url": "http://127.0.0.1:1"}}, "leave sandbox.url out"),
    ],
)
def test_what_cannot_run_there_is_refused(tmp_path, command, settings, says) -> None:
    agent = {"command": command(tmp_path), "sandbox": True}
    with pytest.raises(UserError, match=says):
        SandboxedCommand(configured(settings, agent=agent), None)
