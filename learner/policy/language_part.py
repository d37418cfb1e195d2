"""The language part of a multimodal model: its configuration, and the names of its weights in the folder.

The config.json of a multimodal model has the language model's configuration inside it. Only that model is trained. In
the files its weights have a prefix, which differs between families and between releases of transformers, so it is read
from the names of the weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from common.errors import UserError
from common.model_files import EMBEDDING, HEAD, weight_headers

BODY = "model."  # the prefix of all weights but the output layer's in a causal language model


@dataclass(frozen=True, slots=True)
class LanguagePart:
    """The part of a model that is trained.

    Attributes:
        config: of a causal language model.
        renamed: regular expressions of prefixes in the files, each with the learner's prefix; none for a model of text.
        others: names of the weights in the files that belong to other parts.
    """

    config: PreTrainedConfig
    renamed: Mapping[str, str] = field(default_factory=dict)
    others: frozenset[str] = frozenset()


def language_part(config: PreTrainedConfig, path: str, key: str) -> LanguagePart:
    """The language part of the model at `path`, which the setting `key` names; a model of text alone is its own.

    Raises:
        UserError: the model has no language part that is a causal language model, or the files lack its weights.
    """
    text: Any = config.get_text_config(decoder=True)
    if text is config:
        return LanguagePart(config)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"{key} = {path!r}: transformers has no causal language model of type {text.model_type!r}, the language "
            f"part of {config.model_type!r}; take a model of text, or one whose language part is such a model"
        )
    names = names_in_files(path)
    embedding, head = _shortest(names, EMBEDDING), _shortest(names, f"{HEAD}.weight")
    if embedding is None:
        raise UserError(
            f"{key} = {path!r}: its *.safetensors have no language part, whose name would end in {EMBEDDING}; take all "
            "files of the model"
        )
    # The two configurations may contradict each other; the files decide.
    if config.tie_word_embeddings != text.tie_word_embeddings:
        text.tie_word_embeddings = head is None
    prefix = embedding.removesuffix(EMBEDDING)
    prefixes = {prefix: BODY}
    if head is not None:
        prefixes[head.removesuffix("weight")] = f"{HEAD}."
    renamed = {f"^{re.escape(stored)}": own for stored, own in prefixes.items() if stored != own}
    return LanguagePart(text, renamed, frozenset(name for name in names if not name.startswith(tuple(prefixes))))


def names_in_files(path: str) -> list[str]:
    """Names of the weights in a model's *.safetensors; those of a Hugging Face name are downloaded first."""
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, allow_patterns=["*.json", "model*.safetensors"]))
    return sorted(weight_headers(folder)[0])


def _shortest(names: list[str], part: str) -> str | None:
    """The name of a weight of the language part; layers that predict further tokens have longer names."""
    return min((name for name in names if f".{name}".endswith(f".{part}")), key=len, default=None)
