"""The tables of families in docs/models.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.support.families import FAMILIES

FIGURES = Path(__file__).parents[2] / "golden" / "families.json"
PARTS = ("learner", "export", "engine", "merged", "adapter")
SAME = {"float32": 1e-3, "bfloat16": 0.05}  # |difference| of log-probs that rounding explains, by the engine's type
LEARNER = 1e-4  # of the learner's, which computes in float32
BEGIN, END = "<!-- measured -->\n", "<!-- end -->"


def within(result: list[float] | str, bound: float) -> bool:
    return not isinstance(result, str) and max(result) <= bound


def agrees(name: str, figures: dict[str, Any]) -> bool:
    """Whether learner and transformers, engine and learner, and learner and export give the same log-probs."""
    exact = all(within(figures[part], LEARNER) for part in ("learner", "export"))
    return exact and within(figures["engine"], SAME[FAMILIES[name].dtype])


def fill(page: str, figures: dict[str, Any]) -> str:
    """The page with the tables of these figures in the place of older ones."""
    rows = [name for name in FAMILIES if name in figures]
    agree = [name for name in rows if agrees(name, figures[name])]
    counts = [sum("bfloat16" not in name for name in names) for names in (agree, rows)]  # twice measured count once
    lines = ["{} of {} families agree.".format(*counts), ""]
    lines += ["| family | layers | learner | export | engine | LoRA merged | beside |", "|---|---|---|---|---|---|---|"]
    lines += [_row(name, figures[name]) for name in rows]
    lines += ["", "### Families that do not agree", "", "| family | why | what SPO does |", "|---|---|---|"]
    lines += [f"| {name} | {FAMILIES[name].why} | {_refusal(figures[name])} |" for name in rows if name not in agree]
    lines += ["", "### Adapters that are refused", "", "| family | what the run says |", "|---|---|"]
    lines += [f"| {', '.join(names)} | {reason} |" for reason, names in _adapters(agree, figures).items()]
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2]


def _row(name: str, figures: dict[str, Any]) -> str:
    star = "\\*" if FAMILIES[name].dtype == "bfloat16" else ""
    cells = [_cell(figures[part]) for part in PARTS]
    return f"| {name}{star} | {FAMILIES[name].layers} | {' | '.join(cells)} |"


def _cell(result: list[float] | str) -> str:
    return "no" if isinstance(result, str) else ", ".join(f"{difference:.0e}" for difference in result)


def _refusal(figures: dict[str, Any]) -> str:
    reasons = [_plain(figures[part]) for part in ("learner", "engine") if isinstance(figures[part], str)]
    if reasons:
        return reasons[0]
    if not within(figures["export"], LEARNER):
        return "trains it; the export is not the model that was trained"
    return "trains it; the check of log-probs ends the run only above `generator.logprob_tolerance`"


def _adapters(rows: list[str], figures: dict[str, Any]) -> dict[str, list[str]]:
    """The families whose adapters are refused, by the reason."""
    refused: dict[str, list[str]] = {}
    for name in rows:
        for part in ("merged", "adapter"):
            if isinstance(figures[name][part], str):
                names = refused.setdefault(_plain(figures[name][part]), [])
                if name not in names:
                    names.append(name)
    return refused


def _plain(reason: str) -> str:
    """A reason without the paths of the machine that measured, and not too long for a table."""
    reason = re.sub(r"'?/[\w./-]+'?", "…", reason).replace("|", "\\|")
    return reason if len(reason) <= 200 else reason[:200].rpartition(" ")[0] + " …"
