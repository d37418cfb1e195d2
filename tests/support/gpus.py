"""Stand-ins for GPUs: an `nvidia-smi` that tells of those a test makes up, for a process that has none."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

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
            used: MiB that other processes hold, by GPU; each also computes half of the time.
            slices: profiles of the slices that each GPU is divided into.
            visible: CUDA_VISIBLE_DEVICES.
        """
        rows, lines, profiles = [], [], list(slices)
        for i in range(count):
            held = (used or {}).get(i, 4)
            state = "Enabled" if profiles else "Disabled"
            rows.append(f"{i}, GPU-{i:04d}, {product}, {mebibytes}, {held}, {50 if held > 4 else 0}, {state}")
            lines.append(f"GPU {i}: {product} (UUID: GPU-{i:04d})")
            lines += [f"  MIG {name}     Device  {n}: (UUID: MIG-{i}{n}aa)" for n, name in enumerate(profiles)]
        (self.folder / "query").write_text("\n".join(rows) + "\n")
        (self.folder / "list").write_text("\n".join(lines) + "\n")
        if visible is not None:
            self._monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    def fail(self, message: str) -> None:
        """From now on the driver fails."""
        (self.folder / "broken").write_text(message)
