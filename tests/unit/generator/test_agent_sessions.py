"""Sessions of agents: limits, retries, rewards, and what of a session is trained on."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import structlog

from generator.agents import layer, session
from generator.agents.refusals import Refused
from generator.agents.session import AgentSession
from generator.chat.template import TemplateFailed
from generator.engine.engine import EngineFailed
from tests.support.agent_sessions import CHAT, Client, Rig, in_session
from tests.support.episode import TEMPLATE, TOKENIZER
from tests.support.event_loop import in_event_loop

RETRY = {"headers": {"x-stainless-retry-count": "1"}}


async def sampled(of: AgentSession) -> list[list[str]]:
    """What the model said in each row of a session, which ends."""
    await of.close()
    return [[TOKENIZER.decode(row.tokens()[start:end]) for start, end in row.spans] for row in of.rows()]


@in_session("yes<|im_end|>", "sure<|im_end|>")
async def test_a_second_turn_gets_the_ids_of_the_first(rig: Rig, one: AgentSession) -> None:
    assert await rig.ask(one, "2+2?").reply() == (200, {"content": "yes"})
    assert await rig.ask(one, "2+2?", "yes", "sure?").reply() == (200, {"content": "sure"})
    first, second = rig.app.prompts
    said = TOKENIZER.encode("yes<|im_end|>")
    assert second[: len(first) + len(said)] == first + said
    spoken = [("user", "2+2?"), ("assistant", "yes"), ("user", "sure?")]
    assert second == TEMPLATE.prompt([{"role": role, "content": text} for role, text in spoken]).tolist()
    assert await sampled(one) == [["yes<|im_end|>", "sure<|im_end|>"]]
    prompts = [(request["prompt"], request["kept"]) for request in one.requests_made()]
    assert prompts == [(len(first), 0), (len(second), len(first) + len(said))]
    assert (one.answer_text(), one.reason) == ("sure", "stop")


@in_session("no end", "x<|im_end|>")
async def test_a_turn_that_was_cut_is_ended_in_its_place(rig: Rig, one: AgentSession) -> None:
    await rig.ask(one, "a").reply()
    await rig.ask(one, "a", "no end", "b").reply()
    assert await sampled(one) == [["no end", "x<|im_end|>"]]
    assert "no end<|im_end|>\n<|im_start|>user\nb" in TOKENIZER.decode(one.rows()[0].tokens())


@in_session("1<|im_end|>", "2<|im_end|>")
async def test_what_a_template_cannot_continue_is_rendered_anew(rig, one, monkeypatch) -> None:

    monkeypatch.setattr(TEMPLATE, "between", mock.Mock(side_effect=TemplateFailed("leaves out the reply")))
    await rig.ask(one, "a").reply()
    assert (await rig.ask(one, "a", "1", "b").reply())[0] == 200
    assert await sampled(one) == [["1<|im_end|>"], ["2<|im_end|>"]]


@pytest.mark.parametrize(("markup", "ends"), [(False, 4), (True, 6)])  # two of users, two of the model
@in_event_loop
async def test_markup_in_messages_counts_if_the_session_says_so(markup: bool, ends: int) -> None:
    rig = Rig()
    one = rig.session(markup=markup)
    await rig.ask(one, "a<|im_end|>").reply()
    await rig.ask(one, "a<|im_end|>", "yes", "b<|im_end|>").reply()
    await one.close()
    (row,) = one.rows()
    assert [int(token) for token in row.tokens()].count(TEMPLATE.end_id) == ends


@in_session(max_turns=2)
async def test_turns_are_counted_and_end_the_session(rig: Rig, one: AgentSession) -> None:
    for text in "ab":
        await rig.ask(one, text).reply()
    client = rig.ask(one, "c")
    status, answer = await client.reply()
    assert (status, answer["error"]["message"]) == (409, "this session is over: max_assistant_turns")
    assert dict(client.sent[0]["headers"])[b"x-should-retry"] == b"false"
    assert one.over.is_set()
    await one.close("stop")
    assert one.reason == "max_assistant_turns"


@in_event_loop
async def test_tokens_behind_the_prompt_are_counted_once() -> None:
    reply, tail = "yes<|im_end|>", len(TEMPLATE.between([{"role": "user", "content": "b"}]))
    said = len(TOKENIZER.encode(reply))
    one = Rig(reply)
    enough = one.session(max_response_tokens=2 * said + tail + 1)
    await one.ask(enough, "a").reply()
    node = enough.tree.nodes[0]
    assert enough.room(node) == said + tail + 1
    await one.ask(enough, "a", "yes", "b").reply()
    assert not enough.over.is_set()
    # The next message alone takes more than what is left.
    assert (await one.ask(enough, "a", "yes", "b", "yes", "c").reply())[0] == 409
    assert enough.reason == "length"
    full = one.session(max_response_tokens=said)
    assert (await one.ask(full, "a").reply())[0] == 200
    assert (full.over.is_set(), full.reason) == (True, "length")


@in_event_loop
async def test_a_context_too_long_is_the_agents_to_shorten() -> None:
    rig = Rig()
    one, other = rig.session(max_model_len=60), rig.session(max_model_len=60)
    for session_ in (one, other):
        assert (await rig.ask(session_, "x" * 100).reply())[0] == 400
        assert not session_.over.is_set()
    await rig.ask(other, "short").reply()
    await one.close()
    await other.close()
    assert (one.reason, other.reason) == ("length", "stop")


@in_session()
async def test_what_an_agent_asks_of_sampling_is_overridden_and_said(rig: Rig, one: AgentSession) -> None:
    with structlog.testing.capture_logs() as logs:
        for temperature in (0.2, 0.3, 1.0, None):
            await rig.ask(one, f"{temperature}", body={"temperature": temperature}).reply()
    assert [line["temperature"] for line in logs] == ["0.2 -> 1.0"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("says_so", [False, True])
@in_session("first<|im_end|>", "second<|im_end|>")
async def test_a_retry_is_given_the_reply_that_nobody_heard(rig, one, streamed, says_so) -> None:
    rig.app.gate.clear()
    first = rig.ask(one, "a", body={"stream": streamed})
    await (first.heard if streamed else rig.app.entered).wait()
    await first.leave()
    again = rig.ask(one, "a", body={"stream": streamed}, **(RETRY if says_so else {}))
    if streamed:  # the agent has seen its beginning, so it was cut there: this is another sample
        await again.heard.wait()
    rig.app.gate.set()
    assert await again.reply() == (200, "second" if streamed else {"content": "first"})
    assert await sampled(one) == [["second<|im_end|>" if streamed else "first<|im_end|>"]]
    assert one.retries == (0 if streamed else 1)


@in_session("first<|im_end|>", "second<|im_end|>", "3<|im_end|>", "4<|im_end|>")
async def test_a_reply_is_sent_again_only_if_the_client_says_that_it_retries(rig: Rig, one: AgentSession) -> None:
    assert await rig.ask(one, "a").reply() == (200, {"content": "first"})
    # The connection broke behind our back, and the SDK says so.
    assert await rig.ask(one, "a", **RETRY).reply() == (200, {"content": "first"})
    # An agent that asks the same again on purpose gets another sample.
    assert await rig.ask(one, "a").reply() == (200, {"content": "second"})
    replies = await asyncio.gather(*(rig.ask(one, "a").reply() for _ in range(2)))
    assert sorted(reply["content"] for _, reply in replies) == ["3", "4"]
    await one.close()
    assert (len(one.rows()), one.retries) == (4, 1)


@in_session("1<|im_end|>", "2<|im_end|>", "3<|im_end|>", "4<|im_end|>")
async def test_a_retry_takes_no_reply_from_one_who_listens(rig: Rig, one: AgentSession) -> None:
    rig.app.gate.clear()
    twins = [rig.ask(one, "a", body={"stream": True}) for _ in range(2)]
    for twin in twins:
        await twin.heard.wait()
    for twin in twins:
        await twin.leave()
    retries = []
    for _ in range(2):  # the second one comes while the first one's reply is under way
        retries.append(rig.ask(one, "a", body={"stream": True}, **RETRY))
        await retries[-1].heard.wait()
    rig.app.gate.set()
    heard = {str((await client.reply())[1]) for client in retries}
    assert {text.removesuffix("<|im_end|>") for (text,) in await sampled(one)} == heard


@pytest.mark.parametrize("reason", ["stop", "max_seconds"])
@pytest.mark.parametrize(("streamed", "leaves"), [(False, True), (True, True), (False, False)])
@in_session("first<|im_end|>")
async def test_a_reply_that_the_end_cuts_counts_if_it_was_heard_or_awaited(rig, one, streamed, leaves, reason) -> None:
    rig.app.gate.clear()
    client = rig.ask(one, "a", body={"stream": streamed})
    await (client.heard if streamed else rig.app.entered).wait()
    if leaves:
        await client.leave()
    await one.close(reason)
    assert await sampled(one) == ([["f"]] if streamed or (not leaves and reason == "max_seconds") else [])
    assert (await rig.ask(one, "a", "f", "more").reply())[0] == 409


@in_session()
async def test_an_app_that_breaks_is_an_error_of_the_server(rig: Rig, one: AgentSession) -> None:
    rig.app.fail = EngineFailed("broken")
    status, answer = await rig.ask(one, "a").reply()
    assert (status, answer["error"]["type"], one.rows()) == (500, "api_error", [])


@in_event_loop
async def test_an_app_that_hangs_is_given_up_and_has_stalled_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "CLOSE_SECONDS", 0.01)
    rig = Rig()
    one = rig.session()
    rig.app.gate.clear()
    rig.app.deaf = True
    client = rig.ask(one, "a")
    await rig.app.entered.wait()
    await one.close("max_seconds")
    assert (await client.reply())[0] == 409
    assert one.rows() == []
    assert one.fault(1e-9).startswith("the endpoint stalled: a request waited")
    assert (one.fault(1e9), one.fault(None)) == ("", "")


@in_event_loop
async def test_a_reward_in_its_range_is_sent_once_until_the_session_closes() -> None:
    rig = Rig()
    one, closed, computed = rig.session(reward_range=(0, 1)), rig.session(reward_range=(0, 1)), rig.session()

    async def send(of: Any, reward: Any) -> tuple[int, Any]:
        return await Client(rig.layer, layer.REWARD, of.reward_key, {"reward": reward}).reply()

    for reward in (2.0, -0.5, "1", None, True, [1], float("nan"), float("inf"), 10**400):
        status, answer = await send(one, reward)
        assert (status, one.reward) == (400, None)
        assert "number from 0 to 1" in answer["error"]["message"]
    one.end("length")
    assert await send(one, 1) == (200, {"reward": 1.0})
    assert ((await send(one, 0))[0], one.reward) == (400, 1.0)
    await rig.close(closed)
    assert (await send(closed, 1))[0] == 409
    assert (await send(computed, 1))[0] == 400


@in_event_loop
async def test_a_flood_ends_its_own_session_and_no_other() -> None:
    """Most of it comes after the session's end, at its limit of turns."""
    rig, turns = Rig(), 100
    flooded, other = (rig.session(max_turns=turns, max_response_tokens=20_000, train="all") for _ in range(2))
    statuses: Counter[int] = Counter()
    for start in range(0, 4 * turns, 100):
        flood = [rig.ask(flooded, f"{start + i}") for i in range(100)]
        statuses.update([(await one.reply())[0] for one in flood])
    assert statuses == {200: turns, 409: 3 * turns}
    assert (await rig.ask(other, "a").reply())[0] == 200
    assert len(rig.app.prompts) == turns + 1
    # Replies that no retry can ask for are forgotten.
    assert sum(exchange.can_be_heard for exchange in flooded.exchanges) == session.REMEMBERED
    assert len(flooded.exchanges) == session.REMEMBERED
    await flooded.close()
    assert len(flooded.rows()) == turns
    assert (await rig.ask(flooded, "late").reply())[0] == 409
    assert len(rig.app.prompts) == turns + 1


@in_session("1<|im_end|>", "2<|im_end|>", "3<|im_end|>", "4<|im_end|>")
async def test_what_became_of_each_request_and_what_was_said_is_recorded(rig: Rig, one: AgentSession) -> None:
    await rig.ask(one, "a").reply()
    await rig.ask(one, "a", "1", "b").reply()
    await rig.ask(one, "a", "1", "c").reply()
    rig.app.status = 500
    assert (await rig.ask(one, "d").reply())[0] == 500
    rig.app.status = 200
    assert (await rig.ask(one, "d", **RETRY).reply())[0] == 200  # a failed request has no reply to repeat
    await one.close()
    made = first, second, fork, failed, again = one.requests_made()
    assert [request["request"] for request in made] == [0, 1, 2, 3, 4]
    assert (first["row"], first["kept"], first["sampled"], first["ended"]) == (0, 0, 2, "stop")
    assert (second["row"], second["continues"], second["kept"]) == (0, 0, first["prompt"] + first["sampled"])
    assert (fork["row"], fork["continues"], fork["kept"]) == (1, 0, second["kept"])
    assert failed.keys() == {"request", "prompt", "kept"}
    assert "sampled" in again
    shown = [(entry.role, entry.text, entry.details) for entry in one.transcript()]
    assert shown[:4] == [
        ("user", "a", {"request": 0}),
        ("assistant", "1", {"request": 0}),
        ("user", "b", {"request": 1, "continues": 0}),
        ("assistant", "2", {"request": 1, "continues": 0}),
    ]


@in_session()
async def test_calls_that_an_agent_sends_are_shown_as_calls(rig: Rig, one: AgentSession) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    turns = {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "4"}
    await Client(rig.layer, CHAT, one.key, {"messages": [{"role": "user", "content": "2+2?"}, *turns]}).reply()
    await one.close()
    shown = [(entry.role, entry.text, entry.details.get("tool_calls")) for entry in one.transcript()]
    assert shown == [("user", "2+2?", None), ("assistant", "", [call]), ("tool", "4", None), ("assistant", "yes", None)]


@in_session()
async def test_a_refusal_is_a_fault_until_a_later_request_is_answered(rig: Rig, one: AgentSession) -> None:
    rig.app.gate.clear()
    earlier = rig.ask(one, "a")
    await rig.app.entered.wait()
    one.count_refusal(Refused(429, CHAT, "too many requests"))
    rig.app.gate.set()
    await earlier.reply()
    assert "429 for /v1/chat/completions: too many" in one.fault()
    await rig.ask(one, "b").reply()
    assert one.fault() == ""


@in_session("no<|im_end|>", "why not<|im_end|>", "2<|im_end|>")
async def test_a_request_that_is_not_trained_on_says_why(rig, one, monkeypatch) -> None:
    instructions = ("You solve", "You write titles", "You judge topics")
    aide, titler, judge = ({"role": "system", "content": text} for text in instructions)
    task = {"role": "user", "content": "What is 1+1, and why?"}
    for messages in ([titler, task], [judge, {"role": "user", "content": "new?"}], [aide, aide, aide, task]):
        await Client(rig.layer, CHAT, one.key, {"messages": messages}).reply()
    await one.close()
    # All texts have been compared, in a thread if they are long; what follows does not hold up the event loop.
    monkeypatch.setattr("generator.agents.tree._links", mock.Mock(side_effect=AssertionError))
    made = [(request["row"], request.get("quotes")) for request in one.requests_made()]
    assert made == [(None, True), (None, False), (0, None)]
    assert one.answer_text() == "2"
