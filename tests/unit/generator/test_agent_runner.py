"""Agents that are functions, and how an agent's episode ends: its reason, its answer, its reward, and its failures."""

from __future__ import annotations

import asyncio
import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config import AgentConfig, parse_config
from common.errors import UserError
from common.messages import MAX_TURNS, Task
from generator.agents.programs import AgentFailed, make_program
from generator.agents.sandboxed import check_agents
from generator.agents.session import EndpointFailed
from launcher.tasks import calculator_agent
from tests.support.agents import PretendEndpoint, agent_config, agent_task, agent_tasks, play_agent, run_agent
from tests.support.event_loop import cancelled, in_event_loop
from tests.support.waiting import until

OWN = {"reward": "agent"}
ONCE = {"asks": ["2"]}
FAILS = {**ONCE, "raises": "out of ideas"}
NO_PATH = (404, "/v1/completions", "there is no such path here")
TOO_LONG = (400, "/v1/messages", "prompt is too long", True)  # beyond a limit
CROWDED, BROKEN = (429, "/v1/responses", "128 requests are in flight"), (500, "/v1/responses", "the engine failed")
COUNTS = {"agent": {"function": "tests.support.agents:scripted", "failure": 0.125}}


def asked_once(row: dict[str, Any] | None = None, **more: Any) -> Task:
    return Task(task_id="t", prompt_id="p", prompt="What is 1+1?", row=ONCE | (row or {}), **more)


@pytest.mark.parametrize(
    ("episode", "row", "expected"),
    [
        # What it returns is the answer; without that, what the model said last.
        ({}, {"asks": ["a", "b"]}, ("stop", "b", None, 2)),
        ({}, {**ONCE, "returns": " two "}, ("stop", " two ", None, 1)),
        ({}, {**ONCE, "returns": "half a pair \ud800"}, ("stop", "half a pair ?", None, 1)),
        ({}, {**ONCE, "returns": 89}, ("stop", "89", None, 1)),
        ({}, {**ONCE, "returns": {"x": [1.5, "é"]}}, ("stop", '{"x": [1.5, "é"]}', None, 1)),
        ({}, {**ONCE, "returns": np.int64(89)}, ("stop", "89", None, 1)),
        # A number is the reward where the agent gives it.
        (OWN, {**ONCE, "returns": 0.25}, ("stop", "2", 0.25, 1)),
        (OWN, {**ONCE, "returns": True}, ("stop", "2", 1.0, 1)),
        (OWN, {**ONCE, "returns": np.float32(0.5)}, ("stop", "2", 0.5, 1)),
        (OWN, {**ONCE, "sends": 0.5, "returns": "two"}, ("stop", "two", 0.5, 1)),
        (OWN, {**ONCE, "returns": "two"}, ("stop", "two", None, 1)),
        # A limit ends it; without a reward it then has the lowest.
        ({"max_assistant_turns": 2}, {"asks": ["a", "b", "c"]}, ("max_assistant_turns", "b", None, 2)),
        ({"max_response_tokens": 3}, {"asks": ["abc", "d"]}, ("length", "abc", None, 1)),
        ({"max_seconds": 0.01}, {**ONCE, "waits": True}, ("max_seconds", "2", None, 1)),
        ({"max_seconds": 0.01, **OWN}, {**ONCE, "waits": True}, ("max_seconds", "2", 0.0, 1)),
        ({"max_seconds": 0.01, **OWN}, {**ONCE, "sends": 1, "waits": True}, ("max_seconds", "2", 1.0, 1)),
        # A failure may count as the model's.
        (COUNTS, FAILS, ("agent_failed", "2", 0.125, 1)),
        # A prompt that the model cannot take is a limit too, whatever the agent makes of it.
        ({}, {"asks": ["a", "b" * 180, "c"]}, ("length", "b" * 180, None, 2)),
    ],
)
def test_an_episode_has_a_reason_an_answer_and_a_reward(episode: Any, row: Any, expected: tuple[Any, ...]) -> None:
    played = play_agent(agent_config(**{"max_response_tokens": 900, **episode}), **row)
    assert (played.reason, played.answer, played.reward, played.turns) == expected
    assert played.step is None


def test_conversations_that_quote_the_task_are_told_from_others() -> None:
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "What is 1+1?")]
    dialogue = [{"role": role, "content": text} for role, text in turns]
    for prompt in ("What is 1+1?", dialogue):
        for text, quotes in (("Title of What is 1+1?", True), ("This is not it", False)):
            beside = [{"role": "system", "content": "You write titles"}, {"role": "user", "content": text}]
            played = play_agent(agent_config(), prompt=prompt, **ONCE, beside=beside)
            assert [one.get("quotes") for one in played.requests] == [None, quotes]


@pytest.mark.parametrize(
    ("episode", "row", "error"),
    [
        ({}, FAILS, r"scripted raised ValueError: out of ideas \(agents\.py, line"),
        (COUNTS, {"raises": "at once"}, "ValueError: at once"),  # there is nothing to train on
        ({}, {}, "the agent never called the model"),
        ({}, {"begins": True}, "none of the agent's 1 requests got a token"),
        ({}, {"refused": [NO_PATH] * 3}, "never called .* 3 .* refused: 3 × 404 for /v1/completions: there is no such"),
        ({}, {"refused": [TOO_LONG]}, "1 requests were refused: 1 × 400 for /v1/messages: prompt is too long"),
        ({}, {"begins": True, "refused": [NO_PATH]}, "agent's 1 requests got a token: 1 × 404 for /v1/completions"),
        ({}, {**ONCE, "returns": "an object"}, "the agent returned an object of object; return text"),
        (OWN, {**ONCE, "sends": 1, "returns": 0.5}, "sent the reward 1 and returned 0.5; one is allowed"),
        ({}, {**ONCE, "sends": 1}, "Refusal: this agent's reward is computed"),
    ],
)
def test_a_failed_agent_says_nothing_about_the_model(episode: dict[str, Any], row: dict[str, Any], error: str) -> None:
    with pytest.raises(AgentFailed, match=error):
        play_agent(agent_config(**episode), **row)


@in_event_loop
async def test_requests_with_a_key_of_no_task_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([2, 5])
    monkeypatch.setattr(PretendEndpoint, "strangers", property(lambda _: next(counts)))
    with pytest.raises(AgentFailed, match="never called the model; meanwhile 3 requests came with an unknown key"):
        await run_agent(agent_config())


@pytest.mark.parametrize(
    ("row", "error"),
    [
        # What the agent makes of a refusal is not the model's doing.
        (FAILS | {"refused": [NO_PATH]}, r"out of ideas .*; the endpoint refused 1 × 404 for /v1/completions"),
        (FAILS | {"refused_at_last": [CROWDED]}, r"refused a request of the agent's, and took none after it: 429 for"),
        (ONCE | {"refused_at_last": [CROWDED]}, r"refused a request of the agent's, and took none after it: 429 for"),
        (ONCE | {"refused_at_last": [BROKEN], "returns": "0"}, r"took none after it: 500 for /v1/responses: the eng"),
    ],
)
def test_what_the_endpoint_refused_is_tried_again(row: dict[str, Any], error: str) -> None:
    with pytest.raises((AgentFailed, EndpointFailed), match=error):
        play_agent(agent_config(**COUNTS), **row)


@pytest.mark.parametrize(
    ("row", "reason", "refused"),
    [
        (FAILS | {"refused": [TOO_LONG]}, "agent_failed", 1),
        (ONCE | {"refused": [CROWDED, NO_PATH, BROKEN]}, "stop", 3),  # a later request was taken
        (ONCE | {"refused_at_last": [NO_PATH]}, "stop", 1),  # it does without
    ],
)
def test_a_refusal_that_an_agent_gets_over_changes_nothing(row: dict[str, Any], reason: str, refused: int) -> None:
    played = play_agent(agent_config(**COUNTS), **row)
    assert (played.reason, len(played.refusals)) == (reason, refused)


def test_an_attempt_that_the_endpoint_has_stalled_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generator.agents.session.STALLED", 0.0)
    config, waits = agent_config(max_seconds=0.01), {**ONCE, "waits": True}
    with pytest.raises(EndpointFailed, match="the endpoint stalled: a request waited 0.0 s of the attempt's 0.01 s"):
        play_agent(config, **waits, begins=True)
    assert play_agent(config, **waits).reason == "max_seconds"


@in_event_loop
async def test_a_task_stays_as_the_data_has_it_whatever_its_agent_changes() -> None:
    prompt: list[dict[str, Any]] = [{"role": "user", "content": "What is 1+1?"}]
    task = Task(task_id="t", prompt_id="p", prompt=prompt, row=dict(ONCE))
    before = task.model_copy(deep=True)
    async with agent_tasks(agent_config(agent=f"{HERE}:changing")) as (tasks, _):
        await (await tasks.begin(task)).run()
    assert task == before


@in_event_loop
async def test_a_cancelled_episode_ends_its_agent() -> None:
    async with agent_tasks(agent_config()) as (tasks, endpoint):
        attempt = await tasks.begin(asked_once({"waits": True}))
        playing = asyncio.create_task(attempt.run())
        await until(lambda: endpoint.sessions and endpoint.sessions[0].requests)
        assert attempt.episode.step is not None
        assert (attempt.episode.step.name, attempt.episode.step.ends) == ("agent", math.inf)
        await cancelled(playing)
    assert endpoint.sessions[0].reason == "stopped"
    said = [(entry.role, entry.text) for entry in attempt.episode.transcript.entries]
    assert said == [("user", "What is 1+1?"), ("assistant", "2")]


def test_a_failed_engine_is_never_the_models_doing() -> None:
    with pytest.raises(RuntimeError, match="the engine failed"):
        play_agent(agent_config(**COUNTS), **FAILS, fails=True)


@in_event_loop
async def test_markup_counts_in_what_agents_send_if_the_source_says_so() -> None:
    sources = [{"path": "t", "name": "plain"}, {"path": "t", "name": "marked", "prompt_markup": True}]
    async with agent_tasks(agent_config({"data": {"train": sources}})) as (tasks, endpoint):
        for source in ("plain", "marked"):
            await (await tasks.begin(asked_once(source=source))).run()
    assert [session.limits.markup for session in endpoint.sessions] == [False, True]


@pytest.mark.integration
@in_event_loop
async def test_a_reward_reads_the_agents_files_which_are_then_removed() -> None:
    config = agent_config(reward="tests.support.some_rewards:SizeOfFolder", reward_workers=1)
    async with agent_tasks(config) as (tasks, endpoint):
        attempt = await tasks.begin(asked_once({"files": "x" * 7}, seed=5))
        header, payload = await attempt.run()
    assert (header.reward, header.reason, header.turns, header.model_tokens) == (0.07, "stop", 1, 2)
    assert payload is not None
    assert attempt.episode.folder is not None
    assert not attempt.episode.folder.exists()
    limits = endpoint.sessions[0].limits
    assert (limits.seed, limits.temperature, limits.max_turns, limits.reward_range) == (5, 1.0, MAX_TURNS, None)


HERE = "tests.support.agents"


@in_event_loop
async def test_a_function_gets_the_task_and_returns(tmp_path: Path) -> None:
    for name, returned in {"echo": "What is 1+1? easy", "echoing": "What is 1+1? easy", "blocking": 3}.items():
        assert await make_program(AgentConfig(function=f"{HERE}:{name}")).run(agent_task(tmp_path)) == returned


@in_event_loop
async def test_an_exception_is_the_agents_failure(tmp_path: Path) -> None:
    failing = {"at_the_end": "StopIteration", "failing": "OSError: no such device"}  # not coroutine functions
    for name, error in {"broken": "ValueError: no idea at all", "leaving": "System", **failing}.items():
        with pytest.raises(AgentFailed, match=rf"{name} raised {error}.* \(agents\.py, line \d+\)"):
            await make_program(AgentConfig(function=f"{HERE}:{name}")).run(agent_task(tmp_path))


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"function": "no_such_module:solve"}, "episode.agent = 'no_such_module:solve': cannot import no_such_module"),
        ({"function": f"{HERE}:ecko"}, "did you mean echo"),
        ({"function": "solve"}, "episode.agent = 'solve' is unknown"),
        ({"function": f"{HERE}:THING"}, "is not a function of"),
        ({"function": f"{HERE}:without_arguments"}, "cannot be called with"),
        ({"command": ["no-such-program", "x"]}, "there is no such program"),
        ({"command": ["README.md"]}, "README.md is not executable"),
    ],
)
def test_what_cannot_be_run_is_refused(agent: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_program(AgentConfig(**agent))


def test_a_refusal_names_the_source() -> None:
    sources = [{"path": "a"}, {"path": "b", "episode": {"agent": {"command": ["no-such-program"]}}}]
    tree = {"model": {"path": "m"}, "data": {"train": sources}, "episode": {"agent": f"{HERE}:echo"}}
    with pytest.raises(UserError, match=r"^data\.train\[b\]: episode\.agent\.command = \['no-such-program'\]: there"):
        check_agents(parse_config(tree))


def test_the_calculator_agent_needs_nothing_of_the_environments_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")  # for which httpx needs a package that SPO does not bring
    assert importlib.reload(calculator_agent).CLIENT.max_retries
