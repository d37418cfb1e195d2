"""Files of scored responses, and the keys under which they name prompts.

JSON lines have one response each, `{"input": prompt, "score": number}`, as `spo values estimate` writes them; other
keys are ignored. Rows of the SPO recipe are read too: their `input` is a conversation as text,
`user\\nPROMPT\\nassistant\\n`, which may follow a system turn, and `scores` may hold the scores of several responses.
A `.json` file is one object, `{key: [scores]}`, as `spo values merge` writes it.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.errors import UserError
from sampler.tracker import ValueTracker

if TYPE_CHECKING:
    from sampler.prompts.prompt_set import PromptSet  # imports pyarrow, which not every role has

# The recipe itself looks for the last "user" instead, and so cuts prompts that hold such a line.
_CONVERSATION = re.compile(r"(?:\A|\n)user\n(.*)\nassistant\s*\Z", re.DOTALL)


class ScoreRow(NamedTuple):
    """Scores of responses to one prompt; `where` names file and line, `problem` says why the row cannot be used."""

    where: str
    key: str = ""
    scores: Sequence[float] = ()
    problem: str = ""


def prompt_key(prompt: str | list[dict[str, Any]]) -> str:
    """The key of a prompt: its exact text or, for chat messages, the key of the row that the SPO recipe would write.

    That is the user's message, without white space around it; with several turns, everything from the first user
    message on. So prompts that differ only in their system message have the same key.
    """
    if isinstance(prompt, str):
        return prompt
    turns = [f"{message['role']}\n{_text(message['content'])}\n" for message in prompt]
    return recipe_key("".join([*turns, "assistant\n"]))


def recipe_key(conversation: str) -> str:
    """The key of a recipe's row: the text from the first line `user` to the last line `assistant`, else all of it."""
    match = _CONVERSATION.search(conversation)
    return match[1].strip() if match else conversation


def read_scores(path: Path) -> Iterator[ScoreRow]:
    """Rows of a `.jsonl` file or entries of a JSON object; a line that cannot be used has a `problem`.

    Raises:
        UserError: the file cannot be read, or is not of this form.
    """
    try:
        if path.suffix == ".jsonl":
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield _row_of(line, f"{path} line {number}")
            return
        scores_by_key = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    if not isinstance(scores_by_key, dict):
        raise UserError(f"{path} must be a JSON object {{prompt text: [scores]}}, or JSON lines in a file *.jsonl")
    for key, scores in scores_by_key.items():
        where = f"{path}, prompt {key[:60]!r}"
        try:
            if not isinstance(scores, list):
                raise ValueError("its scores are not a list")
            yield ScoreRow(where, key, _checked(scores))
        except (ValueError, OverflowError) as error:
            raise UserError(f"{where}: {error}") from None


def _row_of(line: bytes, where: str) -> ScoreRow:
    try:
        row = json.loads(line)
        if not isinstance(row, dict) or not row.get("input"):
            raise ValueError("no `input` with a prompt")
        scores = row["scores"] if isinstance(row.get("scores"), list) else [row.get("score")]
        return ScoreRow(where, _key_of(row), _checked(scores))
    except json.JSONDecodeError as error:
        cut = "" if line.endswith(b"\n") else "; the line is cut short"
        return ScoreRow(where, problem=f"not JSON ({error.msg}, column {error.colno}{cut})")
    except UnicodeDecodeError:
        return ScoreRow(where, problem="not UTF-8 text")
    except (ValueError, OverflowError, RecursionError) as error:
        return ScoreRow(where, problem=str(error))


def _key_of(row: dict[str, Any]) -> str:
    prompt = row["input"]
    if isinstance(prompt, list) and all(isinstance(item, dict) and {"role", "content"} <= set(item) for item in prompt):
        return prompt_key(prompt)
    if not isinstance(prompt, str):
        raise ValueError("`input` is neither text nor chat messages")
    # `spo values estimate` writes the prompt as it is, with a task's id; only the recipe has a conversation there.
    return prompt if "task_id" in row else recipe_key(prompt)


def _checked(scores: list[Any]) -> list[float]:
    for score in scores:
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise ValueError(f"the score {str(score)[:40]} is not a finite number")
    return scores


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True, ensure_ascii=False)


Accept = Callable[[float, str], float]  # from a score, and file and line, to the score to keep; raises to refuse it


def collect_scores(path: Path, accept: Accept) -> tuple[dict[str, list[float]], list[str]]:
    """Accepted scores of a file by key, and the problem of each row that cannot be used.

    Raises:
        UserError: from `read_scores`; errors of `accept` pass through.
    """
    scores: defaultdict[str, list[float]] = defaultdict(list)
    problems: list[str] = []
    for row in read_scores(path):
        if row.problem:
            problems.append(f"{row.where}: {row.problem}")
        elif row.scores:
            scores[row.key] += [accept(score, row.where) for score in row.scores]
    return dict(scores), problems


def apply_initial_values(path: str, tracker: ValueTracker, prompts: PromptSet, log: Any) -> int:
    """Initialise the tracker from a file of scores; returns how many prompts it had scores for.

    Prompts are looked up by their exact key, then by their key without white space around it, which the recipe removes.

    Raises:
        UserError: the file cannot be read, is of another form, or a score is outside the reward range.
    """

    def in_range(score: float, where: str) -> float:
        try:
            tracker.rescale(score)
        except ValueError as error:
            raise UserError(f"{where}: {error}; `spo values merge --binarize` makes such scores 0 or 1") from None
        return score

    try:
        scores_by_key, problems = collect_scores(Path(path), in_range)
    except UserError as error:
        raise UserError(f"sampler.initial_values: {error}") from None
    if problems:
        log.warning("rows of initial values skipped", file=path, rows=len(problems), first=problems[0])
    keys = map(prompt_key, prompts.prompts())
    used = [key if key in scores_by_key else key.strip() for key in keys]
    scores_by_id = {i: scores_by_key[key] for i, key in zip(prompts.ids, used, strict=True) if key in scores_by_key}
    tracker.initialize(scores_by_id)
    log.info("initial values read", file=path, prompts=len(scores_by_id), without=len(used) - len(scores_by_id))
    in_use = set(used)
    unknown = [key for key in scores_by_key if key not in in_use]
    if unknown:
        log.warning("initial values of prompts that are not in the data", file=path, prompts=len(unknown),
                    example=unknown[0][:60])  # fmt: skip
    return len(scores_by_id)
