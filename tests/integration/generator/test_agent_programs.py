"""Agents that are programs: what they get, what becomes of their end, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import typer

from common.config import AgentConfig
from common.scripts import entry_point
from generator.agents import programs
from generator.agents.programs import AgentFailed, make_program
from tests.support.agents import agent_task, python
from tests.support.event_loop import cancelled, in_event_loop
from tests.support.http_double import says, serve
from tests.support.processes import children, ended
from tests.support.waiting import eventually, until

# Starts a daemon in a session of its own, which holds the program's output open; then writes the daemon's id.
DAEMON = """
import os, subprocess, sys
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open("pid.new", "w") as file:
    file.write(str(daemon.pid))
os.rename("pid.new", "pid")
"""


async def play(code: str, folder: Path) -> object:
    return await python(code).run(agent_task(folder))


@in_event_loop
async def test_a_program_gets_the_task_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPO_SANDBOX_TOKEN", "secret")
    monkeypatch.setenv("NO_PROXY", "elsewhere")
    reports = """
        import json, os, sys
        task = json.load(open(os.environ["SPO_TASK_FILE"]))
        report = {"stdin": json.load(sys.stdin), "file": task, "env": dict(os.environ), "at": os.getcwd()}
        json.dump(report, open(os.environ["SPO_ANSWER_FILE"], "w"))
    """
    report = json.loads(str(await play(reports, tmp_path)))
    task, environment = report["file"], report["env"]
    assert report["stdin"] == task | {"reward_url": "http://127.0.0.1:1/s/second/v1/reward"}
    assert (task["prompt"], task["row"], "reward_url" in task) == ("What is 1+1?", {"level": "easy"}, False)
    assert Path(report["at"]) == tmp_path
    assert "secret" not in environment.values()
    expected = {
        "OPENAI_BASE_URL": "http://127.0.0.1:1/s/key/v1",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:1/s/key",
        "OPENAI_API_KEY": "key",
        "ANTHROPIC_API_KEY": "key",
        "NO_PROXY": "elsewhere,127.0.0.1,localhost,::1",
        "no_proxy": "elsewhere,127.0.0.1,localhost,::1",
        "SPO_MODEL": "policy",
    }
    assert {name: environment[name] for name in expected} == expected


@in_event_loop
async def test_files_beside_the_configuration_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "FOLDERS", [tmp_path])
    (tmp_path / "agent.py").write_text("import sys; open('answer.txt', 'w').write(sys.argv[1])")
    folder = tmp_path / "folder"
    folder.mkdir()
    program = make_program(AgentConfig(command=["python", "agent.py", "no-file.py"]))
    assert await program.run(agent_task(folder)) == "no-file.py"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import sys; print('a', flush=True); sys.exit('out of\\nideas')", r"ended with exit code 1: a out of ideas$"),
        ("import os; os.kill(os.getpid(), 9)", r"was killed by SIGKILL: it printed nothing$"),
        ("open('answer.txt', 'w').write('x' * (1 << 21))", r"answer.txt has more than 1,048,576 bytes"),
    ],
)
@in_event_loop
async def test_a_failed_program_says_how_it_ended(tmp_path: Path, code: str, error: str) -> None:
    with pytest.raises(AgentFailed, match=error):
        await play(code, tmp_path)


@in_event_loop
async def test_a_flood_of_output_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "PAUSE", 0.0)
    with pytest.raises(AgentFailed, match=r"^\S+ ended with exit code 5: (x ?)+$") as failure:
        await play("import os, sys\nfor _ in range(64): os.write(1, b'x' * (1 << 16))\nsys.exit(5)", tmp_path)
    assert len(str(failure.value)) < 600


@in_event_loop
async def test_a_daemon_ends_with_its_program_and_no_descriptor_is_left(tmp_path: Path) -> None:
    await play("pass", tmp_path)
    before = set(os.listdir("/proc/self/fd"))
    assert await play(DAEMON, tmp_path) is None
    assert ended(int((tmp_path / "pid").read_text()))
    assert set(os.listdir("/proc/self/fd")) == before


@in_event_loop
async def test_a_cancelled_program_leaves_nothing(tmp_path: Path) -> None:
    code = DAEMON + "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
    playing = asyncio.create_task(python(code).run(agent_task(tmp_path)))
    await until((tmp_path / "pid").exists)
    await cancelled(playing)
    assert ended(int((tmp_path / "pid").read_text()))


@in_event_loop
async def test_a_program_cancelled_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    """The event loop stands still from the start of the process until its daemon runs, as on a busy machine."""
    before = children()
    playing = asyncio.create_task(python(DAEMON + "import time\ntime.sleep(600)").run(agent_task(tmp_path)))
    while children() == before:
        await asyncio.sleep(0)
    eventually((tmp_path / "pid").exists)
    await cancelled(playing)
    assert ended(int((tmp_path / "pid").read_text()))
    assert children() == before


# Says where the reward's address is found by a program that the agent starts, once the agent has read its task.
LOOKS = """
import glob, os, subprocess, sys
code = '''
import glob, os, sys
for pid in sys.argv[1:]:
    for path in glob.glob(f"/proc/{pid}/fd/*") + [f"/proc/{pid}/environ", f"/proc/{pid}/cmdline"] + glob.glob("*"):
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                if b"second" in file.read(1 << 20): print(path, os.readlink(path))
        except (OSError, TypeError): pass
'''
"""


@pytest.mark.parametrize("reads", ["import json, sys; json.load(sys.stdin)", "import os; os.read(0, 1 << 20)"])
@in_event_loop
async def test_no_child_of_an_agent_reads_the_rewards_address(tmp_path: Path, reads: str) -> None:
    looks = f"""
{LOOKS}
{reads}
pids = [str(os.getppid()), str(os.getpid()), "self"]
seen = subprocess.run([sys.executable, "-c", code, *pids], capture_output=True, text=True, env={{}})
open("answer.txt", "w").write(seen.stdout + seen.stderr)
"""
    assert await play(looks, tmp_path) == ""


@in_event_loop
async def test_a_long_task_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    row = {"level": "x" * (1 << 20)}
    reading = "import json, sys; open('answer.txt', 'w').write(str(len(json.load(sys.stdin)['row']['level'])))"
    assert await python(reading).run(replace(agent_task(tmp_path), row=row)) == str(1 << 20)
    assert await python("open('answer.txt', 'w').write('none')").run(replace(agent_task(tmp_path), row=row)) == "none"


def test_a_killed_generator_leaves_no_program(tmp_path: Path) -> None:
    code = DAEMON + "import time\ntime.sleep(600)"
    scene = f"""
import asyncio, sys
from pathlib import Path
from common.config import AgentConfig
from generator.agents.programs import AgentTask, make_program
task = AgentTask("", {{}}, "", "", "", "", None, Path({str(tmp_path)!r}))
asyncio.run(make_program(AgentConfig(command=[sys.executable, "-c", {code!r}])).run(task))
"""
    generator = subprocess.Popen([sys.executable, "-c", scene])
    eventually((tmp_path / "pid").exists)
    generator.kill()
    generator.wait()
    assert ended(int((tmp_path / "pid").read_text()))


@in_event_loop
async def test_a_pipe_is_no_answer(tmp_path: Path) -> None:
    assert await play("import os; os.mkfifo('answer.txt')", tmp_path) is None


NOWHERE = "http://127.0.0.1:1"
# The answer of the model, by a client of the standard library.
ASKS = """
    import json, os, urllib.request
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    reply = json.load(urllib.request.urlopen(urllib.request.Request(url, b"{}")))
    open(os.environ["SPO_ANSWER_FILE"], "w").write(reply["choices"][0]["message"]["content"])
"""


@pytest.mark.parametrize(
    ("proxies", "host"),
    [
        ({"http_proxy": NOWHERE, "https_proxy": NOWHERE}, "127.0.0.1"),
        ({"HTTP_PROXY": NOWHERE, "no_proxy": "elsewhere"}, "localhost"),
        ({"ALL_PROXY": NOWHERE, "NO_PROXY": "*"}, "127.0.0.1"),
    ],
)
def test_no_agent_reaches_the_endpoint_by_a_proxy(tmp_path: Path, proxies: dict[str, str], host: str) -> None:
    function, program = make_program(AgentConfig(function="tests.support.agents:on_the_openai_package")), python(ASKS)
    app = typer.Typer()
    answers = []

    @app.command()
    def generate() -> None:
        for agent in (function, program):
            answers.append(asyncio.run(agent.run(agent_task(tmp_path, base_url=f"{double.url}/v1"))))

    none = dict.fromkeys(("no_proxy", "NO_PROXY"), "")
    with (
        serve(says("42"), host=host) as double,
        mock.patch.dict(os.environ, none | proxies),
        mock.patch.object(sys, "argv", [""]),
        pytest.raises(SystemExit, match="0"),
    ):
        entry_point(app)()
    assert answers == ["42", "42"]
