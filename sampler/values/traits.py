"""Traits that predict values of prompts before they are answered: a column of the data, and text or states."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.config import TrackerConfig
from common.errors import UserError
from sampler.prompts.prompt_set import PromptSet
from sampler.values.population import Features, PromptTraits
from sampler.values.states import read_states

NGRAMS = 256  # number of hash values of an n-gram
MAX_GROUPS = 4096
# With more prompts there is no regression: its inputs, 256 bytes a prompt, would take more memory than the rest of the
# sampler.
MAX_PROMPTS = 1 << 17
LONGEST = 4096  # bytes of a prompt's text that are hashed

# All digits count as 0: the length of a number matters more than its value.
_BYTES = np.arange(256, dtype=np.uint64)
_BYTES[ord("0") : ord("9") + 1] = ord("0")
# Odd 64-bit constants, so that the highest bits of the sum depend on all three bytes.
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)
_SHIFT = np.uint64(64 - NGRAMS.bit_length() + 1)


def prompt_traits(prompts: PromptSet, config: TrackerConfig, log: Any) -> PromptTraits:
    """Groups and features of a run's prompts, as far as the tracker's configuration uses them.

    Raises:
        UserError: the column of groups is missing in a row, or has too many values; the states cannot be read.
    """
    if not config.has_population:
        return PromptTraits()
    groups, names = _groups(prompts, config.group_column)
    return PromptTraits(groups, names, _features(prompts, config, log))


def _features(prompts: PromptSet, config: TrackerConfig, log: Any) -> Features | None:
    if len(prompts) > MAX_PROMPTS:
        log.info("too many prompts for a regression on their text or states", prompts=len(prompts), most=MAX_PROMPTS)
        return None
    if config.prompt_states is not None:
        return Features("state", read_states(config.prompt_states, prompts.ids, log))
    ngrams = np.empty((len(prompts), NGRAMS), np.uint8)
    for i, prompt in enumerate(prompts.prompts()):
        ngrams[i] = count_ngrams(prompt if isinstance(prompt, str) else str(prompt[-1]["content"]))
    return Features("text", ngrams)


def count_ngrams(text: str) -> np.ndarray:
    """Count a text's three-byte sequences by hash, each up to 255, uint8 [NGRAMS]."""
    data = _BYTES[np.frombuffer(text.encode("utf-8", "surrogatepass")[:LONGEST], np.uint8)]
    if len(data) < 3:
        return np.zeros(NGRAMS, np.uint8)
    hashes = data[:-2] * _FACTORS[0] + data[1:-1] * _FACTORS[1] + data[2:] * _FACTORS[2]
    counts = np.bincount((hashes >> _SHIFT).astype(np.int64), minlength=NGRAMS)
    return np.minimum(counts, 255).astype(np.uint8)


def _groups(prompts: PromptSet, column: str | None) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Each prompt's group, int64 [N], and the groups' names: values of a column, or else the sources if several."""
    if column is not None:
        values = [_group(prompts, i, column) for i in range(len(prompts))]
    elif len(prompts.parts) > 1:
        values = [part.source.name for part in prompts.parts for _ in range(len(part))]
    else:
        return None, ()
    names = tuple(sorted(set(values)))
    if len(names) > MAX_GROUPS:
        raise UserError(
            f"sampler.tracker.group_column = {column!r} has {len(names):,} different values, and at most "
            f"{MAX_GROUPS:,} groups are allowed; name a column with a level, a task or a source"
        )
    index = {name: g for g, name in enumerate(names)}
    return np.array([index[value] for value in values], np.int64), names


def _group(prompts: PromptSet, i: int, column: str) -> str:
    row = prompts[i].row
    value = row.get(column)
    if isinstance(value, str | int | float | bool):
        return str(value)
    problem = (
        "has no such column" if column not in row else f"has {value!r:.40} there, which is neither text nor a number"
    )
    raise UserError(
        f"sampler.tracker.group_column = {column!r}: {prompts.where(i)} {problem}; its columns are "
        f"{', '.join(row) or 'none but prompt and answer'}"
    )
