"""Prompts of files and datasets: what is read of each row, and which rows are skipped, named by file and line."""

from __future__ import annotations

import datetime
import gzip
import io
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import structlog
from structlog.testing import capture_logs

from common.config import AlgorithmConfig, DataConfig
from common.errors import UserError
from common.streams.broker import Broker
from sampler import cli
from sampler.prompts.prompt_set import PromptSet, load_data, load_prompts, too_few
from tests.support.sampler import make_config, sent
from tests.support.sampler import write_rows as jsonl

LOG = structlog.get_logger()
GOOD = {"prompt": "1+1", "answer": 2, "level": {"a": [1, None, 0.5]}}
CHAT = [{"role": "user", "content": "hello"}]


def load(train: Any, **data: Any) -> tuple[PromptSet, dict[str, str], dict[str, Any]]:
    """The prompts, the reason of each row that was skipped, and what was logged besides, by event."""
    config = DataConfig.model_validate({"train": str(train) if isinstance(train, Path) else train, **data})
    with capture_logs() as logs:
        prompts = load_prompts(config.sources("train"), LOG)
    skipped = {entry["row"]: entry["reason"] for entry in logs if entry["event"] == "row skipped"}
    return prompts, skipped, {entry["event"]: entry for entry in logs}


def parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def asked(prompts: PromptSet) -> list[tuple[Any, Any]]:
    return [(prompts[i].prompt, prompts[i].answer) for i in range(len(prompts))]


def chat(*messages: Any) -> dict[str, Any]:
    return {"prompt": list(messages), "answer": 1}


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": arguments}}


def user(content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "user", "content": content} | keys


def test_jsonl_rows_keep_their_other_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"prompt": "2+2=", "answer": 4, "level": 1}\r\n\n{"prompt": "é?", "answer": "ü"}'.encode())
    prompts, _, _ = load(path)
    assert asked(prompts) == [("2+2=", 4), ("é?", "ü")]
    assert prompts[0].row == {"level": 1}
    assert prompts.ids == load(path)[0].ids, "ids do not change from one start to the next"


def test_text_that_is_not_utf8_is_named_a_bom_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "1", "answer": 1}\n{"prompt": "caf\xe9", "answer": 2}\n')
    prompts, skipped, _ = load(path)
    assert asked(prompts) == [("1", 1)]
    assert skipped == {f"{path} line 2": "not UTF-8 text (byte 0xe9); save the file as UTF-8"}


def test_a_batch_of_too_many_prompts_is_said(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, prompts=5)
    for name, stand_in in {"connect": broker, "record_versions": None, "run_once": True}.items():
        monkeypatch.setattr(cli, name, lambda *_, returned=stand_in, **__: returned)
    with capture_logs() as lines:
        cli.serve(config, LOG)
    warned = [line["event"] for line in lines if line["log_level"] == "warning"]
    assert "needs 8 prompts, but data.train has 5" in " ".join(warned)
    grouped = config.model_copy(update={"algorithm": AlgorithmConfig(method="grpo", group_size=2)})
    assert too_few(grouped, load(tmp_path / "train.jsonl")[0]) is None


def test_columns_are_configurable_and_may_be_nested(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "a.jsonl",
        {"q": CHAT, "reward_model": {"ground_truth": "42"}, "uid": 7},
        {"q": CHAT, "reward_model": {"ground_truth": "43"}, "uid": "b"},
        {"q": CHAT, "reward_model": {"ground_truth": "43"}, "uid": 7},
        {"q": CHAT, "reward_model": {"ground_truth": "43"}},
        {"q": [{"role": "user"}], "reward_model": {"ground_truth": "43"}, "uid": 9},
        '{"q": "p", "reward_model": {"ground_truth": "1"}, "uid": "\\udc80"}',
    )
    prompts, skipped, _ = load(path, prompt_column="q", answer_column="reward_model.ground_truth", id_column="uid")
    assert (prompts.ids, asked(prompts)) == (["7", "b"], [(CHAT, "42"), (CHAT, "43")])
    assert "column 'uid' holds half a surrogate pair" in skipped[f"{path} line 6"]


ASKED = user("So, how warm?")
CALLING = {"role": "assistant", "content": None, "tool_calls": [call(town=0)]}
TOLD = {"role": "tool", "name": "weather", "content": "0 degrees"}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ([user([{"type": "text", "text": "What is 0+0?"}])], [user("What is 0+0?")]),
        ([user([{"type": "text", "text": "a "}, {"type": "input_text", "text": "b"}, "c"])], [user("a bc")]),
        ([user([{"type": "text", "text": "a", "image_url": None}], name=None)], [user("a")]),
        ([{"role": "system", "content": ""}, user("a")], None),
        ([user("a"), {"role": "tool", "content": ""}], None),
        ([user("Weather?"), CALLING, TOLD, ASKED], None),
        ([user("Weather?"), {"role": "assistant", "tool_calls": [call(town=0)]}, TOLD, ASKED],
         [user("Weather?"), CALLING, TOLD, ASKED]),
        ([user("a", tool_calls=None), CALLING | {"tool_calls": [call(town=0, day=None)]}], [user("a"), CALLING]),
    ],
    ids=["part", "parts", "nulls in a part", "empty system", "empty result", "calls", "no content", "nulls"],
)  # fmt: skip
def test_messages_are_read_in_the_shapes_in_which_people_have_them(tmp_path: Path, given: Any, read: Any) -> None:
    prompts, skipped, _ = load(jsonl(tmp_path / "a.jsonl", chat(*given)))
    assert (asked(prompts), skipped) == ([(read or given, 1)], {})


def test_keys_that_arrow_fills_with_null_are_dropped(tmp_path: Path) -> None:
    rows = [[user("a"), CALLING | {"content": "Well"}, TOLD], [user("b")], [{"role": "system", "content": ""}, ASKED]]
    prompts, skipped, _ = load(parquet(tmp_path / "a.parquet", prompt=rows, answer=["1", "2", "3"]))
    assert ([prompt for prompt, _ in asked(prompts)], skipped) == (rows, {})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (chat(user([{"type": "image", "image": "a.png"}, {"type": "text", "text": "a"}])), "part of type 'image'"),
        (chat(user("a"), {"role": "assistant", "content": None}), "message 2 (assistant) has no content"),
        (chat({"from": "human", "value": "a"}), "keys are from, value, and a message needs role and content"),
        (chat(user([{"type": "text", "text": None}])), "message 1 has a part of type 'text' without text"),
        (chat(user("a"), CALLING | {"tool_calls": json.dumps([call(town=0)])}), "has tool_calls of type str"),
        (chat(user({"text": "a"})), "message 1 (user) has content of type dict"),
        (chat(user("a"), user("  ")), "message 2 (user) is empty"),
        (chat({"role": "system", "content": ""}), "all messages are empty"),
        (chat("a"), "message 1 is a str"),
        ({"answer": "2"}, "no prompt in column 'prompt'"),
        ({"prompt": "three"}, "no answer in column 'answer'"),
        ({"prompt": "1+1", "answer": "again"}, "the same prompt as an earlier row"),
        ("{broken", "not JSON"),
        ("[1, 2]", "not a JSON object"),
        *(({"prompt": prompt, "answer": 1}, "neither text nor chat") for prompt in (5, {"text": "x"})),
        ({"prompt": {"messages": [user("a")]}, "answer": 1}, "but a value of type dict (messages)"),
        ('{"prompt": "p", "prompt": "q", "answer": 1}', "a key occurs twice ('prompt')"),
        ('{"prompt": "p", "answer": 18446744073709551616}', "column 'answer' holds an integer of more than 64 bits"),
        ('{"prompt": "p", "answer": 1, "seed": [{"n": -9223372036854775809}]}', "column 'seed' holds an integer"),
        ('{"prompt": "half \\ud800", "answer": 1}', "column 'prompt' holds half a surrogate pair"),
        ('{"prompt": "p", "answer": 1, "\\ud800": 1}', "holds half"),
        ('{"prompt": "p", "answer": NaN}', "no answer in column 'answer'"),
        ('{"prompt": "p", "answer": Infinity}', "column 'answer' holds a number that is not finite"),
        ('{"prompt": [{"role": "user", "content": [NaN]}], "answer": 1}', "column 'prompt' holds a number"),
        *(('{"prompt": "p", "answer": 1, "x": ' + "[" * n + "]" * n + "}", "nested too deep") for n in (100_000, 100)),
        (GOOD | {"prompt": "p", "x": "x" * (9 << 20)}, "too large"),
        (GOOD | {"prompt": "p", "x": [0] * 200_000}, "more than 130,816 values"),
        ('{"prompt": "p", "answer": 1' + "0" * 5000 + "}", "not JSON"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_row_of_no_use_is_skipped_with_its_reason(tmp_path: Path, line: Any, reason: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", GOOD, line, "", GOOD | {"prompt": "last", "answer": 0})
    prompts, skipped, events = load(path)
    assert list(skipped) == [f"{path} line 2"]
    assert reason in skipped[f"{path} line 2"]
    assert [(task.prompt, task.answer) for task in sent(prompts)] == [("1+1", 2), ("last", 0)]
    assert (events["rows skipped"]["count"], events["rows skipped"]["of"]) == (1, 3)


def test_answers_of_different_types_are_named(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "answer": answer} for i, answer in enumerate((1, "2", [3], 4, {"a": 5}))]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    prompts, _, events = load(path)
    assert len(prompts) == 5
    assert events["answers of different types"]["types"] == {
        "number": f"2, first in {path} line 1",
        "text": f"1, first in {path} line 2",
        "list": f"1, first in {path} line 3",
        "mapping": f"1, first in {path} line 5",
    }
    assert "answers of different types" not in load(jsonl(path, *rows[:2]))[2], "numbers and text are alike"


def test_parquet_gives_what_can_be_sent(tmp_path: Path) -> None:
    when, day = datetime.datetime(2024, 5, 6, 7, 8, 9), datetime.date(2024, 5, 6)
    path = parquet(
        tmp_path / "a.parquet",
        prompt=["p", None, "q"],
        answer=pa.array([Decimal("1.50"), Decimal("2"), None]),
        struct=pa.array([{"at": when, "price": Decimal("1.25"), "days": [{"d": day}]}] * 3),
        list=pa.array([[when, None]] * 3),
        map=pa.array([[("k", Decimal("0.5"))]] * 3, pa.map_(pa.string(), pa.decimal128(3, 1))),
        word=pa.array([when] * 3).dictionary_encode(),
        empty=pa.array([None] * 3, pa.struct([("at", pa.timestamp("us"))])),
        far=pa.array([2**62] * 3, pa.timestamp("us")),
        span=pa.array([datetime.timedelta(seconds=1)] * 3),
    )
    prompts, skipped, _ = load(path)
    assert list(skipped) == [f"{path} row 2", f"{path} row 3"]
    (task,) = sent(prompts)
    stamp = "2024-05-06 07:08:09.000000"
    assert (task.prompt, task.answer) == ("p", "1.50")
    task.row.pop("far")
    assert task.row == {
        "struct": {"at": stamp, "price": "1.25", "days": [{"d": "2024-05-06"}]}, "list": [stamp, None],
        "map": [["k", "0.5"]], "word": stamp, "empty": None, "span": "1000000",
    }  # fmt: skip


def test_unreadable_parquet_rows_are_skipped(tmp_path: Path) -> None:
    offsets, text = pa.array([0, 1, 4, 5, 6], pa.int32()), pa.py_buffer(b"a\xed\xa0\x80cd")
    notes = pa.Array.from_buffers(pa.string(), 4, [None, offsets.buffers()[1], text])
    answers = pa.array([1.0, 2.0, math.nan, 0.0], pa.float64())
    path = parquet(tmp_path / "a.parquet", prompt=list("pqrs"), answer=answers, notes=notes)
    prompts, skipped, _ = load(path)
    assert [task.answer for task in sent(prompts)] == [1.0, 0.0]
    assert "column 'notes' cannot be read" in skipped[f"{path} row 2"]
    assert "no answer" in skipped[f"{path} row 3"]


def test_messages_with_bytes_are_skipped_unless_these_are_left_out(tmp_path: Path) -> None:
    image = [{"role": "user", "content": "a", "image": b"x"}]
    part = [{"role": "user", "content": [{"type": "text", "text": "a", "image": b"x"}]}]
    for name, messages in {"image": image, "part": part}.items():
        jsonl(tmp_path / f"{name}.jsonl", GOOD)
        prompts, skipped, _ = load(
            [
                str(tmp_path / f"{name}.jsonl"),
                str(parquet(tmp_path / f"{name}.parquet", prompt=[messages], answer=["1"])),
            ]
        )
        if name == "part":
            assert (prompts[1].prompt, skipped) == ([user("a")], {})
        else:
            (reason,) = skipped.values()
            assert "neither text nor chat messages, but messages with values that are not text" in reason


def test_answers_that_are_bytes_are_named(tmp_path: Path) -> None:
    _, _, logged = load(parquet(tmp_path / "a.parquet", prompt=["p"], answer=[b"42"]))
    assert any("b'42' in column 'answer' is bytes" in event for event in logged)


def test_repeated_rows_do_not_differ_in_a_nan(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", prompt=["p", "p"], answer=["1", "1"], score=[math.nan, math.nan])
    assert not any("differs" in event for event in load(path)[2])


def test_a_row_that_changes_while_in_use_ends_the_run(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "p", "answer": 100})
    prompts, _, _ = load(path)
    with path.open("r+") as file:
        file.write('{"prompt": "p", "answer": NaN}\n')
    with pytest.raises(UserError, match=r"a.jsonl line 1 can no longer be used \(no answer in column 'answer'\)"):
        prompts[0]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"prompt": "q", "answer": 100}, "another row is in its place"),
        ("", "not JSON"),  # a mapped file that is shortened would kill the process
    ],
)
def test_a_file_that_is_replaced_while_in_use_gives_no_other_prompts(tmp_path: Path, changed: Any, reason: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "p", "answer": 100})
    prompts, _, _ = load(path)
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(UserError, match=rf"a.jsonl line 1 can no longer be used \({reason}"):
        prompts[0]


def test_a_file_that_is_emptied_while_in_use_is_named_whoever_reads_it(tmp_path: Path) -> None:
    prompts, _, _ = load(jsonl(tmp_path / "a.jsonl", GOOD))
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(UserError, match="a.jsonl line 1 can no longer be used"):
        list(prompts.prompts())


def with_two_columns() -> bytes:
    buffer = io.BytesIO()
    columns = [pa.array([text]) for text in ("p", "q", "1")]
    pq.write_table(pa.Table.from_arrays(columns, names=["prompt", "prompt", "answer"]), buffer)
    return buffer.getvalue()


FILES: dict[str, bytes] = {
    "data.csv": b"a,b\n",
    "broken.parquet": b"not parquet at all",
    "packed.jsonl": gzip.compress(b'{"prompt": "p", "answer": 1}', mtime=0),
    "large.parquet": b"version https://git-lfs.github.com/spec/v1\n",
    "indented.jsonl": b'[\n {\n  "prompt": "p", "answer": 1\n }\n]\n',
    "list.jsonl": b'[{"prompt": "p", "answer": 1}]',
    "twice.parquet": with_two_columns(),
    "broken.jsonl": b"\xff\xfe\x00",
    "empty.jsonl": b"",
    "a.jsonl": b'{"prompt": "1+1", "answer": 2}\n',
    "nested.jsonl": b'{"prompt": "1+1", "reward_model": {"style": "rule", "ground_truth": "2"}}\n',
    "maths.jsonl": b'{"question": "1+1", "truth": 2, "level": 1}\n{"question": "1+2", "truth": 3}\n',
    "notes.txt": b"",
}
NO_COLUMN = "all 2 rows .*line 1: no .* no column {}; .*question, truth, level"
# Data, other keys of the section, and the refusal.
REFUSALS: list[tuple[Any, dict[str, str], str]] = [
    ("gone.jsonl", {}, "does not exist"),
    ("data.csv", {}, "of an unknown kind"),
    ("broken.parquet", {}, "cannot be read"),
    ("packed.jsonl", {}, "is compressed by gzip; unpack it"),
    ("large.parquet", {}, "is a Git LFS pointer.*git lfs pull"),
    ("indented.jsonl", {}, "line 1: not JSON .*like one JSON list: write each"),
    ("list.jsonl", {}, "line 1: not a JSON object; .*like one JSON list"),
    ("twice.parquet", {}, "several columns 'prompt'; rename or drop all but one"),
    ("broken.jsonl", {}, "unusable .*line 1: not UTF-8 text"),
    ("empty.jsonl", {}, r"no prompts in .*empty\.jsonl: it is empty"),
    ("maths.jsonl", {"prompt_column": "question", "answer_column": "solution"}, NO_COLUMN.format("'solution'")),
    ("maths.jsonl", {"prompt_column": "problem"}, NO_COLUMN.format("'problem', 'answer'")),
    ("maths.jsonl", {"prompt_column": "question", "answer_column": "extra.truth"}, NO_COLUMN.format("'extra.truth'")),
    ("nested.jsonl", {}, r"there are prompt, reward_model\.style, reward_model\.ground_truth; set data\.a"),
    # Several files of one source, and several sources.
    ("gone/*.jsonl", {}, "no file matches 'gone/.*'"),
    (["a.jsonl", "gone-*.jsonl"], {}, "no file matches 'gone-.*'"),
    (["a.jsonl", "b.jsonl"], {}, "data file b.jsonl does not exist; did you mean a.jsonl"),
    (["a.jsonl", "gsm8k"], {}, "data gsm8k is not .*only such files are read together; .* list of sources"),
    ("*", {}, "only such files are read together"),
    # What `stat` refuses, such as a folder without permission.
    (f"{'x' * 300}.jsonl", {}, "data file x+.jsonl cannot be read: .*File name too long"),
    ("x" * 300, {}, "data file x+ cannot be read: .*File name too long"),
    (f"harbor:{'x' * 300}", {}, "data harbor:x+: the folder cannot be read: .*File name too long"),
    ("harbor:~no-such-account/tasks", {}, "the folder cannot be read: Could not determine home"),
    ([{"path": "a.jsonl"}, {"path": "empty.jsonl", "name": "none"}], {}, r"train\[none\]: .*\.jsonl: it is empty"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("given", "keys", "refusal"), REFUSALS)
def test_data_that_cannot_be_read_is_one_line(folder: Path, given: Any, keys: dict[str, str], refusal: str) -> None:
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=refusal):
        load(given, **keys)


def test_sources_stand_one_after_the_other(tmp_path: Path) -> None:
    maths = jsonl(tmp_path / "maths.jsonl", {"q": "1+1", "a": 2, "level": 3}, {"q": "2+2", "a": 4})
    chat = jsonl(tmp_path / "chat.jsonl", {"prompt": "1+1", "answer": "two", "uid": 9})
    first = {"path": str(maths), "prompt_column": "q", "answer_column": "a"}
    prompts, _, _ = load([first, {"path": str(chat), "name": "talk", "id_column": "uid"}])
    assert [prompts.source(i) for i in range(3)] == ["maths", "maths", "talk"]
    assert asked(prompts) == [("1+1", 2), ("2+2", 4), ("1+1", "two")]
    assert prompts[0].row == {"level": 3}
    assert list(prompts.prompts()) == ["1+1", "2+2", "1+1"]
    alone, _, _ = load([first])
    assert [f"maths/{prompt_id}" for prompt_id in alone.ids] == prompts.ids[:2], "one source has no prefix"
    assert prompts.ids[2] == "talk/9"
    with pytest.raises(IndexError):
        prompts[3]


@pytest.mark.parametrize(("ids", "shared"), [({}, [(3, 4)]), ({"id_column": "uid"}, [(1, 3)])])
def test_held_out_prompts_that_are_trained_on_are_counted(tmp_path: Path, ids: dict[str, str], shared: list) -> None:
    def source(name: str, *prompts: str, **columns: str) -> dict[str, str]:
        rows = [{"prompt": prompt, "answer": 1, "uid": i, "number": i} for i, prompt in enumerate(prompts)]
        return {"path": str(jsonl(tmp_path / name, *rows)), **columns}

    train = source("a.jsonl", "1+1", "1+2", **ids)
    # Ids of different columns are not the same prompt, nor are those of files that each number their rows.
    others = [source("b.jsonl", "5+5", id_column="number"), source("c.jsonl", "7+7", **ids)]
    others.append(source("d.jsonl", "1+1", **ids))
    heldout = others if ids else [source("b.jsonl", "1+1", "5+5"), train]
    trained = [train, source("e.jsonl", "8+8", **ids)]
    with capture_logs() as logs:
        load_data(DataConfig.model_validate({"train": trained, "heldout": heldout}), LOG)
    entries = [entry for entry in logs if entry["event"] == "held-out prompts are also trained on"]
    assert [(entry["prompts"], entry["of"]) for entry in entries] == shared


SEVERAL = ["part-*.*", "**/part-*", ["part-a.jsonl", "part-b.parquet"], ["part-a.*", "part-b.*"]]


@pytest.mark.parametrize("given", SEVERAL)
def test_the_rows_of_several_files_are_those_of_one_source(folder: Path, given: Any) -> None:
    jsonl(Path("part-a.jsonl"), GOOD, {"prompt": "2"}, GOOD | {"prompt": "3"})
    parquet(Path("part-b.parquet"), prompt=["1+1", "4"], answer=["2", "5"])
    prompts, skipped, _ = load(given)
    assert asked(prompts) == [("1+1", 2), ("3", 2), ("4", "5")]
    first, second, third = (prompts.where(i) for i in range(3))
    assert (first, second, third) == ("part-a.jsonl line 1", "part-a.jsonl line 3", "part-b.parquet row 2")
    reasons = ["no answer in column 'answer'", "the same prompt as an earlier row"]
    assert skipped == dict(zip(["part-a.jsonl line 2", "part-b.parquet row 1"], reasons, strict=True))


def test_data_without_answers_is_read_where_none_are_asked_for(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "Write a line."}, {"prompt": "Write two.", "answer": None})
    prompts, skipped, _ = load(path, answer_column=None)
    assert (asked(prompts), skipped) == ([("Write a line.", None), ("Write two.", None)], {})
    assert [task.answer for task in sent(prompts)] == [None, None]


def test_what_was_probably_not_meant_is_logged_at_the_start(tmp_path: Path) -> None:
    _, _, logged = load(jsonl(tmp_path / "a.jsonl", chat(user("a"), {"role": "assistant", "content": "So"})))
    (line,) = [event for event in logged if "continue_final_message" in event]
    assert line.startswith(f"data.train: 1 rows (first: {tmp_path / 'a.jsonl'} line 1)")


def test_a_file_whose_name_looks_like_a_pattern_is_read(tmp_path: Path) -> None:
    assert len(load(jsonl(tmp_path / "a[1].jsonl", GOOD))[0]) == 1
