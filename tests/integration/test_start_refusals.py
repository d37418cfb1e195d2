"""The processes themselves, where they cannot start: one line on stderr and exit code 2, before anything is loaded."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from common.curve import make_keys
from common.streams.broker import Broker
from tests.conftest import RedisServer
from tests.support.preflight import refusal, run_file, start

pytestmark = pytest.mark.integration

ROLES = ("sampler", "generator", "learner", "relay")


Bwrap = Callable[..., tuple[str, ...]]


@pytest.fixture
def bwrap(bubblewrap: str) -> Bwrap:
    """Makes commands that let what follows see another file or folder in one place."""
    return lambda *arguments: (bubblewrap, "--dev-bind", "/", "/", *arguments)


@pytest.mark.parametrize("role", ["generator", "learner"])
def test_no_gpu_where_the_overlay_demands_one(role: str, tmp_path: Path) -> None:
    line = refusal(start(f"{role}.cli", "-c", run_file(tmp_path), SPO_REQUIRE_GPUS="64"))
    assert "SPO_REQUIRE_GPUS = 64, and " in line
    assert "compose.gpu.yaml" in line


def test_too_little_shared_memory(tmp_path: Path, bwrap: Bwrap) -> None:
    small = bwrap("--size", str(64 << 20), "--tmpfs", "/dev/shm")
    config = run_file(tmp_path, generator={"engine": {"tensor_parallel_size": 2}})
    line = refusal(start("generator.cli", "-c", config, before=small, CUDA_VISIBLE_DEVICES="0,1"))
    assert "64 MiB free in /dev/shm, and 2 ranks need 256 MiB at least: start the container with --shm-size=1g" in line
    line = refusal(start("learner.cli", "-c", config, before=small, LOCAL_WORLD_SIZE="2"))
    assert "64 MiB free in /dev/shm, and 2 ranks need 144 MiB at least" in line


@pytest.mark.parametrize("role", ROLES)
def test_a_missing_password(role: str, tmp_path: Path) -> None:
    missing = tmp_path / "redis_password"
    line = refusal(start(f"{role}.cli", "-c", run_file(tmp_path, broker={"password_file": str(missing)})))
    assert f"cannot read broker.password_file {missing}: No such file or directory; docker/make-secrets" in line


def test_a_missing_token(tmp_path: Path) -> None:
    missing = tmp_path / "sandbox_token"
    line = refusal(start("generator.cli", "-c", run_file(tmp_path, sandbox={"token_file": str(missing)})))
    assert f"cannot read sandbox.token_file {missing}: No such file or directory" in line
    line = refusal(start("sandbox_client.cli", "--token-file", missing))
    assert f"cannot read --token-file {missing}: No such file or directory" in line


@pytest.mark.parametrize(("role", "file"), [("learner", "server"), ("generator", "client"), ("relay", "client")])
def test_a_missing_key(role: str, file: str, tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / f"{file}.key_secret").unlink()
    config = run_file(tmp_path, learner={"weights": {"curve_dir": str(tmp_path)}})
    line = refusal(start(f"{role}.cli", "-c", config))
    assert f"cannot read the key {tmp_path}/{file}.key_secret (there is no such file); `spo keys DIR`" in line


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = run_file(tmp_path, learner={"weights": {"bind": f"tcp://127.0.0.1:{port}"}})
        line = refusal(start("learner.cli", "-c", config))
        assert f"cannot serve weights on learner.weights.bind = 'tcp://127.0.0.1:{port}'" in line
        assert "stop the process that uses it" in line
        line = refusal(start("sandbox_client.cli", "--port", port))
        assert f"--port {port} cannot be bound: Address already in use" in line


@pytest.mark.parametrize("role", ["generator", "learner", "relay", "sampler"])
def test_an_image_of_another_release(role: str, real_broker: Broker, redis_server: RedisServer, tmp_path: Path) -> None:
    real_broker.redis.set(real_broker.key("release"), "0.0.1")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    config = run_file(tmp_path, broker={"url": redis_server.url}, data={"train": str(tmp_path / "train.jsonl")})
    line = refusal(start(f"{role}.cli", "-c", config))
    assert "run 'test' was started with SPO 0.0.1, this is " in line
    assert "use the same release (image) for all processes of a run" in line


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="about instruction sets of x86")
def test_a_processor_that_vllm_has_no_kernels_for(tmp_path: Path, bwrap: Bwrap) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu sse4_2 avx\n")
    old = bwrap("--ro-bind", str(tmp_path / "cpuinfo"), "/proc/cpuinfo")
    line = refusal(start("generator.cli", "-c", run_file(tmp_path), before=old))
    assert "this processor has neither AVX-512 nor AVX2" in line


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="about instruction sets of x86")
def test_a_processor_without_avx512_is_a_warning_once_nothing_refuses_the_start(
    real_broker: Broker, redis_server: RedisServer, tmp_path: Path, bwrap: Bwrap
) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu fma avx2\n")
    slow = bwrap("--ro-bind", str(tmp_path / "cpuinfo"), "/proc/cpuinfo")
    assert "no Redis at redis://127.0.0.1:1/0" in refusal(start("generator.cli", "-c", run_file(tmp_path), before=slow))
    config = run_file(tmp_path, broker={"url": redis_server.url})  # its model cannot be loaded
    warned, *_ = start("generator.cli", "-c", config, before=slow, HF_HUB_OFFLINE="1").stderr.splitlines()
    assert "lacks AVX-512: vLLM takes its AVX2 kernels" in warned


@pytest.mark.parametrize("role", ["sampler", "generator", "learner"])
def test_a_run_folder_that_cannot_be_written(role: str, tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    line = refusal(start(f"{role}.cli", "-c", run_file(tmp_path)))
    assert f"cannot write in {tmp_path}/runs (Not a directory)" in line
