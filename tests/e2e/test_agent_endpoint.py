"""Agents with the SDKs of OpenAI and Anthropic, unmodified, against the endpoint of a real engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import numpy as np
import openai
import pytest
import torch

from common.errors import UserError
from common.log import get_logger
from generator.agents.dialects import dialects
from generator.agents.endpoint import Endpoint, check_parsers
from generator.agents.refusals import Refusal
from generator.agents.session import AgentSession, SessionLimits
from generator.chat.template import ChatTemplate
from generator.engine.engine import Engine
from launcher.quickstart.tiny_model import build_tokenizer, save
from launcher.tasks.special_tokens import CALL_END, CALL_START
from tests.support.agent_dialects import DIALECTS, Conversation, Reply, Said
from tests.support.engine import MAX_MODEL_LEN, engine_config, load, start_engine, tiny_model

pytestmark = pytest.mark.e2e

TOLERANCE = 1e-4
QUESTION = "What is 2+2?"
ASKED: Any = [{"role": "user", "content": QUESTION}]
CALL, ANSWER = f"{CALL_START}2+2{CALL_END}<|im_end|>", "It is 4<|im_end|>"
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
FUNCTION = {"name": "calculator", "description": "Calculates", "parameters": SCHEMA}
TOOLS: dict[str, Any] = {
    "chat": [{"type": "function", "function": FUNCTION}],
    "responses": [{"type": "function", **FUNCTION}],
    "messages": [{"name": "calculator", "description": "Calculates", "input_schema": SCHEMA}],
}


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
        self.dialects = {kind.path.split("/")[2]: kind for kind in dialects(self.endpoint._layer._app).values()}

    def __call__(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def session(self, **limits: Any) -> AgentSession:
        return self.endpoint.open_session(SessionLimits(**({"max_response_tokens": 400, "max_turns": 20} | limits)))

    def openai(self, session: AgentSession) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.endpoint.url}/v1", api_key=session.key)

    def sampled(self, session: AgentSession) -> list[str]:
        """Close a session and return what was sampled in its only row, which the engine gives the same log-probs."""
        self(self.endpoint.close_session(session))
        (row,) = session.rows()
        scores = self(self.engine.logprobs(row.tokens()))
        own = np.concatenate([scores[start:end] for start, end in row.spans])
        assert np.abs(own - np.concatenate(row.logprobs)).max() < TOLERANCE
        return [self.engine.tokenizer.decode(row.tokens()[start:end]) for start, end in row.spans]

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


def anthropic_client(session: AgentSession) -> anthropic.AsyncAnthropic:
    """A client that cannot set the key: it is in the path."""
    return anthropic.AsyncAnthropic(base_url=session.base_url.removesuffix("/v1"), api_key="none")


async def play(served: Served, session: AgentSession, dialect: str, streamed: bool = False, **asked: Any) -> str:
    """The answer of an agent that has its calls computed."""
    asked = {"extra_body": {"temperature": 0.3}, **asked}  # an agent's own temperature, which does not hold
    conversation = Conversation(dialect, "", [Said(QUESTION)], tools=True)
    async with httpx2.AsyncClient(timeout=600) as http:
        client = DIALECTS[dialect](served.endpoint.url, session.key, http)
        while True:
            reply = Reply()
            await client.ask(conversation, 100, streamed, reply, **asked)
            if not reply.calls:
                return reply.text
            assert [json.loads(arguments) for _, _, arguments in reply.calls] == [{"expression": "2+2"}]
            conversation.turns += [reply, *(Said("4", call_id) for call_id, _, _ in reply.calls)]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_two_turns_with_a_call_are_one_exact_row(served: Served, dialect: str, streamed: bool) -> None:
    session = served.session(seed=1)
    assert served(play(served, session, dialect, streamed)) == "It is 4"
    assert served.sampled(session) == [CALL, ANSWER]  # at the session's temperature, not the agent's
    # The row is what our own loop makes of the conversation.
    template, tokenizer = ChatTemplate(served.engine.tokenizer), served.engine.tokenizer
    result = template.between([{"role": "tool", "content": "4"}]).tolist()
    call, answer = (tokenizer.encode(text, add_special_tokens=False) for text in (CALL, ANSWER))
    (row,) = session.rows()
    assert row.tokens().tolist() == [*template.prompt(QUESTION).tolist(), *call, *result, *answer]
    assert (session.answer_text(), session.tool_calls()) == ("It is 4", 1)


def body(**asked: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}], "input": "a", "max_tokens": 4} | asked


def with_part(kind: str, **part: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, **part}]}]


IMAGE, SOUND = {"url": "data:image/png;base64,AA=="}, {"data": "AA==", "format": "wav"}
# By dialect: fields that are refused, and words of the refusal, which name the client's own field.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"n": 2}, "n is not supported here"),
    ("chat", {"use_beam_search": True, "n": 2}, "use_beam_search is not supported here"),
    ("chat", {"logit_bias": {"65": 5}}, "logit_bias is not supported here"),
    ("chat", {"presence_penalty": 0.5}, "presence_penalty is not supported here"),
    ("chat", {"min_p": 0.1}, "min_p is not supported here"),
    ("chat", {"structured_outputs": {"regex": "a*"}}, "structured_outputs is not supported here"),
    ("chat", {"logprobs": True, "prompt_logprobs": 1}, "prompt_logprobs is not supported here"),
    ("chat", {"allowed_token_ids": [1]}, "allowed_token_ids is not supported here"),
    ("chat", {"ignore_eos": True}, "ignore_eos is not supported here"),
    ("chat", {"chat_template": "x"}, "chat_template is not supported here"),
    ("chat", {"kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer_params is not supported here"),
    ("chat", {"truncate_prompt_tokens": 2}, "truncate_prompt_tokens is not supported here"),
    ("chat", {"continue_final_message": True, "add_generation_prompt": False}, "is not supported here"),
    ("chat", {"functions": [FUNCTION], "function_call": "auto"}, "functions is not supported here"),
    ("chat", {"messages": [{"role": 7, "content": "x"}]}, "messages.0"),
    ("chat", {"stop": list("abcde")}, "stop: Input should be a valid string, or List should have at most 4 items"),
    ("chat", {"messages": with_part("image_url", image_url=IMAGE)}, "messages.0.content.1 is of type image_url: only"),
    ("chat", {"messages": with_part("input_audio", input_audio=SOUND)}, "messages.0.content.1 is of type input_audio"),
    ("responses", {"previous_response_id": "resp_1"}, "previous_response_id is not supported here"),
    ("responses", {"background": True}, "background is not supported here"),
    ("responses", {"response_format": {"type": "json_object"}}, "response_format is not supported here"),
    ("responses", {"input": with_part("input_image", image_url="x")}, "input.0.content.1 is of type input_image"),
    ("messages", {"stop_sequences": list("abcde")}, "stop_sequences: List should have at most 4 items"),
    ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.input_schema: Field required"),
    ("messages", {"messages": with_part("document", source={"type": "text"})}, "content.1 is of type document"),
]  # fmt: skip


def test_what_changes_the_distribution_is_refused_in_one_line_that_names_the_field(served: Served) -> None:
    for dialect, asked, words in REFUSED:
        with pytest.raises(Refusal) as refusal:
            served.dialects[dialect].read(body(**asked))
        assert words in str(refusal.value), asked
        assert (refusal.value.status, "\n" in str(refusal.value)) == (400, False)


def test_a_parser_that_vllm_lacks_is_refused(tmp_path: Path) -> None:
    config = engine_config(tmp_path)
    generator = config.generator.model_copy(update={"tool_parser": "guess"})
    with pytest.raises(UserError, match=r"generator.tool_parser = 'guess' is not a parser of vLLM; it has .*hermes"):
        check_parsers(config.model_copy(update={"generator": generator}))


def test_fields_that_ask_for_nothing_are_accepted(served: Served) -> None:
    nothing: dict[str, Any] = {
        "logit_bias": {}, "presence_penalty": 0, "response_format": {"type": "text"}, "n": 1, "top_logprobs": 0,
        "function_call": "none", "store": True, "metadata": {"a": "b"}, "prediction": None, "stop": [], "seed": 7,
    }  # fmt: skip
    assert served.dialects["chat"].read(body(**nothing)).ignored == ()


def test_a_tool_that_no_agent_runs_is_named_as_ignored(served: Served) -> None:
    request = served.dialects["responses"].read(body(tools=[*TOOLS["responses"], {"type": "web_search"}]))
    assert request.ignored == ("tools.1 of type web_search",)
    assert len(request.variables["tools"]) == 1


JSON_SCHEMA: Any = {"name": "answer", "schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
SCHEMA_FORMAT = {"type": "json_schema", "schema": JSON_SCHEMA["schema"]}
FORCED: Any = {"type": "function", "function": {"name": "calculator"}}
SOME: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
BUDGET = {"type": "enabled", "budget_tokens": 1024}
# By dialect: the client's field, what `ignore` calls it, and its value, which is refused unless it is ignored.
IGNORABLE: list[tuple[str, str, str, Any]] = [
    ("chat", "tool_choice", "tool_choice", "required"),
    ("chat", "tool_choice", "tool_choice", FORCED),
    ("chat", "tool_choice", "tool_choice", SOME),
    ("chat", "response_format", "response_format", {"type": "json_schema", "json_schema": JSON_SCHEMA}),
    ("chat", "guided_json", "response_format", JSON_SCHEMA["schema"]),
    ("chat", "thinking_token_budget", "thinking", 9),
    ("chat", "min_tokens", "min_tokens", 3),
    ("chat", "top_logprobs", "top_logprobs", 2),
    ("responses", "tool_choice", "tool_choice", "required"),
    ("responses", "text.format", "response_format", {"type": "json_object"}),
    ("messages", "tool_choice", "tool_choice", {"type": "any"}),
    ("messages", "output_config.format", "response_format", SCHEMA_FORMAT),
    ("messages", "output_format", "response_format", SCHEMA_FORMAT),
    ("messages", "thinking", "thinking", BUDGET),
]  # fmt: skip


def test_fields_can_be_ignored(served: Served) -> None:
    for dialect, field, name, value in IGNORABLE:
        first, _, rest = field.partition(".")
        asked = body(model="policy", tools=TOOLS[dialect], logprobs=True, max_tokens=2000)
        asked |= {first: {rest: value} if rest else value}
        read = served.dialects[dialect].read
        with pytest.raises(Refusal, match=rf"{field}\b.*ignore: \[{name}\]"):
            read(asked)
        assert read(asked, (name,)).ignored == (field,)


@pytest.mark.parametrize(("dialect", "choice"), [("chat", "required"), ("messages", {"type": "any"})])
def test_an_ignored_field_changes_nothing(served: Served, dialect: str, choice: Any) -> None:
    session = served.session(ignore=("tool_choice",), seed=1)
    assert served(play(served, session, dialect, tool_choice=choice)) == "It is 4"
    assert served.sampled(session) == [CALL, ANSWER]


def test_what_a_client_is_told_of_a_refusal(served: Served) -> None:
    session = served.session(seed=1)
    long: Any = [{"role": "user", "content": "x" * MAX_MODEL_LEN}]

    async def ask() -> None:
        async with served.openai(session) as client, anthropic_client(session) as other:
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.chat.completions.create(model="gpt-4o", messages=ASKED)
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="policy", messages=long)
            assert refused.value.code == "context_length_exceeded"
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await other.messages.create(model="policy", messages=long, max_tokens=4)

    served(ask())
    served(session.close())
    assert session.rows() == []


def test_more_tokens_than_the_model_takes_are_no_error(served: Served) -> None:
    session = served.session(seed=1)

    async def ask() -> list[Any]:
        async with served.openai(session) as client, anthropic_client(session) as other:
            chat = await client.chat.completions.create(model="policy", messages=ASKED, max_tokens=32_000)
            response = await client.responses.create(model="policy", input=QUESTION, max_output_tokens=32_000)
            message = await other.messages.create(model="policy", messages=ASKED, max_tokens=8_000)
        return [chat.choices[0].finish_reason, response.status, message.stop_reason]

    assert served(ask()) == ["stop", "completed", "end_turn"]
    served(session.close())


@pytest.mark.parametrize(
    ("dialect", "streamed", "stop", "heard", "sampled"),
    [
        # What is sampled ends with the token that completes the stop.
        ("chat", False, "is 4", "It ", "It is 4"),
        ("messages", True, "t i", "I", "It i"),
        ("chat", True, "no such text", "It is 4", ANSWER),
    ],
)
def test_a_stop_of_several_characters_ends_the_turn(
    served: Served, dialect: str, streamed: bool, stop: str, heard: str, sampled: str
) -> None:
    session = served.session(seed=1)
    asked: Any = {"stop_sequences" if dialect == "messages" else "stop": [stop, "not this either"]}
    assert served(play(served, session, dialect, streamed, **asked)) == heard
    assert served.sampled(session) == [CALL, sampled]


def test_what_only_reads_is_served(served: Served) -> None:
    session = served.session()

    async def ask() -> tuple[list[str], int]:
        async with served.openai(session) as client, anthropic_client(session) as other:
            count = await other.messages.count_tokens(model="policy", messages=ASKED)
            return [model.id async for model in client.models.list()], count.input_tokens

    assert served(ask()) == (["policy"], len(ChatTemplate(served.engine.tokenizer).prompt(QUESTION)))
    served(session.close())


def test_an_update_in_the_middle_is_in_the_versions(served: Served) -> None:
    sessions = [served.session() for _ in range(4)]
    served(load(served.engine, 1, tiny_model(3)))

    async def ask(session: AgentSession, streamed: bool) -> None:
        asked: Any = {"model": "policy", "messages": [{"role": "user", "content": session.key[:8]}], "max_tokens": 150}
        async with served.openai(session) as client:
            reply: Any = await client.chat.completions.create(stream=streamed, **asked)
            if streamed:
                async for _ in reply:
                    pass

    async def update_in_the_middle() -> None:
        asking = [asyncio.ensure_future(ask(session, i % 2 == 0)) for i, session in enumerate(sessions)]
        while not all(session.tree.nodes for session in sessions):
            await asyncio.sleep(0)
        await load(served.engine, 2, tiny_model(4))
        await asyncio.gather(*asking)
        for session in sessions:
            await session.close()

    served(update_in_the_middle())
    rows = [row for session in sessions for row in session.rows()]
    for row in rows:
        borders = [row.versions[0][1], *(end for _, _, end in row.versions)]
        assert borders == sorted(set(borders))
        assert (borders[0], borders[-1], len(row.logprobs[0])) == (0, row.sampled, row.sampled)
    assert 2 in {version for row in rows for version, _, _ in row.versions}
    served(load(served.engine, 3, served.model))


def test_a_session_that_ends_cuts_what_is_in_flight(served: Served) -> None:
    session, stream = served.session(), served.session()
    served(load(served.engine, 4, tiny_model(5)))
    history: Any = [{"role": "user", "content": "x"}]

    async def end() -> Any:
        async with served.openai(session) as client, served.openai(stream) as streaming:
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

    assert served(end()).choices[0].finish_reason == "length"
    for one in (session, stream):
        assert len(served.sampled(one)) == 1
        assert 0 < one.rows()[0].sampled < 400
    served(load(served.engine, 5, served.model))
