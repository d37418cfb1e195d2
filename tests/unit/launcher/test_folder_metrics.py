from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.folder import appended_lines
from launcher.folder.metrics import read_metrics
from launcher.folder.series import MOST_HISTOGRAMS
from tests.support.event_files import MetricsWriter
from tests.support.run_folders import write_metrics


def test_the_last_entry_of_a_version_counts_and_versions_ascend(tmp_path: Path) -> None:
    for version, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.9)):
        write_metrics(tmp_path, version, {"reward/mean": reward})

    metrics = read_metrics(tmp_path)

    series = metrics.series("reward/mean")
    assert series.versions.tolist() == [1, 2, 3]
    assert series.values.tolist() == [0.1, 0.9, 0.3]
    assert metrics.timeline("reward/mean").values.tolist() == [0.1, 0.2, 0.3, 0.9]


def test_each_process_has_its_own_series_and_the_sampler_is_meant_by_default(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1, {"reward/mean": 0.2}, process="learner")
    write_metrics(tmp_path, 1, {"reward/mean": 0.1})
    for name in ("generator-10", "generator-2"):
        write_metrics(tmp_path, 1, {"generator/episodes": 3}, process=name)

    metrics = read_metrics(tmp_path)

    assert metrics.processes() == ["sampler", "learner", "generator-2", "generator-10"]
    assert metrics.series("reward/mean").values.tolist() == [0.1]
    assert metrics.series("reward/mean", "learner").values.tolist() == [0.2]
    assert metrics.series("reward/mean", "generator-2").values.tolist() == []
    assert metrics.names("generator-2") == ["generator/episodes"]


def test_an_update_reads_what_was_appended_and_leaves_half_a_line_for_later(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1, {"reward/mean": 0.1})
    metrics = read_metrics(tmp_path)
    assert not metrics.update()

    path = tmp_path / "metrics.jsonl"
    whole = '{"time": 1, "version": 2, "process": "sampler", "values": {"reward/mean": 0.2}}\n'
    with path.open("a") as file:
        file.write(whole[:30])
    assert not metrics.update()
    with path.open("a") as file:
        file.write(whole[30:])

    assert metrics.update()
    assert metrics.series("reward/mean").values.tolist() == [0.1, 0.2]
    assert metrics.generation == read_metrics(tmp_path).generation, "nothing was read twice"


@pytest.mark.parametrize("how", ["emptied", "removed", "replaced", "rewritten longer"])
def test_a_file_that_begins_anew_is_read_anew(tmp_path: Path, how: str) -> None:
    path = tmp_path / "metrics.jsonl"
    for version in (1, 2):
        write_metrics(tmp_path, version, {"reward/mean": 0.1})
    metrics = read_metrics(tmp_path)
    before = metrics.generation

    if how == "emptied":
        os.truncate(path, 0)
        expected: list[int] = []
    elif how == "removed":
        path.unlink()
        expected = []
    elif how == "replaced":
        write_metrics(tmp_path / "new", 7, {"reward/mean": 0.7})
        os.replace(tmp_path / "new/metrics.jsonl", path)
        expected = [7]
    else:
        os.truncate(path, 0)
        for version in range(5):
            write_metrics(tmp_path, version, {"reward/another name": 0.5, "reward/mean": 0.5})
        expected = [0, 1, 2, 3, 4]

    assert metrics.update()
    assert metrics.series("reward/mean").versions.tolist() == expected
    assert metrics.generation != before


def test_lines_that_are_no_entries_are_counted_and_passed_over(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1, {"reward/mean": 0.1})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n[1]\n{}\nnull\n\n" + b'{"time": "x", "version": 1, "process": "p", "values": {}}\n')
        file.write(
            b'{"time": 1, "version": 2, "process": "sampler", "values": {"reward/mean": "NaN", "a": [1], "b": 2}}\n'
        )
    write_metrics(tmp_path, 3, {"reward/mean": 0.3}, histograms={"h": {"edges": [0, 1], "counts": [1, 2]}, "i": 3})

    metrics = read_metrics(tmp_path)

    assert metrics.unreadable == 6
    assert metrics.series("reward/mean").versions.tolist() == [1, 3]
    assert metrics.series("b").values.tolist() == [2]
    assert metrics.histograms("h") == []


def test_a_line_that_is_too_long_to_be_one_is_stepped_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appended_lines, "LONGEST", 200)
    write_metrics(tmp_path, 1, {"reward/mean": 0.1})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"x" * 5000)
    metrics = read_metrics(tmp_path)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"x" * 100 + b"\n")
    write_metrics(tmp_path, 2, {"reward/mean": 0.2})

    metrics.update()

    assert metrics.series("reward/mean").versions.tolist() == [1, 2]


def test_histograms_are_kept_by_version_and_thinned_where_there_are_very_many(tmp_path: Path) -> None:
    for version in (*range(MOST_HISTOGRAMS + 10), 3):
        histogram = {"edges": [0, 1, 2], "counts": [version, 1]}
        write_metrics(tmp_path, version, {}, histograms={"staleness/total": histogram})

    histograms = read_metrics(tmp_path).histograms("staleness/total")

    versions = [histogram.version for histogram in histograms]
    assert versions == sorted(versions)
    assert [versions[0], versions[-1]] == [0, MOST_HISTOGRAMS + 9]
    assert len(versions) <= MOST_HISTOGRAMS
    assert histograms[-1].edges.tolist() == [0, 1, 2]
    assert histograms[-1].counts.tolist() == [MOST_HISTOGRAMS + 9, 1]


def test_a_run_of_an_earlier_release_is_read_from_its_event_files(tmp_path: Path) -> None:
    for process in ("sampler", "learner"):
        writer = MetricsWriter(tmp_path / "tensorboard" / process)
        for step in range(3):
            writer.write(step, {"reward/mean": step / 2})
        writer.histogram(2, "staleness/total", {0: 3, 2: 5})
        writer.close()

    metrics = read_metrics(tmp_path)

    assert metrics.from_event_files
    assert metrics.processes() == ["sampler", "learner"]
    assert metrics.series("reward/mean").values.tolist() == [0, 0.5, 1]
    (histogram,) = metrics.histograms("staleness/total")
    assert histogram.edges.tolist() == [-0.5, 0.5, 2.5]
    assert histogram.counts.tolist() == [3, 5]
    assert not metrics.update()

    write_metrics(tmp_path, 9, {"reward/mean": 0.9})
    assert metrics.update()
    assert not metrics.from_event_files
    assert metrics.series("reward/mean").versions.tolist() == [9], "metrics.jsonl takes their place"


def test_event_files_that_are_damaged_cost_what_they_held(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "tensorboard" / "sampler")
    writer.write(0, {"reward/mean": 0.5})
    writer.close()
    (tmp_path / "tensorboard/learner").mkdir()
    (tmp_path / "tensorboard/learner/events.out.tfevents.1").write_bytes(b"nonsense" * 100)

    assert read_metrics(tmp_path).series("reward/mean").values.tolist() == [0.5]


def test_a_folder_without_metrics_gives_none(tmp_path: Path) -> None:
    metrics = read_metrics(tmp_path / "nothing")

    assert metrics.processes() == []
    assert metrics.series("reward/mean").values.tolist() == []
    assert metrics.last("reward/mean") is None
