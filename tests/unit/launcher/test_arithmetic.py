"""The problem set: right answers, no leak from held-out to train, the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from launcher.tasks import arithmetic
from launcher.tasks.arithmetic import value_of
from launcher.tasks.task import HELDOUT_SIZE, TRAIN_SIZE, write

split = arithmetic.TASK.split


@given(st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=3), min_size=1, max_size=4), st.data())
def test_products_bind_before_sums(terms: list[list[int]], data: st.DataObject) -> None:
    signs = [data.draw(st.sampled_from("+-")) for _ in terms[1:]]
    expression = "*".join(map(str, terms[0]))
    for sign, factors in zip(signs, terms[1:], strict=True):
        expression += sign + "*".join(map(str, factors))
    assert value_of(expression) == eval(expression)


def test_answers_are_right_and_every_level_is_there() -> None:
    train, heldout = split(seed=3, train=600, heldout=60)
    assert (len(train), len(heldout)) == (600, 60)
    assert all(
        str(eval(row.prompt.removeprefix("What is ").removesuffix("?"))) == row.answer for row in train + heldout
    )
    assert {row.columns["level"] for row in heldout} == set(arithmetic.LEVELS)


def test_train_and_heldout_share_no_prompt() -> None:
    train, heldout = split(seed=0)
    prompts = [row.prompt for row in train + heldout]
    assert len(prompts) == len(set(prompts)) == TRAIN_SIZE + HELDOUT_SIZE


def test_the_seed_decides_the_problems() -> None:
    assert split(1, 50, 5) == split(1, 50, 5)
    assert split(1, 50, 5) != split(2, 50, 5)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_files_hold_the_rows(tmp_path: Path, name: str) -> None:
    rows, _ = split(0, 20, 1)
    write(rows, tmp_path / "new" / name)
    if name.endswith("jsonl"):
        found = [json.loads(line) for line in (tmp_path / "new" / name).read_text().splitlines()]
    else:
        import pyarrow.parquet

        found = pyarrow.parquet.read_table(tmp_path / "new" / name).to_pylist()
    assert found == [{"prompt": row.prompt, "answer": row.answer, "level": row.columns["level"]} for row in rows]


def test_other_formats_are_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not as rows.csv"):
        write([], tmp_path / "rows.csv")
