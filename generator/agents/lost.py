"""Why an agent's later request does not continue an earlier one: the first message in which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from generator.agents.tree import Node, Tree, canonical
from generator.chat.template import Message

SEARCHED = 50  # number of requests that are compared with each other
EXCERPT_LENGTH = 60  # characters; an excerpt begins a little before the difference


class Lost(NamedTuple):
    """A request that nearly repeats an earlier one's history without continuing it, and the first difference.

    Attributes:
        request, earlier: their numbers.
        message: index of the first message that differs; None if only tools or variables of the template do.
        role: of that message.
        sent, before: its text in this request and in the earlier one, around the difference.
    """

    request: int
    earlier: int
    message: int | None
    role: str
    sent: str
    before: str

    def __str__(self) -> str:
        begins = f"request {self.request} does not continue {self.earlier}: "
        if self.message is None:
            return f"{begins}it has other tools, or other variables of the chat template"
        return f"{begins}message {self.message} ({self.role}) is {self.sent!r}, and was {self.before!r}"


def first_lost(tree: Tree) -> Lost | None:
    """The first request of a session that repeats an earlier one's history in other words; None if there is none."""
    answered = [node for node in tree.nodes if node.turn is not None][:SEARCHED]
    for node in answered:
        # A request that continues a reply does not add it again: an assistant message that it adds was not matched.
        if any(message["role"] == "assistant" for message in node.messages):
            earlier = [other for other in answered if other.number < node.number and other not in _continued(node)]
            lost = filter(None, (_compared(node, other, tree) for other in earlier))
            if nearest := max(lost, key=lambda one: one[0], default=None):
                return nearest[1]
    return None


def _compared(node: Node, earlier: Node, tree: Tree) -> tuple[int, Lost] | None:
    """How many messages a conversation shares with an earlier one and its reply, and the first that differs.

    None if it has fewer messages, or messages of other roles.
    """
    sent, before = _conversation(node), [*_conversation(earlier), earlier.reply or {"role": "assistant"}]
    if len(sent) < len(before) or any(one["role"] != other["role"] for one, other in zip(sent, before, strict=False)):
        return None
    pairs = zip(sent, before, strict=False)
    are_equal = [canonical(one, tree.history) == canonical(other, tree.history) for one, other in pairs]
    common = are_equal.count(True)
    if all(are_equal):
        return common, Lost(node.number, earlier.number, None, "", "", "")
    at = are_equal.index(False)
    return common, Lost(node.number, earlier.number, at, str(sent[at]["role"]), *_around(sent[at], before[at]))


def _continued(node: Node) -> list[Node]:
    """The requests that `node` continues, from its parent to the first."""
    continued = []
    while node.parent is not None:
        node = node.parent
        continued.append(node)
    return continued


def _conversation(node: Node) -> Sequence[Message]:
    """All messages of a request."""
    messages: list[Message] = list(node.messages)
    for earlier in _continued(node):
        messages = [*earlier.messages, earlier.reply or {"role": "assistant"}, *messages]
    return messages


def _around(one: Message, other: Message) -> tuple[str, str]:
    texts = _text(one), _text(other)
    at = next((i for i, (a, b) in enumerate(zip_longest(*texts)) if a != b), 0)
    begin = max(0, at - EXCERPT_LENGTH // 3)
    cut = [("…" if begin else "") + text[begin : begin + EXCERPT_LENGTH] for text in texts]
    return cut[0], cut[1]


def _text(message: Message) -> str:
    calls: list[Any] = [call["function"] for call in message.get("tool_calls") or ()]
    return f"{message.get('content') or ''}{''.join(map(str, calls))}"
