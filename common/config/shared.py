"""Configurations written for others, without secrets, and compared between processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from common.config.data import HARBOR, harbor_folder
from common.config.run import Config
from common.config.sampler import EvalConfig

# Keys that may change after a run's first step; `learner/` and `sampler/` read them at each start. They neither change
# what samples mean, nor what checkpoint, tracker and Redis hold.
CHANGEABLE = {
    f"{section}.{name}"
    for section, names in {
        "run": "steps stop_when log_to keep_mb",
        "eval": " ".join(EvalConfig.model_fields),
        "learner": "lr schedule warmup_steps min_lr_ratio grad_clip token_budget sequence_parallel "
        "gradient_checkpointing exact_every zero_stage checkpoint_every checkpoint_in_background "
        "keep_checkpoints keep_best max_left_out rank_timeout export",
        "generator": "max_attempts retry_pause",
        "sampler": "max_set_aside",
        "algorithm.demonstrations": "data batch_size weight decay_steps",
        "critic": "lr updates gae_lambda return_lambda warmup_steps",
        "teacher": "weight decay_steps reward",
        "episode": "tool_timeout reward_timeout reward_workers reward_memory_mb rollouts_every",
        "sandbox": "memory_mb",
        "broker": "dead_after",
    }.items()
    for name in names.split()
}
# Keys that hold paths: the run folder has them as absolute paths, so that the run can be continued from any folder.
PATHS = (
    "run.output_dir",
    "run.modules",
    "sampler.initial_values",
    "sampler.tracker.prompt_states",
    "learner.weights.curve_dir",
    "sandbox.token_file",
    "broker.password_file",
)
# Keys that hold a path, if it exists, or else a name: of the Hugging Face hub, or of a set that SPO knows.
PATHS_OR_NAMES = (
    "model.path", "algorithm.reference", "critic.model", "teacher.model", "data.train", "data.heldout",
    "sft.data", "sft.heldout", "algorithm.demonstrations.data",
)  # fmt: skip
# Sections and keys that can hold a secret: an address with a password in it, or the secret alone.
SECRETS = (("broker", "url"), ("sandbox", "url"), ("sandbox", "token"))
PASSWORD_OPTIONS = ("password", "ssl_password")


def dump_config(config: Config, *, absolute: bool = False) -> str:
    """The resolved configuration as YAML, every key spelled out, without secrets: those are named in a comment.

    Args:
        absolute: make relative paths absolute, for a file that is read from other folders too.
    """
    notes = [f"# {key} held a secret, which is not written here: give it again.\n" for key in secrets(config)]
    values = without_secrets(config).model_dump(mode="json", by_alias=True)
    if absolute:
        values = _with_absolute_paths(values, "")
    return "".join(notes) + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def without_secrets(config: Config) -> Config:
    """A copy that others may read: its addresses have no passwords, and it has no token."""
    for section_name, name in SECRETS:
        section = getattr(config, section_name)
        value = getattr(section, name)
        public = address_without_password(value) if value and name == "url" else None
        config = config.model_copy(update={section_name: section.model_copy(update={name: public})})
    return config


def secrets(config: Config) -> dict[str, Any]:
    """The settings that hold a secret, by their key (`broker.url`), with the secret."""
    public = without_secrets(config)
    return {
        f"{section}.{name}": value
        for section, name in SECRETS
        if (value := getattr(getattr(config, section), name)) != getattr(getattr(public, section), name)
    }


def address_without_password(url: str) -> str:
    before, mark, query = url.partition("?")
    scheme, _, rest = before.partition("://")
    authority, slash, path = rest.partition("/")
    login, at, hosts = authority.rpartition("@")
    user = login.partition(":")[0]
    options = "&".join(option for option in query.split("&") if option.partition("=")[0] not in PASSWORD_OPTIONS)
    return f"{scheme}://{user}{at * bool(user)}{hosts}{slash}{path}{mark * bool(options)}{options}"


def shared_values(config: BaseModel) -> dict[str, Any]:
    """The values of keys that are not local to a machine, which all processes of a run share."""
    return {
        key: shared_values(value) if isinstance(value, BaseModel) else plain
        for key, value, plain in _shared_fields(config)
    }


@dataclass(frozen=True, slots=True)
class Difference:
    """A key in which a process differs from its run."""

    key: str
    here: Any
    there: Any

    def __str__(self) -> str:
        return f"{self.key} (here {self.here!r}, in the run {self.there!r})"


def differences(config: BaseModel, others: Mapping[str, Any], prefix: str = "") -> list[Difference]:
    """The differences between two processes of a run, except in keys local to a machine.

    Args:
        others: the other's configuration, as `shared_values` or a file gives it.
    """
    different: list[Difference] = []
    for name, value, plain in _shared_fields(config):
        key, other = f"{prefix}{name}", others.get(name)
        if isinstance(value, BaseModel):
            different += differences(value, other if isinstance(other, Mapping) else {}, f"{key}.")
        elif plain != other and not (key in PATHS + PATHS_OR_NAMES and _same_path(plain, other)):
            different.append(Difference(key, plain, other))
    return different


def _shared_fields(section: BaseModel) -> Iterator[tuple[str, Any, Any]]:
    """The key, the value, and the value as JSON has it, of each field that is not local to a machine."""
    dumped = section.model_dump(mode="json", by_alias=True)
    for name, field in type(section).model_fields.items():
        extra = field.json_schema_extra
        if not (isinstance(extra, dict) and extra.get("local")):
            key = field.alias or name
            yield key, getattr(section, name), dumped[key]


def _with_absolute_paths(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    changed = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            value = _with_absolute_paths(value, f"{key}.")
        elif key in PATHS and value is not None:
            value = str(Path(value).absolute())
        elif key in PATHS_OR_NAMES:
            value = _absolute_if_there(value)
        changed[name] = value
    return changed


def _absolute_if_there(value: Any) -> Any:
    if isinstance(value, list):
        return [
            _with_paths(source, *map(_absolute_if_there, _paths(source)))
            if isinstance(source, dict)
            else _absolute_if_there(source)
            for source in value
        ]
    if isinstance(value, str) and value.startswith(HARBOR):
        return f"{HARBOR}{harbor_folder(value)}"
    return str(Path(value).absolute()) if value is not None and (os.path.exists(value) or glob(value)) else value


def _same_path(here: Any, there: Any) -> bool:
    """True if a path, or a list of sources, means the same in two processes.

    A relative path agrees with an absolute one that ends in it: machines may have the run's files in different places.
    """
    if isinstance(here, str) and isinstance(there, str):
        if here.startswith(HARBOR) and there.startswith(HARBOR):
            here, there = here.removeprefix(HARBOR), there.removeprefix(HARBOR)
        shorter, longer = sorted((Path(here), Path(there)), key=lambda path: path.is_absolute())
        return here == there or (not shorter.is_absolute() and longer.parts[-len(shorter.parts) :] == shorter.parts)
    if isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        return all(
            _same_path(one, other)
            if isinstance(one, str)
            else isinstance(one, dict)
            and isinstance(other, dict)
            and _with_paths(one) == _with_paths(other)
            and all(a == b or _same_path(a, b) for a, b in zip(_paths(one), _paths(other), strict=True))
            for one, other in zip(here, there, strict=True)
        )
    return False


def _paths(source: Mapping[str, Any]) -> tuple[Any, Any]:
    """The keys of a data source that hold a path or a name: its own, and its teacher's."""
    return source.get("path"), (source.get("teacher") or {}).get("model")


def _with_paths(source: Mapping[str, Any], path: Any = "", model: Any = "") -> dict[str, Any]:
    """The source with these values for the keys of `_paths`."""
    teacher = source.get("teacher") or {}
    return {**source, "path": path, "teacher": teacher | ({"model": model} if "model" in teacher else {})}
