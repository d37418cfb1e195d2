"""Renders a recorded conversation as the tokens that an episode with the same messages would have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from generator.chat.prompts import THOUGHT_END, PromptNotSeen, Prompts, called, check_is_text, shown_text
from generator.chat.template import Message, TemplateFailed

REASONING = ("reasoning_content", "reasoning", "thinking")  # fields of thoughts beside the content


class Conversations:
    """Renders conversations with the template of one source of the data.

    As in an episode, each turn is rendered once: what a template leaves out of earlier turns (mostly thinking) stays in
    those that are trained on, since the model would have had it in its context.

    Args:
        wrap: of the call format; None if results of tools are messages of their own.
    """

    def __init__(self, prompts: Prompts, wrap: tuple[str, str] | None = None) -> None:
        self._prompts, self._template, self._wrap = prompts, prompts.template, wrap

    def encode(
        self, messages: Sequence[Message], first: int, **variables: Any
    ) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Token ids of a conversation that ends with the assistant, int32 [T], and where turns are in it.

        Args:
            first: position of the first turn that the model would have sampled; messages before it are the prompt.
            variables: of the template, such as `tools`.

        Returns:
            The ids, and the range of each turn from `first` on, with the token that ends it.

        Raises:
            PromptNotSeen: the model would not see the prompt, or would not have sampled a turn like this.
        """
        for number, message in enumerate(messages, 1):
            check_is_text(json.dumps(message, ensure_ascii=False, default=str), f"message {number}")
        pieces, spans = [self._prompts.encode(list(messages[:first]), **variables)], []
        later = [i for i in range(first + 1, len(messages)) if messages[i]["role"] == "assistant"]
        for turn, after in pairwise([first, *later, len(messages)]):
            replies = messages[turn + 1 : after]
            try:
                continues = self._wrap is not None and any(reply["role"] == "tool" for reply in replies)
                ids = self._turn(messages, turn, np.concatenate(pieces), continues, variables)
                between = self._between(messages[turn], replies, ids, variables) if replies else None
            except TemplateFailed as error:
                raise PromptNotSeen(f"message {turn + 1}: {error}") from None
            start = sum(map(len, pieces))
            spans.append((start, start + len(ids)))
            pieces += [ids] if between is None else [ids, between]
            if between is None and after < len(messages):
                raise PromptNotSeen(f"message {after + 1} of the assistant follows another one")
        return np.concatenate(pieces), spans

    def _turn(
        self, messages: Sequence[Message], number: int, before: np.ndarray, continues: bool, variables: dict[str, Any]
    ) -> np.ndarray:
        """Token ids of a turn.

        Args:
            before: ids of everything before it.
            continues: whether results of tools follow within the turn, which has no end then.
        """
        message = messages[number]
        text = None if continues else self._rendered(messages[:number], message, variables)
        if text is None:
            text = self._written(message, number, before) + ("" if continues else self._template.end)
        for end in self._template.ends:
            if end in text[: -len(end)] and end in str(message.get("content")):
                raise PromptNotSeen(f"the text of message {number + 1} contains {end!r}, which ends a turn")
        # Encoded after a token, since some tokenizers put a space before the first word of a text.
        return self._template.tokens.encode(self._template.end + text)[1:]

    def _rendered(self, before: Sequence[Message], message: Message, variables: dict[str, Any]) -> str | None:
        """The turn as the template writes it, with its end; None if the template would not write all of it there."""
        template = self._template
        hidden, variables = template.tokens.hide(list(before)), template.tokens.hide(variables)
        asked = template.rendered(hidden, markup=True, **variables)
        whole = template.rendered([*hidden, message], markup=True, add_generation_prompt=False, **variables)
        if not whole.startswith(asked):
            return None
        turn, ends = whole.removeprefix(asked), template.ends
        # The first token that ends a turn ends it, as in an episode; templates may write more behind it.
        first_end = min((turn.find(end) + len(end) for end in ends if end in turn), default=0)
        turn = turn[:first_end] if first_end else turn + template.end
        texts = THOUGHT_END.split(str(message.get("content") or "")) + [str(message.get(key, "")) for key in REASONING]
        parts = [text.strip().removeprefix("<think>").strip() for text in texts]
        return turn if all(part in turn for part in [*parts, *called(message)]) else None

    def _written(self, message: Message, number: int, before: np.ndarray) -> str:
        """The content as the model would have sampled it; raises `PromptNotSeen` if that is not known."""
        name = f"the template leaves out a part of message {number + 1}"
        if message.get("tool_calls"):
            raise PromptNotSeen(f"{name}, or of its calls; write the calls into its content as the model does")
        if field := next((field for field in REASONING if message.get(field)), ""):
            raise PromptNotSeen(f"{name}, its {field}; write that into its content as the model does")
        text, opened = str(message["content"]), self._template.opened(before)
        if not opened:
            return text
        for prefix in (opened, opened.strip()):
            text = text.removeprefix(prefix)
        if not THOUGHT_END.search(text):
            raise PromptNotSeen(f"prompts end with {opened.strip()}, but message {number + 1} has no reasoning")
        return text

    def _between(
        self, turn: Message, replies: Sequence[Message], turn_ids: np.ndarray, variables: dict[str, Any]
    ) -> np.ndarray:
        if self._wrap is not None and all(reply["role"] == "tool" for reply in replies):
            return self._template.inside([str(reply["content"]) for reply in replies], self._wrap)
        names = iter(called(turn))
        messages = [
            {"role": "tool", "name": reply.get("name") or next(names, "unknown"), "content": reply["content"]}
            if reply["role"] == "tool"
            else {"role": reply["role"], "content": reply["content"]}
            for reply in replies
        ]
        ids = self._template.between(messages, turn=turn_ids, **variables)
        shown = self._template.text(ids)
        for reply in replies:
            if not shown_text(reply, shown):
                raise PromptNotSeen(f"{self._template.name} leaves out a message of role {reply['role']!r}")
        return ids
