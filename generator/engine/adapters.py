"""Versions of a LoRA adapter in vLLM, each under a name of its own: every request keeps the one it began with.

Under an old name vLLM would serve an old version from its cache, and old keys and values from its prefix cache.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class AdapterFiles(Protocol):
    """An adapter on disk, as peft writes one."""

    version: int
    path: Path

    def close(self) -> None:
        """Remove it."""
        ...


@dataclass(eq=False)
class LoadedAdapter:
    """A version in vLLM.

    Attributes:
        request: vLLM's `LoRARequest`.
        users: requests under way that compute with it. vLLM may drop it meanwhile and read its files again.
    """

    files: AdapterFiles
    request: Any
    users: int = 0

    @property
    def version(self) -> int:
        return self.files.version


class Adapters:
    """The newest version, and those that requests under way still use."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._ids = itertools.count(1)
        self._loaded: list[LoadedAdapter] = []  # oldest first

    async def load(self, files: AdapterFiles) -> None:
        """Have new requests use another version; those without a request under way are removed, with their files."""
        from vllm.lora.request import LoRARequest

        number = next(self._ids)
        request = LoRARequest(f"adapter-{number}", number, str(files.path))
        try:
            await self._llm.add_lora(request)
        except BaseException:
            files.close()
            raise
        older, self._loaded = self._loaded, [LoadedAdapter(files, request)]
        for adapter in older:
            if adapter.users:
                self._loaded.insert(-1, adapter)
            else:
                await self._llm.remove_lora(adapter.request.lora_int_id)
                adapter.files.close()

    @contextlib.contextmanager
    def newest(self) -> Iterator[LoadedAdapter | None]:
        """The version for a new request, kept within the block; None: the model as it is on disk, or other weights."""
        adapter = self._loaded[-1] if self._loaded else None
        if adapter is None:
            yield None
            return
        adapter.users += 1
        try:
            yield adapter
        finally:
            adapter.users -= 1

    def close(self) -> None:
        """Remove all files; to be called when vLLM is gone."""
        for adapter in self._loaded:
            adapter.files.close()
        self._loaded = []
