"""Opens the rows of a data set, which are read on demand: JSONL, Parquet, a Hugging Face dataset, or another source."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.config.data import FILES, HARBOR, NOT_READ, Source, matching_files, misspelt_set
from common.errors import UserError, one_line
from common.files import near_file
from common.model import LFS
from sampler.prompts.gym_rows import PREFIX, GymRows
from sampler.prompts.harbor import HarborTasks
from sampler.prompts.row import BadRow, Rows

CHUNK = 4096
PIECE = 1 << 22  # bytes that are searched for line breaks at a time
BOM = codecs.BOM_UTF8  # Windows' editors begin files with it
# First bytes by which files with a misleading name are recognised.
BEGINNINGS = {
    b"\x1f\x8b": "is compressed by gzip; unpack it",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; unpack it",
    LFS: "is a Git LFS pointer, not the data; run `git lfs pull` in its folder",
}
ONE_LIST = "; the file begins like one JSON list: write each of its items on a line of its own"


class JsonLines(Rows):
    """A JSONL file, which stays open; blank lines are skipped.

    It is not mapped into memory: if a mapped file is shortened while it is in use, reading it kills the process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        self._bounds, self._lines = self._scan()

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, i: int) -> dict[str, Any]:
        try:
            line = self._read(self._bounds.item(2 * i), self._bounds.item(2 * i + 1))
            row = json.loads(line.decode(), object_pairs_hook=_mapping)
        except UnicodeDecodeError as error:
            text = f"not UTF-8 text (byte 0x{error.object[error.start]:02x}); save the file as UTF-8"
            raise BadRow(text, reason="not UTF-8 text") from None
        except ValueError as error:
            raise BadRow(f"not JSON ({error}){self._hint()}", reason="not JSON") from None
        except RecursionError:
            raise BadRow("not JSON that can be read (lists or objects nested too deep)") from None
        if not isinstance(row, dict):
            raise BadRow(f"not a JSON object{self._hint()}", reason="not a JSON object")
        return row

    def where(self, i: int) -> str:
        return f"{self._path} line {self._lines.item(i)}"

    def _hint(self) -> str:
        start = self._bounds.item(0)
        return ONE_LIST if self._read(start, start + 1) == b"[" else ""

    def _read(self, start: int, end: int) -> bytes:
        """These bytes; fewer if the file has become shorter. Raises `UserError` if the disk or the server fails."""
        data, file = b"", self._file.fileno()
        try:
            while len(data) < end - start and (piece := os.pread(file, end - start - len(data), start + len(data))):
                data += piece
        except OSError as error:
            raise UserError(f"data file {self._path} cannot be read: {error.strerror}") from None
        return data

    def _scan(self) -> tuple[np.ndarray, np.ndarray]:
        """Bounds of the rows in bytes, flat int64 [2N], and their line numbers, int64 [N]."""
        size, breaks = 0, [np.empty(0, np.int64)]
        while piece := self._file.read(PIECE):
            breaks.append(np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n")) + size)
            size += len(piece)
        ends = np.concatenate([*breaks, [size]])
        starts = np.concatenate([[len(BOM) if self._read(0, len(BOM)) == BOM else 0], ends[:-1] + 1])
        filled = [i for i in range(len(starts)) if self._read(starts.item(i), ends.item(i)).strip()]
        return np.stack([starts[filled], ends[filled]], axis=1).ravel(), np.array(filled, np.int64) + 1


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raises `BadRow` for a duplicate key, because it is ambiguous."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow(f"a key occurs twice ({twice[:100]!r})", reason="a key occurs twice")
    return values


class ArrowRows(Rows):
    """An Arrow table; row numbers start at 1."""

    def __init__(self, table: pa.Table, name: str) -> None:
        self._name = name
        self.table = _plain(table)
        self._columns = list(zip(self.table.column_names, self.table.columns, strict=True))

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = {}
        for name, column in self._columns:
            try:
                row[name] = column[i].as_py()
            except (ValueError, OverflowError, pa.ArrowException) as error:
                # Text that is not UTF-8, or a date that Python cannot represent.
                general = f"column {name!r} cannot be read"
                raise BadRow(f"{general} ({error})", reason=general) from None
        return row

    def __iter__(self) -> Iterator[dict[str, Any] | BadRow]:
        first = 0
        for batch in self.table.to_batches(max_chunksize=CHUNK):
            try:
                yield from batch.to_pylist()
            except (ValueError, OverflowError, pa.ArrowException):
                yield from map(self.row_or_problem, range(first, first + len(batch)))
            first += len(batch)

    def where(self, i: int) -> str:
        return f"{self._name} row {i + 1}"


class JoinedRows(Rows):
    """The rows of several files, one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, i: int) -> dict[str, Any]:
        part = bisect_right(self._starts, i) - 1
        return self._parts[part][i - self._starts[part]]

    def __iter__(self) -> Iterator[dict[str, Any] | BadRow]:
        return chain.from_iterable(self._parts)

    def where(self, i: int) -> str:
        part = bisect_right(self._starts, i) - 1
        return self._parts[part].where(i - self._starts[part])


def open_rows(
    path: str | Sequence[str], split: str, options: Mapping[str, Any] | None = None, config: str | None = None
) -> Rows:
    """Open `*.jsonl`, `*.parquet`, a Hugging Face dataset (name or folder), or a family of reasoning-gym.

    Args:
        path: one file or data set, a list of files, or a pattern that matches several.
        split: of a Hugging Face dataset.
        options: of a family of reasoning-gym.
        config: configuration of a Hugging Face dataset, `load_dataset`'s second argument.

    Raises:
        UserError: it does not exist, cannot be read, has no such split or configuration, or takes no options.
    """
    files = matching_files(path)
    if files == [path]:
        return _open(files[0], split, options, config)
    if others := [file for file in files if Path(file).suffix not in FILES]:
        raise UserError(
            f"data {others[0]} is not *.jsonl or *.parquet, and only such files are read together; give other data "
            "sets as a list of sources, [{path: …}, …]"
        )
    return JoinedRows([_open(file, split, options, config) for file in files])


def open_source(source: Source) -> Rows:
    """Open the data of a source; raises what `open_rows` raises."""
    return open_rows(source.path, source.split, source.options, source.config)


def _open(path: str, split: str, options: Mapping[str, Any] | None, config: str | None) -> Rows:
    if path.startswith(PREFIX):
        return GymRows(path, split, options or {})
    if path.startswith(HARBOR) and not options:
        return HarborTasks(path)
    if options:
        raise UserError(f"data {path} takes no options (given: {', '.join(options)}); they are for {PREFIX}FAMILY")
    file = Path(path)
    try:
        is_file = file.is_file()
        if file.suffix in FILES:
            if not is_file:
                raise UserError(f"data file {path} does not exist{near_file(file, FILES)}")
            _check_file(file)
            return JsonLines(file) if file.suffix == ".jsonl" else ArrowRows(pq.read_table(file), path)
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"data file {path} cannot be read: {one_line(getattr(error, 'strerror', None) or str(error))}"
        ) from None
    if is_file or file.suffix in NOT_READ:
        raise UserError(
            f"data file {path} is of an unknown kind; use *.jsonl, *.parquet, {PREFIX}FAMILY, or a Hugging Face dataset"
        )
    return _open_dataset(path, split, config)


def _check_file(file: Path) -> None:
    """Raise `UserError` for a file whose content does not match its name, or with duplicate column names."""
    with file.open("rb") as opened:
        beginning = opened.read(max(map(len, BEGINNINGS)))
    for start, what in BEGINNINGS.items():
        if beginning.startswith(start):
            raise UserError(f"data file {file} {what}")
    if file.suffix == ".parquet":
        names = pq.read_schema(file).names
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"data file {file} has several columns {twice!r}; rename or drop all but one")


def _open_dataset(path: str, split: str, config: str | None) -> ArrowRows:
    """Open a Hugging Face dataset: a folder, or a name on the hub; raises `UserError`."""
    if near := misspelt_set(path):
        raise UserError(f"data {path!r} is not a file, a folder or a known set; did you mean {near}?")
    # Slow to import, and most runs read files.
    import datasets

    datasets.disable_progress_bars()
    name = f"{path} ({split})" if config is None else f"{path} ({config}, {split})"
    shown = f"dataset {path}" if config is None else f"dataset {path}, configuration {config!r}"
    try:
        saved = _saved_split(Path(path), split, config, shown)
        dataset: Any = datasets.load_dataset(path, config, split=split) if saved is None else _load_saved(saved, shown)
    except UserError:
        raise
    except Exception as error:
        # The library passes on any error of its readers or the network; each concerns the data that the user named.
        raise UserError(f"{shown} (split {split!r}) cannot be loaded: {error}") from None
    return ArrowRows(dataset.data.table, name)


def _saved_split(folder: Path, split: str, config: str | None, shown: str) -> Path | None:
    """Folder of a split that `save_to_disk` wrote, perhaps inside that of its configuration; None if there is none."""
    for place in (folder,) if config is None else (folder / config, folder):
        if (place / "dataset_dict.json").is_file():
            splits = json.loads((place / "dataset_dict.json").read_bytes())["splits"]
            if split not in splits:
                raise UserError(f"{shown} has no split {split!r}; there are {', '.join(splits)}")
            return place / split
        if (place / "state.json").is_file():
            return place
    return None


def _load_saved(folder: Path, shown: str) -> Any:
    import datasets

    # The library fails on a split that was saved without rows.
    if not json.loads((folder / "state.json").read_bytes()).get("_data_files", True):
        raise UserError(f"{shown}: {folder} has no rows")
    return datasets.load_from_disk(str(folder))


def _plain(table: pa.Table) -> pa.Table:
    """Times, dates and decimals as text, in lists and structs too, because messages cannot carry them."""
    for i, field in enumerate(table.schema):
        plain = _plain_type(field.type)
        if plain != field.type:
            # A column that Arrow cannot write as text stays as it is; its rows are refused later.
            with contextlib.suppress(pa.ArrowException):
                table = table.set_column(i, field.name, table.column(i).cast(plain))
    return table


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """A type with text wherever it has times, dates or decimals."""
    if pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        return pa.string()
    if pa.types.is_dictionary(kind):
        value = _plain_type(kind.value_type)
        return kind if value == kind.value_type else value
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_type(kind.value_type), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_type(kind.value_type))
    return pa.list_(_plain_type(kind.value_type)) if pa.types.is_list(kind) else kind
