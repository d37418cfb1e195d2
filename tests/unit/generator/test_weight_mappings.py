"""Memory files of weight updates stay mapped, and never show another file's bytes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from common.weights.memory import MemoryFile
from generator.weights.mappings import KEPT, Mappings


def bytes_of(mappings: Mappings, path: str) -> bytes:
    return bytes(mappings.open(path).numpy())


def test_a_file_is_mapped_once_and_another_of_its_path_again() -> None:
    mappings, file = Mappings(), MemoryFile(16)
    file.write(0, b"a" * 16)
    first = mappings.open(file.path)
    assert bytes(first.numpy()) == b"a" * 16
    file.write(0, b"b" * 16)
    again = mappings.open(file.path)
    assert again.data_ptr() == first.data_ptr()
    assert bytes(again.numpy()) == b"b" * 16
    path = file.path
    file.close()
    # The kernel gives the lowest free number: the same path.
    other = MemoryFile(32)
    assert other.path == path
    other.write(0, b"c" * 32)
    assert bytes_of(mappings, path) == b"c" * 32
    mappings.close()
    other.close()


def mapped(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(name)


def test_files_that_are_no_longer_used_are_unmapped(tmp_path: Path) -> None:
    mappings = Mappings()
    for number in range(3):
        path = tmp_path / f"mapped-weights-{number}"
        path.write_bytes(bytes([number]) * 64)
        assert bytes_of(mappings, str(path)) == bytes([number]) * 64
    assert mapped(f"{tmp_path}/mapped-weights-") == KEPT
    mappings.close()
    assert mapped(f"{tmp_path}/mapped-weights-") == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every file")
def test_a_file_that_may_only_be_read_is_mapped_too(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"r" * 64)
    path.chmod(stat.S_IRUSR)
    assert bytes_of(Mappings(), str(path)) == b"r" * 64
