"""Copies what an export takes from the run's initial model: every file but the weights, and its config.json."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedModel

from common.errors import first_line, one_line
from common.log import get_logger
from common.model import cached_folder
from common.model_files import INDEXES, read_header, weight_headers
from learner.policy.disk_names import untrained

CONFIG, GENERATION = "config.json", "generation_config.json"
# Tokenizers, templates, processors, generation settings, code and licences, whatever they are called.
CARRIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*")
TEMPLATES = "additional_chat_templates"  # a folder
NOT_CARRIED = (CONFIG, "*.index.json", "adapter_config.json", "trainer_state.json", "all_results.json")
SHARD, INDEX = "model-{:05}-of-{:05}.safetensors", INDEXES["model.safetensors"]
DTYPES = ("dtype", "torch_dtype")


def complete(model: PreTrainedModel, dtype: torch.dtype, path: str, folder: Path) -> None:
    """Add the files of the model at `path` to an export of it in `dtype`, and put its config.json in place."""
    (folder / GENERATION).unlink(missing_ok=True)
    source = source_folder(path)
    if source is None or not source.is_dir():
        get_logger().warning("exported without a tokenizer: the files of the model are missing", model=path)
        return
    _add_weights(model, source, folder)
    for file in _carried(source):
        target = folder / file.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)
    if (source / CONFIG).is_file():
        _write_config(model, dtype, source / CONFIG, folder / CONFIG)
    _warn_of_generation_config(folder)


@functools.cache
def source_folder(path: str) -> Path | None:
    """The folder with the files of a model; those of a Hugging Face name are downloaded, unless they are cached."""
    if Path(path).is_dir():
        return Path(path)
    try:
        folder = cached_folder(path)
    except ValueError:  # not a Hugging Face name: a folder that was moved away
        return None
    if folder is None:
        return None
    from huggingface_hub import snapshot_download

    try:
        # Of the revision that was loaded, whose commit the folder is named by.
        snapshot_download(path, revision=folder.name, allow_patterns=[*CARRIED, f"{TEMPLATES}/*"])
    except Exception as error:  # of the network, the hub or the cache, each with classes of its own
        get_logger().warning("an export has only those files of the model that are cached", reason=first_line(error))
    return folder


def _add_weights(model: PreTrainedModel, source: Path, folder: Path) -> None:
    """Add those of the source's weights that are not the model's: of other parts of a multimodal model, and buffers.

    A critic, whose configuration is its own, gets buffers alone.
    """
    headers, problem = weight_headers(source)
    if problem:
        get_logger().warning("exported without weights that are not trained", model=str(source), reason=problem)
    own = model.state_dict().keys() if _is_critic(model) else None
    added = [name for name, there in untrained(model, headers).items() if own is None or there in own]
    if not added:
        return
    shards = sorted(folder.glob("*.safetensors"))
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        renamed = shard.rename(folder / SHARD.format(number, len(shards) + 1))
        places |= dict.fromkeys(read_header(renamed), renamed.name)
    last = folder / SHARD.format(len(shards) + 1, len(shards) + 1)
    save_file(_tensors(source, added), last, metadata={"format": "pt"})
    places |= dict.fromkeys(added, last.name)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _tensors(source: Path, names: list[str]) -> dict[str, torch.Tensor]:
    wanted, tensors = set(names), dict[str, torch.Tensor]()
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in wanted & set(opened.keys())}
    return tensors


def _is_critic(model: PreTrainedModel) -> bool:
    return type(model).__name__.endswith("ForTokenClassification")


def _carried(source: Path) -> Iterator[Path]:
    left_out = {file for pattern in NOT_CARRIED for file in source.glob(pattern)}
    files = {file for pattern in CARRIED for file in source.glob(pattern)} | {*source.glob(f"{TEMPLATES}/*")}
    return (file for file in sorted(files - left_out) if file.is_file())


def _write_config(model: PreTrainedModel, dtype: torch.dtype, source: Path, target: Path) -> None:
    """Write the source's config.json with the type of the weights and, for a critic, its class and its one label.

    Keys that only other releases of transformers know are kept, so programs that can read the source can read the
    export. If nothing has to change, the file is copied byte by byte. If the model's type differs from the source's,
    the config.json that transformers wrote stays.
    """
    values: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    is_part = model.is_part and not _is_critic(model)
    if values.get("model_type") != model.config.model_type and not is_part:
        return
    changed = _with_dtype(values, str(dtype).removeprefix("torch."))
    name = type(model).__name__
    if not is_part and name not in (changed.get("architectures") or [name]):
        changed["architectures"] = [name]
    if _is_critic(model):
        changed |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        changed.pop("num_labels", None)
    if changed == values:
        shutil.copyfile(source, target)
    else:
        target.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _with_dtype(values: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The values with `dtype` wherever they name a type of weights, in nested configurations too."""
    changed = {name: _with_dtype(value, dtype) if isinstance(value, dict) else value for name, value in values.items()}
    return changed | {name: dtype for name in DTYPES if isinstance(values.get(name), str)}


def _warn_of_generation_config(folder: Path) -> None:
    if not (folder / GENERATION).is_file():
        return
    try:
        GenerationConfig.from_pretrained(folder).validate(strict=True)
    except Exception as error:
        get_logger().warning(
            "generation_config.json is the source's, though transformers would not write it",
            reason=one_line(str(error)),
        )
