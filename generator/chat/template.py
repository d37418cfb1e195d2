"""Renders the first prompt, and the text between two assistant turns, as token ids."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from common.config.data import CONTINUE
from common.errors import UserError
from generator.chat.token_text import TokenText

Message = dict[str, Any]

TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")
# Replaces the text of the assistant's turn after which later turns are rendered.
_PLACEHOLDER = f"answer {secrets.token_hex(8)}"
# Replaces the text of the message after a turn when a template is probed.
_FOLLOWING = f"89 {secrets.token_hex(8)}"
_OPENED = re.compile(r"(?:<[A-Za-z][^<>|]*>\s*)+\Z")
_OPENED_TOKENS = 32  # number of last tokens that are searched for opened tags

# A conversation for renderings in which its content does not matter.
_ASKED: Message = {"role": "user", "content": "u"}
_ANSWER: Message = {"role": "assistant", "content": _PLACEHOLDER}
_ARGUMENTS = {"answer": _PLACEHOLDER}  # of a call
EXCHANGE: Sequence[Message] = (_ASKED, {"role": "assistant", "content": ""})


class TemplateFailed(Exception):
    """The chat template raised an exception, or the turns that it renders cannot be joined."""


def as_messages(prompt: str | list[Message], system: str | None) -> list[Message]:
    """A prompt as chat messages; if it is text, `system` becomes a message before it."""
    if not isinstance(prompt, str):
        return prompt
    return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": prompt}]


class ChatTemplate:
    """Renders messages with the tokenizer's own template. Earlier turns are never rendered again.

    A turn of the model continues until it samples a token that ends turns: one of the model's own end-of-text tokens,
    or the token that the template writes after a turn. A turn may hold messages of several channels.

    Args:
        ends: ids of the model's end-of-text tokens (`common.model.end_ids`); the tokenizer's is always one.
        options: variables of the template for every rendering; `CONTINUE` may be one.

    Attributes:
        tokens: converts rendered texts to token ids and back.
        end, end_id: the special token that ends an answer, which the model samples itself, and its id.
        stop_ids: all tokens that end a turn, except the tokenizer's own end of text, at which vLLM stops by default.

    Raises:
        UserError: there is no template, it raises, or it does not end turns with a special token.
    """

    def __init__(
        self,
        tokenizer: Any,
        tool_schemas: list[dict[str, Any]] | None = None,
        ends: Sequence[int] = (),
        options: Mapping[str, Any] = {},
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"the tokenizer of {tokenizer.name_or_path} has no chat template; add one to its tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._options = {name: value for name, value in options.items() if name != CONTINUE}
        self._continues = bool(options.get(CONTINUE))
        known = {token_id for token_id in (tokenizer.eos_token_id, *ends) if token_id is not None}
        self.tokens = TokenText(tokenizer, known)
        self._tools = self.tokens.hide(tool_schemas or None)
        self._ends = {text for text in self.tokens.specials if self.tokens.id(text) in known}
        self._find_ends()
        self._end_ids = {self.tokens.id(text) for text in self._ends} | known
        self.end_id, self._message_id = self.tokens.id(self.end), self._message_start()
        self.stop_ids = tuple(sorted(self._end_ids - {tokenizer.eos_token_id}))

    @property
    def ends(self) -> list[str]:
        """All tokens that end a turn, as text."""
        return sorted(self.text([token_id]) for token_id in self._end_ids)

    @property
    def name(self) -> str:
        """Its name in messages: the tokenizer's folder and the template's file."""
        folder = Path(self._tokenizer.name_or_path)
        files = [file for name in TEMPLATE_FILES if (file := folder / name).is_file()]
        return f"the chat template of {folder}" + (f" ({files[0]})" if files else "")

    def require(self, role: str, field: str, otherwise: str) -> None:
        """Raise `UserError` unless messages of this role can follow a turn of the assistant."""
        try:
            self._end_before(role)
        except TemplateFailed as error:
            reason = f"says: {error.__cause__}" if error.__cause__ else str(error).removeprefix(f"{self.name} ")
            raise UserError(
                f"{field} needs a chat template that shows {role!r} messages after an assistant turn, and the "
                f"template of {self._tokenizer.name_or_path} {reason}; use another template, {otherwise}"
            ) from None

    def undescribed_tools(self) -> list[str]:
        """Names of the tools that the template does not describe to the model."""
        names = [tool["function"]["name"] for tool in self._tools or ()]
        rendered = self._render([_ASKED], {}) if names else ""
        return [name for name in names if name not in rendered]

    def unopened(self) -> str:
        """The header that the template writes before an answer but not at the end of a prompt; empty if none."""
        try:
            asked, unasked = self._render([_ASKED], {}), self._render([_ASKED], {}, asks=False)
            header = self._render([_ASKED, _ANSWER], {}, asks=False).partition(_PLACEHOLDER)[0]
        except TemplateFailed:
            return ""
        return header.removeprefix(asked).strip() if asked == unasked and header.startswith(asked) else ""

    def prompt(
        self, prompt: str | list[Message], system: str | None = None, *, markup: bool = False, **variables: Any
    ) -> np.ndarray:
        """Token ids of a conversation that waits for the assistant, int32 [T].

        Args:
            prompt, system: see `as_messages`; markup in the system message counts.
            markup: whether markup in the prompt counts too; else it is encoded as plain text.
            variables: of the template, such as `tools`; they override those of this object.
        """
        return self.tokens.encode(self.rendered(prompt, system, markup=markup, **variables))

    def rendered(
        self, prompt: str | list[Message], system: str | None = None, *, markup: bool = False, **variables: Any
    ) -> str:
        """The text that `prompt` encodes; unless `markup`, it has the prompt's markup hidden."""
        if not markup:
            prompt, variables = self.tokens.hide(prompt), self.tokens.hide(variables)
        messages = as_messages(prompt, system)
        if self._continues and messages[-1]["role"] == "assistant":
            variables |= {CONTINUE: True, "add_generation_prompt": False}
        return self._render(messages, variables)

    def between(
        self,
        messages: Sequence[Message],
        before: Sequence[Message] = EXCHANGE,
        *,
        turn: np.ndarray | None = None,
        markup: bool = False,
        **variables: Any,
    ) -> np.ndarray:
        """Token ids from the end of an assistant turn, over messages, to the start of the next one, int32 [T].

        Args:
            before: the conversation up to that turn, which is its last message.
            turn: ids that the model sampled in it. If they lack the token with which the template ends the turn, the
                result begins with it; by default they have it.
            markup, variables: see `prompt`.

        Raises:
            TemplateFailed: see the class.
        """
        if not markup:
            messages, before, variables = self.tokens.hide([list(messages), list(before), variables])
        after = self._after_turn(before, messages, variables)
        end = self._end_in(after)
        if end is None:
            raise TemplateFailed(f"{self.name} does not end the assistant's turn with a special token")
        # Encoded after the end token, as the model will see it.
        ids = self.tokens.encode(end + after.partition(end)[2])
        return ids if turn is not None and self._lacks(turn, end) else ids[1:]

    def inside(self, texts: Sequence[str], wrap: tuple[str, str]) -> np.ndarray:
        """Token ids of texts to append within an assistant turn, each between the strings of `wrap`, int32 [T].

        Markup in the texts is encoded as plain text.
        """
        before, after = wrap
        whole = "".join(f"{before}{self.tokens.hide(text)}{after}" for text in texts)
        # Encoded after a token, since some tokenizers put a space before the first word of a text.
        return self.tokens.encode(self.end + whole)[1:]

    def text(self, token_ids: Any, *, plain: bool = False) -> str:
        """Text of tokens [T]; `plain` leaves special ones out."""
        return self.tokens.decode(np.asarray(token_ids, np.int32), plain=plain)

    def opened(self, token_ids: np.ndarray) -> str:
        """The tags, such as <think>, with which the tokens before a turn end; empty if there are none."""
        match = _OPENED.search(self.text(token_ids[-_OPENED_TOKENS:]))
        return match.group() if match else ""

    def turn(self, token_ids: np.ndarray) -> tuple[str, str]:
        """Two texts of an assistant turn, without the token that ended it: as it was sampled, and as a reader sees it.

        The second has no special tokens; if the turn has several messages, it has only the last one.
        """
        turn_ids = token_ids[:-1] if len(token_ids) and int(token_ids[-1]) in self._end_ids else token_ids
        written = self.text(turn_ids)
        if not self.tokens.special(turn_ids).any():
            return written, written
        starts = np.flatnonzero(turn_ids == self._message_id)
        return written, self.text(turn_ids[starts[-1] + 1 :] if len(starts) else turn_ids, plain=True)

    def _find_ends(self) -> None:
        """Find the tokens that the template writes after a turn: before messages of each role, and at the end."""
        self._in_calls: set[str] = set()
        try:
            before_user = self._end_in(self._around_message("user")[0])
        except TemplateFailed as error:
            raise UserError(str(error)) from None
        if before_user is None:
            raise UserError(f"{self.name} ends the assistant's turns without a special token")
        answer = self._special_around(_ASKED, _ANSWER)[-1]
        # An answer may end with another token if a message follows (harmony).
        self.end = before_user if before_user in self._ends or not answer else answer[0]
        self._ends.add(self.end)
        calls = self._special_around(_ASKED, _calling([{}, {}]))
        if len(calls) == 1:  # the template takes one call at a time
            calls = self._special_around(_ASKED, _calling([{}]))
        # Tokens between two calls belong to the calls (quotes, brackets) and do not end a turn.
        self._in_calls = {token for between in calls[1:-1] for token in between}
        call_end = self._first_end(calls[-1])
        self._ends |= {call_end} if call_end is not None else set()
        # A token that the template writes before messages of every role may also occur within a turn (harmony).
        with suppress(TemplateFailed):
            self._ends |= {self._end_before("tool")} - {before_user}
        question = self._special_around({"role": "user", "content": _PLACEHOLDER})[-1]
        self._closing = {*answer, *question, call_end}

    def _message_start(self) -> int | None:
        """Id of the special token after which the text of an answer begins, if the model itself samples that token."""
        try:
            asked, whole = self._render([_ASKED], {}), self._render([_ASKED, _ANSWER], {}, asks=False)
        except TemplateFailed:
            return None
        header = whole.partition(_PLACEHOLDER)[0]
        special = self.tokens.specials_in(header.removeprefix(asked)) if header.startswith(asked) else []
        return self.tokens.id(special[-1]) if special else None

    def _end_before(self, role: str) -> str:
        """The special token that ends a turn before a message of this role; raises `TemplateFailed` if none can."""
        in_front, is_shown, after = self._around_message(role)
        if not is_shown:
            raise TemplateFailed(f"{self.name} leaves them out")
        end = self._end_in(in_front)
        if end is None or end != self._end_in(in_front + after):
            raise TemplateFailed(f"{self.name} ends the assistant's turns without a special token in front of them")
        return end

    def _around_message(self, role: str) -> tuple[str, str, str]:
        """What the template writes between a turn and a message of this role, the message's text, and the rest."""
        message = {"role": role, "name": "calculator", "content": _FOLLOWING}
        return self._after_turn(EXCHANGE, [message], {}).partition(_FOLLOWING)

    def _end_in(self, after: str) -> str | None:
        """The token that ends a turn, in the text that the template renders after it."""
        return self._first_end(self.tokens.specials_in(after))

    def _first_end(self, special: Sequence[str]) -> str | None:
        others = (token for token in special if token not in self._in_calls)
        return next((token for token in special if token in self._ends), next(others, None))

    def _lacks(self, turn: np.ndarray, end: str) -> bool:
        """Whether a sampled turn lacks the special token with which the template ends it."""
        last = int(turn[-1]) if len(turn) else None
        if last not in self._end_ids:
            return True  # it was cut, or ended by a stop string
        # After another end a second closing token is not needed, but a token that opens what follows is (`<|user|>`).
        return last != self.tokens.id(end) and end not in self._closing

    def _after_turn(self, before: Sequence[Message], messages: Sequence[Message], variables: dict[str, Any]) -> str:
        """What the template renders after the text of the assistant's turn with which `before` ends."""
        *earlier, turn = before
        failed, texts = None, []
        # Some templates leave out the text of a turn that calls tools; others fail unless calls precede their results.
        for shown, following in (
            ({**turn, "content": _PLACEHOLDER}, messages),
            (_ANSWER, messages),
            (_calling([message for message in messages if message["role"] == "tool"]), _answering(messages)),
        ):
            try:
                rendered = self._render([*earlier, shown, *following], variables)
            except TemplateFailed as error:
                failed = failed or error
                continue
            _, is_shown, text = rendered.rpartition(_PLACEHOLDER)
            if is_shown and all(_is_in(message.get("content"), text) for message in messages):
                return text
            texts += [text] if is_shown else []
        if texts:
            return texts[0]
        raise failed or TemplateFailed(f"{self.name} leaves out what the assistant says")

    def _special_around(self, *messages: Message) -> list[list[str]]:
        """The special tokens that the template writes before, between and after the placeholders of the last messages.

        If it does not show the placeholders, the result is one empty list.
        """
        try:
            parts = self._render(list(messages), {}, asks=False).split(_PLACEHOLDER)
        except TemplateFailed:
            parts = []
        return [self.tokens.specials_in(part) for part in parts] if len(parts) > 1 else [[]]

    def _render(self, messages: list[Message], variables: dict[str, Any], *, asks: bool = True) -> str:
        options = {"tools": self._tools, "add_generation_prompt": asks, **self._options, **variables}
        taken = [_as_taken(message, self._no_content, self._takes_text) for message in messages]
        try:
            return str(self._tokenizer.apply_chat_template(taken, **options, tokenize=False))
        except Exception as error:  # raised by the template, by Jinja, or by an expression
            raise TemplateFailed(f"{self.name} fails: {type(error).__name__}: {error}") from error

    @cached_property
    def _no_content(self) -> str | None:
        """Replaces the missing content of a message with calls: null, or "" if the template cannot take null."""
        null, empty = (self._shown_call(content, self._takes_text) for content in (None, ""))
        return None if null is not None and null.count("None") <= (empty or "").count("None") else ""

    @cached_property
    def _takes_text(self) -> bool:
        """Whether arguments of calls must be JSON text: the template fails on mappings, or writes Python's form."""

        def shows(as_text: bool) -> bool:
            tried = filter(None, (self._shown_call(content, as_text) for content in (None, "")))
            return any(_PLACEHOLDER in shown and str(_ARGUMENTS) not in shown for shown in tried)

        return shows(as_text=True) and not shows(as_text=False)

    def _shown_call(self, content: str | None, as_text: bool) -> str | None:
        """What the template makes of a turn that calls a tool; None if it fails."""
        turn = _as_taken({**_calling([{}]), "content": content}, content, as_text)
        try:
            return str(self._tokenizer.apply_chat_template([_ASKED, turn], tokenize=False))
        except Exception:  # see `_render`
            return None


def _calling(results: Sequence[Message]) -> Message:
    """The turn that made the calls with these results; their arguments hold the placeholder."""
    functions = [{"name": result.get("name") or "unknown", "arguments": _ARGUMENTS} for result in results]
    calls = [{"id": _call_id(i), "type": "function", "function": function} for i, function in enumerate(functions)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _answering(messages: Sequence[Message]) -> list[Message]:
    """The messages, with ids of calls in results of tools."""
    ids = map(_call_id, count())
    return [{"tool_call_id": next(ids), **one} if one["role"] == "tool" else one for one in messages]


def _is_in(content: Any, text: str) -> bool:
    """Whether a message's text is in what a template rendered, stripped or as JSON; True if it has no text."""
    if not isinstance(content, str):
        return True
    content = content.strip()
    return content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text


def _call_id(number: int) -> str:
    return f"call{number:05}"  # Mistral's templates require nine letters and digits


def _as_taken(message: Message, no_content: str | None, as_text: bool) -> Message:
    """A message as a template takes it: arguments as JSON text or mappings, and `no_content` for a content of null."""
    if not message.get("tool_calls"):
        return message
    content = no_content if message.get("content", "") is None else message.get("content", "")
    return {**message, "content": content, "tool_calls": [_with_arguments(c, as_text) for c in message["tool_calls"]]}


def _with_arguments(call: Any, as_text: bool) -> Any:
    """A call whose arguments are JSON text, or a mapping if they can be."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str) and not as_text:
        with suppress(ValueError, RecursionError):
            parsed = json.loads(arguments or "{}")
            arguments = parsed if isinstance(parsed, dict) else arguments
    elif isinstance(arguments, dict) and as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": function | ({"arguments": arguments} if "arguments" in function else {})}
