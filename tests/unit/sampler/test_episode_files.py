"""Episodes in files: each once, whatever is killed in between, and none without its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.messages import SampleHeader
from common.payload import pack_record
from sampler.episode_files import CACHED_VERSIONS, EpisodeFiles, Rollouts, episode_line
from sampler.records import DispatchedTask


def header(task_id: str = "t1", **values: Any) -> SampleHeader:
    return SampleHeader(task_id=task_id, prompt_id="p", **values)


def line(task_id: str) -> tuple[str, bytes]:
    return task_id, episode_line(header(task_id), {}, {})


def ids(path: Path) -> list[str]:
    return [json.loads(text)["task_id"] for text in path.read_text().splitlines()]


def test_a_line_holds_what_the_header_and_the_record_say() -> None:
    record = pack_record({"input": "2+2?", "messages": [{"role": "assistant", "content": "\ud800\n4"}]})
    sample = header(
        reward=0.5, reward_parts={"exact": 1.0}, turn_rewards=[-0.5], tokens=9, oldest_version=2, newest_version=3,
        record=record,
    )  # fmt: skip
    row = json.loads(episode_line(sample, {"version": 1}, {"input": "not this"}))
    assert (row["reward"], row["parts"], row["turn_rewards"]) == (0.5, {"exact": 1.0}, [-0.5])
    assert (row["versions"], row["version"], row["tokens"]) == ([2, 3], 1, 9)
    assert (row["input"], row["messages"][0]["content"]) == ("2+2?", "\ud800\n4")


def test_a_task_nobody_could_answer_has_a_reason_and_no_reward() -> None:
    sample = header(status="set_aside", reason="ChatUnavailable: HTTP 503")
    row = json.loads(episode_line(sample, {}, {"input": "2+2?"}))
    assert (row["reward"], row["reason"], row["input"]) == (None, "ChatUnavailable: HTTP 503", "2+2?")


def test_a_line_is_one_line_for_every_reader() -> None:
    sample = header(reason="a\u2028b\x85c", reward_parts={"mine\u2029": 0.5})
    (text,) = episode_line(sample, {}, {"input": "2\u2028+2?"}).decode().splitlines()
    row = json.loads(text)
    assert (row["reason"], row["parts"], row["input"]) == ("a\u2028b\x85c", {"mine\u2029": 0.5}, "2\u2028+2?")


@pytest.mark.parametrize("record", [b"nonsense", pack_record({})])
def test_a_record_that_says_nothing_leaves_a_whole_line(record: bytes) -> None:
    row = json.loads(episode_line(header(record=record), {}, {"input": "2+2?"}))
    assert row["task_id"] == "t1"


def test_a_line_is_written_once_also_by_the_next_process(tmp_path: Path) -> None:
    EpisodeFiles(tmp_path).write(3, [line("t1"), line("t2"), line("t1")])
    files = EpisodeFiles(tmp_path)
    files.write(3, [line("t2"), line("t3")])
    files.write(3, [line("t3")])
    files.write(4, [line("t3")])
    assert ids(tmp_path / "3.jsonl") == ["t1", "t2", "t3"]
    assert ids(tmp_path / "4.jsonl") == ["t3"]


@pytest.mark.parametrize("cut", [1, 5, 100])
def test_a_line_that_a_kill_cut_short_is_written_again(tmp_path: Path, cut: int) -> None:
    EpisodeFiles(tmp_path).write(0, [line("t1"), line("t2")])
    path = tmp_path / "0.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    EpisodeFiles(tmp_path).write(0, [line("t2"), line("t3")])
    assert ids(path) == ["t1", "t2", "t3"]


def test_more_versions_than_are_cached_have_each_line_once(tmp_path: Path) -> None:
    files = EpisodeFiles(tmp_path)
    for version in [*range(3 * CACHED_VERSIONS), *range(3 * CACHED_VERSIONS)]:
        files.write(version, [line("t1")])
    assert {tuple(ids(tmp_path / f"{version}.jsonl")) for version in range(3 * CACHED_VERSIONS)} == {("t1",)}


def test_a_file_under_way_has_another_name_and_comes_out_in_order(tmp_path: Path) -> None:
    files = EpisodeFiles(tmp_path, unfinished=True)
    files.write(6, [line("e6-10"), line("e6-9")])
    assert [path.name for path in tmp_path.iterdir()] == ["6.jsonl.part"]
    files.write(6, [line("e6-1")])
    rows = files.finish(6, "e6-", 6)
    assert [path.name for path in tmp_path.iterdir()] == ["6.jsonl"]
    assert ids(tmp_path / "6.jsonl") == [row["task_id"] for row in rows] == ["e6-1", "e6-9", "e6-10"]


def test_answers_that_were_given_up_are_not_in_the_finished_file(tmp_path: Path) -> None:
    files = EpisodeFiles(tmp_path, unfinished=True)
    files.write(4, [line("e4-0")])
    files.finish(4, "e4-", 4)
    files.write(7, [line("e6-0"), line("e6-1")])
    files.write(8, [line("e6.1-0")])
    files.write(7, [line("e6.2-1"), line("e6.2-0")])
    assert [row["task_id"] for row in files.finish(7, "e6.2-", 6)] == ["e6.2-0", "e6.2-1"]
    assert ids(tmp_path / "7.jsonl") == ["e6.2-0", "e6.2-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4.jsonl", "7.jsonl"]


def test_finished_and_killed_before_anyone_knew_nothing_is_lost(tmp_path: Path) -> None:
    files = EpisodeFiles(tmp_path, unfinished=True)
    files.write(6, [line(f"e6-{n}") for n in range(4)])
    files.finish(6, "e6-", 6)
    again = EpisodeFiles(tmp_path, unfinished=True)
    again.write(6, [line("e6-3")])  # the last round is counted again
    again.finish(6, "e6-", 6)
    assert ids(tmp_path / "6.jsonl") == ["e6-0", "e6-1", "e6-2", "e6-3"]


def test_what_another_run_left_is_removed(tmp_path: Path) -> None:
    old = EpisodeFiles(tmp_path)
    for version in (0, 10, 20):
        old.write(version, [line("t1")])
    (tmp_path / "notes.jsonl").write_text("mine")
    files = EpisodeFiles(tmp_path)
    files.discard(10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.jsonl", "notes.jsonl"]
    files.discard(0, keep=0)
    assert (tmp_path / "0.jsonl").exists()
    files.discard(0)
    files.write(0, [line("t1")])
    assert ids(tmp_path / "0.jsonl") == ["t1"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file")
    with pytest.raises(UserError, match="episodes cannot be written to .*rollouts/0.jsonl: "):
        EpisodeFiles(tmp_path / "rollouts").write(0, [line("t1")])


def kept(rollouts: Rollouts, version: int, **values: Any) -> bool:
    return rollouts.wants(DispatchedTask("p", False, version, 0.5), header(**values))


def test_chosen_versions_are_kept_whole_and_of_the_others_what_was_set_aside(tmp_path: Path) -> None:
    rollouts = Rollouts(tmp_path, 5)
    assert [version for version in range(12) if kept(rollouts, version)] == [0, 5, 10]
    assert all(kept(rollouts, version, status="set_aside") for version in range(12))


def test_every_zero_keeps_nothing_and_removes_nothing(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text("{}\n")
    rollouts = Rollouts(tmp_path, 0)
    rollouts.discard(0)
    assert not any(kept(rollouts, 0, status=status) for status in ("ok", "set_aside"))
    assert (tmp_path / "0.jsonl").exists()
