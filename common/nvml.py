"""Measures a process's GPUs by NVML, NVIDIA's management library.

Without a driver, or without the package nvidia-ml-py, there are no figures, and no message.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

EVERY = 1.0  # seconds between two readings
READINGS = 5  # newest readings, of which a figure is the mean
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Functions that measure one GPU, by metric.
MEASURES: dict[str, Callable[[Any, Any], float]] = {
    "gpu/utilisation": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "gpu/memory_gb": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e9,
    "gpu/memory_share": lambda nvml, gpu: (memory := nvml.nvmlDeviceGetMemoryInfo(gpu)).used / memory.total,
    "gpu/watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
}


class GpuReader:
    """Reads GPUs in a thread of its own, so that a driver that hangs does not stop heartbeats.

    Args:
        count: how many of the GPUs that CUDA_VISIBLE_DEVICES names, from the first on.
        nvml: NVML's Python module; by default the installed one.
    """

    def __init__(self, count: int, environ: Mapping[str, str] = os.environ, nvml: Any = None) -> None:
        self._newest: deque[dict[str, float]] = deque(maxlen=READINGS)
        self._nvml: Any = nvml or (_library() if count else None)
        self._gpus = [] if self._nvml is None else self._visible(environ)[:count]

    def start(self) -> Callable[[], dict[str, float]]:
        """Read from now on until the process ends; returns a function that returns the newest figures."""
        if self._gpus:
            threading.Thread(target=self._follow, name="gpus", daemon=True).start()
        return self.figures

    def figures(self) -> dict[str, float]:
        """The metrics `gpu/…` over the newest readings: means over the GPUs, and the least busy one's utilisation."""
        readings = list(self._newest)
        names = {name for reading in readings for name in reading}
        values = {name: [reading[name] for reading in readings if name in reading] for name in names}
        return {name: sum(of_name) / len(of_name) for name, of_name in values.items()}

    def read(self) -> None:
        """Read all GPUs once. What the driver does not report, such as the load of a slice (MIG), is left out."""
        figures = {"gpu/count": float(len(self._gpus))}
        for name, measure in MEASURES.items():
            values = [value for gpu in self._gpus if (value := self._measured(measure, gpu)) is not None]
            if values:
                figures[name] = sum(values) / len(values)
            if values and name == "gpu/utilisation":
                figures["gpu/least_utilisation"] = min(values)
        self._newest.append(figures)

    def _follow(self) -> None:
        pause = threading.Event()
        while True:
            self.read()
            pause.wait(EVERY)

    def _measured(self, measure: Callable[[Any, Any], float], gpu: Any) -> float | None:
        try:
            return measure(self._nvml, gpu)
        except self._nvml.NVMLError:
            return None

    def _visible(self, environ: Mapping[str, str]) -> list[Any]:
        """NVML's handles; its numbers are those of CUDA with CUDA_DEVICE_ORDER=PCI_BUS_ID."""
        nvml, named = self._nvml, environ.get(VISIBLE)
        try:
            names = map(str, range(nvml.nvmlDeviceGetCount())) if named is None else map(str.strip, named.split(","))
            return [
                nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
                for name in names
                if name
            ]
        except nvml.NVMLError:
            return []


def _library() -> Any:
    """NVML's Python module, ready for calls; None without the package or without a driver."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml
