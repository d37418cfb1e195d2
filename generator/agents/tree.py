"""The requests of an agent as a tree, in which each continues its parent, and the rows that they form; plain data.

A request continues an earlier one if its messages begin with that one's messages and the reply to it. A request that
continues none begins a conversation of its own, so the requests of an episode are a forest.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from generator.chat.template import Message
from generator.engine.engine import Completion
from generator.episode.episode import TokenRow

History = Literal["as_sampled", "as_sent"]
Train = Literal["connected", "quoting", "all"]

SHARED_TEXT = 20  # minimum length of a model's text that, quoted in a longer message, connects conversations
END_OF_THINKING = "</think>"
SYSTEM = ("system", "developer")
THE_TASK = ""  # marks a conversation that quotes the task: its other texts are never empty


@dataclass(eq=False, slots=True)
class Node:
    """One request, and what the model sampled for it."""

    parent: Node | None  # the request that it continues
    messages: Sequence[Message]  # what it adds to the parent's conversation
    digest: Any  # a running BLAKE2 hash of its whole conversation
    frame: bytes = b""  # equal for requests with the same system messages, or without any and with the same tools
    number: int = -1  # how many requests came before it
    # Ids of its prompt that follow those of the parent's prompt and reply, int32 [T].
    tail: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    kept: int = 0  # how many ids the parent's prompt and reply have
    turn: Completion | None = None  # what was sampled; None until sampling has ended, and after the request is dropped
    reply: Message | None = None  # what the agent was sent, as a chat message
    children: list[Node] = field(default_factory=list)  # requests that continue it, in order
    dropped: bool = False  # it was not answered, or no client has read the reply

    @property
    def length(self) -> int:
        """Number of ids of the prompt, and of the reply once there is one."""
        return self.kept + len(self.tail) + (0 if self.turn is None else len(self.turn.token_ids))

    def earlier(self) -> Iterator[Node]:
        """The requests that this one continues, from its parent to the first."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    def prompt_ids(self) -> np.ndarray:
        """Ids of the whole prompt, int32 [T]."""
        parts = [self.tail]
        for node in self.earlier():
            assert node.turn is not None
            parts += [node.turn.token_ids, node.tail]
        return np.concatenate(parts[::-1])

    def experts(self) -> list[np.ndarray]:
        """The experts of the first ids of the prompt, one array for each request that this one continues."""
        turns = [node.turn for node in self.earlier()]
        return [turn.experts for turn in turns[::-1] if turn is not None and turn.experts is not None]

    @property
    def routed(self) -> int:
        """Number of leading ids of the prompt whose experts are known."""
        return sum(map(len, self.experts()))

    def conversation(self) -> Iterator[Node]:
        """This request and those that continue it, without those for which nothing was sampled."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            if node.turn is not None:
                yield node
            waiting += node.children


# A vertex of the graph that connects conversations: a conversation (its first request), or a text sent in a frame.
Link = Node | tuple[bytes, str]


class Tree:
    """The requests of one session, in order.

    Args:
        history: whether a reply that is sent back without its thinking, or with other white space around it, counts as
            the same reply (`as_sampled`) or as another (`as_sent`).
        task: text of the task, which connects the conversations that quote it; empty if it has none.
    """

    def __init__(self, history: History = "as_sampled", task: str = "") -> None:
        self.nodes: list[Node] = []
        self.history, self.task = history, task
        escaped = (json.dumps(task, ensure_ascii=ascii)[1:-1] for ascii in (True, False))
        self._task_forms = {_bare(form) for form in (task, *escaped)} - {""}
        self._by_digest: dict[bytes, list[Node]] = {}
        self._trained: dict[Train, list[Node]] = {}  # results of `trained` since the last change

    def find(self, setting: Any, messages: Sequence[Message]) -> Node:
        """A node, not yet in the tree, for a conversation; its parent has the longest matching history.

        Args:
            setting: the other inputs of its prompt (tools, variables of the template), as plain data.
        """
        parent, known = None, 0
        digest = hashlib.blake2b(_packed(setting), digest_size=16)
        system = [canonical(message, self.history) for message in messages if message["role"] in SYSTEM]
        frame = hashlib.blake2b(b"".join(system) or _packed(setting), digest_size=16)
        for count, message in enumerate(messages, 1):
            digest.update(canonical(message, self.history))
            nodes = self._by_digest.get(digest.digest()) if message["role"] == "assistant" else None
            if nodes:
                # Of equal replies, take one that no request continues yet: each went to another part of the agent.
                parent, known = next((node for node in nodes if not node.children), nodes[0]), count
        return Node(parent, messages[known:], digest, frame.digest())

    def add(self, node: Node, tail: np.ndarray) -> None:
        """Add a request that `find` has made.

        Args:
            tail: ids of the prompt after those of the parent's prompt and reply, int32 [T].
        """
        node.number, node.tail = len(self.nodes), tail
        self._trained.clear()
        self.nodes.append(node)
        if node.parent is not None:
            node.kept = node.parent.length
            node.parent.children.append(node)

    def sampled(self, node: Node, turn: Completion) -> None:
        """Record what was sampled for a request."""
        node.turn = turn
        self._trained.clear()

    def answer(self, node: Node, reply: Message) -> None:
        """Record the reply that the agent was sent, so that later requests can continue it."""
        node.reply = reply
        self._trained.clear()
        self._by_digest.setdefault(self._after(node, reply), []).append(node)

    def drop(self, node: Node) -> None:
        """Forget what was sampled for a request, since no client has read its reply; none may continue it."""
        assert not node.children
        node.turn, node.dropped = None, True
        self._trained.clear()
        if node.parent is not None:
            node.parent.children.remove(node)
        if node.reply is not None:
            self._by_digest[self._after(node, node.reply)].remove(node)

    def rows(self, train: Train = "connected") -> list[TokenRow]:
        """The rows to train on; see `placed`."""
        return self.placed(train)[0]

    def placed(self, train: Train = "connected") -> tuple[list[TokenRow], dict[Node, int]]:
        """The rows to train on, ordered by first request, and the index of the row in which each request ends.

        Each sampled token of these conversations counts as the model's in exactly one row.

        The first request that continues another continues its row. Each later one starts a row of its own, in which
        what was sampled before counts as prompt.
        """
        rows: list[TokenRow] = []
        row_of: dict[Node, int] = {}
        continued: set[Node] = set()
        trained = self.trained(train)
        for node in self.nodes:
            if node.turn is None or (node.parent is None and node not in trained):
                continue
            if node.parent is not None and node.parent not in row_of:
                continue  # its conversation is not trained on
            if node.parent is None or node.parent in continued:
                row_of[node] = len(rows)
                rows.append(TokenRow(node.prompt_ids(), experts=node.experts()))
            else:
                row_of[node] = row_of[node.parent]
                rows[row_of[node]].append(node.tail)
                continued.add(node.parent)
            rows[row_of[node]].extend(node.turn)
        return rows, row_of

    def trained(self, train: Train) -> list[Node]:
        """The first requests of the conversations that are trained on.

        With `connected` these are the main conversation, which has the most requests (see `_size`), and those that are
        connected with it, directly or through others. Two conversations are connected if what the model said in one was
        sent in the other, or if they have a message in common, or both quote the task, under the same instructions: the
        same system messages, or none and the same tools. With `quoting` the instructions may differ: requests beside
        the task, such as for a title, often quote it.

        The time is linear in the length of all texts: seconds for megabytes. The result is kept until the tree changes.
        """
        if train not in self._trained:
            self._trained[train] = self._choose(train)
        return self._trained[train]

    def _choose(self, train: Train) -> list[Node]:
        conversations = {root: list(root.conversation()) for root in self.nodes if root.parent is None and root.turn}
        if train == "all" or len(conversations) < 2:
            return list(conversations)
        texts = {root: _Texts.of(nodes) for root, nodes in conversations.items()}
        main = max(conversations, key=lambda root: self._size(conversations[root], texts[root]))
        for root, own in texts.items():
            if root is main or self._is_quoted(own.sent):
                own.sent.add(THE_TASK)
        links = _links(texts, train == "quoting")
        connected: set[Link] = {main}
        waiting: list[Link] = [main]
        while waiting:
            near = links[waiting.pop()] - connected
            connected |= near
            waiting += near
        return [root for root in conversations if root in connected]

    def _size(self, nodes: Sequence[Node], texts: _Texts) -> tuple[int, bool, int]:
        """Sort key of a conversation: number of requests, whether a message is just the task, number of tokens."""
        return len(nodes), self.task.strip() in texts.sent, max(node.length for node in nodes)

    def _is_quoted(self, texts: Iterable[str]) -> bool:
        """Whether one of the texts contains the task, plain or escaped as in JSON, ignoring white space."""
        return any(form in sent for sent in map(_bare, texts) for form in self._task_forms)

    def _after(self, node: Node, reply: Message) -> bytes:
        digest = node.digest.copy()
        digest.update(canonical(reply, self.history))
        return bytes(digest.digest())


def canonical(message: Message, history: History) -> bytes:
    """A message as bytes, equal for messages that mean the same; ids of calls, which servers invent, are left out."""
    shown = {key: value for key, value in message.items() if value is not None and key != "tool_call_id"}
    shown["content"] = message.get("content") or ""
    if calls := shown.pop("tool_calls", None):
        shown["tool_calls"] = [call["function"] for call in calls]
    if history == "as_sampled" and message["role"] == "assistant":
        shown = {key: value for key, value in shown.items() if not key.startswith("reasoning")}
        shown["content"] = str(shown["content"]).rpartition(END_OF_THINKING)[2].strip()
    return _packed(shown)


@dataclass(slots=True)
class _Texts:
    """What the agent sent in a conversation, and what the model said there."""

    sent: set[str] = field(default_factory=set)
    said: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> _Texts:
        texts = cls()
        for node in nodes:
            texts.sent.update(text for message in node.messages for text in leaves(message.get("content")))
            reply = node.reply or {}
            calls = [call["function"]["arguments"] for call in reply.get("tool_calls") or ()]
            without_thinking = str(reply.get("content") or "").rpartition(END_OF_THINKING)[2]
            texts.said.update(leaves([reply.get("content"), without_thinking, *calls]))
        return texts


def _links(texts: Mapping[Node, _Texts], quoting: bool) -> Mapping[Link, set[Link]]:
    """Link conversations with the texts that connect them, in time linear in the total length of the texts.

    A text that was sent is linked with the conversations of the same frame (if `quoting`, of any) in which it was sent,
    and with those in which the model said it or a long part of it.
    """
    links: defaultdict[Link, set[Link]] = defaultdict(set)
    said: defaultdict[str, set[Node]] = defaultdict(set)
    sent: defaultdict[str, set[bytes]] = defaultdict(set)
    for root, own in texts.items():
        frame = b"" if quoting else root.frame
        for text in own.sent:
            links[frame, text].add(root)
            sent[text].add(frame)
        for text in own.said:
            said[text].add(root)
    # Texts of the model that are long enough to be found within longer ones, by their first characters.
    by_start: defaultdict[str, list[str]] = defaultdict(list)
    for text in said:
        if len(text) >= SHARED_TEXT:
            by_start[text[:SHARED_TEXT]].append(text)
    for text, of_frames in sent.items():
        parts = {text} & said.keys()
        for at in range(len(text) - SHARED_TEXT + 1):
            parts.update(part for part in by_start.get(text[at : at + SHARED_TEXT], ()) if text.startswith(part, at))
        sayers = {root for part in parts for root in said[part]}
        for frame in of_frames:
            links[frame, text] |= sayers
            for one in links[frame, text]:
                links[one].add((frame, text))
    return links


def leaves(value: Any) -> Iterator[str]:
    """The texts in plain data that are not blank, stripped."""
    if isinstance(value, str):
        if value.strip():
            yield value.strip()
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)


def _bare(text: str) -> str:
    return "".join(text.split())


def _packed(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
