"""The dialects of vLLM's server, which use its models of bodies and its handlers, and read its replies as messages."""

from __future__ import annotations

import inspect
import json
from abc import abstractmethod
from collections.abc import Collection, Iterator
from contextlib import suppress
from copy import copy
from functools import cache
from itertools import chain
from pkgutil import resolve_name
from typing import Any, NamedTuple

from pydantic_core import from_json
from starlette.datastructures import State
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request

from common.config.agent import IGNORABLE
from common.config.data import CONTINUE, DECIDED_VARIABLES
from generator.agents.dialect import Dialect
from generator.agents.exchange import Exchange, Receive, Send, fresh_request
from generator.agents.refusals import Refusal
from generator.agents.session import AgentRequest, AgentSession
from generator.chat.template import Message

DECIDED = ("temperature", "top_p", "top_k", "seed")  # set by the session; values in requests are overridden
# Parameters that a request may set: the session overrides those of `DECIDED`; the rest only say where a turn ends and
# how its text is shown. Any other parameter would change what is sampled or recorded.
HARMLESS = {
    *DECIDED, "stop", "stop_token_ids", "max_tokens", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "output_kind", "stream_interval", "logprobs", "skip_clone", "extra_args",
    "output_text_buffer_length",  # vLLM derives it from `stop`
}  # fmt: skip
# Refused fields: they change the prompt, name data outside of the request, or are for vLLM's own processes. Each with
# the values besides null that are accepted, because they have no effect.
REFUSED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,), "echo": (False,), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "add_special_tokens": (False,), "chat_template": (), "truncate_prompt_tokens": (), "documents": (),
    "top_logprobs": (0,), "functions": ([],), "function_call": ("auto", "none"), "background": (False,),
    "previous_response_id": (), "previous_input_messages": (), "prompt": (), "conversation": (),
    "kv_transfer_params": (), "ec_transfer_params": (), "vllm_xargs": (), "mm_processor_kwargs": (),
    "media_io_kwargs": (),
}  # fmt: skip
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
FORMATS = (
    "response_format", "text.format", "output_config.format", "output_format",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
THINKING = ("thinking", "thinking_token_budget")
# For each name in `episode.agent.ignore`: the fields in which clients send it, and those that vLLM derives from them.
PLACES = {
    "response_format": FORMATS,
    "structured_outputs": (*FORMATS, "structured_outputs"),
    "thinking": THINKING,
    "thinking_token_budget": THINKING,
}
# Kinds of `tool_choice`, formats and thinking that do not constrain the model.
PLAIN_KINDS = ("auto", "none", "text", "adaptive", "disabled", 0)
# Kinds of tools that the agent runs itself; a server would run the others, such as a web search.
FUNCTIONS = ("function", "namespace")
# Prefixes of the types of message parts that are not text, in any dialect.
MEDIA = ("image", "input_image", "audio", "input_audio", "video", "file", "input_file", "document")


class Parsed(NamedTuple):
    """A checked body."""

    body: Any  # for vLLM's handler
    sampling: Any  # the request from which vLLM reads the sampling parameters
    messages: list[Any]
    tools: list[Any] | None


class VllmDialect(Dialect):
    """One of the protocols of vLLM's server."""

    handler: str  # vLLM's handler of this path
    serving: str  # name of the object in the app's state that samples requests of this dialect

    def __init__(self, app: Any) -> None:
        self._app, self._state = app, app.state
        # Without the decorator that cancels it when its client disconnects.
        self._handle = inspect.unwrap(resolve_name(self.handler))

    def read(self, body: dict[str, Any], ignore: Collection[str] = ()) -> AgentRequest:
        """See `Dialect.read`; refuses what would change the prompt or the sampling, and what vLLM rejects."""
        body, ignored = _without(body, ignore)
        for name, harmless in REFUSED.items():
            if body.get(name) not in (None, *harmless):
                raise Refusal(400, f"{name} is not supported here{_way_out(name)}")
        _check_constraints(body)
        try:
            parsed = self._parse(body)
            _check_sampling(parsed.sampling, body, self._state.vllm_config.model_config.max_model_len)
            return AgentRequest(
                messages=self._conversation(parsed.messages),
                variables=self._variables(parsed.sampling, parsed.tools),
                streamed=bool(parsed.body.stream),
                sampling={name: body.get(name) for name in DECIDED},
                ignored=(*ignored, *self._unheeded(body)),
                body=parsed.body,
            )
        except Refusal:
            raise
        except Exception as error:  # vLLM checks a body in many places, some of which raise errors of other kinds
            raise Refusal(400, _one_line(error, body)) from error

    async def respond(self, session: AgentSession, exchange: Exchange, request: AgentRequest) -> None:
        """Have vLLM's handler of this path answer a request.

        The handler is called directly: vLLM's routing and checks of the body would take longer than the rest of a short
        request.
        """
        body, ids = request.body, exchange.node.prompt_ids().tolist()
        # The prompt's ids enter vLLM in `kv_transfer_params`, the field for ids that another server has rendered: the
        # handler then renders nothing, counts these ids, and passes them to `generate` of the engine client from
        # `_app_of`.
        body.kv_transfer_params = {"prompt_token_ids": ids}
        room = self._state.vllm_config.model_config.max_model_len - len(ids)
        # vLLM refuses a limit above the context, and agents ask for 32,000 tokens whatever the model.
        for name in LENGTHS:
            if (asked := getattr(body, name, None)) is not None and asked > room:
                setattr(body, name, room)

        async def answer(scope: Any, receive: Receive, send: Send) -> None:
            response = await self._handle(body, Request(scope, receive))
            await response(scope, receive, send)

        scope, receive = fresh_request(self._app_of(session, exchange), "POST", self.path)
        await ExceptionMiddleware(answer, self._app.exception_handlers)(scope, receive, exchange.send)

    def _app_of(self, session: AgentSession, exchange: Exchange) -> Any:
        """A copy of vLLM's app for one request: its sampling part has this request's engine client."""
        serving, app = copy(self._state[self.serving]), copy(self._app)
        serving.engine_client = self._state.engine_client.of(session, exchange)
        app.state = State({**self._state._state, self.serving: serving})
        return app

    def reply(self, body: bytes, streamed: bool) -> Message | None:
        try:
            parsed = self._joined(list(_events(body))) if streamed else json.loads(body)
            return self._conversation(self._sent_back(parsed))[0]
        except Exception:  # it was cut before it held a message
            return None

    @abstractmethod
    def _parse(self, body: dict[str, Any]) -> Parsed: ...

    def _unheeded(self, body: dict[str, Any]) -> Iterator[str]:
        """Fields of a body that vLLM silently ignores."""
        return iter(())

    @abstractmethod
    def _joined(self, events: list[Any]) -> Any:
        """The body of a reply that was streamed as these events."""

    @abstractmethod
    def _sent_back(self, reply: Any) -> list[Any]:
        """A reply's body as vLLM's chat messages of the next request."""

    def _conversation(self, messages: list[Any]) -> list[Message]:
        from vllm.renderers.chat_utils import parse_chat_messages

        conversation, media, _ = parse_chat_messages(messages, self._state.vllm_config.model_config, "string")
        if media:
            raise Refusal(400, "only text is supported here")
        return [dict(message, content=message.get("content") or "") for message in conversation]

    def _variables(self, request: Any, tools: list[Any] | None) -> dict[str, Any]:
        from vllm.renderers.hf import resolve_chat_template, resolve_chat_template_kwargs

        tokenizer = self._state.engine_client.renderer.tokenizer
        model_config = self._state.vllm_config.model_config
        template = resolve_chat_template(tokenizer, None, tools, model_config=model_config)
        asked = request.build_chat_params(None, "string").chat_template_kwargs
        asked = {name: value for name, value in asked.items() if value is not None}
        usable = resolve_chat_template_kwargs(tokenizer, template or "", asked)
        extra = {name: value for name, value in usable.items() if name in asked.keys() - DECIDED_VARIABLES - {CONTINUE}}
        return extra | ({"tools": tools} if tools else {})


class Chat(VllmDialect):
    path, serving = "/v1/chat/completions", "openai_serving_chat"
    handler = "vllm.entrypoints.openai.chat_completion.api_router:create_chat_completion"

    def _parse(self, body: dict[str, Any]) -> Parsed:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest.model_validate(body)
        return Parsed(request, request, list(request.messages), _tools(request))

    def _joined(self, events: list[Any]) -> Any:
        message: dict[str, Any] = {}
        for event in events:
            for choice in event.get("choices", ()):
                _add(message, choice["delta"])
        return {"choices": [{"message": message}]}

    def _sent_back(self, reply: Any) -> list[Any]:
        message = {key: value for key, value in reply["choices"][0]["message"].items() if value is not None}
        return [message | {"role": "assistant"}]


class Responses(VllmDialect):
    path, serving = "/v1/responses", "openai_serving_responses"
    handler = "vllm.entrypoints.openai.responses.api_router:create_responses"

    def _parse(self, body: dict[str, Any]) -> Parsed:
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
        from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts

        request = ResponsesRequest.model_validate(body)
        messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
        return Parsed(request, request, messages, construct_tool_dicts(request.tools, request.tool_choice))

    def _unheeded(self, body: dict[str, Any]) -> Iterator[str]:
        for number, tool in enumerate(body.get("tools") or ()):
            if tool["type"] not in FUNCTIONS:
                yield f"tools.{number} of type {tool['type']}"

    def _joined(self, events: list[Any]) -> Any:
        ends = ("response.completed", "response.incomplete")
        whole = [event["response"] for event in events if event.get("type") in ends]
        items = [event["item"] for event in events if event.get("type") == "response.output_item.done"]
        return whole[-1] if whole else {"output": items}

    def _sent_back(self, reply: Any) -> list[Any]:
        return self._parse({"input": reply["output"]}).messages


class Messages(VllmDialect):
    path, serving, errors = "/v1/messages", "anthropic_serving_messages", "anthropic"
    handler = "vllm.entrypoints.anthropic.api_router:create_messages"

    def _parse(self, body: dict[str, Any]) -> Parsed:
        from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

        request = AnthropicMessagesRequest.model_validate(body)
        serving = self._state.anthropic_serving_messages
        chat = serving.to_chat_completion_request(request, merge_inline_system=serving._merge_inline_system)
        return Parsed(request, chat, list(chat.messages), _tools(chat))

    def _joined(self, events: list[Any]) -> Any:
        blocks: dict[int, dict[str, Any]] = {}
        for event in events:
            if event.get("type") == "content_block_start":
                blocks[event["index"]] = dict(event["content_block"])
            elif event.get("type") == "content_block_delta":
                delta = {key: value for key, value in event["delta"].items() if key != "type"}
                _add(blocks[event["index"]], delta)
        for block in blocks.values():
            if "partial_json" in block:
                # If a call was cut off, its input is what Anthropic's SDK makes of it: the complete arguments so far.
                block["input"] = from_json(block.pop("partial_json") or "{}", allow_partial=True)
        return {"content": list(blocks.values())}

    def _sent_back(self, reply: Any) -> list[Any]:
        message = {"role": "assistant", "content": reply["content"]}
        return self._parse({"model": "-", "max_tokens": 1, "messages": [message]}).messages


def dialects(app: Any) -> dict[str, Dialect]:
    """The dialects that vLLM's app serves, by their paths."""
    return {dialect.path: dialect(app) for dialect in (Chat, Responses, Messages)}


def _check_constraints(body: dict[str, Any]) -> None:
    """Refuse what vLLM would obey by masking tokens, or ignore without telling the client."""
    if not _is_plain(asked := body.get("tool_choice")):
        raise Refusal(
            400,
            f"tool_choice = {json.dumps(asked)[:100]} is not supported here: the model would not have "
            f"sampled a forced call{_way_out('tool_choice')}",
        )
    for field in FORMATS:
        if not _is_plain(_at(body, field)):
            raise _not_recorded(field)
    for place, kind in chain(_media(body.get("messages"), "messages"), _media(body.get("input"), "input")):
        raise Refusal(400, f"{place} is of type {kind}: only text is supported here")


def _check_sampling(request: Any, body: dict[str, Any], max_model_len: int) -> None:
    """Refuse a request that vLLM would sample with other parameters than the session's."""
    sampled = request.to_sampling_params(max_model_len, {})
    for name, plain in _plain_sampling().items():
        if getattr(sampled, name) not in (plain, {}, []):
            raise _not_recorded(next((place for place in PLACES.get(name, ()) if _at(body, place) is not None), name))


def _not_recorded(field: str) -> Refusal:
    return Refusal(400, f"{field} is not supported here: the record would not match what is sampled{_way_out(field)}")


def _media(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the type of each message part that is not text."""
    for number, part in enumerate(value if isinstance(value, list) else ()):
        if isinstance(part, dict):
            here, kind = f"{place}.{number}", part.get("type")
            if isinstance(kind, str) and kind.startswith(MEDIA):
                yield here, kind
            for inner in ("content", "output"):  # of messages, and of results of tools
                yield from _media(part.get(inner), f"{here}.{inner}")


@cache
def _plain_sampling() -> dict[str, Any]:
    """The parameters that no request may change, with their defaults."""
    from vllm.sampling_params import SamplingParams

    names = [name for name in SamplingParams.__struct_fields__ if name not in HARMLESS and not name.startswith("_")]
    plain = SamplingParams()
    return {name: getattr(plain, name) for name in names}


def _at(body: Any, place: str) -> Any:
    """The value in a body at a place such as `text.format`; None if there is none."""
    for name in place.split("."):
        body = body.get(name) if isinstance(body, dict) else None
    return body


def _is_plain(asked: Any) -> bool:
    """Whether the value of a field does not constrain the model."""
    return asked is None or (asked.get("type") if isinstance(asked, dict) else asked) in PLAIN_KINDS


def _without(body: dict[str, Any], ignore: Collection[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Remove the fields to ignore that constrain the model; return the remaining body and the names of the removed."""
    ignored = []
    for place in (place for name in ignore for place in PLACES.get(name, (name,))):
        if _is_plain(_at(body, place)):
            continue
        ignored.append(place)
        first, _, rest = place.partition(".")
        within = {name: value for name, value in body[first].items() if name != rest} if rest else None
        body = {name: value for name, value in body.items() if name != first} | ({first: within} if within else {})
    return body, tuple(ignored)


def _way_out(field: str) -> str:
    """The end of a refusal: the setting that lets the field be ignored; empty if none does."""
    name = next((name for name in IGNORABLE if field in PLACES.get(name, (name,))), None)
    return "" if name is None else f"; episode.agent.ignore: [{name}] makes the endpoint ignore it"


def _tools(request: Any) -> list[Any] | None:
    return [tool.model_dump(exclude_none=True) for tool in request.tools] if request.tools else None


def _events(body: bytes) -> Iterator[Any]:
    """The events of a streamed body, which may be cut anywhere."""
    with suppress(ValueError):
        for line in body.split(b"\n"):
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def _add(whole: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to a streamed message: strings are appended, items of lists are matched by their `index`."""
    for key, value in delta.items():
        if isinstance(value, str) and key not in ("role", "id", "type", "name"):
            whole[key] = (whole.get(key) or "") + value
        elif isinstance(value, dict):
            _add(whole.setdefault(key, {}), value)
        elif isinstance(value, list):
            items = whole.setdefault(key, [])
            for item in value:
                while len(items) <= item.get("index", 0):
                    items.append({})
                _add(items[item.get("index", 0)], item)
        elif value is not None:
            whole[key] = value


def _one_line(error: Exception, body: dict[str, Any]) -> str:
    """What is wrong with a body, without quoting it."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        problems: dict[str, dict[str, None]] = {}  # messages by place, each once
        for each in error.errors(include_input=False, include_url=False):
            problems.setdefault(_place(each, body), {})[each["msg"]] = None
        # For a union, pydantic reports an error of each type; the type that fits best fails at the longest path.
        inner = [place for place in problems if not any(other.startswith(f"{place}.") for other in problems)]
        return "; ".join(f"{place or 'body'}: {', or '.join(problems[place])}" for place in inner[:3])[:500]
    return " ".join(str(error).split())[:500] or type(error).__name__


def _place(problem: Any, body: Any) -> str:
    """Where in a body a problem is, without the names that pydantic adds for the types that a value may have."""
    place: list[str] = []
    for part in problem["loc"]:
        with suppress(LookupError, TypeError):
            body = body[part]
            place.append(str(part))
    return ".".join([*place, str(problem["loc"][-1])] if problem["type"] == "missing" else place)
