"""Memory files of weight updates stay mapped, and never show another file's bytes."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from common.weights.memory import MemoryFile

pytestmark = pytest.mark.integration  # importing vLLM starts a process


@pytest.fixture(scope="module")
def module() -> ModuleType:
    from generator.weights import weight_engine

    return weight_engine


def bytes_of(mappings: Any, path: str) -> bytes:
    return bytes(mappings.open(path).numpy())


def test_a_file_is_mapped_once_and_another_of_its_path_again(module: ModuleType) -> None:
    mappings, file = module.Mappings(), MemoryFile(16)
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


def test_files_that_are_no_longer_used_are_unmapped(module: ModuleType, tmp_path: Path) -> None:
    mappings = module.Mappings()
    for number in range(5):
        path = tmp_path / f"mapped-weights-{number}"
        path.write_bytes(bytes([number]) * 64)
        assert bytes_of(mappings, str(path)) == bytes([number]) * 64
    assert mapped(f"{tmp_path}/mapped-weights-") == module.KEPT
    mappings.close()
    assert mapped(f"{tmp_path}/mapped-weights-") == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every file")
def test_a_file_that_may_only_be_read_is_mapped_too(module: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"r" * 64)
    path.chmod(stat.S_IRUSR)
    assert bytes_of(module.Mappings(), str(path)) == b"r" * 64


@pytest.mark.parametrize("result", [0, 801])
def test_a_mapping_cuda_refuses_leaves_no_error_behind(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, result: int
) -> None:
    calls: list[str] = []

    def kernel(*_: Any, **options: Any) -> None:
        """Torch blames the first kernel that the thread starts afterwards."""
        calls.append(f"kernel on {options['device']}")
        raise RuntimeError("CUDA error: operation not supported")

    def register(address: int, size: int, flags: int) -> int:
        calls.append("register")
        return result

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: calls.append("unregister"))
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module.torch.cuda, "cudart", lambda: cudart)
    mappings, file = module.Mappings(), MemoryFile(64)
    file.write(0, b"w" * 64)
    with monkeypatch.context() as patch:
        patch.setattr(module.torch, "ones", kernel)
        assert bytes_of(mappings, file.path) == b"w" * 64
    mappings.close()
    assert calls == (["register", "unregister"] if result == 0 else ["register", "kernel on cuda"])
    file.close()
