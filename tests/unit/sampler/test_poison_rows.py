"""Rows that no message can carry are set aside with their reason; what is left can be sent, each and every one."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import structlog
from structlog.testing import capture_logs

from common.config import DataConfig
from common.errors import UserError
from common.messages import Task
from sampler.prompts import PromptSet, load_prompts

GOOD = {"prompt": "1+1", "answer": 2, "level": {"a": [1, None, 0.5]}}


def load(path: Path, **data: Any) -> tuple[PromptSet, dict[str, str]]:
    """The prompts, and the reason of each row that was set aside."""
    with capture_logs() as logs:
        prompts = load_prompts(DataConfig(train=str(path), **data).sources("train"), structlog.get_logger())
    return prompts, {entry["row"]: entry["reason"] for entry in logs if entry["event"] == "row set aside"}


def sent(prompts: PromptSet) -> list[Task]:
    """Each prompt's task, as a generator reads it."""
    tasks = []
    for i, prompt_id in enumerate(prompts.ids):
        prompt = prompts[i]
        task = Task(task_id="t", prompt_id=prompt_id, prompt=prompt.prompt, answer=prompt.answer, row=prompt.row)
        tasks.append(Task.unpack(task.pack()))
    return tasks


def nested(depth: int) -> str:
    """A row with a list as deep as this."""
    return '{"prompt": "p", "answer": 1, "x": ' + "[" * depth + "]" * depth + "}"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "p", "answer": 18446744073709551616}', "column 'answer' holds an integer of more than 64 bits"),
        ('{"prompt": "p", "answer": 1, "seed": [{"n": -9223372036854775809}]}', "column 'seed' holds an integer"),
        ('{"prompt": "half \\ud800", "answer": 1}', "column 'prompt' holds half a surrogate pair"),
        ('{"prompt": "p", "answer": "\\udfff"}', "column 'answer' holds half"),
        ('{"prompt": "p", "answer": 1, "notes": {"\\ud800": 1}}', "column 'notes' holds half"),
        ('{"prompt": "p", "answer": 1, "\\ud800": 1}', "holds half"),
        ('{"prompt": [{"role": "user", "content": "\\ud83d"}], "answer": 1}', "column 'prompt' holds half"),
        ('{"prompt": "p", "answer": NaN}', "no answer in column 'answer'"),
        ('{"prompt": "p", "answer": Infinity}', "column 'answer' holds a number that is not finite"),
        ('{"prompt": "p", "answer": [1, {"x": NaN}]}', "column 'answer' holds a number that is not finite"),
        ('{"prompt": [{"role": "user", "content": [NaN]}], "answer": 1}', "column 'prompt' holds a number"),
        (nested(100_000), "nested too deep"),
        (nested(700), "nested too deep"),
        (nested(100), "nested too deep"),
        (json.dumps(GOOD | {"prompt": "p", "x": "x" * (9 << 20)}), "too large"),
        (json.dumps(GOOD | {"prompt": "p", "x": [0] * 200_000}), "more than 130,816 values"),
        ('{"prompt": "p", "answer": 1' + "0" * 5000 + "}", "not JSON"),
    ],
    ids=lambda value: value[:60],
)  # fmt: skip
def test_a_line_that_cannot_be_sent_is_set_aside_with_its_reason(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n{json.dumps(GOOD | {'prompt': 'last'})}\n")
    prompts, set_aside = load(path)
    assert list(set_aside) == [f"{path} line 2"]
    assert reason in set_aside[f"{path} line 2"]
    assert [task.prompt for task in sent(prompts)] == ["1+1", "last"]


def test_a_lone_surrogate_in_an_id_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "p", "answer": 1, "id": "\\udc80"}\n{"prompt": "q", "answer": 1, "id": "b"}\n')
    prompts, set_aside = load(path, id_column="id")
    assert prompts.ids == ["b"]
    assert "column 'id' holds half a surrogate pair" in set_aside[f"{path} line 1"]


def test_what_a_message_has_no_form_for_is_text_at_any_depth(tmp_path: Path) -> None:
    when, day = datetime.datetime(2024, 5, 6, 7, 8, 9), datetime.date(2024, 5, 6)
    columns = {
        "prompt": ["p"],
        "answer": [1],
        "struct": pa.array([{"at": when, "price": Decimal("1.25"), "days": [{"d": day}]}]),
        "list": pa.array([[when, None]]),
        "map": pa.array([[("k", Decimal("0.5"))]], pa.map_(pa.string(), pa.decimal128(3, 1))),
        "word": pa.array([when]).dictionary_encode(),
        "empty": pa.array([None], pa.struct([("at", pa.timestamp("us"))])),
        "far": pa.array([2**62], pa.timestamp("us")),
        "span": pa.array([datetime.timedelta(seconds=1)]),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    prompts, set_aside = load(tmp_path / "a.parquet")
    assert set_aside == {}
    (task,) = sent(prompts)
    stamp = "2024-05-06 07:08:09.000000"
    assert task.row["struct"] == {"at": stamp, "price": "1.25", "days": [{"d": "2024-05-06"}]}
    assert task.row["list"] == [stamp, None]
    assert task.row["map"] == [["k", "0.5"]]
    assert task.row["word"] == stamp
    assert task.row["empty"] is None
    assert task.row["span"] == "1000000"


def test_text_that_is_not_utf8_in_a_parquet_file_is_a_bad_row_among_good_ones(tmp_path: Path) -> None:
    offsets, text = pa.array([0, 1, 4, 5], pa.int32()), pa.py_buffer(b"a\xed\xa0\x80c")
    notes = pa.Array.from_buffers(pa.string(), 3, [None, offsets.buffers()[1], text])
    pq.write_table(pa.table({"prompt": ["p", "q", "r"], "answer": [1, 2, 3], "notes": notes}), tmp_path / "a.parquet")
    prompts, set_aside = load(tmp_path / "a.parquet")
    assert [task.answer for task in sent(prompts)] == [1, 3]
    assert "column 'notes' cannot be read" in set_aside[f"{tmp_path / 'a.parquet'} row 2"]


def test_a_row_that_changes_after_it_was_checked_ends_the_run_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "p", "answer": 100}\n')
    prompts, _ = load(path)
    with path.open("r+") as file:
        file.write('{"prompt": "p", "answer": NaN}\n')
    with pytest.raises(UserError, match=r"a.jsonl line 1 can no longer be used \(no answer in column 'answer'\)"):
        prompts[0]
