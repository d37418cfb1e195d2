"""`metrics.jsonl`: whole lines, whatever was killed or full."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from structlog.testing import capture_logs

from sampler.metrics_file import Entry, Histogram, MetricsFile

LOG = structlog.get_logger()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_entry_is_read_back_as_it_was_written() -> None:
    histogram = Histogram.of_integers(np.array([2, 0, 2]))
    entry = Entry(3, "generator-1", {"a": 0.25, "b": 1e9}, {"ages": histogram}, time=12.5)
    assert Entry.parse(entry.line()) == entry
    assert (histogram.edges, histogram.counts) == ([-0.5, 0.5, 1.5, 2.5], [1, 0, 2])


def test_a_wide_range_of_whole_numbers_has_few_bins_and_loses_none() -> None:
    numbers = np.arange(0, 10_000, 7)
    histogram = Histogram.of_integers(numbers)
    assert len(histogram.counts) + 1 == len(histogram.edges) <= 129
    assert sum(histogram.counts) == len(numbers)
    assert histogram.edges[0] < 0 < 9_996 < histogram.edges[-1]


def test_numbers_that_json_does_not_have_are_left_out(tmp_path: Path) -> None:
    MetricsFile(tmp_path, LOG).append([Entry(1, "sampler", {"k": math.inf, "mean": math.nan, "n": 1.0})])
    assert lines(tmp_path)[0]["values"] == {"n": 1}


def test_an_entry_after_a_line_that_a_kill_cut_short_is_whole(tmp_path: Path) -> None:
    MetricsFile(tmp_path, LOG).append([Entry(1, "sampler", {"a": 1.0})])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(Entry(2, "sampler", {"a": 2.0}).line()[:-9])
    MetricsFile(tmp_path, LOG).append([Entry(2, "sampler", {"a": 3.0})])
    assert [(line["version"], line["values"]) for line in lines(tmp_path)] == [(1, {"a": 1}), (2, {"a": 3})]


def test_a_file_without_one_whole_line_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"x" * 200_000)
    MetricsFile(tmp_path, LOG).append([Entry(1, "sampler", {"a": 1.0})])
    assert len(lines(tmp_path)) == 1


def test_a_full_disk_warns_once_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    file = MetricsFile(tmp_path, LOG)
    with capture_logs() as logs:
        for version in range(3):
            file.append([Entry(version, "sampler", {"a": 1.0})])
        assert [entry["log_level"] for entry in logs] == ["warning"]
        path.unlink()
        file.append([Entry(3, "sampler", {"a": 1.0})])
    assert [line["version"] for line in lines(tmp_path)] == [0, 1, 2, 3]


def test_versions_that_are_made_again_are_removed_and_those_before_stay(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path, LOG)
    file.append([Entry(version, process, {"a": 1.0}) for version in range(5) for process in ("sampler", "learner")])
    file.discard(2)
    assert [line["version"] for line in lines(tmp_path)] == [0, 0, 1, 1, 2, 2]
    file.discard(0)
    assert lines(tmp_path) == []
