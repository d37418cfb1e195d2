"""A run folder for notebooks and scripts: what it holds as plain columns and rows."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError, one_line
from launcher.folder.episodes import read_line
from launcher.folder.query import FIELDS, Query, page
from launcher.folder.run import read_one
from launcher.folder.tracker import newest_tracker
from launcher.page.panels.learning import reward_panel
from launcher.page.svg import svg


class RecordedRun:
    """A run folder, of a run that is over or under way; each call reads what the folder has at that moment.

    Tables are dicts of lists of equal length, which `pandas.DataFrame` and `polars.DataFrame` take.

    Attributes:
        folder: the run folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self._run = read_one(Path(folder))
        self.folder = self._run.folder.path

    @property
    def state(self) -> str:
        """`finished`, `running`, `stopped`, or `empty` if nothing has been written yet."""
        self._run.update_metrics()
        return self._run.state

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, as a dict of sections; empty if it cannot be read."""
        return self._run.folder.config()

    def metrics(self, process: str | None = None) -> dict[str, list[Any]]:
        """The metrics of each step: `step`, and a column for each name of [metrics.md](metrics.md), NaN where none was
        written.

        Args:
            process: `sampler`, `learner`, or a generator's name; None: for each metric, the first of these processes
                that reports it.
        """
        self._run.update_metrics()
        metrics = self._run.metrics
        series = {name: metrics.series(name, process) for name in metrics.names(process)}
        steps = np.unique(np.concatenate([np.empty(0, np.int64), *(one.versions for one in series.values())]))
        columns: dict[str, list[Any]] = {"step": steps.tolist()}
        for name, one in series.items():
            column = np.full(len(steps), np.nan)
            column[np.searchsorted(steps, one.versions)] = one.values
            columns[name] = column.tolist()
        return columns

    def episodes(self, limit: int | None = None, **query: str) -> list[dict[str, Any]]:
        """The episodes that the run has kept, newest first, each with its messages, reward and, if kept, tokens.

        Args:
            limit: how many to return at most.
            query: conditions as `spo episodes` and the dashboard have them: `kind` ("train", "eval", "failed"),
                `reward` and `tokens` ("<0.5"), `step` ("10-30"), `version`, `prompt`, `source`, `reason`, `text`,
                `generator`, `task`; and `sort`, such as "-reward".

        Raises:
            UserError: a condition is unknown or cannot be read.
        """
        if unknown := query.keys() - set(FIELDS):
            raise UserError(f"condition {min(unknown)!r} is unknown; allowed: {', '.join(FIELDS)}")
        self._run.update_episodes()
        found = page(self._run.episodes, Query(**query), 0, sys.maxsize if limit is None else limit, float("inf"))
        return [record for row in found.rows if (record := read_line(self.folder / row["file"], row["offset"]))]

    def evaluations(self) -> dict[str, list[Any]]:
        """The evaluations: `step`, `prompts`, `responses`, and mean `accuracy` and `reward` over the prompts.

        `accuracy_low`, `accuracy_high`, `reward_low` and `reward_high` are the ends of 95% bootstrap intervals over
        prompts.
        """
        self._run.update_episodes()
        rows = []
        for one in self._run.evaluations():
            row: dict[str, float] = {"step": one.version, "prompts": len(one.prompts), "responses": len(one.rows)}
            for name, band in (("accuracy", one.accuracy()), ("reward", one.reward())):
                row |= {name: band.mean, f"{name}_low": band.low, f"{name}_high": band.high}
            rows.append(row)
        return {name: [row[name] for row in rows] for name in rows[0]} if rows else {"step": []}

    def values(self) -> dict[str, list[Any]]:
        """The value of each prompt in the newest checkpoint, empty before the first.

        `value` is the expected reward, from 0 (lowest) to 1 (highest); `count` the effective number of rewards behind
        the value: older rewards are discounted, and the prior counts too; `visits` how often the prompt was drawn.
        """
        saved = newest_tracker(self.folder)
        if saved is None:
            return {"prompt_id": [], "value": [], "count": [], "visits": []}
        arrays = {"value": saved.values, "count": saved.counts, "visits": saved.visits}
        return {"prompt_id": saved.prompt_ids, **{name: array.tolist() for name, array in arrays.items()}}

    def html(self, dashboard: str = "") -> str:
        """State, curves and, if its address is given, a link to the dashboard, as HTML."""
        self._run.update_metrics()
        self._run.update_episodes()
        run = self._run
        of = f" of {run.steps:,}" if run.steps is not None else ""
        words = [f"<b>{escape(one_line(run.name))}</b>: {run.state}, step {run.step:,}{of}"]
        words += [escape(one_line(run.ended_with))] if run.ended_with else []
        words += [f'<a href="{escape(dashboard)}" target="_blank">dashboard</a>'] if dashboard else []
        charts = reward_panel(run.metrics, run.evaluations())["charts"][:2]
        return f"<div>{' · '.join(words)}</div><div>{''.join(map(svg, charts))}</div>"

    def _repr_html_(self) -> str:
        return self.html()

    def __repr__(self) -> str:
        return f"<run in {self.folder}, {self.state}>"
