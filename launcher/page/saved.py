"""Saves runs as one HTML file that opens without a server: the page with everything that a server would answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from launcher.folder.episodes import record_of
from launcher.folder.query import Lines, episode_row
from launcher.folder.run import Run
from launcher.page.episode import episode_view, shown, training_lines
from launcher.page.html import page_html
from launcher.page.panels import panels

EPISODE_BYTES = 6 << 20  # approximate size of the episodes of all runs in a file


def save(path: Path, title: str, runs: Sequence[Run], comparison: dict[str, Any] | None = None) -> None:
    """Write the page of some runs, with a panel that compares them; raises `UserError` if it cannot be written."""
    text = page_html(title, saved_data(runs, comparison))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def saved_data(runs: Sequence[Run], comparison: dict[str, Any] | None = None) -> dict[str, Any]:
    """The data that replaces a server's answers."""
    of_runs = {run.name: panels(run) for run in runs}
    episodes = {run.name: _episodes(run, of_runs[run.name], EPISODE_BYTES // len(runs)) for run in runs}
    statuses = []
    for run in runs:
        status, kept = run.status(), len(episodes[run.name])
        if kept < status["episodes"]:
            status["notes"].append(f"{kept:,} of {status['episodes']:,} episodes are in this file, evenly spread")
        statuses.append(status)
    data = {
        "made": f"saved {time.strftime('%Y-%m-%d %H:%M')} with SPO {version('spo-trainer')}",
        "runs": statuses,
        "panels": of_runs,
        "comparison": comparison,
        "episodes": episodes,
    }
    return shown(data, depth=14)


def _episodes(run: Run, own_panels: list[dict[str, Any]], most_bytes: int) -> list[dict[str, Any]]:
    """Rows with their episodes: those that the panels show, and evenly spread ones up to the size limit."""
    rows = run.episodes.rows()
    if not len(rows):
        return []
    pairs = [pair for panel in own_panels for chart in panel["charts"] for pair in chart.get("pairs", ())]
    places = {(side["file"], side["offset"]) for pair in pairs for side in pair["sides"]}
    paths = {path for path, _ in map(run.episodes.place, rows[np.unique(rows["file"], return_index=True)[1]])}
    # A factor of 2, since token texts, log-probs and entropies about double the size.
    share = min(1.0, most_bytes / (2 * sum(path.stat().st_size for path in paths if path.exists()) + 1))
    chosen = set(np.linspace(0, len(rows) - 1, max(1, int(share * len(rows)))).astype(int).tolist())
    kept = []
    with Lines() as lines:
        for i, row in enumerate(rows):
            path, offset = run.episodes.place(row)
            if i not in chosen and (f"{path.parent.name}/{path.name}", offset) not in places:
                continue
            if (record := record_of(lines.read(path, offset))) is not None:
                view = episode_view(record, run.model(), training_lines(run.folder.path, record))
                kept.append({**episode_row(run.episodes, row, record), "episode": view})
    return kept
