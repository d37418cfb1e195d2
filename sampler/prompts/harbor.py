"""Tasks in Harbor's folders: `task.toml`, `instruction.md`, `environment/`, `tests/` and `solution/`.

Harbor's own package reads them too, but needs Python 3.12; the verifiers package does not build a Dockerfile.
"""

from __future__ import annotations

import tomllib
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.config.agent import ContainerConfig
from common.config.data import harbor_folder
from common.errors import UserError
from common.messages import first_problem
from sampler.prompts.row import BadRow, Rows

CONFIG, INSTRUCTION, DOCKERFILE = "task.toml", "instruction.md", "environment/Dockerfile"
TESTS, SOLUTION = "tests/test.sh", "solution/solve.sh"
# Parts of a task that its tests may rely on, and that are not provided.
COMPOSE = ("environment/docker-compose.yaml", "environment/docker-compose.yml")
UNITS = {"K": 1 / 1024, "M": 1, "G": 1024}  # MiB


class HarborTasks(Rows):
    """The tasks in a folder, `harbor:FOLDER`, which may itself be a task; raises `UserError` if there is none."""

    def __init__(self, source: str) -> None:
        folder = harbor_folder(source)
        try:
            is_folder = folder.is_dir()
        except OSError as error:
            raise UserError(f"data {source}: the folder cannot be read: {error.strerror}") from None
        if not is_folder:
            raise UserError(f"data {source}: there is no folder {folder}")
        configs = [folder / CONFIG] if (folder / CONFIG).is_file() else sorted(folder.glob(f"*/{CONFIG}"))
        if not configs:
            raise UserError(f"data {source}: there is no {CONFIG} in {folder}, nor in its folders")
        self.folders = [config.parent for config in configs]
        self._rows: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self.folders)

    def __getitem__(self, i: int) -> dict[str, Any]:
        # Kept, since the name of an image is a hash of all that it is built from.
        if i not in self._rows:
            self._rows[i] = task_row(self.folders[i])
        return dict(self._rows[i])

    def where(self, i: int) -> str:
        return str(self.folders[i])


def task_row(folder: Path) -> dict[str, Any]:
    """A task as a row; raises `BadRow`.

    It has `prompt`, the instruction; `answer`, the folder of the tests, which no agent sees; `task`, the folder's name;
    `docker_image`, its name; and `container`, the task's own limits.
    """
    settings = _settings(folder)
    try:
        for needed in (INSTRUCTION, TESTS):
            if not (folder / needed).is_file():
                raise BadRow(f"the task has no {needed}")
        return {
            "prompt": (folder / INSTRUCTION).read_text(encoding="utf-8", errors="replace").strip(),
            "answer": str((folder / TESTS).parent),
            "task": folder.name,
            "docker_image": _image(folder, settings),
            "container": _limits(settings),
        }
    except OSError as error:
        raise BadRow(
            f"a file of the task cannot be read ({error})", reason="a file of the task cannot be read"
        ) from None


def _image(folder: Path, settings: dict[str, Any]) -> str:
    """The name of a task's image: its `docker_image`, or one with a hash of the files in `environment/`."""
    if named := _section(settings, "environment").get("docker_image"):
        return str(named)
    if not (folder / DOCKERFILE).is_file():
        raise BadRow(f"the task has neither {DOCKERFILE} nor environment.docker_image in {CONFIG}")
    digest = blake2b(digest_size=6)
    environment = folder / "environment"
    for path in sorted(environment.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(environment)}\0{len(content)}\0".encode())
            digest.update(content)
    # Names of images have no other letters than ASCII's.
    letters = (letter if letter.isascii() and letter.isalnum() else "-" for letter in folder.name.lower())
    name = "".join(letters).strip("-") or "task"
    return f"spo-harbor/{name}:{digest.hexdigest()}"


def _settings(folder: Path) -> dict[str, Any]:
    """The task's configuration; raises `BadRow` if it cannot be read, or asks for what SPO does not provide."""
    try:
        settings = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadRow(f"{CONFIG} cannot be read ({error})", reason=f"{CONFIG} cannot be read") from None
    environment, verifier = _section(settings, "environment"), _section(settings, "verifier")
    for what, is_asked in {
        "several steps": settings.get("steps"),
        "several services (docker-compose)": any((folder / name).exists() for name in COMPOSE),
        "another system than Linux": str(environment.get("os", "linux")).lower() != "linux",
        "GPUs or TPUs": environment.get("gpus") or environment.get("tpu"),
        "MCP servers": environment.get("mcp_servers"),
        "a network with a list of allowed hosts": environment.get("network_mode") == "allowlist",
        "a verifier in a container of its own": verifier.get("environment_mode") == "separate"
        or verifier.get("environment"),
    }.items():
        if is_asked:
            raise BadRow(f"the task asks for {what}, which is not supported")
    return settings


def _section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    section = settings.get(name, {})
    if not isinstance(section, dict):
        raise BadRow(f"{CONFIG}: {name} = {section!r} is not a table", reason=f"{CONFIG} cannot be read")
    return section


def _limits(settings: dict[str, Any]) -> dict[str, Any]:
    """The task's limits, by the keys of `episode.agent.container`."""
    environment = _section(settings, "environment")
    limits = {
        "cpus": environment.get("cpus"),
        "memory_mb": environment.get("memory_mb", _size(environment.get("memory"))),
        "disk_mb": environment.get("storage_mb", _size(environment.get("storage"))),
        "agent_seconds": _section(settings, "agent").get("timeout_sec"),
        "grading_seconds": _section(settings, "verifier").get("timeout_sec"),
        "network": "none" if environment.get("network_mode") == "no-network" else None,
    }
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    try:
        ContainerConfig.model_validate(limits)
    except ValidationError as error:
        raise BadRow(f"{CONFIG} has wrong limits ({first_problem(error)})", f"{CONFIG} has wrong limits") from None
    return limits


def _size(text: Any) -> int | None:
    """MiB of a size such as `2G`, as older tasks write it."""
    if text is None:
        return None
    try:
        return int(float(str(text)[:-1]) * UNITS[str(text)[-1:].upper()])
    except (ValueError, KeyError, OverflowError):
        raise BadRow(
            f"{CONFIG} has the size {text!r}; write it as 512M or 2G", reason=f"{CONFIG} has a malformed size"
        ) from None
