"""Whether off-policy correction keeps learning stable when samples are 1 to 64 weight versions old."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import plots, tables

AGES = (1, 4, 16, 64)
# Settings that all runs share; a run with other ones is another variant.
SHARED = ("learner.lr=2e-4", "learner.schedule=constant", "learner.mini_batches=4", "sampler.drift.mode=constant")
OTHER = ("learner.lr=", "sampler.")
REFERENCE = "disabled"  # drawn in each panel
GROUPS = {
    "weights and masks by row": (
        "decoupled_seq_is",
        "decoupled_seq_is, ess_lr",
        "decoupled_seq_is_rs",
        "decoupled_geo_rs",
        "decoupled_k3_rs_seq_tis",
        "decoupled_k3_rs_token_tis",
        "vcpo",
    ),
    "weights and masks by token": (
        REFERENCE,
        "decoupled_token_is",
        "decoupled_token_is, interpolated",
        "skyrl token, outliers",
        "icepop",
        "sao",
    ),
    "losses around the generating policy": (
        "bypass_ppo_clip",
        "bypass_pg_is",
        "vespo",
        "dro",
        "dppo_kl",
        "dppo_tv",
        "importance_sampling",
    ),
    "losses around the recomputed policy": ("geo_mean", "clip_cov", "kl_cov", "m2po"),
}
Runs = dict[tuple[str, int], list[dict[str, Any]]]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Mean of the last two evaluations (lowest–highest seed) by variant and staleness.

    The last column is the lowest accuracy of any seed in the second half of its run.
    """
    runs = _by_variant(rows)
    named = [name for names in GROUPS.values() for name in names]
    groups = GROUPS | {"with other settings": sorted({name for name, _ in runs} - set(named))}
    lines = []
    for title, names in groups.items():
        lines.append([f"**{title}**", *[""] * (len(AGES) + 1)])
        for name in names:
            of_ages = [runs.get((name, age), []) for age in AGES]
            lowest = min(_lowest_late(row) for of_age in of_ages for row in of_age)
            lines.append([f"`{name}`", *map(_cell, of_ages), f"{lowest:.2f}"])
    heads = ["correction, or loss", *(f"staleness {age}" for age in AGES), "lowest late"]
    on_policy = "; ".join(f"{name} {_cell(same)}" for (name, age), same in runs.items() if age == 0)
    return f"{tables.table(heads, lines)}\n\non-policy: {on_policy}"


def plot(rows: Sequence[dict[str, Any]], target: Path) -> None:
    """Accuracy against learner steps: a row of panels for each group of variants, a column for each staleness."""
    runs = _by_variant(rows)
    figure, axes = plots.panels(len(GROUPS), len(AGES), 3.5, 2.4, dpi=90)
    for (title, names), line in zip(GROUPS.items(), axes, strict=True):
        for age, axis in zip(AGES, line, strict=True):
            for name, colour in zip(names, ("C0", "C1", "C2", "C3", "C4", "C5", "C6"), strict=False):
                _draw(axis, runs[name, age], colour if name != REFERENCE else "black", name)
            if REFERENCE not in names:
                _draw(axis, runs[REFERENCE, age], "black", REFERENCE, linestyle=":")
            axis.set_ylim(0, 1.02)
        line[0].set_ylabel(textwrap.fill(title, 20), fontsize=9)
        line[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=8)
    for age, top, bottom in zip(AGES, axes[0], axes[-1], strict=True):
        top.set_title(f"staleness {age}", fontsize=10)
        bottom.set_xlabel("learner steps")
    figure.suptitle("held-out accuracy", fontsize=11)
    plots.save(figure, target)


def _draw(axis: Any, rows: list[dict[str, Any]], colour: str, name: str, **style: Any) -> None:
    steps, accuracy = np.array([row["accuracy"] for row in rows]).transpose(2, 0, 1)  # [seeds, points]
    plots.curve(axis, steps[0], accuracy, colour, name, whole=True, **style)


def _by_variant(rows: Sequence[dict[str, Any]]) -> Runs:
    """Runs by variant, with the settings that only it has, and staleness."""
    runs: Runs = {}
    for row in rows:
        own = [one for one in row["overrides"] if one.startswith(OTHER) and one not in SHARED]
        runs.setdefault((", ".join([row["variant"], *own]), row["staleness"]), []).append(row)
    return runs


def _lowest_late(row: dict[str, Any]) -> float:
    curve = row["accuracy"]
    return float(min(accuracy for version, accuracy in curve if 2 * version >= curve[-1][0]))


def _cell(rows: list[dict[str, Any]]) -> str:
    finals = [float(np.mean([accuracy for _, accuracy in row["accuracy"][-2:]])) for row in rows]
    return f"{np.mean(finals):.2f} ({min(finals):.2f}–{max(finals):.2f})" if finals else "–"
