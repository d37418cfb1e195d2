"""Agents in containers, against a stand-in for the engine: what they get, their grading, and what may go wrong."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from common.config import Config
from common.config.agent import ContainerConfig
from common.errors import UserError
from common.files import own_folder
from common.messages import Failure, failure_of
from generator.agents.containers import container as containers
from generator.agents.containers.container import URL, Containers, check_containers, remove_left
from generator.agents.containers.engine import FRAME, ContainerEngine, ContainerFailed, end_of
from generator.agents.containers.grading import GradingTimedOut, files_of, grade, reward_of
from generator.agents.programs import AgentFailed
from generator.agents.sandboxed import check_agents
from generator.episode.episode import Episode
from generator.rewards.pool import RewardFailed
from launcher.checks.containers import check_images, try_tasks
from tests.support.agents import SESSIONS, agent_config, agent_task, answered, run_agent
from tests.support.container_engine import IMAGE, Box, StandIn, stand_in
from tests.support.event_loop import in_event_loop
from tests.support.harbor import harbor_task
from tests.support.http_double import fails, raw

TESTS = {"test.sh": "#!/bin/sh\n", "data/expected": "4"}


def config(**agent: Any) -> Config:
    return agent_config(agent={"command": ["solve", "--fast"], "image": IMAGE, **agent})


@asynccontextmanager
async def used(engine: StandIn, settings: Config | None = None, **options: Any) -> AsyncIterator[Containers]:
    made = Containers(settings or config(), own_folder() / "endpoint", engine.engine(**options))
    try:
        yield made
    finally:
        await made.close()


async def play(engine: StandIn, folder: Path, settings: Config | None = None, **row: Any) -> object:
    async with used(engine, settings) as made, made.started(row) as container:
        return await container.run(agent_task(folder))


def says(answer: str, code: int = 0, output: bytes = b"") -> Any:
    def agent(box: Box, command: list[str], variables: dict[str, str]) -> tuple[int, bytes]:
        box.files["spo/answer.txt"] = answer.encode()
        return code, output

    return agent


@in_event_loop
async def test_an_agent_gets_its_task_and_limits_and_leaves_nothing(tmp_path: Path) -> None:
    seen: list[Any] = []

    def agent(box: Box, command: list[str], variables: dict[str, str]) -> tuple[int, bytes]:
        seen.extend((command[4:], variables, json.loads(box.files["spo/task.json"]), box.files["spo/prompt.txt"]))
        return says("42")(box, command, variables)

    with stand_in(tmp_path, agent=agent) as engine:
        settings = config(container={"cpus": 0.5, "memory_mb": 100, "processes": 20})
        assert await play(engine, tmp_path, settings) == "42"
        assert engine.boxes == {}
    command, variables, task, prompt = seen
    assert command == ["solve", "--fast"]
    assert (prompt, task["row"], "reward_url" in task) == (b"What is 1+1?", {"level": "easy"}, False)
    assert (variables["SPO_PROMPT_FILE"], variables["SPO_ANSWER_FILE"]) == ("/spo/prompt.txt", "/spo/answer.txt")
    host = engine.created[0].settings["HostConfig"]
    limits = {"NetworkMode": "none", "NanoCpus": 5e8, "Memory": 100 << 20, "MemorySwap": 100 << 20, "PidsLimit": 20}
    assert {name: host[name] for name in limits} == limits
    assert host["Binds"] == [f"{own_folder()}/endpoint:/run/spo:ro"]
    assert (tmp_path / "agent.log").read_text() == ""


@pytest.mark.parametrize("size", [1, 3, 8, 9, 5000, 1 << 20])
@in_event_loop
async def test_output_in_frames_is_read_however_it_is_cut(size: int) -> None:
    pieces = [b"a" * 4000, b"", b"b", b"c" * 7, b"d" * 1000, b"e"]
    frames = b"".join(FRAME.pack(1, len(piece)) + piece for piece in pieces)

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(frames), size):
            yield frames[at : at + size]

    assert await end_of(chunks()) == b"".join(pieces)[-4000:]


@in_event_loop
async def test_as_many_are_started_ahead_as_are_in_use(tmp_path: Path) -> None:
    with stand_in(tmp_path) as engine:
        async with used(engine) as made:
            async with made.started({}) as first, made.started({}) as second:
                assert first.id != second.id
            async with made.started({}) as third:
                assert third.id not in (first.id, second.id)
            # Three were in use, two of them at a time.
            assert len(engine.created) <= 5
        assert engine.boxes == {}


@in_event_loop
async def test_containers_of_settings_that_are_no_longer_asked_for_do_not_pile_up(tmp_path: Path) -> None:
    with stand_in(tmp_path) as engine:
        async with used(engine) as made:
            for seconds in range(1, 21):  # each row has a limit of its own
                async with made.started({"container": {"agent_seconds": seconds}}):
                    await asyncio.gather(*(one for queue in made._ahead.values() for one in queue))
            await asyncio.gather(*made._removing)
            assert len(engine.boxes) <= 1
            async with made.started({"container": {"agent_seconds": 20}}) as last:
                assert last.id in engine.boxes
            assert len(engine.created) <= 42  # the last one was started ahead
        assert engine.boxes == {}


@in_event_loop
async def test_one_started_ahead_that_is_gone_is_replaced(tmp_path: Path) -> None:
    with stand_in(tmp_path) as engine:
        async with used(engine) as made:
            async with made.started({}):
                await asyncio.gather(*made._ahead[made._settings])
            for box in engine.boxes.values():
                box.running = False
            async with made.started({}) as fresh:
                assert engine.boxes[fresh.id].running


@in_event_loop
async def test_a_row_has_an_image_and_limits_of_its_own(tmp_path: Path) -> None:
    with stand_in(tmp_path, images={"own:2"}) as engine:
        row = {"image": "own:2", "container": {"memory_mb": 300, "network": "bridge"}}
        await play(engine, tmp_path, config(image="image"), **row)
    (box,) = engine.created
    assert (box.settings["Image"], box.settings["HostConfig"]["Memory"]) == ("own:2", 300 << 20)
    assert box.settings["HostConfig"]["NetworkMode"] == "bridge"


@pytest.mark.parametrize(
    ("behaviour", "row", "says_what"),
    [
        ({"images": set()}, {}, "404: No such image: task:1"),
        ({"faults": {r"POST /containers/c\d/start": fails(500, '{"message": "no space"}')}}, {}, "500: no space"),
        ({"faults": {r"POST /containers/c\d/start": fails(500, "what?")}}, {}, "500: what?"),
        ({"faults": {"POST /containers/create": fails(200, "no JSON")}}, {}, "text other than JSON: no JSON"),
        ({"faults": {"POST /exec/0/start": fails(404, '{"message": "No such exec"}')}}, {}, "No such exec"),
        ({"faults": {"GET /exec/0/json": fails(200, '{"Running": true}')}}, {}, "has lost the program 'sh'"),
        ({"agent": says("", 125, b"neither python3 nor node")}, {}, "neither python3 nor node"),
        ({}, {"container": {"memory": 3}}, "the row's column 'container'"),
        ({}, {"container": "much"}, "the row's column 'container'"),
    ],
)
def test_a_failure_of_the_engine_says_nothing_about_the_model(tmp_path, behaviour, row, says_what) -> None:
    with stand_in(tmp_path, **behaviour) as engine:
        with pytest.raises(ContainerFailed, match=says_what) as failed:
            asyncio.run(play(engine, tmp_path, **row))
        assert engine.boxes == {}
    assert failure_of(failed.value) is Failure.CONTAINER_FAILED


@in_event_loop
async def test_a_container_that_ends_by_itself_is_named(tmp_path: Path) -> None:
    words = "the container of image task:1 has ended by itself, with exit code 1"
    with stand_in(tmp_path) as engine:
        async with used(engine) as made, made.started({}) as one:
            engine.boxes[one.id].running = False
            with pytest.raises(ContainerFailed, match=words):
                await one.run(agent_task(tmp_path))


@pytest.mark.parametrize(
    ("agent", "says_what"),
    [
        (says("", 3, b"no\nidea"), "solve ended with exit code 3: no idea"),
        (says("", 1, b"x" * (3 << 20) + b"the end"), "exit code 1: x+the end$"),
        (says("", 1), "it printed nothing"),
        (says("x" * ((1 << 20) + 1)), "answer.txt has more than 1,048,576 bytes"),
    ],
)
def test_a_failure_of_the_agent_is_one_and_bounded(tmp_path, agent, says_what) -> None:
    with stand_in(tmp_path, agent=agent) as engine, pytest.raises(AgentFailed, match=says_what) as failed:
        asyncio.run(play(engine, tmp_path))
    assert len(str(failed.value)) < 500


@in_event_loop
async def test_an_agent_that_fills_the_disk_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "LOOK_SECONDS", 0.0)
    looked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def agent(box: Box, *_: Any) -> tuple[int, bytes]:
        box.written = 12 << 20
        asyncio.run_coroutine_threadsafe(looked.wait(), loop).result()
        return 0, b""

    with stand_in(tmp_path, agent=agent) as engine:
        with pytest.raises(AgentFailed, match="it wrote 12 MiB .*disk_mb = 10 are allowed"):
            await play(engine, tmp_path, config(container={"disk_mb": 10}))
        looked.set()


def test_an_engine_that_is_away_or_elsewhere_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = structlog.get_logger()
    for address, says_what in (
        (f"unix://{tmp_path}/none", "episode.agent.image: the container engine at unix://.*none is away"),
        ("tcp://127.0.0.1:2375", "DOCKER_HOST = 'tcp://127.0.0.1:2375' is not of the form unix://PATH"),
    ):
        monkeypatch.setenv("DOCKER_HOST", address)
        monkeypatch.setattr(ContainerEngine.__init__, "__defaults__", (None, 1))
        with pytest.raises(UserError, match=says_what):
            asyncio.run(check_containers(config(), log))


@in_event_loop
async def test_only_containers_of_ended_generators_are_left(tmp_path: Path) -> None:
    with stand_in(tmp_path) as engine:
        made = Containers(config(), tmp_path / "ended" / "endpoint", engine.engine())
        dead = await made._start(IMAGE, ContainerConfig())
        async with used(engine) as alive, alive.started({}) as kept:
            assert await remove_left(alive.engine) == 1
            assert dead not in engine.boxes
            assert kept.id in engine.boxes
            # Generators that start together find the same containers; Docker refuses all but the first removal.
            dying = await made._start(IMAGE, ContainerConfig())
            busy = f'{{"message": "removal of container {dying} is already in progress"}}'
            engine.faults[f"DELETE /containers/{dying}"] = fails(409, busy)
            assert await remove_left(alive.engine) == 1
        await made.close()


def leaves(**files: str) -> Any:
    def tests(box: Box, *_: Any) -> tuple[int, bytes]:
        box.files |= {f"logs/verifier/{name.replace('_', '.')}": text.encode() for name, text in files.items()}
        return 1, b"1 failed"

    return tests


async def graded(engine: StandIn, folder: Path, **container: Any) -> float:
    async with used(engine, config(container=container)) as made, made.started({}) as one:
        await one.run(agent_task(folder))
        return await grade(one, TESTS)


@in_event_loop
async def test_tests_come_in_after_all_the_agents_programs_are_ended(tmp_path: Path) -> None:
    def agent(box: Box, *_: Any) -> tuple[int, bytes]:
        box.files |= {"logs/verifier/reward.txt": b"1", "tests/mine": b"", "work/fixed.py": b""}
        return 0, b""

    def tests(box: Box, *_: Any) -> tuple[int, bytes]:
        assert sorted(one for one in box.files if one.startswith(("tests", "logs", "work"))) == [
            "tests/data/expected",
            "tests/test.sh",
            "work/fixed.py",
        ]
        return leaves(reward_txt="0.25\n")(box)

    with stand_in(tmp_path, agent=agent, tests=tests) as engine:
        assert await graded(engine, tmp_path) == 0.25
    ((restarted,),) = [box.restarts for box in engine.created if box.restarts]
    assert "tests/test.sh" not in restarted


@pytest.mark.parametrize(
    ("text", "as_json", "reward"),
    [
        (b" 1\n", None, 1.0),
        (None, b'{"reward": 0.5, "other": 3}', 0.5),
        (None, b"0.5", 0.5),
        (b"1", b"1.0", 1.0),
        (None, None, "left no reward in /logs/verifier \\(exit code 1\\)"),
        (b"1", b'{"reward": 0}', "left two rewards, 1 in reward.txt and 0 in reward.json"),
        (b"", None, "reward.txt holds '\\(nothing\\)', which is no finite number"),
        (b"nan", None, "no finite number"),
        (b"passed", None, "reward.txt holds 'passed'"),
        (None, b"true", "no finite number"),
        (None, b'{"score": 1}', "and no mapping with one as `reward`"),
        (None, b"{", "no finite number"),
    ],
)
def test_a_reward_is_one_finite_number(text, as_json, reward) -> None:
    if isinstance(reward, float):
        assert reward_of(text, as_json, "") == reward
    else:
        with pytest.raises(RewardFailed, match=reward):
            reward_of(text, as_json, "exit code 1")


@pytest.mark.parametrize("tests", [{"other.sh": ""}, "no/such/folder", None])
def test_a_task_without_tests_gives_no_reward(tests) -> None:
    with pytest.raises(RewardFailed, match="there is no test.sh in"):
        files_of(tests, "test.sh")


@pytest.mark.parametrize("tests", ["The sum is 4. " * 30, "long/" * 1000])
def test_an_answer_that_is_no_path_gives_no_reward(tests: str) -> None:
    with pytest.raises(RewardFailed, match="cannot be read: File name too long"):
        files_of(tests, "test.sh")


@in_event_loop
async def test_tests_that_take_too_long_say_so(tmp_path: Path) -> None:
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    def tests(box: Box, *_: Any) -> tuple[int, bytes]:
        asyncio.run_coroutine_threadsafe(ended.wait(), loop).result()
        return 0, b""

    with stand_in(tmp_path, tests=tests) as engine:
        try:
            with pytest.raises(GradingTimedOut):
                await graded(engine, tmp_path, grading_seconds=0.2)
        finally:
            ended.set()


def episode_of(engine: StandIn, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Episode:
    """An episode of an agent that asks the model once, graded by the stand-in's tests."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.path}")
    monkeypatch.setattr("tests.support.agents.PretendEndpoint.socket", own_folder() / "endpoint/socket", raising=False)

    async def scene() -> Episode:
        loop = asyncio.get_running_loop()

        def agent(box: Box, command: list[str], variables: dict[str, str]) -> tuple[int, bytes]:
            assert variables["OPENAI_BASE_URL"].startswith(f"{URL}/s/")
            session = SESSIONS[variables["OPENAI_API_KEY"]]
            ask = answered(session, [{"role": "user", "content": "1+1?"}], "2")
            asyncio.run_coroutine_threadsafe(ask, loop).result()
            if changes.get("max_seconds"):
                asyncio.run_coroutine_threadsafe(session.over.wait(), loop).result()
            return changes.get("code", 0), b""

        engine.agent = agent
        agent_section = {"command": ["solve"], "image": IMAGE, **changes.get("agent", {})}
        limits = {"max_seconds": changes["max_seconds"]} if "max_seconds" in changes else {}
        settings = agent_config(agent=agent_section, reward="container", **limits)
        return await run_agent(settings, answer=changes.get("tests", TESTS))

    return asyncio.run(scene())


@pytest.mark.parametrize(
    ("changes", "reason", "reward"),
    [
        ({}, "stop", 0.5),
        ({"max_seconds": 0.3}, "max_seconds", 0.5),
        ({"code": 1, "agent": {"failure": 0.125}}, "agent_failed", 0.125),
    ],
)
def test_an_episode_is_graded_however_the_agent_ended(tmp_path, monkeypatch, changes, reason, reward) -> None:
    with stand_in(tmp_path, tests=leaves(reward_json='{"reward": 0.5}')) as engine:
        episode = episode_of(engine, monkeypatch, **changes)
        assert engine.boxes == {}
    assert (episode.reason, episode.reward) == (reason, reward)
    parts = {"start", "agent"} if reason == "agent_failed" else {"start", "agent", "grading"}
    assert set(episode.seconds) == parts


def test_an_engine_that_dies_during_grading_gives_no_reward(tmp_path, monkeypatch) -> None:
    faults = {r"POST /containers/c\d/restart": fails(500, '{"message": "going down"}')}
    with stand_in(tmp_path, faults=faults) as engine, pytest.raises(ContainerFailed, match="going down"):
        episode_of(engine, monkeypatch)


@pytest.mark.parametrize(
    ("episode", "says_what"),
    [
        ({"agent": {"function": "m:f", "image": "i"}}, "image: NAME needs a `command`"),
        ({"agent": {"command": ["c"], "image": "i", "sandbox": True}}, "no `sandbox`"),
        ({"agent": {"command": ["c"]}, "reward": "container"}, "episode.agent has no image"),
        ({"agent": {"command": ["c"], "image": "i"}, "reward": "agent"}, "cannot give itself a reward"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(episode, says_what) -> None:
    with pytest.raises(UserError, match=says_what):
        agent_config(**episode)


@pytest.mark.parametrize(
    ("agent", "names"),
    [
        ({"image": IMAGE}, ["prompt.txt", "forward.py", "forward.js", "task.json", "answer.txt"]),
        ({"sandbox": True}, ["task.json", "answer.txt"]),
    ],
)
def test_a_file_may_not_have_the_name_of_one_that_spo_writes(tmp_path, monkeypatch, agent, names) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (*names, "mine.txt"):
        (tmp_path / name).write_text("mine")
        settings = agent_config(agent={"command": ["python3", name], **agent})
        if name == "mine.txt":
            check_agents(settings)
        else:
            with pytest.raises(UserError, match=f"{name} has the name of a file that SPO writes in the agent's folder"):
                check_agents(settings)


def harbor_config(folder: Path, **episode: Any) -> Config:
    agent = {"command": ["solve"], "image": "docker_image"}
    data = {"data": {"train": f"harbor:{folder}"}}
    return agent_config(data, agent=agent, reward="container", **episode)


def solves(reward: float, idle: float = 0.0) -> dict[str, Any]:
    """A stand-in whose tests give one reward after the solution has run, and another before."""

    def agent(box: Box, command: list[str], variables: dict[str, str]) -> tuple[int, bytes]:
        assert command == ["/solution/solve.sh"]
        box.files["work/fixed"] = b""
        return 0, b"fixed"

    def tests(box: Box, *_: Any) -> tuple[int, bytes]:
        box.files["logs/verifier/reward.txt"] = str(reward if "work/fixed" in box.files else idle).encode()
        return 0, b""

    return {"agent": agent, "tests": tests}


@pytest.mark.parametrize(
    ("behaviour", "level", "says_what"),
    [
        (solves(1.0), "ok", "its solution gets 1, doing nothing 0"),
        (solves(0.5), "problem", r"its solution gets 0.5 instead of 1 \(it ended with exit code 0, fixed\)"),
        (solves(1.0, 1.0), "problem", "an agent that does nothing gets 1"),
        ({}, "problem", "test.sh left no reward"),
    ],
)
def test_the_data_check_builds_images_and_plays_tasks(tmp_path, monkeypatch, behaviour, level, says_what) -> None:
    harbor_task(tmp_path / "tasks" / "a")
    with stand_in(tmp_path, **behaviour) as engine:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.path}")
        settings = harbor_config(tmp_path / "tasks")
        with pytest.raises(UserError, match="there is no image 'spo-harbor/a:.*`spo data check`"):
            asyncio.run(check_images(settings))
        built, played = asyncio.run(try_tasks(settings))
        asyncio.run(check_images(settings))
        assert "1 images built, 1 of 1 tasks" in built.line
        assert (engine.built[0]["files"], engine.boxes) == ({"Dockerfile": b"FROM scratch\n"}, {})
    assert played.level == level
    assert re.search(says_what, played.line)


def test_an_image_that_does_not_build_is_named_with_its_last_words(tmp_path, monkeypatch) -> None:
    harbor_task(tmp_path / "tasks" / "a")
    log = b'{"stream": "Step 2/2 : RUN make"}\n{"error": "make: not found"}\n'
    with stand_in(tmp_path, faults={"POST /build": lambda handler, _: raw(handler, log)}) as engine:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.path}")
        wrong, _ = asyncio.run(try_tasks(harbor_config(tmp_path / "tasks")))
    assert wrong.level == "problem"
    assert re.search(r"tasks/a: spo-harbor/a:\w+ does not build: make: not found \(after: Step 2/2", wrong.line)


def test_each_task_whose_image_is_missing_counts_and_the_image_is_named_once(tmp_path, monkeypatch) -> None:
    for name in "abc":
        pulled = {"environment_Dockerfile": None, "task_toml": '[environment]\ndocker_image = "none:1"\n'}
        harbor_task(tmp_path / "tasks" / name, **(pulled if name != "c" else {}))
    with stand_in(tmp_path) as engine:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.path}")
        missing, count = asyncio.run(try_tasks(harbor_config(tmp_path / "tasks")))
    assert "tasks/a: there is no image 'none:1'; build or pull it" in missing.line
    assert "1 images built, 1 of 3 tasks have theirs" in count.line
