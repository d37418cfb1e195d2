"""Reads a model folder without loading the model: shards, names and shapes of weights, ids of tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HEADER_LIMIT = 100 << 20  # of the safetensors format
INDEXES = {"model.safetensors": "model.safetensors.index.json", "pytorch_model.bin": "pytorch_model.bin.index.json"}
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head"
MAX_NAMES = 3  # that a message lists
Header = dict[str, dict[str, Any]]


def read_header(path: Path) -> Header:
    """Type, shape and place of each tensor in a *.safetensors, by name; raises OSError or ValueError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > HEADER_LIMIT:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(file.read(length))
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}


def contradiction(folder: Path, config: Mapping[str, Any], tokenizer: bool) -> str | None:
    """How files of a model folder contradict one another, with a fix; None if they do not.

    Args:
        config: content of its config.json.
        tokenizer: whether its tokens must fit too.
    """
    text = config.get("text_config", config)
    sizes = text if isinstance(text, Mapping) else config
    names, problem = weight_headers(folder)
    problem = problem or _without_head(names, config, sizes) or _other_vocabulary(names, sizes)
    return problem or (_tokens_beyond(folder, sizes) if tokenizer else None)


def weight_headers(folder: Path) -> tuple[Header, str | None]:
    """Headers of the tensors in *.safetensors, and a line about files or tensors of the index that are missing."""
    for single, index in INDEXES.items():
        if (folder / single).exists():
            return (read_header(folder / single), None) if single.endswith(".safetensors") else ({}, None)
        if (folder / index).exists():
            return _indexed(folder, folder / index)
    return {}, None


def _indexed(folder: Path, index: Path) -> tuple[Header, str | None]:
    try:
        places = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        if not all(isinstance(name, str) for name in places.values()):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError):
        return {}, f"cannot read {index.name}; it is damaged, or not all of it was copied: download it again"
    files = sorted(set(places.values()))
    if absent := [name for name in files if not (folder / name).exists()]:
        return {}, f"{listed(absent)}, which {index.name} names, is not there; download the folder again"
    header: Header = {}
    for name in files:
        header |= read_header(folder / name) if name.endswith(".safetensors") else {}
    lost = sorted(places.keys() - header.keys()) if header else []
    problem = f"the files lack {listed(lost)}, which {index.name} names; download the folder again"
    return header, problem if lost else None


def _without_head(names: Header, config: Mapping[str, Any], sizes: Mapping[str, Any]) -> str | None:
    """A line about a causal model that lacks its untied output layer. Models with other names are not judged."""
    tied = config.get("tie_word_embeddings", sizes.get("tie_word_embeddings"))
    is_causal = any("ForCausalLM" in str(name) for name in config.get("architectures") or ())
    has_embedding = any(name.endswith(EMBEDDING) for name in names)
    if tied is not False or not is_causal or not has_embedding or any(HEAD in name.split(".") for name in names):
        return None
    return lacks([f"{HEAD}.weight"])


def lacks(names: list[str]) -> str:
    """The line about weights that a model needs and its files do not have."""
    it = "them" if len(names) > 1 else "it"
    tie = ", or, if it shares its output layer with its embeddings, set tie_word_embeddings to true in its config.json"
    return (
        f"the file lacks {listed(names)}, and the configuration does not tie {it}: training would start from random "
        f"numbers; take all files of the model{tie if names == [f'{HEAD}.weight'] else ''}"
    )


def _other_vocabulary(names: Header, sizes: Mapping[str, Any]) -> str | None:
    """A line about embeddings with another number of rows than config.json says."""
    rows = [tensor.get("shape", [0])[0] for name, tensor in names.items() if name.endswith(EMBEDDING)]
    size = sizes.get("vocab_size")
    if len(rows) != 1 or not isinstance(size, int) or rows[0] == size:
        return None
    return f"{EMBEDDING} has {rows[0]} rows, but its config.json says vocab_size = {size}; take both from one model"


def _tokens_beyond(folder: Path, sizes: Mapping[str, Any]) -> str | None:
    """A line about ids that the tokenizer makes, but for which the model has no embedding.

    A special token that neither the chat template nor the tokenizer's settings name is never made.
    """
    size = sizes.get("vocab_size")
    try:
        tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary, added = tokenizer["model"]["vocab"], tokenizer.get("added_tokens") or []
        ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
        if isinstance(vocabulary, list):  # pieces with their scores, by id
            ids = {piece[0]: number for number, piece in enumerate(vocabulary)}
        used = _settings(folder)
        ids |= {one["content"]: one["id"] for one in added if not one.get("special") or one["content"] in used}
        beyond = sorted((number, text) for text, number in ids.items() if number >= size)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # it has another format
    if not beyond:
        return None
    tokens = listed([f"{text!r} (id {number})" for number, text in beyond])
    return (
        f"the tokenizer has {tokens}, but the model has embeddings only for ids below {size}: take the tokenizer of "
        "this model, or enlarge the model with resize_token_embeddings()"
    )


def _settings(folder: Path) -> str:
    """The chat template and the tokenizer's settings, without its list of added tokens."""
    template, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    texts = [template.read_text(encoding="utf-8")] if template.exists() else []
    if settings.exists():
        values = json.loads(settings.read_text(encoding="utf-8"))
        named = ("bos_token", "eos_token", "pad_token", "chat_template")
        texts += [json.dumps(values.get(name), ensure_ascii=False) for name in named]
    return "\n".join(texts)


def listed(names: list[str]) -> str:
    """The first names of a list, and the number of the others."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
