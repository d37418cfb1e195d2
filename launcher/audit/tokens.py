"""Reads the tokens of a run's records: those that kept episodes sampled, and those that the learner trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from common.messages import InvalidMessage
from common.payload import LOGPROB, TOKEN, Payload, check_payload


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of a row that the model sampled, as the generator and the learner both record them."""

    ids: np.ndarray  # int32 [M]
    versions: np.ndarray  # of the weights that sampled each, int32 [M]
    logprobs: np.ndarray  # log pi_rollout, rounded, float64 [M]
    experts: np.ndarray  # checksums of each token's experts, int64 [M]; empty without router replay


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """A line of `training_data/`: a row, and what the learner computed for its M model tokens."""

    task_id: str
    row: int
    mini_batch: int  # number of the optimizer step in its batch
    advantages: list[float]  # the sampler's, of the sample or of its turns
    sampled: SampledTokens  # as the learner got them
    logprobs: np.ndarray  # of the policy before the optimizer step, float64 [M]
    # A teacher's log-probs, float64 [M] or [M, K], NaN for tokens without scores; None without a teacher.
    teacher: np.ndarray | None
    # A critic's, float64 [M]; None without a critic.
    values: np.ndarray | None
    returns: np.ndarray | None
    token_advantages: np.ndarray | None

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Self:
        """Raises LookupError, TypeError or ValueError for a line that lacks something."""
        ids = np.array(line["token_ids"], TOKEN)

        def column(name: str) -> np.ndarray | None:
            """A number for each token; NaN for None."""
            if line.get(name) is None:
                return None
            values = np.array(line[name], np.float64)
            if len(values) != len(ids):
                raise ValueError(name)
            return values

        logprobs, rollout = column("logprobs"), column("rollout_logprobs")
        if logprobs is None or rollout is None:
            raise LookupError("log-probs")
        experts = np.array(line.get("experts", ()), np.int64)
        sampled = SampledTokens(ids, np.array(line["token_versions"], TOKEN), rollout, experts)
        return cls(
            str(line["task_id"]), int(line.get("row", 0)), int(line["mini_batch"]),
            [float(one) for one in line["advantages"]], sampled, logprobs,
            column("teacher_logprobs"), column("values"), column("returns"), column("token_advantages"),
        )  # fmt: skip


def flaw_of(line: Mapping[str, Any]) -> str:
    """How the counts of an episode's line differ from its messages and tokens; empty if they do not."""
    left_out = line.get("left_out", ())
    if line["status"] != "ok" or "everything" in left_out:
        return ""
    if "text" not in left_out:
        if not line.get("messages"):
            return "no messages"
        if flaw := _flaw_of_messages(line):
            return flaw
    if "token_ids" not in line:
        # Only training episodes are kept with tokens.
        return "" if line["kind"] != "train" or "tokens" in left_out else "no tokens"
    return _flaw_of_tokens(line)


def _flaw_of_messages(line: Mapping[str, Any]) -> str:
    if "requests" not in line and "scored" not in line:
        said = sum(message["role"] == "assistant" for message in line["messages"])
        return "" if said == line["turns"] else f"{line['turns']} turns and {said} messages of the assistant's"
    # In an agent's episode, the last message of each answered request is the reply.
    replies = {message["request"]: message for message in line["messages"] if message["role"] == "assistant"}
    answered = [one for one in line["requests"] if "sampled" in one]
    if replies.keys() != {one["request"] for one in answered}:
        return f"{len(answered)} answered requests and replies to {len(replies)}"
    trained = [one for one in answered if one["row"] is not None]
    ends = {one["row"]: one["prompt"] + one["sampled"] for one in trained}
    counts = {
        "turns": len(trained),
        "tokens": sum(ends.values()),
        "model_tokens": sum(one["sampled"] for one in trained),
        "rows": len(ends),
        "tool_calls": sum(len(reply.get("tool_calls", ())) for reply in replies.values()),
    }
    return _differences(line, counts, "requests")


def _differences(line: Mapping[str, Any], counts: Mapping[str, Any], what: str) -> str:
    wrong = [f"{name} {line[name]}, by its {what} {count}" for name, count in counts.items() if line[name] != count]
    return ", ".join(wrong)


def _flaw_of_tokens(line: Mapping[str, Any]) -> str:
    payload = _payload(line)
    try:
        check_payload(payload)
    except InvalidMessage as error:
        return str(error)
    counts = {
        "tokens": len(payload.token_ids),
        "model_tokens": len(payload.logprobs),
        "rows": len(payload.rows()),
        "versions": [int(payload.version_spans[:, 0].min()), int(payload.version_spans[:, 0].max())],
    }
    return _differences(line, counts, "tokens")


def sampled_tokens(line: Mapping[str, Any]) -> Sequence[SampledTokens]:
    """The tokens of each row of an episode without a flaw; empty if the line has no tokens."""
    if "token_ids" not in line:
        return ()
    experts = np.array(line.get("experts", ()), np.int64)
    rows, at = [], 0
    for row in _payload(line).rows():
        end = at + len(row.logprobs)
        ids = row.token_ids[row.mask()]
        rows.append(SampledTokens(ids, row.versions(), row.logprobs.astype(np.float64), experts[at:end]))
        at = end
    return rows


def _payload(line: Mapping[str, Any]) -> Payload:
    return Payload(
        np.array(line["token_ids"], TOKEN),
        np.array(line["model_spans"], TOKEN).reshape(-1, 2),
        np.array(line["logprobs"], LOGPROB),
        np.array(line["version_spans"], TOKEN).reshape(-1, 3),
        np.array(line.get("row_lengths", ()), TOKEN),
    )
