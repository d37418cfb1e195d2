"""A conversation of an agent, and how the unmodified SDKs send it in each dialect."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import anthropic
import openai

TOOL = {"type": "object", "properties": {"expression": {"type": "string"}}}
END_OF_THINKING = "</think>"


@dataclass
class Said:
    text: str
    call_id: str | None = None


@dataclass
class Reply:
    text: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)  # id, name, arguments

    def without_thinking(self) -> Reply:
        return replace(self, text=self.text.rpartition(END_OF_THINKING)[2].lstrip())


@dataclass
class Conversation:
    dialect: str
    system: str
    turns: list[Said | Reply]
    tools: bool


class Chat:
    """`/v1/chat/completions`."""

    def __init__(self, url: str, key: str, http: Any) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, http_client=http)

    async def ask(self, conversation: Conversation, max_tokens: int, streamed: bool, reply: Reply, **more: Any) -> None:
        """Add the model's reply to `reply`, piece by piece if it is streamed."""
        system = [{"role": "system", "content": conversation.system}] if conversation.system else []
        body: dict[str, Any] = {"model": "policy", "max_tokens": max_tokens, **more}
        body["messages"] = [*system, *(self._message(turn) for turn in conversation.turns)]
        if conversation.tools:
            body["tools"] = [{"type": "function", "function": {"name": "calculator", "parameters": TOOL}}]
        if not streamed:
            message = (await self._client.chat.completions.create(**body)).choices[0].message
            reply.text = message.content or ""
            reply.calls += [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ()]
            return
        async for chunk in await self._client.chat.completions.create(**body, stream=True):
            for choice in chunk.choices:
                reply.text += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    if call.index == len(reply.calls):
                        reply.calls.append((call.id, call.function.name, ""))
                    id_, name, arguments = reply.calls[call.index]
                    reply.calls[call.index] = (id_, name, arguments + (call.function.arguments or ""))

    @staticmethod
    def _message(turn: Said | Reply) -> dict[str, Any]:
        if isinstance(turn, Said):
            known = {"role": "user"} if turn.call_id is None else {"role": "tool", "tool_call_id": turn.call_id}
            return known | {"content": turn.text}
        calls = [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id_, name, arguments in turn.calls
        ]
        return {"role": "assistant", "content": turn.text} | ({"tool_calls": calls} if calls else {})


class Responses:
    """`/v1/responses`."""

    def __init__(self, url: str, key: str, http: Any) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{url}/s/{key}/v1", api_key="none", http_client=http)

    async def ask(self, conversation: Conversation, max_tokens: int, streamed: bool, reply: Reply, **more: Any) -> None:
        body: dict[str, Any] = {"model": "policy", "max_output_tokens": max_tokens, **more}
        body["instructions"] = conversation.system or None
        body["input"] = [item for turn in conversation.turns for item in self._items(turn)]
        if conversation.tools:
            body["tools"] = [{"type": "function", "name": "calculator", "parameters": TOOL, "strict": False}]
        response = None
        if not streamed:
            response = await self._client.responses.create(**body)
        else:
            async for event in await self._client.responses.create(**body, stream=True):
                if event.type == "response.output_text.delta":
                    reply.text += event.delta
                elif event.type in ("response.completed", "response.incomplete"):
                    response = event.response
        if response is not None:
            reply.text = response.output_text
            calls = [item for item in response.output if item.type == "function_call"]
            reply.calls += [(call.call_id, call.name, call.arguments) for call in calls]

    @staticmethod
    def _items(turn: Said | Reply) -> list[dict[str, Any]]:
        if isinstance(turn, Said) and turn.call_id is None:
            return [{"role": "user", "content": turn.text}]
        if isinstance(turn, Said):
            return [{"type": "function_call_output", "call_id": turn.call_id, "output": turn.text}]
        calls = [
            {"type": "function_call", "call_id": id_, "name": name, "arguments": arguments}
            for id_, name, arguments in turn.calls
        ]
        return ([{"role": "assistant", "content": turn.text}] if turn.text or not calls else []) + calls


class Messages:
    """`/v1/messages`."""

    def __init__(self, url: str, key: str, http: Any) -> None:
        self._client = anthropic.AsyncAnthropic(base_url=url, api_key=key, http_client=http)

    async def ask(self, conversation: Conversation, max_tokens: int, streamed: bool, reply: Reply, **more: Any) -> None:
        body: dict[str, Any] = {"model": "policy", "max_tokens": max_tokens, **more}
        if conversation.system:
            body["system"] = conversation.system
        body["messages"] = [self._message(turn) for turn in conversation.turns]
        if conversation.tools:
            body["tools"] = [{"name": "calculator", "input_schema": TOOL}]
        if not streamed:
            message = await self._client.messages.create(**body)
        else:
            async with self._client.messages.stream(**body) as stream:
                async for text in stream.text_stream:
                    reply.text += text
                message = await stream.get_final_message()
        reply.text = "".join(block.text for block in message.content if block.type == "text")
        calls = [block for block in message.content if block.type == "tool_use"]
        reply.calls += [(call.id, call.name, json.dumps(call.input)) for call in calls]

    @staticmethod
    def _message(turn: Said | Reply) -> dict[str, Any]:
        if isinstance(turn, Said) and turn.call_id is None:
            return {"role": "user", "content": turn.text}
        if isinstance(turn, Said):
            block: dict[str, Any] = {"type": "tool_result", "tool_use_id": turn.call_id, "content": turn.text}
            return {"role": "user", "content": [block]}
        blocks: list[dict[str, Any]] = [{"type": "text", "text": turn.text}] if turn.text or not turn.calls else []
        for id_, name, arguments in turn.calls:
            blocks.append({"type": "tool_use", "id": id_, "name": name, "input": json.loads(arguments)})
        return {"role": "assistant", "content": blocks}


DIALECTS: dict[str, Any] = {"chat": Chat, "responses": Responses, "messages": Messages}
