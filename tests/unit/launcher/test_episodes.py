"""Kept episodes: their index, the queries on it, and `spo episodes`, whose terminal no episode can drive."""

from __future__ import annotations

import math
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from common.errors import one_line, visible
from launcher import episodes as view
from launcher.cli import app
from launcher.folder.episodes import EpisodeIndex, read_line
from launcher.folder.query import Query, page
from launcher.page.episode import episode_view
from launcher.quickstart.tiny_model import build_tokenizer
from tests.support.episode_rows import CONVERSATION, TOKENS, keep
from tests.support.spo_command import spo_output

output_of = partial(spo_output, "episodes")


def indexed(folder: Path) -> EpisodeIndex:
    index = EpisodeIndex(folder)
    index.update()
    return index


def tasks(index: EpisodeIndex, query: Query | None = None) -> list[str]:
    return [row["task"] for row in page(index, query or Query(sort="step"), 0, 100).rows]


def listed(*arguments: object) -> list[str]:
    """Task ids of a list."""
    lines = [line.split("\t") for line in output_of(*arguments).splitlines()]
    assert lines[0] == list(view.COLUMNS)
    return [cells[1] for cells in lines[1:]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Seven episodes of four versions; the held-out ones of one version are still being written."""
    keep(tmp_path, 0, "t1", reward=0.0, reason="length", tokens=500)
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi"}]
    keep(tmp_path, 0, "t2", reward=0.25, prompt=chat, generator="g2")
    keep(tmp_path, 10, "t3", {"messages": CONVERSATION, **TOKENS}, reward=0.75, turns=3, tool_calls=2, tokens=7)
    keep(tmp_path, 10, "t4", prompt="Name a river.", seconds=9.0, prompt_id="maths/7")
    keep(tmp_path, 13, "t5", status="set_aside", reason="ChatUnavailable: HTTP 503", record=None, tokens=0)
    keep(tmp_path, 10, "e10-0", where="validation_data", kind="eval", prompt_id="maths-2/7")
    (tmp_path / "validation_data/20.jsonl.part").write_bytes((tmp_path / "validation_data/10.jsonl").read_bytes())
    return tmp_path


ALL = "e10-0 t5 t3 t4 e10-0 t1 t2"  # the newest first


def test_options_choose_and_order(run: Path) -> None:
    for options, expected in (
        ([], ALL), (["--limit", "0"], ALL), (["--min-tokens", "31"], "t1"), (["--max-tokens", "7"], "t5 t3"),
        (["--error"], "t5 t3"), (["--reward", ">= 1", "--step", "10"], "t4 e10-0"),
        (["--source", "maths", "--prompt", "river"], "t4"), (["--source", "nowhere"], ""),
        (["--reason", "LENGTH"], "t1"), (["--sort=-seconds", "--limit", "1"], "t4"),
    ):  # fmt: skip
        assert " ".join(listed(run, *options)) == expected, options


def test_queries_choose_and_order(run: Path) -> None:
    index = indexed(run)
    for query, expected in (
        (Query(kind="train", sort="step"), "t1 t2 t3 t4 t5"),
        (Query(kind="tool error"), "t3"),
        (Query(kind="with tokens"), "t3"),
        (Query(reward="<0.5"), "t1 t2"),
        (Query(reward="!=1"), "t3 t1 t2"),
        (Query(reward=">=0.2,<=0.8", sort="reward"), "t2 t3"),
        (Query(prompt="hi"), "t2"),
        (Query(reason="503"), "t5"),
        (Query(generator="g2"), "t2"),
        (Query(step="11-13"), "t5"),
        (Query(version="11", sort="step"), "t3 t4 e10-0 e10-0"),
        (Query(text="LET me SEE"), "t3"),
        (Query(task="t4"), "t4"),
        (Query(sort="-reward", step="0-13"), "t4 e10-0 t3 t2 t1 t5"),
    ):
        assert " ".join(tasks(index, query)) == expected, query


def test_an_episode_is_shown_from_its_prompt_to_its_worth(run: Path) -> None:
    shown = output_of(run, "--show", "t3")
    order = [
        "t3, prompt p-t3, train", "reward 0.75", "dispatched at version 10", "sampled by 10 to 11", "value before 0.42",
        "3 turns, 2 tool calls", "What is 2+2?", "assistant  turn 1", "Let me see.",
        'tool  calculator {"expression": "12*7+5"}', "89", "tool  failed: shell {}", "error: no tool",
        "assistant  turn 2", "It is 98.", 'user  reward -0.25, {"score": 0.5}', "That is not right.",
        "assistant  turn 3", "expected 4",
    ]  # fmt: skip
    position = 0
    for text in order:
        position = shown.index(text, position) + len(text)
    skipped = output_of(run, "--show", "t5")
    assert "skipped: ChatUnavailable: HTTP 503" in skipped
    assert "What is 2+2?" in skipped
    assert "reward" not in skipped
    (run / "config.yaml").touch()
    assert "e10-0, prompt" in output_of(run / "config.yaml", "--show", "10/e10-0")

    last = [{"role": "assistant", "content": "4"}, {"role": "user", "content": "", "reward": -0.5, "metadata": {}}]
    # A part of the reward may be called like the record.
    parts = {"exact": 1.0, "input": -0.3}
    keep(run, 30, "t9", {"messages": last}, reward=0.7, reward_parts=parts, turn_rewards=[0.0, -0.5])
    shown = output_of(run, "--show", "t9")
    assert "reward 0.7 (exact 1, input -0.3, turn by turn 0 -0.5)" in shown
    assert "4\n\nuser  reward -0.5\n(the conversation ends here)\n" in shown


def test_tokens_have_log_probs_versions_and_texts(run: Path) -> None:
    lines = output_of(run, "--show", "t3", "--tokens").splitlines()
    table = [line.split() for line in lines[lines.index(next(line for line in lines if "log-prob" in line)) + 1 :]]
    sampled = {2: ["-0.0100", "20"], 3: ["-0.5000", "21"], 5: ["-2.0000", "21"], 6: ["-7.2500", "21"]}
    assert table == [[str(i), str(10 + i), *sampled.get(i, ("–", "–"))] for i in range(7)]
    (row,) = page(indexed(run), Query(task="t3"), 0, 9).rows
    episode = read_line(run / row["file"], row["offset"]) or {}
    styles = [str(line.style) for line in view.token_lines(episode, None)]
    assert styles == ["dim", "dim", "dim", "green", "yellow", "dim", "dark_orange", "red"]
    assert "were not kept" in output_of(run, "--show", "t4", "--tokens")
    for damage in (
        {"version_spans": 1}, {"version_spans": [[1, 0]]}, {"logprobs": [-1.0]}, {"logprobs": None},
        {"model_spans": []}, {"model_spans": [[2, 9], [5, 7]]}, {"row_lengths": [4]}, {"logprobs": [math.nan] * 4},
        {"token_ids": [None] * 7},
    ):  # fmt: skip
        (line,) = view.token_lines(episode | damage, None)
        assert "its record is damaged" in line.plain
    for name in ("parts", "turn_rewards", "messages", "requests", "refusals"):
        damaged = episode | {name: 1, "scored": {"reward": 1.0}}
        assert [*view.episode_lines(damaged)]
        assert episode_view(damaged, None, [])["requests"] == []
    of_rows = [line.plain for line in view.token_lines(episode | {"row_lengths": [4, 3]}, None)]
    assert [(i, line) for i, line in enumerate(of_rows) if "row" in line] == [(1, "row 1 of 2"), (6, "row 2 of 2")]

    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(run / "model")
    (run / "config.yaml").write_text(f"model: {{path: {run / 'model'}}}")
    ids = tokenizer.encode("4\x1b[2J<|im_end|>")
    story = {"token_ids": ids, "model_spans": [[0, len(ids)]], "logprobs": [-0.5] * len(ids)}
    keep(run, 30, "t9", story | {"version_spans": [[3, 0, len(ids)]]})
    shown = output_of(run, "--show", "t9", "--tokens")
    assert re.search(r"0 +\d+ +-0.5000 +3  '4'\n", shown)
    assert r"'\x1b'" in shown
    assert "'<|im_end|>'" in shown


def test_pages_follow_and_a_search_reads_a_part_at_once(run: Path) -> None:
    index = indexed(run)
    first = page(index, Query(sort="step"), 0, 3)
    assert (first.total, first.next) == (7, 3)
    last = page(index, Query(sort="step"), 6, 3)
    assert ([row["task"] for row in last.rows], last.next) == (["e10-0"], None)
    part = page(index, Query(sort="step", text="503"), 0, 3, most_bytes=1)
    assert (part.rows, part.next) == ([], 1), "one line was read; the search goes on from there"
    assert index.rows().itemsize <= 64, "texts stay in the files"
    for row in index.rows():
        path, offset = index.place(row)
        same = index.find(f"{path.parent.name}/{path.name}", offset)
        assert same is not None
        assert same["task"] == row["task"]


def test_reasons_beyond_those_that_are_numbered_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.folder.episodes.MOST_WORDS", 3)
    for i in range(5):
        keep(tmp_path, 0, f"t{i}", reason=f"HTTP 50{i}")
    assert listed(tmp_path, "--reason", "504") == ["t4"]
    assert listed(tmp_path, "--reason", "501") == ["t1"]


def test_an_update_adds_what_was_written_since(run: Path) -> None:
    index = indexed(run)
    assert not index.update()
    keep(run, 13, "t6")
    with (run / "rollouts/13.jsonl").open("ab") as file:
        file.write(b'{"task_id": "half')
    assert index.update()
    assert tasks(index)[-2:] == ["t6", "e10-0"]
    assert index.unreadable == 0

    (run / "rollouts/0.jsonl").unlink()
    os.truncate(run / "rollouts/13.jsonl", 0)
    os.replace(run / "validation_data/20.jsonl.part", run / "validation_data/20.jsonl")
    assert index.update()
    assert tasks(index, Query(sort="step")) == ["t3", "t4", "e10-0", "e10-0"]
    assert [row["file"] for row in page(index, Query(step="20"), 0, 9).rows] == ["validation_data/20.jsonl"]


def test_lines_that_are_no_episodes_are_counted(run: Path) -> None:
    with (run / "rollouts/0.jsonl").open("ab") as file:
        file.write(b'not json\n{"reward": 1}\n[1]\n{"task_id": "x", "reward": "high"}\n\xff\xfe\n' + b"[" * 100_000)
        file.write(b'\n{"task_id": "half')
    ran = CliRunner().invoke(app, ["episodes", str(run), "--step", "0"])
    assert [line.split("\t")[1] for line in ran.stdout.splitlines()[1:]] == ["t1", "t2"]
    assert "6 lines could not be read" in ran.stderr


IMPOSSIBLE = ('"versions": [-1e30, 3]', '"tokens": -1', '"reward": 1e300', '"reward": NaN', '"seconds": 1e999')


@pytest.mark.parametrize("number", IMPOSSIBLE)
def test_an_impossible_number_costs_its_line_alone(run: Path, number: str) -> None:
    index = indexed(run)
    with (run / "rollouts/0.jsonl").open("a") as file:
        file.write(f'{{"task_id": "x", {number}}}\n')
        file.write('{"task_id": "big", "reward": 1, "tokens": 1e30, "turns": 99999, "versions": [1e30]}\n')
    (run / "rollouts/99999999999.jsonl").write_text('{"task_id": "far", "reward": 1}\n')
    assert index.update()
    assert tasks(index, Query(step="0", sort="step")) == ["t1", "t2", "big"]
    assert (index.unreadable, len(index.rows())) == (1, 8)


HOSTILE = "\x1b[2J\x1b]0;title\x07\r\b\x00\x7f\x9b31m\u202egnp.exe\u2066\u2028\u200e\ud800\U000e0041 [red]x[/red]"
UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0001\U000e0020-\U000e007f]"
)


def test_a_hostile_episode_cannot_drive_the_terminal(tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": HOSTILE},
        {"role": "tool", "content": HOSTILE, "name": HOSTILE, "arguments": {HOSTILE: HOSTILE}},
        {"role": HOSTILE, "content": HOSTILE, "reward": HOSTILE, "metadata": {HOSTILE: HOSTILE}},
        {"role": "user", "content": {"a": HOSTILE}, "reward": None, "metadata": HOSTILE},
    ]
    story = {"messages": messages, "output": HOSTILE, "gts": HOSTILE, "left_out": [HOSTILE]}
    # What comes over the wire is UTF-8; half pairs come in records alone.
    sendable = HOSTILE.replace("\ud800", "")
    names = {"prompt_id": sendable, "reason": sendable, "generator": sendable, "reward_parts": {sendable: 1.0}}
    keep(tmp_path, 0, "t1", story, prompt=HOSTILE, **names)
    keep(tmp_path, 0, "t2", status="set_aside", prompt=[{"role": HOSTILE, "content": HOSTILE}], reason=sendable)
    for options in ([], ["--show", "t1"], ["--show", "t2"], ["--show", "t1", "--tokens"]):
        shown = output_of(tmp_path, *options)
        assert not UNSAFE.search(shown)
        assert r"\x1b[2J" in shown

    console = Console(width=300, force_terminal=True, color_system="truecolor", highlight=False)
    rows = page(indexed(tmp_path), Query(), 0, 9).rows
    with console.capture() as capture:
        console.print(view.listing(rows))
        for row in rows:
            for line in view.episode_lines(read_line(tmp_path / row["file"], row["offset"]) or {}):
                console.print(line, soft_wrap=True)
    # What is left of escapes is rich's own colours.
    assert not UNSAFE.search(re.sub(r"\x1b\[[\d;]*m", "", capture.get()))
    assert "[red]x[/red]" in capture.get()
    words = "Größe 数学 नमस्ते 👩‍🔬\n\tindented"
    assert visible(words) == words


@given(st.text(st.characters(), max_size=200))
def test_visible_text_has_nothing_a_terminal_acts_on(text: str) -> None:
    assert not UNSAFE.search(visible(text))
    assert not UNSAFE.search(one_line(text))
    assert "\n" not in one_line(text)


def test_what_an_agent_sends_is_no_users(run: Path) -> None:
    asked = [{"role": "user", "content": "1+1?", "request": 0}, {"role": "assistant", "content": "2", "request": 0}]
    keep(run, 40, "t40", {"messages": asked})
    flags = {cells[1]: cells[-2] for cells in (line.split("\t") for line in output_of(run).splitlines())}
    assert (flags["t40"], flags["t3"]) == ("", "tool error, user")


REQUESTS = [
    {"request": 0, "prompt": 9, "kept": 0, "sampled": 4, "ended": "stop", "row": 0},
    {"request": 1, "prompt": 15, "kept": 13, "continues": 0, "sampled": 2, "ended": "stop", "row": 0},
    {"request": 2, "prompt": 16, "kept": 13, "continues": 0, "sampled": 3, "ended": "length", "row": 1},
    {"request": 3, "prompt": 20, "kept": 19, "continues": 2, "sampled": 1, "ended": "stop", "row": 1},
    {"request": 4, "prompt": 5, "kept": 0, "sampled": 2, "ended": "stop", "row": None, "quotes": True},
    {"request": 5, "prompt": 18, "kept": 17, "continues": 1},
]
TREE = """\
0: 9 tokens; 4 sampled (stop), row 1
   2: 16 tokens, 13 of them kept from 0; 3 sampled (length), row 2
   3: 20 tokens, 19 of them kept from 2; 1 sampled (stop), row 2
1: 15 tokens, 13 of them kept from 0; 2 sampled (stop), row 1
5: 18 tokens, 17 of them kept from 1; dropped
4: 5 tokens; 2 sampled (stop), not trained on (it quotes the task, under other instructions)
refused: 2 × 404 for /v1/completions: there is no such path here"""
REFUSALS = [{"times": 2, "status": 404, "path": "/v1/completions", "message": "there is no such path here"}]


def test_requests_of_an_agent_are_a_tree(run: Path) -> None:
    asked = {"role": "user", "content": "1+1?", "request": 0}
    called = {"role": "assistant", "content": "", "request": 0, "tool_calls": [{"function": {"name": "add"}}]}
    keep(run, 40, "t40", {"messages": [asked, called], "requests": REQUESTS, "refusals": REFUSALS})
    shown = output_of(run, "--show", "t40")
    assert TREE in shown
    assert 'assistant  request 0\n{"function": {"name": "add"}}' in shown
    record = read_line(run / "rollouts" / "40.jsonl", 0) or {}
    assert episode_view(record, None, [])["requests"] == TREE.splitlines()


SCORED: dict[str, tuple[Any, list[str]]] = {
    "an answer": ({"answer": "two", "reward": None, "failure": ""}, ["the agent's answer: two"]),
    "a reward": ({"answer": "", "reward": 0.5, "failure": ""}, ["the agent's reward: 0.5", "the agent's answer: "]),
    "a reward of its tests": (
        {"answer": "", "reward": 0.5, "failure": "", "parts": {"container": 0.5}},
        ["the tests' reward: 0.5", "the agent's answer: "],
    ),
    "a failure": ({"answer": "", "reward": 0.0, "failure": "agent.py raised"}, ["the agent failed: agent.py raised"]),
    "no mapping": ("no mapping", []),
}


@pytest.mark.parametrize("given", SCORED)
def test_what_an_agent_gave_to_be_scored_is_shown(run: Path, given: str) -> None:
    scored, lines = SCORED[given]
    parts = scored.pop("parts", {}) if isinstance(scored, dict) else {}
    keep(run, 40, "t40", {"scored": scored}, reward_parts=parts)
    output = output_of(run, "--show", "t40").splitlines()
    shown = [line for line in output if line.startswith(("the agent", "the tests"))]
    assert shown == lines
    record = read_line(run / "rollouts" / "40.jsonl", 0) or {}
    assert [f"{name} {text}" for name, text in episode_view(record, None, [])["scored"]] == lines


def test_the_table_fits_a_terminal_and_flags_what_is_special(run: Path) -> None:
    lines = [line.split("\t") for line in output_of(run).splitlines()]
    flags = {cells[1]: cells[-2] for cells in lines[1:]}
    assert flags == {"e10-0": "eval", "t5": "skipped", "t3": "tool error, user", "t4": "", "t1": "", "t2": ""}
    assert {cells[1]: cells[-1] for cells in lines[1:]} == dict.fromkeys(flags, "4") | {"t5": ""}
    console = Console(width=100, force_terminal=True, color_system=None)
    keep(run, 40, "t40", prompt="very long " * 50)
    with console.capture() as capture:
        console.print(view.listing(page(indexed(run), Query(), 0, 99).rows))
    shown = capture.get().splitlines()
    assert len(shown) == 9
    assert max(map(len, shown)) <= 100
    assert shown[0].split() == list(view.COLUMNS)
    assert re.search(r"10  t3 +What is 2\+2\? +0.75 +3 +7  stop +tool error, user", capture.get())
