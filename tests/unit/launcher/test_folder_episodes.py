from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.folder import episode_query
from launcher.folder.episode_query import Query, page
from launcher.folder.episodes import ROW, EpisodeIndex
from tests.support.episode_rows import CONVERSATION, TOKENS, keep


def indexed(folder: Path) -> EpisodeIndex:
    index = EpisodeIndex(folder)
    index.update()
    return index


def names(index: EpisodeIndex, query: Query | None = None) -> list[str]:
    return [row["task"] for row in page(index, query or Query(sort="step"), 0, 100).rows]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keep(tmp_path, 10, "t1", {"messages": CONVERSATION, **TOKENS}, reward=0.25, tokens=40, tool_calls=2)
    keep(tmp_path, 10, "t2", prompt="Is 7 a prime?", reward=1.0, reason="length", generator="g2")
    keep(tmp_path, 20, "t3", status="set_aside", reason="ToolUnavailable: no sandbox", reward=0.0)
    keep(tmp_path, 20, "e20-1", where="validation_data", kind="eval", reward=0.5, prompt_id="p-t2")
    return tmp_path


def test_every_episode_is_a_row_and_its_line_is_found_again(folder: Path) -> None:
    index = indexed(folder)

    assert names(index) == ["t1", "t2", "t3", "e20-1"]
    for row in index.rows():
        path, offset = index.place(row)
        found = index.find(f"{path.parent.name}/{path.name}", offset)
        assert found is not None
        assert found["task"] == row["task"]
    assert index.find("rollouts/10.jsonl", 3) is None
    assert index.find("../secret", 0) is None


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (Query(kind="train", sort="step"), ["t1", "t2", "t3"]),
        (Query(kind="eval"), ["e20-1"]),
        (Query(kind="set aside"), ["t3"]),
        (Query(kind="tool error"), ["t1"]),
        (Query(kind="with tokens"), ["t1"]),
        (Query(least=0.5, sort="reward"), ["e20-1", "t2"]),
        (Query(most=0.3), ["t1"]),
        (Query(reason="length"), ["t2"]),
        (Query(reason="no such ending"), []),
        (Query(generator="g2"), ["t2"]),
        (Query(version=11, sort="step"), ["t1", "t2"]),
        (Query(first_step=11, last_step=20, kind="train"), ["t3"]),
        (Query(text="LET me SEE"), ["t1"]),
        (Query(text="sandbox"), ["t3"]),
        (Query(prompt="p-t2", sort="step"), ["t2", "e20-1"]),
        (Query(sort="-reward"), ["t2", "e20-1", "t1", "t3"]),
        (Query(sort="reward"), ["t1", "e20-1", "t2", "t3"]),
    ],
)
def test_a_query_gives_the_episodes_that_fit_in_its_order(folder: Path, query: Query, expected: list[str]) -> None:
    assert names(indexed(folder), query) == expected


def test_pages_follow_one_another_and_a_search_reads_no_more_than_a_part_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = indexed(folder)
    first = page(index, Query(sort="step"), 0, 3)
    assert first.total == 4
    assert first.next == 3
    second = page(index, Query(sort="step"), first.next, 3)
    assert [row["task"] for row in second.rows] == ["e20-1"]
    assert second.next is None

    monkeypatch.setattr(episode_query, "SEARCHED_BYTES", 1)
    part = page(index, Query(sort="step", text="sandbox"), 0, 3)
    assert part.rows == []
    assert part.next == 1, "one line was read; the search goes on from there"


def test_an_update_adds_what_was_written_since(folder: Path) -> None:
    index = indexed(folder)
    assert not index.update()

    keep(folder, 20, "t4")
    with (folder / "rollouts/20.jsonl").open("ab") as file:
        file.write(b'{"task_id": "half')

    assert index.update()
    assert names(index) == ["t1", "t2", "t3", "e20-1", "t4"]
    assert index.unreadable == 0


def test_files_that_go_or_are_emptied_take_their_episodes_with_them(folder: Path) -> None:
    index = indexed(folder)

    (folder / "rollouts/10.jsonl").unlink()
    os.truncate(folder / "rollouts/20.jsonl", 0)

    assert index.update()
    assert names(index) == ["e20-1"]
    assert len(index.rows()) == 1


def test_held_out_episodes_are_read_once_though_their_file_is_renamed(folder: Path) -> None:
    (folder / "validation_data/30.jsonl.part").write_bytes((folder / "validation_data/20.jsonl").read_bytes())
    index = indexed(folder)
    os.replace(folder / "validation_data/30.jsonl.part", folder / "validation_data/30.jsonl")

    index.update()

    assert [row["file"] for row in page(index, Query(kind="eval", first_step=30), 0, 9).rows] == [
        "validation_data/30.jsonl"
    ]


def test_lines_that_are_no_episodes_are_counted(folder: Path) -> None:
    with (folder / "rollouts/10.jsonl").open("ab") as file:
        file.write(b'\xff\n[1]\n{"task_id": 3, "reward": "x"}\n{}\n' + b"[" * 10_000 + b"\n")
    index = indexed(folder)

    assert index.unreadable == 5
    assert len(names(index)) == 4


def test_a_part_of_the_reward_may_be_called_like_the_record(tmp_path: Path) -> None:
    keep(tmp_path, 1, "t1", reward_parts={"a": 0.5, "input": 0.25})

    assert names(indexed(tmp_path)) == ["t1"]


def test_a_row_takes_few_bytes_whatever_the_episode_holds(tmp_path: Path) -> None:
    for i in range(300):
        keep(tmp_path, i // 100, f"t{i}", {"messages": [{"role": "assistant", "content": "long " * 2000}]})
    index = indexed(tmp_path)

    rows = index.rows()
    assert len(rows) == 300
    assert rows.nbytes == 300 * ROW.itemsize
    assert ROW.itemsize <= 64
