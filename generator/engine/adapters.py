"""Versions of a LoRA adapter in vLLM, each under its own name; every request keeps the version it began with.

Under a reused name vLLM would serve the old version, and its keys and values from the prefix cache.
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
        """Remove the files."""


@dataclass(eq=False)
class LoadedAdapter:
    """A version that vLLM has loaded.

    Attributes:
        request: vLLM's `LoRARequest`.
        users: number of running requests that use it. They need its files, since vLLM may drop it and read it again.
    """

    files: AdapterFiles
    request: Any
    users: int = 0


class Adapters:
    """The newest version, and those that running requests still use."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._ids = itertools.count(1)
        self._loaded: list[LoadedAdapter] = []  # oldest first

    async def load(self, files: AdapterFiles) -> None:
        """Have new requests use another version; versions that no request uses are removed, with their files."""
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
        """The version for a new request, kept within the block; None if no adapter is loaded."""
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
        """Remove all files; call it once vLLM is gone."""
        for adapter in self._loaded:
            adapter.files.close()
