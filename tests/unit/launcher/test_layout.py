"""Which process of `spo run` gets which GPU: on stand-ins for one, two, four and eight of them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
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
from launcher.layout.gpus import numbers, read_gpus, select, watching
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


@pytest.mark.parametrize(
    ("count", "learner", "asked", "expected"),
    [
        (1, {"lora": {"rank": 16}}, Choice(), ("0", ["0"])),
        (2, {"zero_stage": 3, "offload": "all"}, Choice(), ("0", ["1"])),
        (4, {}, Choice(), ("0,1,2", ["3"])),
        (8, {}, Choice(), ("0,1,2,3", ["4", "5", "6", "7"])),
        (8, {}, Choice(2), ("0,1,2,3,4,5", ["6", "7"])),
        (8, {}, Choice(None, "4-7"), ("4,5,6,7", ["0", "1", "2", "3"])),
        (8, {}, Choice(None, None, "0,7"), ("1,2,3,4,5,6", ["0", "7"])),
        (8, {}, Choice(None, "0-3", "6"), ("0,1,2,3", ["6"])),
        (8, {}, Choice(1, "0-3"), ("0,1,2,3", ["4"])),
        (8, {}, Choice(0), ("0,1,2,3,4,5,6,7", [])),
        (8, {"sequence_parallel": 4}, Choice(), ("0,1,2,3", ["4", "5", "6", "7"])),
        (8, {"sequence_parallel": 2}, Choice(2), ("0,1,2,3,4,5", ["6", "7"])),
    ],
)
def test_gpus_are_divided(
    count: int,
    learner: dict[str, Any],
    asked: Choice,
    expected: tuple[str, list[str]],
    config: Callable[..., Config],
    gpus: StandInGpus,
) -> None:
    gpus.are(count)
    layout = lay_out(config(learner), asked)
    assert devices(layout) == expected
    first, others = expected[0].split(","), len(expected[1])
    size = learner.get("sequence_parallel", 1)
    assert layout.split(size) == (Split(len(first), others, size) if others and count > 1 else None)
    assert layout.reasons[0].startswith("learner: GPU 0" if expected[0][0] == "0" else "learner: GPU ")
    in_file = {"learner_gpus": asked.learner_gpus, "generator_gpus": asked.generator_gpus}
    assert lay_out(config(learner, run=in_file), Choice(asked.generators)) == layout


@pytest.mark.parametrize(
    ("count", "sections", "asked", "words"),
    [
        (1, {}, Choice(), "GPU 0 has 85.5 GB, of which a rank of the learner needs "),
        (2, {}, Choice(), "set -o learner.zero_stage=3 -o learner.offload="),
        (8, {"gradient_checkpointing": False}, Choice(), "set -o learner.gradient_checkpointing=true"),
        (8, {}, Choice(None, "8"), "--learner-gpus = '8' names GPU 8, and GPUs here are 0 to 7"),
        (8, {}, Choice(None, "0-x"), "must be numbers of GPUs, such as 0-3 or 0,2"),
        (8, {}, Choice(None, "3-1"), "must be numbers of GPUs"),
        (8, {}, Choice(None, "0,0-1"), "names GPU 0 twice"),
        (8, {}, Choice(None, None, "0-7"), "no GPU is left for the learner"),
        (8, {}, Choice(9), "leave none of 8 for the learner"),
        (8, {}, Choice(3, "0-5"), "there are GPUs for 2, of 1 each"),
        (0, {}, Choice(None, "0"), "--learner-gpus = '0', and there is no GPU here"),
        (0, {}, Choice(teacher_gpus="0"), "--teacher-gpus = '0', and there is no GPU here"),
        (8, {}, Choice(teacher_gpus="0"), "--teacher-gpus names 1 GPU, and 0 teachers take 0"),
        (8, {"sequence_parallel": 8}, Choice(), "for the learner, or no multiple of learner.sequence_parallel = 8: "),
        (8, {"sequence_parallel": 2}, Choice(None, "0-2"), "does not divide the learner's ranks, of which there are 3"),
        (0, {"sequence_parallel": 2}, Choice(), "does not divide the learner's ranks, of which there is 1: start a"),
    ],
)
def test_what_cannot_be_laid_out_is_said_with_what_would_fit(
    count: int,
    sections: dict[str, Any],
    asked: Choice,
    words: str,
    config: Callable[..., Config],
    gpus: StandInGpus,
) -> None:
    gpus.are(count)
    with pytest.raises(UserError) as refused:
        lay_out(config(sections), asked)
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


def test_long_contexts_are_advised_to_divide_sequences(config: Callable[..., Config], gpus: StandInGpus) -> None:
    gpus.are(8)
    long = {
        "model": {"path": config().model.path, "max_model_len": 131_072},
        "episode": {"max_response_tokens": 130_048},
    }
    with pytest.raises(UserError, match=r"set -o learner\.zero_stage=3 -o learner\.sequence_parallel=4$"):
        lay_out(config(**long), Choice(None, "0-3"))
    assert lay_out(config({"zero_stage": 3, "sequence_parallel": 4}, **long), Choice(None, "0-3")).learner


def test_generators_of_several_gpus(config: Callable[..., Config], gpus: StandInGpus) -> None:
    gpus.are(8)
    two = config(generator={"engine": {"tensor_parallel_size": 2}})
    layout = lay_out(two, Choice(None, "0-2"))
    assert devices(layout) == ("0,1,2", ["3,4", "5,6"])
    assert "GPU 7 is not used: a generator takes 2" in layout.reasons
    with pytest.raises(UserError, match="a generator takes 2 GPUs"):
        lay_out(two, Choice(None, "0-2", "3-5"))


def test_a_model_too_large_for_an_engine_is_divided(config: Callable[..., Config], gpus: StandInGpus) -> None:
    gpus.are(2, "NVIDIA RTX 4080", 16_376)
    with pytest.raises(UserError, match="set generator.engine.tensor_parallel_size=2"):
        lay_out(config(run={"steps": 0}), Choice())


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


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("4,5,6,7", ("4,5,6", ["7"])),
        ("7,2,3,1", ("7,2,3", ["1"])),
        ("GPU-0001,GPU-0003,GPU-0005,GPU-0007", ("GPU-0001,GPU-0003,GPU-0005", ["GPU-0007"])),
    ],
)
def test_a_schedulers_choice_is_kept(
    visible: str, expected: tuple[str, list[str]], config: Callable[..., Config], gpus: StandInGpus
) -> None:
    gpus.are(8, visible=visible)
    assert devices(lay_out(config(), Choice())) == expected
    by_hand = lay_out(config(), Choice(None, "0-2"))
    assert devices(by_hand) == expected, "numbers are those that torch counts"


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_are_not_used(visible: str, config: Callable[..., Config], gpus: StandInGpus) -> None:
    gpus.are(8, visible=visible)
    layout = lay_out(config(), Choice(3))
    assert (devices(layout), layout.generators) == (("", []), ((), (), ()))


def test_unknown_gpus_are_named(config: Callable[..., Config], gpus: StandInGpus) -> None:
    gpus.are(2, visible="0,5")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES names '5', and the GPUs here are 0, 1"):
        lay_out(config(), Choice())


def test_gpus_of_others_are_left_alone(config: Callable[..., Config], gpus: StandInGpus) -> None:
    gpus.are(5, used={1: 70_000})
    layout = lay_out(config(), Choice())
    assert devices(layout) == ("0,2,3", ["4"])
    assert "other processes hold 73.4 of 85.5 GB of GPU 1: it is left out" in layout.reasons
    with pytest.raises(UserError, match="of GPU 1: end them, or name another GPU"):
        lay_out(config(), Choice(None, "0-3"))
    gpus.are(2, used={0: 70_000, 1: 70_000})
    with pytest.raises(UserError, match="and so of every other GPU here"):
        lay_out(config(), Choice())


def test_slices_are_used_one_by_one(config: Callable[..., Config], gpus: StandInGpus) -> None:
    gpus.are(2, slices=["3g.40gb", "3g.40gb"])
    one = {"lora": {"rank": 16}, "token_budget": 64}
    short = {"episode": {"max_response_tokens": 1024}}
    layout = lay_out(config(one, **short), Choice())
    assert devices(layout) == ("MIG-00aa", ["MIG-01aa", "MIG-10aa", "MIG-11aa"])
    assert layout.learner[0].total == 40 << 30
    with pytest.raises(UserError, match="slices of a GPU cannot work together"):
        lay_out(config(one, **short), Choice(None, "0-1"))
    with pytest.raises(UserError, match="slices of a GPU cannot work together"):
        lay_out(config(one, **short, generator={"engine": {"tensor_parallel_size": 2}}), Choice(None, "0", "2-3"))


def test_a_driver_that_fails_is_quoted(config: Callable[..., Config], gpus: StandInGpus) -> None:
    gpus.are(8)
    gpus.fail("Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.")
    with pytest.raises(UserError, match=r"nvidia-smi ended with code 15: .* GPU is lost"):
        lay_out(config(), Choice())


def test_a_model_that_is_not_here_divides_evenly(gpus: StandInGpus) -> None:
    gpus.are(8)
    layout = lay_out(config_of(), Choice())
    assert devices(layout) == ("0,1,2,3", ["4", "5", "6", "7"])
    assert layout.reasons[-1] == "memory is not checked: m is not on this machine yet"


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
    assert "mixtures with mlp_only_layers = [0] are not known" in layout.reasons[-1]


def test_a_deterministic_run_has_one_generator(config: Callable[..., Config], gpus: StandInGpus) -> None:
    gpus.are(8)
    serial = config(run={"deterministic": True})
    assert devices(lay_out(serial, Choice())) == ("0,1,2,3,4,5,6", ["7"])
    assert devices(lay_out(serial, Choice(None, "0-3"))) == ("0,1,2,3", ["4"])


def test_without_a_learner_all_gpus_generate(config: Callable[..., Config], gpus: StandInGpus) -> None:
    gpus.are(4)
    assert devices(lay_out(config(run={"steps": 0}), Choice())) == ("", ["0", "1", "2", "3"])


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


def test_lists_are_read_and_written(gpus: StandInGpus) -> None:
    gpus.are(8)
    there = read_gpus({"PATH": str(gpus.folder)})
    assert numbers(select("6,0-2, 4", there, "it")) == "0-2, 4, 6"
    assert [replace(gpu, load=None).number for gpu in there] == list(range(8))


TELLS = """
import json, os, sys
names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS")
print(json.dumps({name: os.environ.get(name) for name in names}))
"""


@pytest.mark.parametrize(
    ("count", "learner", "generators", "threads"), [(1, "0", ["0"], "48"), (2, "0", ["1"], "48"),
     (4, "0,1,2", ["3"], "24"), (8, "0,1,2,3", ["4", "5", "6", "7"], "12")],
)  # fmt: skip
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
