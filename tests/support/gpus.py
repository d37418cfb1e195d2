"""Stand-ins for GPUs: an `nvidia-smi` and an NVML that tell of those a test makes up, for a process that has none."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

H100 = ("NVIDIA H100 80GB HBM3", 81_559)  # name, and MiB

# The answers lie beside the script.
SCRIPT = """#!/bin/sh
here="${0%/*}"
[ -e "$here/broken" ] && { /bin/cat "$here/broken"; exit 15; }
case "$1" in
    -L) /bin/cat "$here/list" ;;
    *) /bin/cat "$here/query" ;;
esac
"""


class StandInGpus:
    """GPUs that `nvidia-smi` tells of, and packages that would use them.

    Args:
        folder: for the program.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        folder.mkdir()
        (folder / "nvidia-smi").write_text(SCRIPT)
        (folder / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for module in ("launcher.layout.layout", "launcher.run.processes"):
            monkeypatch.setattr(f"{module}.cpu_build", lambda role: None)

    def are(
        self,
        count: int,
        product: str = H100[0],
        mebibytes: int = H100[1],
        used: dict[int, int] | None = None,
        slices: Iterable[str] = (),
        visible: str | None = None,
    ) -> None:
        """Make up so many GPUs.

        Args:
            used: MiB that other processes hold, by GPU.
            slices: profiles of the slices that each GPU is divided into.
            visible: CUDA_VISIBLE_DEVICES.
        """
        rows, lines, profiles = [], [], list(slices)
        for i in range(count):
            held = (used or {}).get(i, 4)
            state = "Enabled" if profiles else "Disabled"
            rows.append(f"{i}, GPU-{i:04d}, {product}, {mebibytes}, {held}, {state}")
            lines.append(f"GPU {i}: {product} (UUID: GPU-{i:04d})")
            lines += [f"  MIG {name}     Device  {n}: (UUID: MIG-{i}{n}aa)" for n, name in enumerate(profiles)]
        (self.folder / "query").write_text("\n".join(rows) + "\n")
        (self.folder / "list").write_text("\n".join(lines) + "\n")
        if visible is not None:
            self._monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    def fail(self, message: str) -> None:
        """From now on the driver fails."""
        (self.folder / "broken").write_text(message)


class StandInNvml:
    """NVML of a machine with these utilisations [percent], by GPU; each uses 20 of 80 GB and 500 W.

    Args:
        fails: names of the functions that this driver does not support.
    """

    class NVMLError(Exception):
        pass

    def __init__(self, *utilisations: int, fails: Iterable[str] = ()) -> None:
        self._utilisations, self._fails = utilisations, set(fails)

    def nvmlDeviceGetCount(self) -> int:
        return len(self._utilisations)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(self._utilisations):
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return self.nvmlDeviceGetHandleByIndex(int(uuid.removeprefix("GPU-")))

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:
        self._supports("utilisation")
        return SimpleNamespace(gpu=self._utilisations[gpu])

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(used=20_000_000_000, total=80_000_000_000)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        self._supports("power")
        return 500_000

    def _supports(self, name: str) -> None:
        if name in self._fails:
            raise self.NVMLError("Not Supported")
