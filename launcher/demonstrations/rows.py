"""Reads rows of demonstrations, and renders them as tokens with weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from common.config import Config
from common.config.data import CONTINUE
from common.errors import UserError
from generator.chat.conversation import Conversations
from generator.chat.prompts import ROLES, PromptNotSeen, Prompts
from generator.chat.template import as_messages
from generator.episode.parts import make_template
from generator.formats import make_format
from generator.tools import Toolbox
from learner.batch.demonstrations import Demonstration, Demonstrations
from sampler.prompts.chat import NotAMessage, plain_messages
from sampler.prompts.row import BadRow
from sampler.prompts.rows import open_rows

LARGEST = 3e38  # weight that a float32 holds
MAX_LOGGED = 10  # skipped rows that are logged one by one
TOO_LONG, CUT = "longer than the limit", "cut to the limit"


class RowReader:
    """Turns rows into demonstrations with the template, tools and call format of the run.

    A row holds either an episode that a run recorded, with its tokens, or a conversation, or a prompt and a completion.

    Raises:
        UserError: the tokenizer has no chat template that fits the tools, or a tool cannot be made.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._sft, self._data, self._ids = config.sft, config.data, len(tokenizer)
        # A conversation that ends with an assistant's message is complete here, not one to continue.
        options = {name: value for name, value in config.data.template_options.items() if name != CONTINUE}
        config = config.model_copy(update={"data": config.data.model_copy(update={"template_options": options})})
        # Tools are described here and never called, so they need no sandbox.
        toolbox = Toolbox(config.episode, {"sandbox": lambda: None, "memory_mb": lambda: config.sandbox.memory_mb})
        prompts = Prompts(make_template(tokenizer, config, toolbox), config.data)
        self._conversations = Conversations(prompts, make_format(config.episode.call_format).wrap)

    def read(self, row: Mapping[str, Any]) -> list[Demonstration]:
        """The demonstrations of a row: one, or several of an episode of several rows; raises `BadRow`."""
        if row.get("token_ids") is not None and row.get("model_spans") is not None:
            return _recorded(row, self._ids)
        messages = self._messages(row)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise BadRow("no message is the assistant's, so there is nothing to learn")
        weights = [_weight(messages[turn], f"message {turn + 1}") for turn in turns]
        messages = [{name: value for name, value in one.items() if name != "weight"} for one in messages]
        first = turns[0] if self._sft.train == "all" else turns[-1]
        try:
            ids, spans = self._conversations.encode(messages[: turns[-1] + 1], first, **self._tools(row))
        except PromptNotSeen as error:
            raise BadRow(str(error), reason=error.reason) from None
        of_spans = [(*span, weight) for span, weight in zip(spans, weights[-len(spans) :], strict=True)]
        return [Demonstration.of_spans(ids, of_spans)]

    def _messages(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        value, column = row.get(self._sft.messages_column), self._sft.messages_column
        if value is None:
            value = self._prompt_and_completion(row)
        if not isinstance(value, list):
            raise BadRow(f"column {column!r} is of type {type(value).__name__}, and not a list of messages")
        try:
            messages = plain_messages(value)
        except NotAMessage as error:
            raise BadRow(str(error)) from None
        for number, message in enumerate(messages, 1):
            if message["role"] not in ROLES:
                reason = f"role {message['role'][:40]!r} is unknown; allowed: {', '.join(ROLES)}"
                raise BadRow(f"message {number}: {reason}", reason=reason)
        return messages

    def _prompt_and_completion(self, row: Mapping[str, Any]) -> list[Any]:
        prompt, completion = row.get(self._data.prompt_column), row.get(self._sft.completion_column)
        if prompt is None or completion is None:
            wanted = f"{self._sft.messages_column!r}, or {self._data.prompt_column!r} and"
            raise BadRow(
                f"it needs the columns {wanted} {self._sft.completion_column!r}; it has {', '.join(row) or 'none'}"
            )
        for column, value in ((self._data.prompt_column, prompt), (self._sft.completion_column, completion)):
            if not isinstance(value, str | list):
                raise BadRow(f"column {column!r} is of type {type(value).__name__}, and neither text nor messages")
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion, "weight": row.get("weight")}]
        return [*as_messages(prompt, self._data.system_prompt), *completion]

    def _tools(self, row: Mapping[str, Any]) -> dict[str, Any]:
        tools, column = row.get(self._sft.tools_column), self._sft.tools_column
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except (ValueError, RecursionError) as error:
                raise BadRow(f"column {column!r} is not JSON ({error})") from None
        if not tools:
            return {}
        if not isinstance(tools, list):
            raise BadRow(f"column {column!r} is of type {type(tools).__name__}, and not a list of tools")
        return {"tools": tools}


def _weight(holder: Mapping[str, Any], name: str) -> float:
    weight = holder.get("weight")
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= LARGEST:
        reason = f"weight = {str(weight)[:40]!r} is not a number from 0 to {LARGEST:g}"
        raise BadRow(f"{name}: {reason}", reason=reason)
    return float(weight)


def _recorded(row: Mapping[str, Any], ids: int) -> list[Demonstration]:
    """The rows of an episode that a run recorded; its model's tokens are trained on."""
    weight = _weight(row, "the episode")
    try:
        tokens, spans = _whole_numbers(row["token_ids"]), _whole_numbers(row["model_spans"]).reshape(-1, 2)
        lengths = _whole_numbers(row.get("row_lengths") or [len(tokens)])
        is_whole = tokens.ndim == lengths.ndim == 1 and lengths.min() > 0 and lengths.sum() == len(tokens)
        is_whole = is_whole and spans.min() > 0 and spans.max() <= len(tokens)
        is_whole = is_whole and tokens.min() >= 0 and tokens.max() < ids
    except (ValueError, TypeError, OverflowError):
        is_whole = False
    if not is_whole:
        raise BadRow(f"token_ids and model_spans are not those of an episode of this model, which has {ids} ids")
    whole = Demonstration.of_spans(tokens.astype(np.int32), [(start, end, weight) for start, end in spans.tolist()])
    ends = np.cumsum(lengths).tolist()
    return [
        Demonstration(whole.token_ids[end - length : end], whole.weights[end - length : end])
        for end, length in zip(ends, lengths.tolist(), strict=True)
    ]


def _whole_numbers(values: Any) -> np.ndarray:
    """Whole numbers as an array, int64; raises `ValueError` for anything else, which numpy would round or convert."""
    numbers = np.asarray(values)
    if numbers.dtype.kind not in "iu":
        raise ValueError(f"{numbers.dtype} instead of whole numbers")
    return numbers.astype(np.int64)


def load_demonstrations(
    config: Config, paths: str | Sequence[str], reader: RowReader, key: str, split: str, log: Any
) -> Demonstrations:
    """Read all rows of some files. Those that cannot be used are skipped, counted, and named by file and line.

    Args:
        key: the setting that names them.
        split: of a Hugging Face dataset.

    Raises:
        UserError: the data cannot be read, or no row can be used.
    """
    rows = open_rows(paths, split)
    problems: Counter[str] = Counter()
    first = ""
    kept: list[Demonstration] = []
    for number, row in enumerate(rows):
        demonstrations, problem = _read(row, reader, config)
        kept += [one for one in demonstrations if one.is_trained]
        if problem is None:
            continue
        where = rows.where(number)
        first = first or f"{where}: {problem}"
        problems[problem.reason] += 1
        if problems.total() <= MAX_LOGGED:
            log.warning("row skipped" if problem.reason != CUT else "row cut", row=where, reason=str(problem))
    if not kept:
        what = f"none of the {len(rows)} rows can be used ({first})" if len(rows) else "there are no rows"
        raise UserError(f"{key} = {paths!r}: {what}")
    if problems:
        log.warning("rows skipped or cut", data=paths, count=problems.total(), of=len(rows), reasons=dict(problems))
    return Demonstrations.of(kept)


def _read(row: Any, reader: RowReader, config: Config) -> tuple[list[Demonstration], BadRow | None]:
    """A row's demonstrations, and what is wrong with it."""
    if isinstance(row, BadRow):
        return [], row
    try:
        demonstrations = reader.read(row)
    except BadRow as problem:
        return [], problem
    return demonstrations, _fit(demonstrations, config)


def _fit(demonstrations: list[Demonstration], config: Config) -> BadRow | None:
    """Cut what is too long, to nothing unless `sft.too_long` is `cut`; returns what is wrong with the row."""
    limit, problem = config.sft.max_tokens or config.model.max_model_len, None
    for number, one in enumerate(demonstrations):
        if len(one.token_ids) > limit:
            cut = config.sft.too_long == "cut"
            demonstrations[number] = one.cut(limit if cut else 0)
            problem = BadRow(f"{len(one.token_ids)} tokens; the limit is {limit}", reason=CUT if cut else TOO_LONG)
    if problem is None and not any(one.is_trained for one in demonstrations):
        return BadRow("no token has a weight above 0")
    return problem
