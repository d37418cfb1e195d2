"""Weights as a generator keeps them: versions of an adapter in the engine, and memory files that stay mapped."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from peft import PeftConfig
from safetensors.torch import load_file

from common.config import LoraConfig
from common.errors import UserError
from common.weights.memory import MemoryFile
from generator.engine.adapters import Adapters
from generator.weights.adapter import AdapterFolder, check_adapter
from generator.weights.mappings import KEPT, Mappings
from generator.weights.shared_weights import SharedWeights
from learner.publish.weight_copy import copy_weights
from tests.support.event_loop import in_event_loop

LORA = LoraConfig(rank=4, alpha=8)
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


class Request(NamedTuple):
    lora_name: str
    lora_int_id: int
    lora_path: str


class Llm:
    def __init__(self) -> None:
        self.loaded: dict[int, str] = {}
        self.names: list[str] = []

    async def add_lora(self, request) -> bool:
        (Path(request.lora_path) / "adapter_model.safetensors").stat()
        self.loaded[request.lora_int_id] = request.lora_path
        self.names.append(request.lora_name)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        return self.loaded.pop(lora_id, None) is not None


def adapter(rank: int = 4, version: int = 1) -> SharedWeights:
    generator = torch.Generator().manual_seed(version)
    shapes = {"A": (rank, 33), "B": (7, rank)}
    tensors = {f"{LAYER}.lora_{name}.weight": torch.randn(*shapes[name], generator=generator) for name in shapes}
    snapshot = copy_weights(version, tensors.items(), torch.bfloat16, 1 << 20).snapshot()
    return SharedWeights(snapshot.manifest, snapshot.file, 0.0, MemoryFile.close)


def folder(version: int) -> AdapterFolder:
    with adapter(version=version) as weights:
        return AdapterFolder(weights, LORA)


def test_vllm_finds_an_adapter_as_peft_writes_one():
    files = folder(version=1)
    a = load_file(files.path / "adapter_model.safetensors")[f"{LAYER}.lora_A.weight"]
    assert torch.equal(a, torch.randn(4, 33, generator=torch.Generator().manual_seed(1)).bfloat16())
    settings = PeftConfig.from_pretrained(str(files.path))
    assert (settings.r, settings.lora_alpha, settings.target_modules) == (4, 8, {"q_proj"})
    files.close()
    assert not files.path.exists()


def test_what_is_no_adapter_of_this_rank_is_refused():
    with adapter(rank=4) as weights:
        check_adapter(weights.manifest, LORA)
    with adapter(rank=8) as weights, pytest.raises(UserError, match=r"rank 8.*learner\.lora\.rank = 4"):
        check_adapter(weights.manifest, LORA)
    others = {
        "model.norm.weight": (torch.zeros(4), r"model\.norm\.weight, which is not part of an adapter"),
        f"{LAYER}.lora_A.weight": (torch.zeros(4, 33), r"one of the two matrices of .*q_proj alone"),
        f"{LAYER}.lora_B.weight": (torch.zeros(7, 4), r"one of the two matrices of .*q_proj alone"),
    }
    for name, (tensor, words) in others.items():
        snapshot = copy_weights(3, [(name, tensor)], torch.float32, 1 << 20).snapshot()
        with pytest.raises(UserError, match=words):
            check_adapter(snapshot.manifest, LORA)


@in_event_loop
async def test_a_version_is_kept_until_its_last_request_is_over(monkeypatch):
    # Importing vLLM takes seconds and starts a process.
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=Request))
    llm = Llm()
    adapters = Adapters(llm)
    with adapters.newest() as none_yet:
        assert none_yet is None
    first, *others = [folder(version) for version in (1, 2, 3, 3)]
    await adapters.load(first)
    with adapters.newest() as kept, adapters.newest():
        for files in others[:2]:
            await adapters.load(files)
        assert kept is not None
        assert kept.files.version == 1
        assert kept.request.lora_int_id in llm.loaded
        assert [files.path.exists() for files in (first, *others)] == [True, False, True, True]
    await adapters.load(others[2])
    assert [files.path.exists() for files in (first, *others)] == [False, False, False, True]
    assert len(llm.loaded) == 1
    assert len(set(llm.names)) == 4, "under an old name vLLM would serve an old version"
    adapters.close()
    assert not others[2].path.exists()
    with pytest.raises(FileNotFoundError):
        await adapters.load(others[2])


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
