"""`spo values split`: divides a data set into Parquet files, so that several machines can work on it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.config import DataConfig
from common.config.data import DataSource, matching_files
from common.errors import UserError
from common.files import replacing
from sampler.prompts.row import BadRow, Rows
from sampler.prompts.rows import ArrowRows, open_source

ARROW_ERRORS = (pa.ArrowException, OverflowError)


def split_data(
    data: str, split: str | None, parts: int, folder: Path, subset: str | None = None
) -> tuple[list[Path], list[str]]:
    """Write `subset_0.parquet` and so on, in the order of the rows; their sizes differ by at most one row.

    Args:
        data: a file, a Hugging Face dataset, or the name of a known set; `split` of it is read.
        subset: the dataset's configuration, such as `en`; None means the known set's, or the dataset's default.

    Returns:
        The files, and a line about each row that cannot be read.

    Raises:
        UserError: the data cannot be read, has mixed types in a column, or has fewer rows than there are parts; the
            folder cannot be written, holds other subsets, or a subset would replace the data.
    """
    (source,) = DataConfig(train=[DataSource(path=data, split=split, config=subset)]).sources("train")
    table, problems = _table(open_source(source), data)
    rows = table.num_rows
    if rows < parts:
        raise UserError(
            f"{data} has {rows} rows, but --parts is {parts}: some subsets would be empty; give {rows} or fewer"
        )
    width = len(str(parts - 1))
    paths = [folder / f"subset_{number:0{width}d}.parquet" for number in range(parts)]
    read = {Path(file).resolve() for file in matching_files(data)}
    if read & {path.resolve() for path in paths}:
        raise UserError(f"{data} is one of the files that would be written; choose another --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = sorted(set(folder.glob("subset_*.parquet")) - set(paths))
        if others:
            raise UserError(
                f"{folder} holds other subsets ({others[0].name}, …); remove them, or choose another --output"
            )
        for number, path in enumerate(paths):
            first, end = number * rows // parts, (number + 1) * rows // parts
            with replacing(path) as file:
                pq.write_table(table.slice(first, end - first), file)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from None
    except pa.ArrowException as error:
        raise UserError(f"{data} cannot be written as Parquet: {error}") from None
    return paths, problems


def _table(rows: Rows, data: str) -> tuple[pa.Table, list[str]]:
    if isinstance(rows, ArrowRows):
        return rows.table, []
    read: list[tuple[int, dict[str, Any]]] = []
    problems = []
    for i, row in enumerate(rows):
        if isinstance(row, BadRow):
            problems.append(f"{rows.where(i)}: {row}")
        else:
            read.append((i, row))
    if not read:
        raise UserError(f"no rows in {data}: {problems[0] if problems else 'it is empty'}")
    names = dict.fromkeys(name for _, row in read for name in row)
    places = [i for i, _ in read]
    return pa.table({name: _column(name, [row.get(name) for _, row in read], places, rows) for name in names}), problems


def _column(name: str, values: list[Any], places: list[int], rows: Rows) -> pa.Array:
    """A column as an array of one type; raises `UserError`, which names the first row whose type differs."""
    try:
        return pa.array(values)
    except ARROW_ERRORS as error:
        # If a prefix fails, all longer ones fail too, so the first bad row can be found by bisection.
        first = bisect_left(range(1, len(values) + 1), True, key=lambda end: _fails(values[:end]))
        raise UserError(
            f"{rows.where(places[first])}: column {name!r} has another type than in the rows before it, "
            f"{values[first]!r:.60}, but Parquet has one type for a column; make them alike ({error})"
        ) from None


def _fails(values: list[Any]) -> bool:
    try:
        pa.array(values)
    except ARROW_ERRORS:
        return True
    return False


def describe(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        yield f"{path}: {pq.read_metadata(path).num_rows:,} rows"
