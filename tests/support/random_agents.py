"""Agents as plain data, made from a seed; and what each of them has seen, for checks that do not ask the endpoint."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import anthropic
import httpx2
import openai

from generator.agents.session import AgentSession, SessionLimits
from tests.support.agent_dialects import DIALECTS, Conversation, Reply, Said
from tests.support.broken_connections import TROUBLE, Trouble
from tests.support.engine_tap import Marker, marker_text

StepKind = Literal["go_on", "repeat", "twins", "fork", "compact", "side", "sub_agents"]
TroubleKind = Literal["none", "generating", "headers", "asks_again", "goes_on", "gives_up"]


@dataclass(frozen=True)
class Step:
    """What an agent does next.

    Attributes:
        kind: asks in the conversation it is in (`go_on`; twice one after the other, or at the same time: `repeat`,
            `twins`); goes back some turns and asks else (`fork`); begins anew with a summary (`compact`); asks
            something that has nothing to do with the task (`side`); has others work on the task at the same time
            (`sub_agents`).
        trouble: the connection breaks while the engine generates or before the reply is read, and the SDK tries
            again; or a stream breaks after `pieces`, and the agent asks again or goes on with what it has; or the
            agent gives up waiting.
    """

    kind: StepKind
    dialect: str
    streamed: bool
    tools: bool
    max_tokens: int
    words: str
    trouble: TroubleKind
    pieces: int
    back: int
    steps: tuple[tuple[Step, ...], ...] = ()


@dataclass(frozen=True)
class Agent:
    """An agent's whole program, and the limits of its session.

    Attributes:
        strips: sends replies back without their thinking.
        stopped_at: the session is closed from outside with this call.
    """

    seed: int
    limits: SessionLimits
    strips: bool
    stopped_at: int | None
    steps: tuple[Step, ...]


def random_agent(seed: int) -> Agent:
    chance = random.Random(seed)
    limits = SessionLimits(
        max_response_tokens=chance.choice([60, 300, 4000, 4000]),
        max_turns=chance.choice([4, 100, 100, 100]),
        seed=1000 * seed,
        history=chance.choice(["as_sampled", "as_sampled", "as_sent"]),
        train=chance.choice(["connected", "all"]),
    )
    steps = tuple(_step(chance, depth=0) for _ in range(chance.randint(2, 9)))
    stopped_at = chance.randint(1, 6) if chance.random() < 0.1 else None
    return Agent(seed, limits, chance.random() < 0.5, stopped_at, steps)


def _step(chance: random.Random, depth: int) -> Step:
    kinds: dict[StepKind, int] = {
        "go_on": 10, "fork": 3, "compact": 2, "side": 2, "repeat": 1, "twins": 1,
        "sub_agents": 0 if depth else 2,
    }  # fmt: skip
    troubles: dict[TroubleKind, int] = {
        "none": 12, "generating": 1, "headers": 1, "asks_again": 1, "goes_on": 1, "gives_up": 1,
    }  # fmt: skip
    kind = chance.choices(list(kinds), list(kinds.values()))[0]
    trouble = chance.choices(list(troubles), list(troubles.values()))[0]
    parts: list[tuple[Step, ...]] = []
    if kind == "sub_agents":
        parts = [
            tuple(_step(chance, depth + 1) for _ in range(chance.randint(1, 3))) for _ in range(chance.randint(2, 4))
        ]
    return Step(
        kind=kind,
        dialect=chance.choice(list(DIALECTS)),
        streamed=trouble in ("asks_again", "goes_on") or chance.random() < 0.4,
        tools=chance.random() < 0.6,
        max_tokens=chance.choice([1, 8, 16, 24]),
        words="".join(chance.choice("abc <>/é\n") for _ in range(chance.randint(0, 20))),
        trouble=trouble,
        pieces=chance.randint(0, 8),
        back=chance.randint(1, 3),
        steps=tuple(parts),
    )


@dataclass(eq=False)
class Call:
    """What an agent knows of one of its calls.

    Attributes:
        markers: of all messages that it sent, in order; the last one is the call's own.
        on_task: whether the conversation shares the task with the agent's others.
        continues: the call whose whole reply its last new messages follow.
        heard: whole replies that it got; a retry may get the same one again.
        perhaps: replies of which it may have seen a part.
    """

    markers: list[Marker]
    on_task: bool
    continues: Marker | None
    heard: list[Reply] = field(default_factory=list)
    perhaps: int = 0

    def replies(self) -> set[tuple[Any, ...]]:
        """The replies it got; an empty one may be of a request that was cut before its first token."""
        return {(reply.text, *reply.calls) for reply in self.heard if reply.text or reply.calls}


class SessionEnded(Exception):
    """The endpoint says that the session is over."""


@dataclass
class Thread:
    """A conversation, with what the checks need to know of it."""

    conversation: Conversation
    markers: list[Marker]
    on_task: bool
    whole: list[Marker | None] = field(default_factory=list)  # for each reply, the call it is the whole reply to


class AgentRun:
    """Runs an agent in a session; `calls` are in order."""

    def __init__(
        self,
        agent: Agent,
        session: AgentSession,
        url: str,
        http: httpx2.AsyncClient,
        expect: Callable[[Marker, Any], None],
    ) -> None:
        self.agent, self.session, self.calls = agent, session, list[Call]()
        self._clients = {name: kind(url, session.key, http) for name, kind in DIALECTS.items()}
        self._expect = expect
        self._closing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        try:
            await self._play(self.agent.steps, None)
        except* SessionEnded:
            pass
        if self._closing is not None:
            await self._closing
        await self.session.close()

    async def _play(self, steps: tuple[Step, ...], thread: Thread | None) -> None:
        for step in steps:
            if step.kind == "sub_agents":
                async with asyncio.TaskGroup() as group:
                    for part in step.steps:
                        group.create_task(self._play(part, None))
                continue
            if step.kind == "side":
                await self._ask(self._begin(step, on_task=False), step)
                continue
            if thread is None or step.kind == "compact":
                summary = "" if thread is None else _last_text(thread)
                thread = self._begin(step, on_task=True, summary=summary)
            elif step.kind == "fork":
                thread = _shortened(thread, step.back)
            if not await self._ask(thread, step):
                thread = None

    def _begin(self, step: Step, on_task: bool, summary: str = "") -> Thread:
        """A conversation of its own, which may start with a summary of another."""
        system = f"Work on task {self.agent.seed}." if on_task else "Find a title."
        turns: list[Said | Reply] = [Said(summary)] if summary else []
        return Thread(Conversation(step.dialect, system, turns, step.tools), [], on_task)

    async def _ask(self, thread: Thread, step: Step) -> bool:
        """Say something and ask for a reply; returns whether the conversation can go on."""
        if self.agent.stopped_at == len(self.calls):
            self._closing = asyncio.create_task(self.session.close("max_seconds"))
        marker = (self.agent.seed, len(self.calls))
        turns = thread.conversation.turns
        text = f"{step.words}{marker_text(marker)}"
        calls = turns[-1].calls if turns and isinstance(turns[-1], Reply) else []
        new = [Said(text, call_id) for call_id, _, _ in calls] or [Said(text)]
        continues = thread.whole[-1] if thread.whole and isinstance(turns[-1], Reply) else None
        call = Call([*thread.markers, marker], thread.on_task, continues)
        self.calls.append(call)
        conversation = Conversation(
            thread.conversation.dialect, thread.conversation.system, [*turns, *new], thread.conversation.tools
        )
        if step.kind == "twins":
            twins = [asyncio.create_task(self._reply(call, conversation, step)) for _ in range(2)]
            await asyncio.wait(twins)
            for twin in twins:
                twin.exception()  # or asyncio would report the second one's
            got = [twin.result() for twin in twins][-1]
        else:
            for _ in range(2 if step.kind == "repeat" else 1):
                got = await self._reply(call, conversation, step)
        if got is None:
            return False
        reply, whole = got
        if self.agent.strips:
            shown = reply.without_thinking()
            whole, reply = whole and (shown == reply or self.agent.limits.history == "as_sampled"), shown
        turns += [*new, reply]
        thread.markers.append(marker)
        thread.whole.append(marker if whole and (reply.text.strip() or reply.calls) else None)
        return True

    async def _reply(self, call: Call, conversation: Conversation, step: Step) -> tuple[Reply, bool] | None:
        """A reply, and whether it is whole; None if there is none to go on with."""
        client, marker = self._clients[conversation.dialect], call.markers[-1]
        trouble = _trouble(step)
        for again in (False, True):
            TROUBLE.set(None if again else trouble)
            if trouble is not None:
                self._expect(marker, trouble.generating)
            reply = Reply()
            asked = asyncio.create_task(client.ask(conversation, step.max_tokens, step.streamed, reply))
            gives_up = asyncio.create_task(_gives_up(trouble, asked)) if step.trouble == "gives_up" else None
            try:
                await asked
            except asyncio.CancelledError:
                call.perhaps += 1
                return None
            except (openai.APIStatusError, anthropic.APIStatusError) as error:
                if error.status_code == 409:
                    call.perhaps += 1
                    raise SessionEnded from error
                if (error.status_code == 400 and "context length" in str(error)) or "too long" in str(error):
                    return None
                raise
            except ValueError:  # the SDK takes no call that was cut in the middle of its arguments
                call.perhaps += 1
                return None
            except (httpx2.TransportError, openai.APIConnectionError, anthropic.APIConnectionError):
                call.perhaps += 1
                if step.trouble != "asks_again" or again:
                    usable = step.trouble == "goes_on" and reply.text.strip() and not reply.calls
                    return (reply, False) if usable else None
            else:
                call.heard.append(reply)
                return reply, True
            finally:
                if gives_up is not None:
                    gives_up.cancel()
        return None


async def _gives_up(trouble: Trouble | None, asked: asyncio.Task[None]) -> None:
    assert trouble is not None
    await trouble.generating.wait()
    asked.cancel()


def _trouble(step: Step) -> Trouble | None:
    if step.trouble in ("generating", "headers"):
        return Trouble(step.trouble)
    if step.trouble in ("asks_again", "goes_on"):
        return Trouble("stream", step.pieces)
    return Trouble("stream", over=True) if step.trouble == "gives_up" else None


def _shortened(thread: Thread, back: int) -> Thread:
    turns, markers, whole = list(thread.conversation.turns), list(thread.markers), list(thread.whole)
    for _ in range(min(back, len(whole) - 1)):
        turns.pop()
        while turns and isinstance(turns[-1], Said):
            turns.pop()
        markers.pop()
        whole.pop()
    old = thread.conversation
    return Thread(Conversation(old.dialect, old.system, turns, old.tools), markers, thread.on_task, whole)


def _last_text(thread: Thread) -> str:
    replies = [turn.text for turn in thread.conversation.turns if isinstance(turn, Reply)]
    return f"So far: {replies[-1][:40]}" if replies else ""
