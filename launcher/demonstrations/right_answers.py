"""The command `spo data demonstrations`: makes rows for `spo sft` from a model's right answers."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from common.config.data import matching_files
from common.errors import UserError
from common.files import rewrite
from common.payload import json_line

TOKENS = ("token_ids", "model_spans", "row_lengths")
REPEATED, OVER, BELOW, WITHOUT = "identical", "beyond --per-prompt", "below --reward", "without tokens or text"


def demonstrations(
    answers: Annotated[
        list[str],
        typer.Argument(metavar="ANSWERS…", help="Files of `spo eval --output`, or rollouts/*.jsonl of a run folder."),
    ],
    reward: Annotated[float, typer.Option(help="Least reward of an answer that is taken.")] = 1.0,
    per_prompt: Annotated[int | None, typer.Option(min=1, help="Most answers to one prompt; by default all.")] = None,
    output: Annotated[Path, typer.Option(help="File to write, *.jsonl.")] = Path("demonstrations.jsonl"),
) -> None:
    """Make demonstrations for `spo sft` from the right answers of a model (rejection sampling).

    Of several identical answers to a prompt, one is taken. Rows have the episode's tokens if the file has them.

    - `spo eval runs/maths -c maths.yaml --data train.jsonl --samples 16 --output answers.jsonl`
    - `spo data demonstrations answers.jsonl --reward 1 --per-prompt 4`
    """
    from sampler.prompts.rows import open_rows  # imports pyarrow, which not every role has

    if output.suffix != ".jsonl":
        raise UserError(f"--output {output} must be a file *.jsonl")
    if not math.isfinite(reward):
        raise UserError(f"--reward {reward} must be a number")
    files = matching_files(answers)
    if output.resolve() in [Path(file).resolve() for file in files]:
        raise UserError(f"--output {output} is one of the files that are read; choose another")
    left_out: Counter[str] = Counter()
    rows = list(chosen(open_rows(files, "train"), reward, per_prompt, left_out))
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
    if not rows:
        raise UserError(f"no answer in {', '.join(answers)} can be taken ({reasons or 'there are none'})")
    try:
        rewrite(output, (json_line(row).encode("utf-8", "backslashreplace") + b"\n" for row in rows))
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}") from None
    prompts = len({prompt_of(row) for row in rows})
    typer.echo(
        f"{output}: {len(rows):,} answers to {prompts:,} prompts" + (f"; left out: {reasons}" if reasons else "")
    )


def chosen(
    rows: Iterable[Any], reward: float, per_prompt: int | None, left_out: Counter[str]
) -> Iterator[dict[str, Any]]:
    """The rows of demonstrations, in the order of the answers; `left_out` counts the others by reason.

    Args:
        rows: the rows of the files; an exception in place of one that cannot be read.
    """
    taken: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        if isinstance(row, Exception):
            left_out["unreadable"] += 1
            continue
        score, answers = row.get("score"), taken[prompt_of(row)]
        said = json_line([row.get("output"), row.get("messages")])
        demonstration = _demonstration(row)
        if isinstance(score, bool) or not isinstance(score, int | float) or not score >= reward:
            left_out[BELOW] += 1
        elif demonstration is None:
            left_out[WITHOUT] += 1
        elif said in answers:
            left_out[REPEATED] += 1
        elif len(answers) == per_prompt:
            left_out[OVER] += 1
        else:
            answers.add(said)
            yield demonstration


def prompt_of(row: dict[str, Any]) -> str:
    """A key that all answers to one prompt share."""
    return json_line([row.get("source"), row.get("prompt_id"), row.get("input", row.get("prompt"))])


def _demonstration(row: dict[str, Any]) -> dict[str, Any] | None:
    """An answer as a row of demonstrations; None if it has neither tokens nor one text of the assistant."""
    named = {name: row[name] for name in ("prompt_id", "source", "score") if name in row}
    if row.get("token_ids"):
        return named | {"prompt": row.get("input")} | {name: row[name] for name in TOKENS if row.get(name)}
    messages = row.get("messages")
    said = [one for one in messages if isinstance(one, dict)] if isinstance(messages, list) else []
    if len(said) != 1 or said[0].get("role") != "assistant" or row.get("input") is None:
        return None
    content = said[0].get("content", "")
    return named | {"prompt": row["input"], "completion": content} if isinstance(content, str) else None
