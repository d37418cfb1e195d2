"""The layer before the server of agents: whose a request is, and what is refused before the server sees it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog

from generator.agents import layer
from generator.agents.session import AgentSession
from tests.support.agent_sessions import CHAT, MAX_BODY, MODEL, Client, Rig, in_session


@in_session()
async def test_a_session_is_known_by_its_key(rig: Rig, one: AgentSession) -> None:
    body, in_path = {"messages": [{"role": "user", "content": "a"}]}, f"/s/{one.key}{CHAT}"
    by_header = (CHAT, None, {"x-api-key": one.key})
    for path, key, headers in ((CHAT, one.key, {}), by_header, (in_path, None, {}), (in_path, "EMPTY", {})):
        assert (await Client(rig.layer, path, key, body, headers=headers).reply())[0] == 200


@in_session()
async def test_no_other_key_opens_a_session(rig: Rig, one: AgentSession) -> None:
    other, gone = rig.session(), rig.session()
    await rig.close(gone)
    body = {"messages": [{"role": "user", "content": "a"}]}
    for key in (None, "", "x", one.key[:-1], one.key + "A", one.reward_key, "*", "EMPTY"):
        assert (await Client(rig.layer, CHAT, key, body).reply())[0] == 401
    assert (await Client(rig.layer, CHAT, gone.key, body).reply())[0] == 409
    assert (await Client(rig.layer, layer.REWARD, one.key, {"reward": 1}).reply())[0] == 401
    assert rig.app.prompts == []
    await rig.ask(other, "a").reply()
    assert (one.requests, other.requests) == (0, 1)


PATHS = [
    "/", "/v1", "/v1/", "/metrics", "/tokenize", "/v1/load_lora_adapter", "/v1/completions", "/v1/chat/completions/",
    "//v1/chat/completions", "/v1//chat/completions", "/v1/../tokenize", "/v1/chat/completions/..",
    "/v1/chat/completions;x", "/v1/chat/completions\n", "/V1/chat/completions", "/v1/chat/completions\0",
    "/inference/v1/generate", "/v1/messages/count_tokens/x", "/v1/models/policy", "http://x/v1/models",
]  # fmt: skip


@in_session()
async def test_only_the_dialects_paths_are_served(rig: Rig, one: AgentSession) -> None:
    for path in [*PATHS, *(f"/s/{one.key}{path}" for path in PATHS)]:
        for method in ("GET", "POST", "DELETE"):
            assert (await Client(rig.layer, path, one.key, {}, method=method).reply())[0] in (401, 404, 405), path
    for path in (f"/s/{one.key}", f"/s/{one.key}/s/{one.key}{CHAT}", f"/s//{one.key}{CHAT}", f"/s/../{one.key}{CHAT}"):
        assert (await Client(rig.layer, path, None, {}).reply())[0] == 401
    assert (rig.app.scopes, rig.app.prompts) == ([], [])


@in_session()
async def test_nothing_of_a_clients_headers_reaches_the_app(rig: Rig, one: AgentSession) -> None:
    headers = {"x-data-parallel-rank": "1", "cookie": "a=b", "x-request-id": "z", "host": "evil"}
    path = "/v1/messages/count_tokens"
    await rig.ask(one, "a", path=f"/s/{one.key}{path}", headers=headers).reply()
    (scope,) = rig.app.scopes
    assert {name for name, _ in scope["headers"]} == {b"content-type", b"content-length"}
    assert (scope["path"], scope["query_string"], scope["root_path"]) == (path, b"", "")


@in_session()
async def test_a_bad_body_is_refused_in_one_line(rig: Rig, one: AgentSession) -> None:
    bodies: list[tuple[Any, int, str]] = [
        (b"{", 400, "not valid JSON"),
        (b"", 400, "not valid JSON"),
        (b"[" * 50_000, 400, "not valid JSON"),
        (b"[]", 400, "must be a JSON object"),
        (b"\xff\xfe", 400, "not valid JSON"),
        ({"messages": 7}, 400, "messages: Field required"),
        ({"messages": [], "model": "gpt-4o"}, 404, "`gpt-4o` does not exist"),
        (b"x" * (MAX_BODY + 1), 413, f"longer than {MAX_BODY} bytes"),
    ]
    for body, status, words in bodies:
        code, answer = await Client(rig.layer, CHAT, one.key, body).reply()
        assert (code, words in answer["error"]["message"]) == (status, True)
        assert "\n" not in answer["error"]["message"]
    assert (one.requests, one.in_flight, rig.app.prompts) == (0, 0, [])


@in_session()
async def test_half_an_emoji_reaches_the_model_as_a_question_mark(rig: Rig, one: AgentSession) -> None:
    for text, sent in (("cut \\ud83d", "cut ?"), ("\\uDE00 whole \\ud83d\\ude00", "? whole 😀")):
        body = f'{{"messages": [{{"role": "user", "content": "{text}"}}]}}'
        assert (await Client(rig.layer, CHAT, one.key, body.encode()).reply())[0] == 200
        assert one.tree.nodes[-1].messages[-1]["content"] == sent


@in_session()
async def test_a_request_that_the_endpoint_cannot_read_is_its_own_fault(rig: Rig, one: AgentSession) -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}
    messages = [{"role": "assistant", "content": "x", "tool_calls": [call]}, {"role": "user", "content": "a"}]
    status, answer = await Client(rig.layer, CHAT, one.key, {"messages": messages}).reply()
    assert (status, answer["error"]["message"]) == (500, "the endpoint failed; the generator's log says why")
    assert (one.refusals.counted, one.in_flight) == (1, 0)
    assert "refused a request of the agent's, and took none after it: 500" in one.fault()


@in_session()
async def test_refusals_are_counted_and_each_kind_is_said_once(rig: Rig, one: AgentSession) -> None:
    other, full = rig.session(), rig.session(max_model_len=40)
    with structlog.testing.capture_logs() as logs:
        for session in (one, one, other):
            await Client(rig.layer, f"/s/{session.key}/v1/completions", None, {}).reply()
        await rig.ask(one, "a", body={"model": "gpt-4o"}).reply()
        await Client(rig.layer, CHAT, "no key", {}).reply()
        await rig.ask(full, "x" * 100).reply()
        rig.app.status = 400  # what vLLM's server itself refuses
        await rig.ask(other, "a").reply()
    nowhere = (404, "/v1/completions", "there is no such path here")
    model = (404, CHAT, f"the model `gpt-4o` does not exist; this endpoint has `{MODEL}`")
    assert one.refusals.counts == {(*nowhere, False): 2, (*model, False): 1}
    assert [refused.status for refused in other.refusals.counts] == [404, 400]
    assert [refused.is_limit for refused in full.refusals.counts] == [True]
    assert (one.refusals.counted, full.refusals.counted, rig.layer.refused, rig.layer.strangers) == (3, 0, 6, 1)
    said = [line["answered"].partition(" for")[0] for line in logs if line["log_level"] == "warning"]
    assert said == ["404", "404", "400"]
    assert one.refusals.records()[0] == dict(zip(("status", "path", "message"), nowhere, strict=True), times=2)


@in_session(ignore=("tool_choice",))
async def test_ignored_fields_are_said_once(rig: Rig, one: AgentSession) -> None:
    with structlog.testing.capture_logs() as logs:
        for session in (one, *(rig.session(ignore=("tool_choice",)) for _ in range(2))):
            await rig.ask(session, "a", body={"tool_choice": "required"}).reply()
            await rig.ask(session, "b").reply()
    assert [line["fields"] for line in logs if "ignored" in line["event"]] == [("tool_choice",)]


@in_session(max_model_len=40)
async def test_errors_have_the_shape_of_their_dialect(rig: Rig, one: AgentSession) -> None:
    _, openai = await rig.ask(one, "x" * 100, body={"model": MODEL}).reply()
    assert openai["error"]["code"] == "context_length_exceeded"
    assert openai["error"]["type"] == "invalid_request_error"
    _, anthropic = await rig.ask(one, "x" * 100, path="/v1/messages").reply()
    assert anthropic["type"] == "error"
    assert anthropic["error"]["message"].startswith("prompt is too long: ")
    error = {"type": "authentication_error", "message": "the API key belongs to no session of this endpoint"}
    refused = await Client(rig.layer, "/v1/messages", "x", {}).reply()
    assert refused == (401, {"type": "error", "error": error})


@in_session()
async def test_a_body_that_never_ends_is_given_up(rig: Rig, one: AgentSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "BODY_SECONDS", 0.01)
    client = rig.ask(one, "a", endless=True)
    status, answer = await client.reply()
    assert (status, "not complete" in answer["error"]["message"]) == (408, True)
    headers = dict(client.sent[0]["headers"])
    assert (headers[b"connection"], headers[b"x-should-retry"]) == (b"close", b"true")
    gone = rig.ask(one, "a", endless=True)
    await gone.leave()
    assert one.in_flight == 0


@in_session(max_turns=1000)
async def test_a_session_has_a_bounded_number_of_requests_in_flight(rig: Rig, one: AgentSession) -> None:
    rig.app.gate.clear()
    waiting = [rig.ask(one, f"{i}") for i in range(layer.MAX_IN_FLIGHT)]
    while len(rig.app.prompts) < len(waiting):
        await asyncio.sleep(0)
    assert (await rig.ask(one, "one more").reply())[0] == 429
    rig.app.gate.set()
    assert {(await client.reply())[0] for client in waiting} == {200}
