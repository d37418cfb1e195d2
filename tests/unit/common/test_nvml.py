"""What a process measures of its GPUs, by a stand-in for NVML."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from common.nvml import GpuReader
from common.streams.broker import Broker
from common.streams.presence import Presence
from tests.support.gpus import StandInNvml

FOUR = (90, 70, 10, 50)


@pytest.mark.parametrize(
    ("count", "visible", "mean", "least"),
    [(4, None, 0.55, 0.1), (2, None, 0.8, 0.7), (2, "3,1", 0.6, 0.5), (1, "GPU-2", 0.1, 0.1), (8, "0,1", 0.8, 0.7)],
)
def test_the_figures_are_those_of_the_gpus_in_use(count: int, visible: str | None, mean: float, least: float) -> None:
    reader = GpuReader(count, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, StandInNvml(*FOUR))
    reader.read()
    figures = reader.figures()
    assert (figures["gpu/utilisation"], figures["gpu/least_utilisation"]) == pytest.approx((mean, least))
    assert (figures["gpu/memory_gb"], figures["gpu/memory_share"], figures["gpu/watts"]) == (20.0, 0.25, 500.0)


def test_what_the_driver_does_not_report_is_left_out() -> None:
    reader = GpuReader(1, {}, StandInNvml(50, fails=["utilisation", "power"]))
    reader.read()
    assert reader.figures().keys() == {"gpu/count", "gpu/memory_gb", "gpu/memory_share"}


def test_a_figure_is_the_mean_of_the_newest_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = StandInNvml(0)
    reader = GpuReader(1, {}, nvml)
    for percent in (0, 0, 10, 20, 30, 40, 50):
        monkeypatch.setattr(nvml, "_utilisations", (percent,))
        reader.read()
    assert reader.figures()["gpu/utilisation"] == pytest.approx(0.3)


def test_heartbeats_carry_the_figures(fake_broker: Broker) -> None:
    reader, presence = GpuReader(1, {}, StandInNvml(60)), Presence(fake_broker, "generator-1", "generator")
    presence.measured = reader.figures
    reader.read()
    presence.status(metrics={"generator/slots": 3})
    presence.beat()
    metrics = fake_broker.processes()["generator-1"]["metrics"]
    assert (metrics["gpu/utilisation"], metrics["generator/slots"]) == (0.6, 3)


def no_driver() -> None:
    raise StandInNvml.NVMLError("Driver Not Loaded")


@pytest.mark.parametrize("package", [None, SimpleNamespace(nvmlInit=no_driver, NVMLError=StandInNvml.NVMLError)])
def test_without_a_package_or_a_driver_nothing_is_measured(package: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", package)
    assert GpuReader(1, {}).start()() == {}


def test_a_gpu_that_does_not_exist_is_not_measured() -> None:
    assert GpuReader(1, {"CUDA_VISIBLE_DEVICES": "7"}, StandInNvml(50)).start()() == {}
