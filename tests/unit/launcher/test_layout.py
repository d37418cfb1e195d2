"""Which process of `spo run` gets which GPU: on stand-ins for one, two, four and eight of them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.memory_table import QWEN3_30B_A3B
from common.config import Config
from common.errors import UserError
from common.log import get_logger
from launcher.folder.time_budget import Split
from launcher.layout import layout as layouts
from launcher.layout.gpus import watching
from launcher.layout.layout import Choice, Placement, lay_out
from launcher.run import processes
from launcher.run.local_run import worker_commands
from launcher.run.processes import start_all, thread_limits
from launcher.run.supervisor import Supervisor
from tests.support.checks import config_of
from tests.support.gpus import StandInGpus
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration


def devices(layout: Placement) -> tuple[str, list[str]]:
    """CUDA_VISIBLE_DEVICES of the learner and of each generator."""
    visible = {name: one["CUDA_VISIBLE_DEVICES"] for name, one in layout.environments.items()}
    assert all(one["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" for one in layout.environments.values())
    return visible.pop("learner", ""), list(visible.values())


TWO_EACH = {"generator": {"engine": {"tensor_parallel_size": 2}}}
SLICED = {"lora": {"rank": 16}, "token_budget": 64, "episode": {"max_response_tokens": 1024}}
LONG = {"model": {"max_model_len": 131_072}, "episode": {"max_response_tokens": 130_048}}


@pytest.fixture
def laid_out(config: Callable[..., Config], gpus: StandInGpus, model: Path) -> Callable[..., Placement]:
    """Lays a run out on stand-in GPUs; settings that are no sections are keys of the section `learner`."""

    def build(
        present: int | dict[str, Any], settings: dict[str, Any], asked: Choice, run: dict[str, Any] | None = None
    ) -> Placement:
        gpus.are(**({"count": present} if isinstance(present, int) else present))
        sections = {name: value for name, value in settings.items() if name in Config.model_fields}
        learner = {name: value for name, value in settings.items() if name not in Config.model_fields}
        sections["run"] = sections.get("run", {}) | (run or {})
        if "model" in sections:
            sections["model"] = {"path": str(model)} | sections["model"]
        return lay_out(config(learner, **sections), asked)

    return build


# On so many GPUs, or on those that `StandInGpus.are` makes of these words: the learner's section or all sections, what
# the user asks for, and the GPUs of the learner and of each generator.
DIVIDED: list[tuple[int | dict[str, Any], dict[str, Any], Choice, tuple[str, list[str]]]] = [
    (1, {"lora": {"rank": 16}}, Choice(), ("0", ["0"])),
    (2, {"zero_stage": 3, "offload": "all"}, Choice(), ("0", ["1"])),
    (4, {}, Choice(), ("0,1,2", ["3"])),
    (8, {}, Choice(), ("0,1,2,3", ["4", "5", "6", "7"])),
    (8, {}, Choice(2), ("0,1,2,3,4,5", ["6", "7"])),
    (8, {}, Choice(None, None, "0,7"), ("1,2,3,4,5,6", ["0", "7"])),
    (8, {}, Choice(1, "0-3"), ("0,1,2,3", ["4"])),
    (8, {}, Choice(0), ("0,1,2,3,4,5,6,7", [])),
    (8, {"sequence_parallel": 2}, Choice(2), ("0,1,2,3,4,5", ["6", "7"])),
    ({"count": 8, "visible": "7,2,3,1"}, {}, Choice(), ("7,2,3", ["1"])),
    ({"count": 8, "visible": "7,2,3,1"}, {}, Choice(None, "0-2"), ("7,2,3", ["1"])),  # numbers as torch counts
    ({"count": 8, "visible": "GPU-0001,GPU-0003,GPU-0005,GPU-0007"}, {}, Choice(),
     ("GPU-0001,GPU-0003,GPU-0005", ["GPU-0007"])),
    ({"count": 8, "visible": "-1"}, {}, Choice(2), ("", [])),
    ({"count": 2, "slices": ["3g.40gb"] * 2}, SLICED, Choice(),
     ("MIG-00aa", ["MIG-01aa", "MIG-10aa", "MIG-11aa"])),
    (8, {"run": {"deterministic": True}}, Choice(), ("0,1,2,3,4,5,6", ["7"])),
    (8, {"run": {"deterministic": True}}, Choice(None, "0-3"), ("0,1,2,3", ["4"])),
    (4, {"run": {"steps": 0}}, Choice(), ("", ["0", "1", "2", "3"])),
    (8, {"model": {"path": "not-here"}}, Choice(), ("0,1,2,3", ["4", "5", "6", "7"])),
]  # fmt: skip


@pytest.mark.parametrize(("present", "settings", "asked", "expected"), DIVIDED, ids=str)
def test_gpus_are_divided(
    present: int | dict[str, Any],
    settings: dict[str, Any],
    asked: Choice,
    expected: tuple[str, list[str]],
    laid_out: Callable[..., Placement],
) -> None:
    placement = laid_out(present, settings, asked)
    assert devices(placement) == expected
    ranks, others = len(placement.learner), len(expected[1])
    size = settings.get("sequence_parallel", 1)
    assert placement.split(size) == (Split(ranks, others, size) if ranks and others and present != 1 else None)
    in_file = {"learner_gpus": asked.learner_gpus, "generator_gpus": asked.generator_gpus}
    assert laid_out(present, settings, Choice(asked.generators), in_file) == placement


@pytest.mark.parametrize(
    ("present", "settings", "asked", "words"),
    [
        (1, {}, Choice(), "GPU 0 has 85.5 GB, of which a rank of the learner needs "),
        (2, {}, Choice(), "set -o learner.zero_stage=3 -o learner.offload="),
        (8, {"gradient_checkpointing": False}, Choice(), "set -o learner.gradient_checkpointing=true"),
        (8, LONG, Choice(None, "0-3"), "set -o learner.zero_stage=3 -o learner.sequence_parallel=4"),
        (8, {}, Choice(None, "8"), "--learner-gpus = '8' names GPU 8, but GPUs here are 0 to 7"),
        (8, {}, Choice(None, "0-x"), "must be numbers of GPUs, such as 0-3 or 0,2"),
        (8, {}, Choice(None, "3-1"), "must be numbers of GPUs"),
        (8, {}, Choice(None, "0,0-1"), "names GPU 0 twice"),
        (8, {}, Choice(None, None, "0-7"), "no GPU is left for the learner"),
        (8, {}, Choice(9), "leave none of 8 for the learner"),
        (8, {}, Choice(3, "0-5"), "there are GPUs for 2, of 1 each"),
        (8, TWO_EACH, Choice(None, "0-2", "3-5"), "a generator takes 2 GPUs"),
        (0, {}, Choice(None, "0"), "--learner-gpus = '0', but there is no GPU here"),
        (8, {}, Choice(teacher_gpus="0"), "--teacher-gpus names 1 GPU, but 0 teachers take 0"),
        (2, {"sequence_parallel": 2}, Choice(), "for the learner, or no multiple of learner.sequence_parallel = 2: "),
        (8, {"sequence_parallel": 2}, Choice(None, "0-2"), "the number of the learner's ranks, 3: start a"),
        (0, {"sequence_parallel": 2}, Choice(), "the number of the learner's ranks, 1: start a"),
        ({"count": 2, "product": "NVIDIA RTX 4080", "mebibytes": 16_376}, {"run": {"steps": 0}}, Choice(),
         "set generator.engine.tensor_parallel_size=2"),
        ({"count": 2, "visible": "0,5"}, {}, Choice(), "CUDA_VISIBLE_DEVICES names '5', but the GPUs here are 0, 1"),
        ({"count": 5, "used": {1: 70_000}}, {}, Choice(None, "0-3"), "of GPU 1: end them, or name another GPU"),
        ({"count": 2, "used": {0: 70_000, 1: 70_000}}, {}, Choice(), "and so of every other GPU here"),
        ({"count": 2, "slices": ["3g.40gb"] * 2}, SLICED, Choice(None, "0-1"), "slices of a GPU cannot work together"),
        ({"count": 2, "slices": ["3g.40gb"] * 2}, SLICED | TWO_EACH, Choice(None, "0", "2-3"),
         "slices of a GPU cannot work together"),
    ],
)  # fmt: skip
def test_what_cannot_be_laid_out_is_said_with_what_would_fit(
    present: int | dict[str, Any],
    settings: dict[str, Any],
    asked: Choice,
    words: str,
    laid_out: Callable[..., Placement],
) -> None:
    with pytest.raises(UserError) as refused:
        laid_out(present, settings, asked)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_advice_is_one_that_fits(config: Callable[..., Config], gpus: StandInGpus) -> None:
    gpus.are(4)
    plain = {"zero_stage": 0, "gradient_checkpointing": False}
    with pytest.raises(UserError) as refused:
        lay_out(config(plain), Choice(None, "0-2"))
    advised = dict(re.findall(r"-o learner\.(\w+)=(\w+)", str(refused.value)))
    learner = plain | {name: yaml.safe_load(value) for name, value in advised.items()}
    assert lay_out(config(learner), Choice(None, "0-2")).learner


def test_generators_of_several_gpus(config: Callable[..., Config], gpus: StandInGpus) -> None:
    gpus.are(8)
    two = config(generator={"engine": {"tensor_parallel_size": 2}})
    layout = lay_out(two, Choice(None, "0-2"))
    assert devices(layout) == ("0,1,2", ["3,4", "5,6"])
    assert "GPU 7 is not used: a generator takes 2" in layout.reasons


def test_a_rank_and_a_generator_share_one_gpu(config: Callable[..., Config], gpus: StandInGpus, tmp_path: Path) -> None:
    gpus.are(1)
    layout = lay_out(config({"lora": {"rank": 16}}), Choice())
    assert layout.utilization is not None
    assert 0.3 < layout.utilization < 0.8
    commands = worker_commands(tmp_path / "config.yaml", layout)
    assert f"generator.engine.gpu_memory_utilization={layout.utilization}" in commands["generator-1"]
    assert "--ranks" not in commands["learner"]
    configured = config({"lora": {"rank": 16}}, generator={"engine": {"gpu_memory_utilization": 0.25}})
    assert lay_out(configured, Choice()).utilization == 0.25


def test_gpus_of_others_are_left_alone(config: Callable[..., Config], gpus: StandInGpus) -> None:
    gpus.are(5, used={1: 70_000})
    layout = lay_out(config(), Choice())
    assert devices(layout) == ("0,2,3", ["4"])
    assert "other processes hold 73.4 of 85.5 GB of GPU 1: it is left out" in layout.reasons


def test_a_driver_that_fails_is_quoted(config: Callable[..., Config], gpus: StandInGpus) -> None:
    gpus.are(8)
    gpus.fail("Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.")
    with pytest.raises(UserError, match=r"nvidia-smi ended with code 15: .* GPU is lost"):
        lay_out(config(), Choice())


def test_a_mixture_is_laid_out_by_all_of_its_experts(
    config: Callable[..., Config], gpus: StandInGpus, tmp_path: Path
) -> None:
    gpus.are(8)
    QWEN3_30B_A3B.save_pretrained(tmp_path)
    model = {"path": str(tmp_path), "max_model_len": 10_240}
    with pytest.raises(UserError, match=r"set -o learner.offload=optimizer"):
        lay_out(config({"zero_stage": 3}, model=model), Choice())
    layout = lay_out(config({"zero_stage": 3, "offload": "optimizer"}, model=model), Choice())
    learner, generators = devices(layout)
    assert len(learner.split(",")) + len(generators) == 8
    assert "61.1 GB of weights" in layout.reasons[1]


def test_a_mixture_of_uneven_layers_is_divided_evenly(gpus: StandInGpus, tmp_path: Path) -> None:
    gpus.are(4)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B.to_dict() | {"mlp_only_layers": [0]}))
    layout = lay_out(config_of(model={"path": str(tmp_path)}), Choice())
    assert devices(layout) == ("0,1", ["2", "3"])
    assert "mixtures with mlp_only_layers = [0] are not supported" in layout.reasons[-1]


def test_builds_for_the_cpu_use_no_gpu(gpus: StandInGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.are(8)
    monkeypatch.setattr(layouts, "cpu_build", lambda role: f"{role}-build 1")
    assert devices(lay_out(config_of(), Choice(2))) == ("", [])
    with pytest.raises(UserError, match="learner-build 1 and generator-build 1 compute on the CPU only"):
        lay_out(config_of(), Choice(None, "0"))


def test_gpus_are_watched_until_the_driver_fails(
    config: Callable[..., Config], gpus: StandInGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.layout.gpus.EVERY", 0.01)
    gpus.are(4)
    used = lay_out(config({"lora": {"rank": 16}}), Choice(None, "0", "2")).gpus
    with watching(os.environ, used) as newest:
        gpus.are(4, used={2: 70_000})
        eventually(lambda: [(gpu.number, gpu.load) for gpu in newest()] == [(0, 0.0), (2, 0.5)])
        gpus.fail("it fell off the bus")
        eventually(lambda: not newest())


@pytest.mark.parametrize(("asked", "share"), [(Choice(), "2"), (Choice(1), "4"), (Choice(7), "1")])
def test_without_gpus_the_learner_of_a_large_model_uses_the_cores_that_generators_leave(
    asked: Choice, share: str, config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"):
        monkeypatch.delenv(variable, raising=False)
    for module in (layouts, processes):
        monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: range(8))

    def threads(layout: Placement, name: str) -> str:
        limits = thread_limits(name, layout.processes, layout.all_cores)
        # Threads that spin while they wait would take the cores from those they wait for.
        assert (limits.get("OMP_WAIT_POLICY") == "PASSIVE") is layout.all_cores
        return limits["OMP_NUM_THREADS"]

    large = lay_out(config(), asked)
    assert (threads(large, "learner"), threads(large, "generator-1")) == ("8", share)
    assert "the learner on all cores" in large.reasons[0]
    unknown = lay_out(config_of(model={"path": "org/elsewhere"}), asked)
    assert threads(unknown, "learner") == threads(unknown, "generator-1") == share
    assert not lay_out(config(run={"steps": 0}), asked).all_cores
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "OMP_WAIT_POLICY" not in thread_limits("learner", 2, all_cores=True)  # what the user has set stays


TELLS = """
import json, os, sys
names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS")
print(json.dumps({name: os.environ.get(name) for name in names}))
"""


@pytest.mark.parametrize(
    ("count", "learner", "generators", "threads"), [(1, "0", ["0"], "48"), (4, "0,1,2", ["3"], "24")]
)
def test_each_process_sees_its_own_gpus(
    count: int,
    learner: str,
    generators: list[str],
    threads: str,
    config: Callable[..., Config],
    gpus: StandInGpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("launcher.run.processes.os.sched_getaffinity", lambda _: range(96))
    gpus.are(count)
    settings = config({"lora": {"rank": 16}} if count < 4 else {})
    layout = lay_out(settings, Choice())
    commands = worker_commands(tmp_path / "config.yaml", layout)
    ranks = learner.count(",") + 1
    assert commands["learner"][-2:] == (
        ["--ranks", str(ranks)] if ranks > 1 else ["--config", str(tmp_path / "config.yaml")]
    )
    names = [f"generator-{number}" for number in range(1, len(generators) + 1)]
    assert list(commands) == ["learner", *names, "sampler"]
    told = {name: [sys.executable, "-c", TELLS] for name in commands}
    supervisor = Supervisor(tmp_path / "logs", get_logger())
    try:
        start_all(settings, tmp_path / "config.yaml", told, layout, supervisor)
        eventually(lambda: supervisor.poll() or not supervisor.alive())
    finally:
        supervisor.stop()
    seen = {name: json.loads((tmp_path / "logs" / f"{name}.log").read_text()) for name in commands}
    for name, visible in zip(["learner", *names], [learner, *generators], strict=True):
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "OMP_NUM_THREADS": threads}
        assert seen[name] == {"CUDA_VISIBLE_DEVICES": visible} | order
    assert seen["sampler"]["CUDA_VISIBLE_DEVICES"] is None
