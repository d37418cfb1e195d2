"""Episodes in files: each once, whatever is killed in between, and none without its place."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.messages import SampleHeader
from common.payload import pack_record
from common.streams.broker import Broker
from common.streams.lease import LeaseLost
from common.streams.ledger import SamplerLedger
from sampler.cli import run_once, write_config
from sampler.files.episode_files import CACHED_VERSIONS, EpisodeFiles, Rollouts, episode_line
from sampler.records import DispatchedTask
from tests.support.sampler import NoopGenerator, NoopLearner, make_config
from tests.support.sampler_driving import start


def header(task_id: str = "t1", **values: Any) -> SampleHeader:
    return SampleHeader(task_id=task_id, prompt_id="p", **values)


def lines(*task_ids: str) -> list[tuple[str, bytes]]:
    return [(task_id, episode_line(header(task_id), {}, {})) for task_id in task_ids]


LINE = len(lines("t1")[0][1]) + 1


def ids(path: Path) -> list[str]:
    return [json.loads(text)["task_id"] for text in path.read_text().splitlines()]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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


def test_a_task_without_an_answer_is_one_line_with_a_reason() -> None:
    sample = header(status="set_aside", reason="a\u2028b\x85c", reward_parts={"mine\u2029": 0.5})
    (text,) = episode_line(sample, {}, {"input": "2\u2028+2?"}).decode().splitlines()
    row = json.loads(text)
    assert (row["reward"], row["reason"], row["input"]) == (None, "a\u2028b\x85c", "2\u2028+2?")
    assert row["parts"] == {"mine\u2029": 0.5}
    for record in (b"nonsense", pack_record({})):  # it says nothing
        assert json.loads(episode_line(header(record=record), {}, {"input": "2+2?"}))["task_id"] == "t1"


def test_a_line_is_written_once_also_by_the_next_process(tmp_path: Path) -> None:
    EpisodeFiles(tmp_path).write(3, lines("t1", "t2", "t1"))
    files = EpisodeFiles(tmp_path)
    for version, task_ids in ((3, ("t2", "t3")), (3, ("t3",)), (4, ("t3",))):
        files.write(version, lines(*task_ids))
    assert ids(tmp_path / "3.jsonl") == ["t1", "t2", "t3"]
    assert ids(tmp_path / "4.jsonl") == ["t3"]
    versions = range(5, 5 + 2 * CACHED_VERSIONS)
    for version in (*versions, *versions):
        files.write(version, lines("t1"))
    assert {tuple(ids(tmp_path / f"{version}.jsonl")) for version in versions} == {("t1",)}


def test_a_line_that_a_kill_cut_short_is_written_again(tmp_path: Path) -> None:
    EpisodeFiles(tmp_path).write(0, lines("t1", "t2"))
    path = tmp_path / "0.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    EpisodeFiles(tmp_path).write(0, lines("t2", "t3"))
    assert ids(path) == ["t1", "t2", "t3"]


@pytest.mark.parametrize("damaged", [b"null", b"\0" * 50, b"[" * 100_000, b'{"reward": 1}'])
def test_a_damaged_line_is_no_episode(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "3.jsonl.part").write_bytes(damaged + b"\n")
    files = EpisodeFiles(tmp_path, unfinished=True)
    files.withdraw(0, "t1".__eq__)
    files.write(3, lines("t1"))
    assert [fields["task_id"] for fields in files.finish(3, "t", 3)] == ["t1"]
    assert ids(tmp_path / "3.jsonl") == ["t1"]


def test_a_file_under_way_has_another_name(tmp_path: Path) -> None:
    files = EpisodeFiles(tmp_path, unfinished=True)
    files.write(6, lines("e6-10", "e6-9"))
    assert names(tmp_path) == ["6.jsonl.part"]
    files.write(6, lines("e6-1"))
    assert [row["task_id"] for row in files.finish(6, "e6-", 6)] == ["e6-1", "e6-9", "e6-10"]
    assert names(tmp_path) == ["6.jsonl"]
    # A sampler that was killed before its commit counts the last round again.
    again = EpisodeFiles(tmp_path, unfinished=True)
    again.write(6, lines("e6-10"))
    again.finish(6, "e6-", 6)
    assert ids(tmp_path / "6.jsonl") == ["e6-1", "e6-9", "e6-10"]


def test_answers_that_were_given_up_are_not_in_the_finished_file(tmp_path: Path) -> None:
    files = EpisodeFiles(tmp_path, unfinished=True)
    files.write(4, lines("e4-0"))
    files.finish(4, "e4-", 4)
    files.write(7, lines("e6-0", "e6-1"))
    files.write(8, lines("e6.1-0"))
    files.write(7, lines("e6.2-1", "e6.2-0"))
    assert [row["task_id"] for row in files.finish(7, "e6.2-", 6)] == ids(tmp_path / "7.jsonl") == ["e6.2-0", "e6.2-1"]
    assert names(tmp_path) == ["4.jsonl", "7.jsonl"]


def test_what_another_run_left_is_removed(tmp_path: Path) -> None:
    for version in (0, 10, 20):
        EpisodeFiles(tmp_path).write(version, lines("t1"))
    (tmp_path / "notes.jsonl").write_text("mine")
    Rollouts(tmp_path, 0).discard(0)  # it keeps nothing, and removes nothing
    files = EpisodeFiles(tmp_path)
    files.discard(10)
    files.discard(0, spare=0)
    assert names(tmp_path) == ["0.jsonl", "notes.jsonl"]
    files.discard(0)
    files.write(0, lines("t1"))
    assert ids(tmp_path / "0.jsonl") == ["t1"]


@pytest.mark.parametrize(("size", "kept"), [(4 * LINE, [3, 4]), (1, [4]), (1 << 20, [0, 1, 2, 3, 4])])
def test_files_of_the_oldest_versions_are_removed(tmp_path: Path, size: int, kept: list[int]) -> None:
    rollouts, heldout = EpisodeFiles(tmp_path / "a", size), EpisodeFiles(tmp_path / "b", size, unfinished=True)
    for version in range(5):
        rollouts.write(version, lines("t1"))
        rollouts.write(version, lines("t1", "t2"))
        heldout.write(version, lines(f"e{version}-0"))
        heldout.finish(version, f"e{version}-", version)
    (tmp_path / "a" / "notes.jsonl").write_text("mine")
    rollouts.write(4, lines("t3"))
    assert names(tmp_path / "a") == [*(f"{version}.jsonl" for version in kept), "notes.jsonl"]
    first, *_, newest = names(tmp_path / "b")
    assert (first, newest) == ("0.jsonl", "4.jsonl"), "the first evaluation is what later ones are compared with"
    assert (len(names(tmp_path / "b")) < 5) == (len(kept) < 5)
    # A late result of a version whose file is gone.
    rollouts.write(0, lines("t4"))
    assert ("0.jsonl" in names(tmp_path / "a")) == (0 in kept)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file")
    with pytest.raises(UserError, match="episodes cannot be written to .*rollouts/0.jsonl: "):
        EpisodeFiles(tmp_path / "rollouts").write(0, lines("t1"))


def test_a_disk_too_full_for_the_configuration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="run folder .* cannot be written: No space left on device"):
        write_config(make_config(tmp_path))


def test_chosen_versions_are_whole_others_keep_what_was_skipped(tmp_path: Path) -> None:
    def kept(every: int, **values: Any) -> list[int]:
        rollouts = Rollouts(tmp_path, every)
        return [v for v in range(12) if rollouts.wants(DispatchedTask("p", False, v, 0.5), header(**values))]

    assert kept(5) == [0, 5, 10]
    assert kept(5, status="set_aside") == list(range(12))
    assert kept(0) == kept(0, status="set_aside") == []


@pytest.mark.parametrize("gone_again", [False, True])
def test_lines_of_a_replaced_sampler_reach_no_file(broker: Broker, tmp_path: Path, gone_again: bool) -> None:
    config = make_config(tmp_path, episode={"rollouts_every": 1}, heldout=3)
    NoopLearner(broker)
    paused, generator = start(config, broker, SamplerLedger(broker, "paused")), NoopGenerator(broker)
    for n in (6, 8):
        paused.round()
        generator.work(n)
    headers, steps = paused.read()
    assert headers
    broker.redis.delete(broker.key("lease"))
    ledger = SamplerLedger(broker, "successor")
    start(config, broker, ledger).round()
    if gone_again:
        ledger.release()
    paused.read = lambda: (headers, steps)  # type: ignore[method-assign]
    with pytest.raises(LeaseLost):
        paused.round()
    for folder in ("rollouts", "validation_data"):
        for path in (config.run.folder / folder).iterdir():
            assert len(ids(path)) == len(set(ids(path))), path


@pytest.mark.parametrize("moved", [False, True])
def test_a_write_that_fails_in_a_moved_run_folder_says_so(broker: Broker, tmp_path: Path, moved: bool) -> None:
    config = make_config(tmp_path)
    config.run.folder.mkdir(parents=True)
    sampler = start(config, broker)

    def run() -> None:
        if moved:
            config.run.folder.rename(tmp_path / "elsewhere")
        raise UserError("episodes cannot be written")

    sampler.run = run  # type: ignore[method-assign]
    with pytest.raises(UserError, match="was moved away or deleted" if moved else "episodes cannot be written"):
        run_once(sampler)
