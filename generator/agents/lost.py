"""Why an agent's later request does not continue an earlier one: the first message in which they differ."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from generator.agents.tree import Node, Tree, canonical
from generator.chat.template import Message

SEARCHED = 50  # number of requests that are compared with each other
EXCERPT_LENGTH = 60  # characters; an excerpt begins a little before the difference


def first_lost(tree: Tree) -> str:
    """Name the first request that repeats an earlier one's history in other words, and where; empty if none does."""
    answered = [node for node in tree.nodes if node.turn is not None][:SEARCHED]
    for node in answered:
        # A request that continues a reply does not add it again: an assistant message that it adds was not matched.
        if any(message["role"] == "assistant" for message in node.messages):
            continued = set(node.earlier())
            earlier = [other for other in answered if other.number < node.number and other not in continued]
            lost = filter(None, (_compared(node, other, tree) for other in earlier))
            if nearest := max(lost, key=lambda one: one[0], default=None):
                return nearest[1]
    return ""


def _compared(node: Node, earlier: Node, tree: Tree) -> tuple[int, str] | None:
    """How many messages a conversation shares with an earlier one and its reply, and the first difference in words.

    None if it has fewer messages, or messages of other roles.
    """
    sent, before = _conversation(node), [*_conversation(earlier), earlier.reply or {"role": "assistant"}]
    if len(sent) < len(before) or any(one["role"] != other["role"] for one, other in zip(sent, before, strict=False)):
        return None
    pairs = zip(sent, before, strict=False)
    are_equal = [canonical(one, tree.history) == canonical(other, tree.history) for one, other in pairs]
    begins = f"request {node.number} does not continue {earlier.number}: "
    if all(are_equal):
        return len(before), f"{begins}it has other tools, or other variables of the chat template"
    at = are_equal.index(False)
    now, then = _around(sent[at], before[at])
    return are_equal.count(True), f"{begins}message {at} ({sent[at]['role']}) is {now!r}, and was {then!r}"


def _conversation(node: Node) -> list[Message]:
    """All messages of a request."""
    messages = list(node.messages)
    for earlier in node.earlier():
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
