"""One attempt of an agent at one task: its keys and limits, its requests, and what was sampled for them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from common.messages import Ending, Failure
from generator.agents.exchange import Exchange
from generator.agents.refusals import ContextTooLong, Refusal, Refusals, Refused, SessionsLog
from generator.agents.tree import History, Node, Train, Tree
from generator.chat.template import ChatTemplate, Message, TemplateFailed
from generator.concurrency import LONG_TEXT, LONG_TOKENS, offload
from generator.engine.engine import Completion
from generator.episode.episode import TokenRow, TranscriptEntry

REMEMBERED = 16  # replies that a session keeps for retries; an SDK retries within seconds
STALLED = 0.5  # share of an attempt's time; if a request waits longer for its first token, the endpoint has stalled
CLOSE_SECONDS = 5.0  # for requests to end once they are cut; later ones are cancelled and lose their tokens


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a session allows, and how it samples, whatever the agent asks for."""

    # Limit on the sample's tokens, not counting the first prompt of each conversation; a token that several requests
    # share counts once. Concurrent requests may each use all that is left.
    max_response_tokens: int
    max_turns: int  # limit on the number of answered requests
    temperature: float = 1.0  # this and the next two: see `Engine.generate`
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None  # of the first request; each later one has the next
    history: History = "as_sampled"  # this and the next two: see `Tree`
    train: Train = "connected"
    task: str = ""
    ignore: tuple[str, ...] = ()  # fields that are removed from requests instead of refused
    reward_range: tuple[float, float] | None = None  # of the reward that the agent may send; None if it may send none
    markup: bool = False  # whether special tokens in what the agent sends count as such
    template_options: Mapping[str, Any] = field(default_factory=dict)  # unless a request sets them


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A request for tokens, independent of its dialect."""

    messages: list[Message]  # the conversation as chat messages, contents as text
    variables: dict[str, Any]  # of the chat template, `tools` among them; plain data
    streamed: bool = False  # whether the reply is sent piece by piece
    # The agent's values of the parameters that the session sets, by vLLM's names.
    sampling: dict[str, Any] | None = None
    ignored: tuple[str, ...] = ()  # fields that were removed from the body or that vLLM ignores
    body: Any = None  # the checked body, in a type of its dialect


class EndpointFailed(Exception):
    """The endpoint refused a request or let it wait, which is neither the agent's nor the model's fault."""

    failure = Failure.ENDPOINT_FAILED


class AgentSession:
    """What one agent may do and has done; made by `Endpoint.open_session`."""

    def __init__(
        self, limits: SessionLimits, template: ChatTemplate, max_model_len: int, url: str, log: SessionsLog
    ) -> None:
        self.key = secrets.token_urlsafe(32)  # opens the endpoint for requests of this session; a secret
        self.reward_key = secrets.token_urlsafe(32)  # lets its holder send the reward, once, and nothing else; a secret
        self.base_url = f"{url}/s/{self.key}/v1"  # for clients that cannot set a key
        self.limits = limits
        self.over = asyncio.Event()  # set once no more requests are taken
        self.reason = ""  # why it is over: an `Ending`; `failed`, `stopped` or `closed` if the episode cannot be used
        self.failure: Exception | None = None  # an error of the engine; the session then says nothing about the model
        self.reward: float | None = None  # what the agent sent as its reward
        self.requests = 0  # requests for tokens that were taken
        self.retries = 0  # requests that were answered by the reply to an earlier one
        self.in_flight = 0  # requests of any kind whose clients wait
        self.refusals = Refusals(log)
        self.tree = Tree(limits.history, limits.task)
        self.exchanges: list[Exchange] = []
        self._template, self._max_model_len, self._log = template, max_model_len, log
        self._used = 0  # of `max_response_tokens`
        self._turns = 0
        self._context_full = False
        self._overridden: set[str] = set()

    async def begin(self, request: AgentRequest, fingerprint: bytes = b"") -> Exchange:
        """Accept a request: find the request that it continues and the ids of its prompt.

        Raises:
            Refusal: no more requests are taken, or this one is beyond a limit, which ends the session; or the chat
                template does not take its messages.
            ContextTooLong: see the class; the agent may continue with a shorter conversation.
        """
        self._check_open()
        await self._settled()
        node = self.tree.find(request.variables, request.messages)
        tail = await self._tail(request, node)
        if node.parent is not None and node.parent.dropped:  # while `_tail` waited
            return await self.begin(request, fingerprint)
        self._check_limits(node, tail)
        self._log_unheeded(request)
        self.tree.add(node, tail)
        self.requests += 1
        self._turns += 1
        self._used += len(tail) if node.parent else 0
        exchange = Exchange(fingerprint, request.streamed, node)
        self._remember(exchange)
        return exchange

    def room(self, node: Node) -> int:
        """How many tokens may be sampled for a request that was just accepted."""
        return max(1, min(self.limits.max_response_tokens - self._used, self._max_model_len - node.length))

    def sampled(self, node: Node, turn: Completion) -> None:
        """Record what was sampled for a request, up to its end or until it was cut."""
        if len(turn.token_ids) == 0 or node.dropped:
            return
        self.tree.sampled(node, turn)
        self._used += len(turn.token_ids)
        if self._used >= self.limits.max_response_tokens:
            self.end(Ending.LENGTH)

    def answer(self, node: Node, reply: Message | None) -> None:
        """Record the reply that the agent was sent for a request; None if it cannot be sent back."""
        if node.turn is not None and reply is not None:
            self.tree.answer(node, reply)
        self.refusals.answered(node.number)

    def drop(self, node: Node) -> None:
        """Remove a request that was not answered, or whose reply no client has read, with its tokens."""
        if node.dropped or node.children:
            return
        if node.turn is not None:
            self._used -= len(node.turn.token_ids)
        self._used -= len(node.tail) if node.parent else 0
        self._turns -= 1
        self.tree.drop(node)

    def count_refusal(self, refused: Refused) -> None:
        self.refusals.add(refused, len(self.tree.nodes))

    def fault(self, seconds: float | None = None) -> str:
        """How the endpoint caused the end of this attempt; empty if it did not. Call it once the session is closed.

        Args:
            seconds: the time limit of the attempt, if it has ended the attempt.
        """
        if self.refusals.fault is not None:
            return f"the endpoint refused a request of the agent's, and took none after it: {self.refusals.fault}"
        waited = max((one.seconds for one in self.exchanges if one.node.turn is None), default=0.0)
        if seconds is not None and waited > STALLED * seconds:
            return f"the endpoint stalled: a request waited {waited:.1f} s of the attempt's {seconds:g} s for a token"
        return ""

    def retried(self, fingerprint: bytes, is_retry: bool) -> Exchange | None:
        """The earlier request that this one repeats, because its client did not get the reply; None if there is none.

        Args:
            is_retry: whether the client says so; otherwise the earlier request counts as repeated only if no client
                got its whole reply and none is reading it.
        """
        same = [
            one
            for one in reversed(self.exchanges)
            if one.fingerprint == fingerprint and one.can_be_heard and not one.node.dropped
        ]
        unheard = [one for one in same if not one.heard and not one.readers]
        for exchange in unheard or (same if is_retry else []):
            if exchange.seen and not exchange.heard and not exchange.readers:
                # A stream without readers was cut, so the rest of its reply does not exist: it is sampled again. A
                # stream that still has a reader continues, and may have a second one.
                self.drop(exchange.node)
            elif not exchange.node.children:
                self.retries += 1
                return exchange
        return None

    def send_reward(self, reward: Any) -> None:
        """Take the agent's own reward, until the session is closed; raises `Refusal`."""
        if self.limits.reward_range is None:
            raise Refusal(400, "this agent's reward is computed; none can be sent")
        low, high = self.limits.reward_range
        if self.reward is not None:
            raise Refusal(400, "the reward has been sent already")
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not low <= reward <= high:
            raise Refusal(400, f"reward must be a number from {low:g} to {high:g}, not {str(reward)[:40]}")
        self.reward = float(reward)

    def fail(self, error: Exception) -> None:
        """End the session because the engine failed."""
        self.failure = self.failure or error
        self.end("failed")

    def end(self, reason: str) -> None:
        """Take no more requests; those in flight are cut."""
        if self.over.is_set():
            return
        self.reason = reason
        self.over.set()
        for exchange in self.exchanges:
            exchange.cut.set()

    async def close(self, reason: str = Ending.STOP) -> None:
        """End the session, unless a limit has, and wait until what was sampled is recorded.

        What was sampled counts if the agent may have acted on it: a whole reply once it is sent, a stream after its
        first piece. It also counts if a limit has cut it while the agent waited. Otherwise it is dropped.
        """
        self.end(Ending.LENGTH if self._context_full and reason == Ending.STOP else reason)
        limited = self.reason != Ending.STOP
        # Decided before the wait: cut replies are sent during it, but an agent that has ended can no longer use them.
        unread = [one for one in self.exchanges if not one.seen and not (one.readers and limited)]
        tasks = {exchange.task for exchange in self.exchanges if exchange.task and not exchange.ended}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
        for exchange in unread:
            self.drop(exchange.node)
        await offload(sum(len(node.tail) for node in self.tree.nodes) > LONG_TOKENS, self._compare)

    def _compare(self) -> None:
        """Choose the conversations to train on, which may take seconds; the tree keeps them for `rows` and others."""
        self.tree.trained(self.limits.train)
        if self.limits.train == "connected":
            self.tree.trained("quoting")

    def rows(self) -> list[TokenRow]:
        """The rows to train on; call it once the session is closed."""
        return self.tree.rows(self.limits.train)

    def answer_text(self) -> str:
        """Text of the last reply that is trained on, if the model ended it itself and called no tool; else empty."""
        trained = self.tree.trained(self.limits.train)
        last = max(
            (node for root in trained for node in root.conversation()), key=lambda node: node.number, default=None
        )
        if last is None or last.turn is None or last.turn.finish_reason != "stop" or last.reply is None:
            return ""
        return "" if last.reply.get("tool_calls") else str(last.reply.get("content") or "").strip()

    def tool_calls(self) -> int:
        """Calls in the replies that the agent was given."""
        return sum(len((node.reply or {}).get("tool_calls") or ()) for node in self.tree.nodes if node.turn is not None)

    def requests_made(self) -> list[dict[str, Any]]:
        """What became of each request, in order, as plain data for the record of the episode.

        A request has the number of ids in its prompt, and how many of them were kept from the one that it `continues`.
        Unless it was dropped, it also has how many were `sampled`, how that `ended`, and its `row`, None if it is not
        trained on; the first of such a conversation says whether it `quotes` one that is trained on.
        """
        _, placed = self.tree.placed(self.limits.train)
        quoting = set(self.tree.trained("quoting")) if self.limits.train == "connected" else set()
        made = []
        for node in self.tree.nodes:
            one: dict[str, Any] = {"request": node.number, "prompt": node.kept + len(node.tail), "kept": node.kept}
            if node.parent is not None:
                one["continues"] = node.parent.number
            if node.turn is not None:
                turn = node.turn
                one |= {"sampled": len(turn.token_ids), "ended": turn.finish_reason, "row": placed.get(node)}
                if node.parent is None and node not in placed:
                    one["quotes"] = node in quoting
            made.append(one)
        return made

    def transcript(self) -> list[TranscriptEntry]:
        """All messages by requests; an entry has the number of its request and of the one that this continues."""
        entries = []
        for node in self.tree.nodes:
            if node.turn is None:
                continue
            details: dict[str, Any] = {"request": node.number}
            if node.parent is not None:
                details["continues"] = node.parent.number
            for message in [*node.messages, {**(node.reply or {}), "role": "assistant"}]:
                more = {key: message[key] for key in ("reasoning", "tool_calls") if message.get(key)}
                entries.append(TranscriptEntry(message["role"], str(message.get("content") or ""), details | more))
        return entries

    def _check_limits(self, node: Node, tail: np.ndarray) -> None:
        """Refuse a request that may not be sampled, and end the session at a limit."""
        self._check_open()
        if self._turns >= self.limits.max_turns:
            self.end(Ending.MAX_ASSISTANT_TURNS)
        elif node.parent is not None and self._used + len(tail) >= self.limits.max_response_tokens:
            self.end(Ending.LENGTH)
        self._check_open()
        length = len(tail) + (node.parent.length if node.parent else 0)
        self._context_full = length >= self._max_model_len
        if self._context_full:
            raise ContextTooLong(length, self._max_model_len)

    def _check_open(self) -> None:
        if self.over.is_set():
            raise Refusal(409, f"this session is over: {self.reason}", is_limit=True)

    async def _settled(self) -> None:
        """Wait for replies whose tokens are all sampled: a client may send its next request before the reply ends."""
        tasks = [one.task for one in self.exchanges if one.task and not one.ended and one.node.turn]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)

    async def _tail(self, request: AgentRequest, node: Node) -> np.ndarray:
        """The ids of a prompt after its parent's; if the template cannot join them, the node loses its parent."""
        try:
            return await self._rendered(request, node)
        except TemplateFailed as error:
            if node.parent is None:
                raise Refusal(400, str(error)) from None
            # The template cannot render what follows that reply, but perhaps the whole conversation.
            node.parent, node.messages = None, request.messages
            return await self._tail(request, node)

    async def _rendered(self, request: AgentRequest, node: Node) -> np.ndarray:
        messages = request.messages
        options = {**self.limits.template_options, **request.variables, "markup": self.limits.markup}
        if node.parent is None:
            render = partial(self._template.prompt, messages, **options)
        else:
            assert node.parent.turn is not None
            options["turn"] = node.parent.turn.token_ids
            known = messages[: len(messages) - len(node.messages)]
            render = partial(self._template.between, node.messages, known, **options)
        # Short texts are rendered at once: after `offload`, requests would reach the engine one by one, in small steps.
        long = sum(len(str(message.get("content"))) for message in messages) > LONG_TEXT
        ids: np.ndarray = await offload(True, render) if long else render()
        return ids

    def _remember(self, exchange: Exchange) -> None:
        """Remember a request; keep older ones that may still be cut or dropped, but free their complete replies."""
        self.exchanges.append(exchange)
        older, newest = self.exchanges[:-REMEMBERED], self.exchanges[-REMEMBERED:]
        for old in older:
            if old.ended:
                old.forget()
        # An older request that has ended and was read is settled.
        self.exchanges = [old for old in older if not (old.ended and old.seen)] + newest

    def _log_unheeded(self, request: AgentRequest) -> None:
        """Log a request's fields that are ignored, and its sampling parameters that the session overrides."""
        if request.ignored:
            self._log.warn_once("fields of agents' requests are ignored", fields=request.ignored)
        asked = request.sampling or {}
        decided = {name: getattr(self.limits, name) for name in ("temperature", "top_p", "top_k", "seed")}
        names = {name for name, value in asked.items() if value is not None and value != decided.get(name)}
        if new := names - self._overridden:
            self._overridden |= new
            shown = {name: f"{asked[name]} -> {decided.get(name)}" for name in sorted(new)}
            self._log.info("an agent's sampling parameters were overridden", **shown)
