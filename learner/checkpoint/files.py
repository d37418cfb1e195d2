"""A checkpoint's settings, and its files: flushed to the disk, and compared with their checksums."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import xxhash
from torch import nn

from common.config import Config
from common.files import METADATA, sync_folder
from common.model import weights_fingerprint
from learner.ranks.world import World

Sums = dict[str, list[Any]]  # path in the folder -> [size in bytes, XXH3 of the content, in hexadecimal]


def division(config: Config, world: World) -> dict[str, Any]:
    """How the optimizer's state is divided among ranks."""
    return {"ranks": world.size, "zero_stage": config.learner.zero_stage}


def contents(config: Config) -> dict[str, Any]:
    """The settings that determine the tensors; a checkpoint only fits a learner with the same settings."""
    learner, lora = config.learner, None
    if learner.lora is not None:
        # The settings of the adapter's parameters, and its base model, which is not saved with it.
        lora = learner.lora.model_dump(mode="json", exclude={"serve"})
        lora["base"] = weights_fingerprint(config.model.path)
    return {"dtype": learner.dtype, "lora": lora, "critic": _critic(config)}


def _critic(config: Config) -> dict[str, Any] | None:
    """The critic's initial model, and whether its attention is frozen: frozen weights are not saved."""
    if not config.algorithm.has_critic:
        return None
    path = config.critic.model or config.model.path
    return {"model": weights_fingerprint(path), "freeze_attention": config.critic.freeze_attention}


def is_undivided(config: Config, metadata: dict[str, Any]) -> bool:
    """Whether each rank holds the whole state, in the checkpoint and here.

    That is so without ZeRO, and thus not in bfloat16, for which DeepSpeed always uses it.
    """
    return metadata.get("zero_stage") == config.learner.zero_stage == 0 and config.learner.dtype == "float32"


def differing(own: dict[str, Any], metadata: dict[str, Any]) -> str:
    """The settings in which a checkpoint differs from this learner, as text; '' if in none."""
    return ", ".join(
        f"{key} = {metadata.get(key)!r} (here {value!r})" for key, value in own.items() if metadata.get(key) != value
    )


def min_size(parameters: Iterable[nn.Parameter], exported: bool) -> int:
    """Minimum size of a checkpoint in bytes: trained weights, two Adam moments in fp32, and the export."""
    sizes = [(getattr(one, "ds_numel", one.numel()), one.element_size(), one.requires_grad) for one in parameters]
    trained = sum(size * (8 + width) for size, width, is_trained in sizes if is_trained)
    return trained + (sum(size * width for size, width, _ in sizes) if exported else 0)


class Damaged(Exception):
    """A checkpoint's files differ from what the learner wrote; the message names the file."""


def paths_in(folder: Path) -> list[str]:
    """All files below a folder but its metadata, in an order that all ranks agree on."""
    paths = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path != METADATA)


def sum_up(folder: Path, paths: Sequence[str]) -> Sums:
    """Flush files to the disk; returns their sizes and checksums. Raises `OSError`, for example on a full disk."""
    sums: Sums = {}
    for path in paths:
        with (folder / path).open("rb") as file:
            os.fsync(file.fileno())
        sums[path] = [(folder / path).stat().st_size, _checksum(folder / path)]
    return sums


def write_metadata(folder: Path, metadata: dict[str, Any]) -> None:
    """Write the metadata, and flush all folders to the disk. It is written last: a folder that has it is complete."""
    with (folder / METADATA).open("w", encoding="utf-8") as file:
        json.dump(metadata, file)
        file.flush()
        os.fsync(file.fileno())
    for path in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync_folder(path)


def read_metadata(folder: Path) -> dict[str, Any]:
    """The metadata of a checkpoint; raises `Damaged`."""
    try:
        metadata = json.loads((folder / METADATA).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{METADATA} cannot be read ({error})") from None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("files"), dict):
        raise Damaged(f"{METADATA} is not what a learner writes")
    return metadata


def compare(folder: Path, sums: Sums, paths: Sequence[str]) -> None:
    """Raise `Damaged` unless each of these files has its recorded size and checksum."""
    for path in paths:
        try:
            size, checksum = sums[path]
            actual_size = (folder / path).stat().st_size
            if actual_size != size:
                raise Damaged(f"{path} has {actual_size:,} bytes instead of {size:,}")
            if _checksum(folder / path) != checksum:
                raise Damaged(f"{path} has another checksum than when it was written")
        except OSError as error:
            raise Damaged(f"{path}: {error.strerror}") from None
        except (TypeError, ValueError):
            raise Damaged(f"{METADATA} has no checksum of {path}") from None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
