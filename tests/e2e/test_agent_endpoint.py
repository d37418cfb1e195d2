"""Agents with the SDKs of OpenAI and Anthropic, unmodified, against the endpoint of a real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import torch

from common.log import get_logger
from generator.agents.dialects import dialects
from generator.agents.endpoint import Endpoint
from generator.agents.session import RequestRefused, Session, SessionLimits
from generator.chat.template import ChatTemplate
from generator.engine.engine import Engine
from launcher.quickstart.tiny_model import build_tokenizer, save
from launcher.tasks.special_tokens import CALL_END, CALL_START
from tests.support.engine import MAX_MODEL_LEN, engine_config, load, start_engine, tiny_model

pytestmark = pytest.mark.e2e

TOLERANCE = 1e-4
QUESTION = "What is 2+2?"
CALL, ANSWER = f"{CALL_START}2+2{CALL_END}<|im_end|>", "It is 4<|im_end|>"
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
FUNCTION = {"name": "calculator", "description": "Calculates", "parameters": SCHEMA}
CHAT_TOOLS: Any = [{"type": "function", "function": FUNCTION}]
RESPONSE_TOOLS: Any = [{"type": "function", **FUNCTION}]
ANTHROPIC_TOOLS: Any = [{"name": "calculator", "description": "Calculates", "input_schema": SCHEMA}]
COMMON: Any = {"model": "policy", "temperature": 0.3}  # an agent's own temperature, which does not hold


def model_that_calls() -> torch.nn.Module:
    """A tiny model that knows one conversation by heart: a call, and an answer to its result."""
    tokenizer, model = build_tokenizer(), tiny_model(0).train()
    template = ChatTemplate(tokenizer)
    prompt = template.prompt(QUESTION).tolist()
    result = template.between([{"role": "tool", "content": "4"}]).tolist()
    said = [tokenizer.encode(text, add_special_tokens=False) for text in (CALL, ANSWER)]
    ids = torch.tensor([[*prompt, *said[0], *result, *said[1]]])
    labels = torch.tensor([[*[-100] * len(prompt), *said[0], *[-100] * len(result), *said[1]]])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss = torch.tensor(torch.inf)
    while loss > 1e-4:  # sampled at temperature 1, 30 tokens are then others in 0.3% of all conversations
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


class Served:
    """An engine and its endpoint, and the event loop they live in."""

    def __init__(self, folder: Path) -> None:
        self.model = model_that_calls()
        save(self.model, build_tokenizer(), folder)  # type: ignore[arg-type]
        self.runner = asyncio.Runner()
        self.engine: Engine = self(start_engine(folder))
        self.endpoint: Endpoint = self(Endpoint.start(engine_config(folder), self.engine, get_logger()))

    @property
    def app(self) -> Any:
        """vLLM's."""
        return self.endpoint._layer._app

    def __call__(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def session(self, **limits: Any) -> Session:
        return self.endpoint.open(SessionLimits(**({"max_response_tokens": 400, "max_turns": 20} | limits)))

    def close(self) -> None:
        self(self.endpoint.close())
        self(self.engine.close())
        self.runner.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_API_KEY", "of servers that vLLM itself starts")
        served = Served(tmp_path_factory.mktemp("model"))
    yield served
    served.close()


def openai_client(served: Served, session: Session) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.endpoint.url}/v1", api_key=session.key)


def anthropic_client(session: Session) -> anthropic.AsyncAnthropic:
    """A client that cannot set the key: it is in the path."""
    return anthropic.AsyncAnthropic(base_url=session.base_url.removesuffix("/v1"), api_key="none")


async def chat(served: Served, session: Session, **asked: Any) -> str:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    async with openai_client(served, session) as client:
        while True:
            reply = await client.chat.completions.create(messages=messages, tools=CHAT_TOOLS, **COMMON, **asked)
            message = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                assert json.loads(call.function.arguments) == {"expression": "2+2"}  # type: ignore[union-attr]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "4"})


async def streamed_chat(served: Served, session: Session, **asked: Any) -> str:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    async with openai_client(served, session) as client:
        while True:
            async with client.chat.completions.stream(messages=messages, tools=CHAT_TOOLS, **COMMON, **asked) as stream:
                message = (await stream.get_final_completion()).choices[0].message
            calls = [call.model_dump() for call in message.tool_calls or ()]
            for call in calls:
                call["function"].pop("parsed_arguments")
            messages.append(
                {"role": "assistant", "content": message.content} | ({"tool_calls": calls} if calls else {})
            )
            if not calls:
                return message.content or ""
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in calls]


async def responses(served: Served, session: Session, streamed: bool = False) -> str:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    async with openai_client(served, session) as client:
        while True:
            if streamed:
                async with client.responses.stream(input=items, tools=RESPONSE_TOOLS, **COMMON) as stream:
                    reply = await stream.get_final_response()
            else:
                reply = await client.responses.create(input=items, tools=RESPONSE_TOOLS, **COMMON)
            items += [item.model_dump(exclude={"parsed_arguments", "parsed"}) for item in reply.output]
            calls = [item for item in reply.output if item.type == "function_call"]
            if not calls:
                return reply.output_text
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": "4"} for call in calls]


async def streamed_responses(served: Served, session: Session) -> str:
    return await responses(served, session, streamed=True)


async def messages(served: Served, session: Session, streamed: bool = False, **more: Any) -> str:
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    # This SDK has no argument for the temperature any more.
    asked: Any = {
        "model": "policy", "max_tokens": 100, "tools": ANTHROPIC_TOOLS, "extra_body": {"temperature": 0.3}
    } | more  # fmt: skip
    async with anthropic_client(session) as client:
        while True:
            if streamed:
                async with client.messages.stream(messages=history, **asked) as stream:
                    reply = await stream.get_final_message()
            else:
                reply = await client.messages.create(messages=history, **asked)
            history.append({"role": "assistant", "content": reply.content})
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in reply.content if block.type == "text")
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "4"} for call in calls]
            history.append({"role": "user", "content": results})


async def streamed_messages(served: Served, session: Session, **asked: Any) -> str:
    return await messages(served, session, streamed=True, **asked)


AGENTS = [chat, streamed_chat, responses, streamed_responses, messages, streamed_messages]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
def test_two_turns_with_a_call_are_one_exact_row(
    served: Served, agent: Callable[[Served, Session], Coroutine[Any, Any, str]]
) -> None:
    session = served.session(seed=1)
    answer = served(agent(served, session))
    served(session.close())
    first, second = session.tree.nodes
    assert first.turn is not None
    assert second.turn is not None
    known = [*first.prompt_ids().tolist(), *first.turn.token_ids.tolist()]
    assert second.prompt_ids()[: len(known)].tolist() == known
    # Just what our own loop makes of it.
    template, tokenizer = ChatTemplate(served.engine.tokenizer), served.engine.tokenizer
    result = template.between([{"role": "tool", "content": "4"}]).tolist()
    said = [tokenizer.encode(text, add_special_tokens=False) for text in (CALL, ANSWER)]
    (row,) = session.rows()
    assert row.tokens().tolist() == [*template.prompt(QUESTION).tolist(), *said[0], *result, *said[1]]
    assert [row.tokens()[start:end].tolist() for start, end in row.spans] == said
    assert error(served, row) < TOLERANCE  # at the session's temperature, not the agent's
    assert (answer, session.answer_text(), session.tool_calls()) == ("It is 4", "It is 4", 1)


def error(served: Served, row: Any) -> float:
    """The largest difference between a row's log-probs and the engine's scores of its tokens."""
    scores = served(served.engine.logprobs(row.tokens()))
    sampled = np.concatenate([scores[start:end] for start, end in row.spans])
    return float(np.abs(sampled - np.concatenate(row.logprobs)).max())


CHAT_REFUSED = {
    "n": {"n": 2},
    "beam search": {"extra_body": {"use_beam_search": True, "n": 2}},
    "logit bias": {"logit_bias": {"65": 5}},
    "presence penalty": {"presence_penalty": 0.5},
    "frequency penalty": {"frequency_penalty": 0.5},
    "repetition penalty": {"extra_body": {"repetition_penalty": 1.1}},
    "min_p": {"extra_body": {"min_p": 0.1}},
    "JSON": {"response_format": {"type": "json_object"}},
    "a grammar": {"extra_body": {"structured_outputs": {"regex": "a*"}}},
    "a forced call": {"tools": CHAT_TOOLS, "tool_choice": "required"},
    "a named call": {"tools": CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "calculator"}}},
    "top log-probs": {"logprobs": True, "top_logprobs": 3},
    "prompt log-probs": {"extra_body": {"prompt_logprobs": 1}},
    "allowed tokens": {"extra_body": {"allowed_token_ids": [1]}},
    "bad words": {"extra_body": {"bad_words": ["a"]}},
    "at least some tokens": {"extra_body": {"min_tokens": 5}},
    "no end": {"extra_body": {"ignore_eos": True}},
    "another template": {"extra_body": {"chat_template": "x"}},
    "another template, inside": {"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}},
    "ids of its own": {"extra_body": {"kv_transfer_params": {"prompt_token_ids": [1]}}},
    "a truncated prompt": {"extra_body": {"truncate_prompt_tokens": 2}},
    "a continued message": {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}},
    "an image": {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]},
    "another model": {"model": "gpt-4o"},
    "a role of nobody's": {"messages": [{"role": 7, "content": "x"}]},
    "too much": {"messages": [{"role": "user", "content": "x" * MAX_MODEL_LEN}]},
}  # fmt: skip
RESPONSES_REFUSED = {
    "an earlier response": {"previous_response_id": "resp_1"},
    "the background": {"background": True},
    "JSON": {"text": {"format": {"type": "json_object"}}},
    "a forced call": {"tools": RESPONSE_TOOLS, "tool_choice": "required"},
}


def test_what_changes_the_distribution_is_refused(served: Served) -> None:
    session = served.session()

    async def ask() -> None:
        async with openai_client(served, session) as client:
            for name, asked in CHAT_REFUSED.items():
                body: Any = {"model": "policy", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4} | asked
                with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
                    await client.chat.completions.create(**body)
                assert "\n" not in caught.value.body["message"], name  # type: ignore[index]
                assert name != "too much" or caught.value.code == "context_length_exceeded"
            for asked in RESPONSES_REFUSED.values():
                with pytest.raises(openai.BadRequestError):
                    await client.responses.create(**({"model": "policy", "input": "a"} | asked))  # type: ignore
        async with anthropic_client(session) as client:
            for asked in ({"messages": [{"role": "user", "content": "x" * MAX_MODEL_LEN}]},
                          {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
                          {"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "any"}}):  # fmt: skip
                plain = {"model": "policy", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
                with pytest.raises(anthropic.BadRequestError):
                    await client.messages.create(**(plain | asked))  # type: ignore

    served(ask())
    served(session.close())
    assert session.rows() == []


FORCED: Any = {"type": "function", "function": {"name": "calculator"}}
JSON_SCHEMA: Any = {"name": "answer", "schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
# By the client's own field: what is refused unless it is ignored, with the fields beside it.
WANTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a call": ("chat", "tool_choice", {"tool_choice": "required", "tools": CHAT_TOOLS}),
    "this call": ("chat", "tool_choice", {"tool_choice": FORCED, "tools": CHAT_TOOLS}),
    "JSON": ("chat", "response_format", {"response_format": {"type": "json_object"}}),
    "a schema": ("chat", "response_format", {"response_format": {"type": "json_schema", "json_schema": JSON_SCHEMA}}),
    "a call in Responses": ("responses", "tool_choice", {"tool_choice": "required", "tools": RESPONSE_TOOLS}),
    "JSON in Responses": (
        "responses", "text.format", {"text": {"format": {"type": "json_object"}, "verbosity": "low"}},
    ),
    "a schema in Responses": ("responses", "text.format", {"text": {"format": {"type": "json_schema", **JSON_SCHEMA}}}),
    "any call of Anthropic's": ("messages", "tool_choice", {"tool_choice": {"type": "any"}, "tools": ANTHROPIC_TOOLS}),
    "this call of Anthropic's": (
        "messages", "tool_choice", {"tool_choice": {"type": "tool", "name": "calculator"}, "tools": ANTHROPIC_TOOLS},
    ),
    "a schema of Anthropic's": (
        "messages", "output_config.format",
        {"output_config": {"format": {"type": "json_schema", "schema": JSON_SCHEMA["schema"]}}},
    ),
    "any call": ("chat", "tool_choice", {"tool_choice": "any", "tools": CHAT_TOOLS}),
    "one of some calls": (
        "chat", "tool_choice",
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "tools": CHAT_TOOLS},
    ),
    "JSON by a name of vLLM's": ("chat", "guided_json", {"guided_json": JSON_SCHEMA["schema"]}),
    "a schema in Anthropic's beta": (
        "messages", "output_format", {"output_format": {"type": "json_schema", "schema": JSON_SCHEMA["schema"]}},
    ),
    "a budget of vLLM's": ("chat", "thinking_token_budget", {"thinking_token_budget": 9}),
    "at least some tokens": ("chat", "min_tokens", {"min_tokens": 3}),
    "top log-probs": ("chat", "top_logprobs", {"logprobs": True, "top_logprobs": 2}),
    "a budget of thinking": (
        "messages", "thinking", {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
    ),
}  # fmt: skip


PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
IMAGE, SOUND = {"url": "data:image/png;base64,AA=="}, {"data": "AA==", "format": "wav"}
# What a client sends, by its dialect, and the words of the refusal.
NAMED: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"stop": list("abcde")}, "stop: Input should be a valid string, or List should have at most 4 items"),
    ("chat", {"functions": [FUNCTION], "function_call": "auto"}, "functions is not supported here"),
    ("responses", {"response_format": {"type": "json_object"}}, "response_format is not supported here"),
    ("messages", {"stop_sequences": list("abcde")}, "stop_sequences: List should have at most 4 items"),
    ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.input_schema: Field required"),
    *(
        (dialect, {field: [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]},
         rf"{field}.0.content.1 is of type {part['type']}: only text is supported here")
        for dialect, field, part in [
            ("chat", "messages", {"type": "image_url", "image_url": IMAGE}),
            ("chat", "messages", {"type": "input_audio", "input_audio": SOUND}),
            ("responses", "input", {"type": "input_image", "image_url": IMAGE["url"]}),
            ("messages", "messages", {"type": "document", "source": {"type": "text", "data": "a"}}),
            ("messages", "messages", {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1"}}),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "asked", "words"), NAMED)
def test_a_refusal_names_the_clients_field(served: Served, dialect: str, asked: dict[str, Any], words: str) -> None:
    plain = {"messages": [{"role": "user", "content": "a"}], "input": "a", "max_tokens": 4}
    with pytest.raises(RequestRefused, match=words):
        dialects(served.app)[PATHS[dialect]].read(plain | asked)


def test_a_field_that_asks_for_nothing_is_accepted(served: Served) -> None:
    nothing: dict[str, Any] = {
        "logit_bias": {}, "presence_penalty": 0, "response_format": {"type": "text"}, "n": 1, "top_logprobs": 0,
        "function_call": "none", "store": True, "metadata": {"a": "b"}, "prediction": None, "stop": [], "seed": 7,
    }  # fmt: skip
    plain = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    assert dialects(served.app)[PATHS["chat"]].read(plain | nothing).ignored == ()


def test_a_tool_that_no_agent_runs_is_named_as_ignored(served: Served) -> None:
    asked = {"input": "a", "tools": [*RESPONSE_TOOLS, {"type": "web_search"}]}
    request = dialects(served.app)[PATHS["responses"]].read(asked)
    assert request.ignored == ("tools.1 of type web_search",)
    assert len(request.variables["tools"]) == 1


@pytest.mark.parametrize("wanted", WANTED)
def test_a_field_that_is_ignored_changes_nothing(served: Served, wanted: str) -> None:
    dialect, field, asked = WANTED[wanted]
    other = {"guided_json": "response_format", "thinking_token_budget": "thinking"}
    name = "response_format" if field.endswith("format") else other.get(field, field)
    refusing, ignoring = served.session(), served.session(ignore=(name,), seed=1)

    async def ask(session: Session) -> Any:
        said = {"model": "policy", "extra_body": asked}
        if dialect == "messages":
            async with anthropic_client(session) as client:
                history: Any = [{"role": "user", "content": QUESTION}]
                return await client.messages.create(**({"max_tokens": 100, "messages": history} | said))
        async with openai_client(served, session) as other:
            if dialect == "responses":
                return await other.responses.create(input=QUESTION, **said)  # type: ignore[call-overload]
            return await other.chat.completions.create(messages=[{"role": "user", "content": QUESTION}], **said)

    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match=rf"{field}\b.*ignore: \[{name}\]"):
        served(ask(refusing))
    served(ask(ignoring))
    served(ignoring.close())
    (row,) = ignoring.rows()
    said = served.engine.tokenizer.encode(CALL, add_special_tokens=False)
    assert [row.tokens()[start:end].tolist() for start, end in row.spans] == [said]
    assert error(served, row) < TOLERANCE


def test_more_tokens_than_the_model_takes_are_no_error(served: Served) -> None:
    session = served.session(seed=1)

    async def ask() -> list[str]:
        history: Any = [{"role": "user", "content": QUESTION}]
        async with openai_client(served, session) as client, anthropic_client(session) as other:
            chat = await client.chat.completions.create(model="policy", messages=history, max_tokens=32_000)
            response = await client.responses.create(model="policy", input=QUESTION, max_output_tokens=32_000)
            message = await other.messages.create(model="policy", messages=history, max_tokens=8_000)
        return [str(chat.choices[0].finish_reason), str(response.status), str(message.stop_reason)]

    assert served(ask()) == ["stop", "completed", "end_turn"]
    served(session.close())


# A stop, what the client sees of ANSWER, and what is sampled: the token that completes the stop is the last.
STOPS = {"is 4": ("It ", "It is 4"), "t i": ("I", "It i"), "no such text": ("It is 4", ANSWER)}


@pytest.mark.parametrize("agent", [chat, streamed_chat, messages, streamed_messages], ids=lambda agent: agent.__name__)
@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_of_several_characters_ends_the_turn(
    served: Served, agent: Callable[..., Coroutine[Any, Any, str]], stop: str
) -> None:
    session, stops = served.session(seed=1), [stop, "not this either"]
    asked = {"stop_sequences": stops} if agent in (messages, streamed_messages) else {"stop": stops}
    heard = served(agent(served, session, **asked))
    served(session.close())
    (row,) = session.rows()
    sampled = [served.engine.tokenizer.decode(row.tokens()[start:end]) for start, end in row.spans]
    assert (heard, sampled) == (STOPS[stop][0], [CALL, STOPS[stop][1]])
    assert error(served, row) < TOLERANCE


def test_what_only_reads_is_served(served: Served) -> None:
    session = served.session()

    async def ask() -> tuple[list[str], int]:
        async with openai_client(served, session) as client, anthropic_client(session) as other:
            models = [model.id async for model in client.models.list()]
            history: Any = [{"role": "user", "content": QUESTION}]
            count = await other.messages.count_tokens(model="policy", messages=history)
        return models, count.input_tokens

    expected = len(ChatTemplate(served.engine.tokenizer).prompt(QUESTION))
    assert served(ask()) == (["policy"], expected)
    served(session.close())


def test_an_update_in_the_middle_is_in_the_versions(served: Served) -> None:
    sessions = [served.session() for _ in range(8)]
    served(load(served.engine, 1, tiny_model(3)))

    async def ask(session: Session, streamed: bool) -> None:
        async with openai_client(served, session) as client:
            asked: Any = {"model": "policy", "messages": [{"role": "user", "content": session.key[:8]}]}
            if streamed:
                async for _ in await client.chat.completions.create(stream=True, max_tokens=150, **asked):
                    pass
            else:
                await client.chat.completions.create(max_tokens=150, **asked)

    async def update_in_the_middle() -> None:
        asking = [asyncio.ensure_future(ask(session, i % 2 == 0)) for i, session in enumerate(sessions)]
        while not all(session.tree.nodes for session in sessions):
            await asyncio.sleep(0)
        await load(served.engine, 2, tiny_model(4))
        await asyncio.gather(*asking)
        for session in sessions:
            await session.close()

    served(update_in_the_middle())
    for session in sessions:
        (row,) = session.rows()
        borders = [row.versions[0][1], *(end for _, _, end in row.versions)]
        assert borders == sorted(set(borders))
        assert (borders[0], borders[-1], len(row.logprobs[0])) == (0, row.sampled, row.sampled)
    versions = {version for session in sessions for version, _, _ in session.rows()[0].versions}
    assert 2 in versions
    served(load(served.engine, 3, served.model))


def test_a_session_that_ends_cuts_what_is_in_flight(served: Served) -> None:
    session, stream = served.session(), served.session()
    served(load(served.engine, 4, tiny_model(5)))

    async def end() -> Any:
        history: Any = [{"role": "user", "content": "x"}]
        async with openai_client(served, session) as client, openai_client(served, stream) as streaming:
            asked = asyncio.ensure_future(client.chat.completions.create(model="policy", messages=history))
            pieces = await streaming.chat.completions.create(model="policy", messages=history, stream=True)
            states = served.engine.llm.output_processor.request_states
            async for _ in pieces:
                # A request that is cut before its first token makes no row.
                if len(states) == 2 and not any(state.is_prefilling for state in states.values()):
                    break
            await session.close("max_seconds")
            await stream.close("max_seconds")
            reply = await asked
            with pytest.raises(openai.ConflictError, match="over"):
                await client.chat.completions.create(model="policy", messages=history)
            return reply

    reply = served(end())
    assert reply.choices[0].finish_reason == "length"
    for one in (session, stream):
        (row,) = one.rows()
        assert 0 < row.sampled == len(row.logprobs[0]) < 400
        assert error(served, row) < TOLERANCE
    served(load(served.engine, 5, served.model))


def test_other_paths_of_the_server_are_not_reached(served: Served) -> None:
    session = served.session()
    host, port = served.endpoint.url.removeprefix("http://").split(":")
    key = session.key
    paths = [
        "/metrics", "/tokenize", "/v1/load_lora_adapter", "/v1/completions", "/docs", "/openapi.json", "/ping",
        "/invocations", "/inference/v1/generate", "/v1/chat/completions/render", "/v1/responses/resp_1",
        f"/s/{key}/../../tokenize", f"/s/{key}/v1/../../../tokenize", f"/s/{key}//tokenize",
        f"/s/{key}/v1/chat%2Fcompletions%2F..%2F..%2F..%2Ftokenize", f"/s/{key}/v1/%2e%2e/tokenize", "//tokenize",
        f"http://{host}/tokenize", f"/s/{key}/tokenize", f"/s/{key}%2Ftokenize", f"/s/{key}/%2e%2e/tokenize",
        "/v1/chat/completions/../../../tokenize",
    ]  # fmt: skip

    async def ask(path: str, method: str) -> int:
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"model": "policy", "prompt": "x", "lora_name": "x", "lora_path": "/"}'
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status = int((await reader.readline()).split()[1])
        writer.close()
        return status

    for path in paths:
        for method in ("GET", "POST"):
            assert served(ask(path, method)) in (400, 401, 404, 405), path
    served(session.close())
    assert session.requests == 0
