"""compose.gpu.yaml on top of compose.yaml, and the configuration they run."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import Config, differences, load_config

ROOT = Path(__file__).parents[3]
MATHS = ROOT / "configs" / "qwen3-8b-maths.yaml"
COMPOSE_FILES = ("compose.yaml", "compose.gpu.yaml")
WITH_CONFIG = ("sampler", "generator", "learner")
WITH_GPU = ("generator", "learner", "teacher")
WITH_WEIGHTS = ("generator", "learner")
VARIABLE = re.compile(r"\$\{(\w+):?-((?:[^{}]|\{[^{}]*\})*)\}")


def lines_of(name: str) -> dict[str, str]:
    """The variables that an example of `.env` sets."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


RESET = object()  # what `!reset` leaves of a key: nothing


class Loader(yaml.SafeLoader):
    """Knows Compose's own tag."""


Loader.add_constructor("!reset", lambda loader, node: RESET)


def merge(base: Any, overlay: Any, key: str = "") -> Any:
    """https://docs.docker.com/reference/compose-file/merge: mappings by key, lists added up, commands replaced."""
    if isinstance(base, dict):
        merged = base | {
            name: merge(base[name], value, name) if name in base else value for name, value in overlay.items()
        }
        return {name: value for name, value in merged.items() if value is not RESET}
    if overlay is RESET:
        return RESET
    return base + overlay if isinstance(base, list) and key not in ("command", "test") else overlay


@cache
def services(*files: str, env_file: str | None = None) -> dict[str, Any]:
    """The services of these files, or of both, with all variables put in."""
    values = lines_of(env_file) if env_file else {}
    merged: dict[str, Any] = {}
    for name in files or COMPOSE_FILES:
        text = (ROOT / name).read_text(encoding="utf-8")
        text = VARIABLE.sub(lambda match: values.get(match[1], match[2]), text)
        merged = merge(merged, yaml.load(text, Loader)["services"])
    return merged


def settings(service: str, files: tuple[str, ...] = COMPOSE_FILES) -> Config:
    """The configuration as that service's process reads it."""
    environment = {name: str(value) for name, value in services(*files)[service]["environment"].items()}
    return load_config(MATHS, (), environment)


def test_the_examples_list_what_the_files_read() -> None:
    assert services("compose.yaml", env_file=".env.example") == services("compose.yaml")
    plain, listed = services(), services(env_file=".env.gpu.example")
    for name in (*WITH_GPU, "redis", "sandbox"):
        assert listed[name] == plain[name]
    read = {name for file in COMPOSE_FILES for name, _ in VARIABLE.findall((ROOT / file).read_text(encoding="utf-8"))}
    assert not lines_of(".env.gpu.example").keys() - read


def test_every_service_reads_a_valid_configuration_and_all_agree() -> None:
    generator = settings("generator").model_dump(mode="json", by_alias=True)
    for service in WITH_CONFIG:
        config = settings(service)
        assert config.model.path == "/data/models/Qwen3-8B"
        assert config.run.experiment == config.run.name == "qwen3-8b-maths"
        for words in (services()[service]["command"], services()[service]["healthcheck"]["test"]):
            assert any("/etc/spo/qwen3-8b-maths.yaml" in word for word in words)
        assert differences(config, generator) == []


def test_gpu_services_have_devices_and_shared_memory() -> None:
    devices = []
    for name, service in services().items():
        reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {})
        assert bool(reserved) == (name in WITH_GPU)
        if name not in WITH_GPU:
            continue
        (device,) = reserved["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        assert device["count"] in (-1, "all")
        assert service["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
        assert str(service["shm_size"]) in ("16g", str(16 << 30))
        environment = service["environment"]
        assert environment["SPO_REQUIRE_GPUS"] == "1"
        assert {"NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE"} <= environment.keys()
        assert name == "teacher" or service["build"]["args"]["LOCKS"] == "-gpu"
        if "profiles" not in service:
            devices += environment["CUDA_VISIBLE_DEVICES"].split(",")
    assert len(devices) == len(set(devices))
    generating = services()["generator"]["environment"]["CUDA_VISIBLE_DEVICES"].split(",")
    assert settings("generator").generator.engine == {"data_parallel_size": len(generating)}


@pytest.mark.parametrize("files", [("compose.yaml",), COMPOSE_FILES])
def test_learner_and_generators_share_a_folder_for_weights(files: tuple[str, ...]) -> None:
    for name in WITH_WEIGHTS:
        service = services(*files)[name]
        folder = service["environment"]["SPO__LEARNER__WEIGHTS__SHARED_FOLDER"]
        assert f"weights:{folder}" in service["volumes"]
    for name, service in services(*files).items():
        assert name in WITH_WEIGHTS or not [path for path in service.get("volumes", ()) if path.startswith("weights:")]


@pytest.mark.parametrize("files", [("compose.yaml",), COMPOSE_FILES])
def test_a_teacher_is_served_on_demand_and_reached_by_generators_alone(files: tuple[str, ...]) -> None:
    of_files = services(*files)
    teacher, generator = of_files["teacher"], of_files["generator"]
    assert {name for name, service in of_files.items() if "profiles" in service} == {"teacher"}
    assert teacher["profiles"] == ["teacher"]
    assert {name for name, service in of_files.items() if "scores" in service.get("networks", ())} == {
        "teacher", "generator",
    }  # fmt: skip
    assert (teacher["networks"], "secrets" in teacher) == (["scores"], False)
    assert teacher["image"] == generator["image"], "it needs no image of its own"
    assert teacher["command"].startswith("python -m vllm.entrypoints.openai.api_server --model /data/")


@pytest.mark.parametrize("name", [name for name, service in services().items() if "devices" in str(service)])
def test_no_two_replicas_share_their_gpus(name: str) -> None:
    """Compose starts one container of a service whose container has a name, and refuses to scale it."""
    service = services()[name]
    assert service["container_name"] == f"spo-{name}-1"
    assert service.get("deploy", {}).get("replicas", 1) == 1
    assert "container_name" not in services("compose.yaml").get(name, {}), "generators on the CPU can be scaled"
