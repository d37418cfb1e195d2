"""A model folder on disk: whether it can be trained, its size, context length, fingerprint, and failed downloads."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError, nearest
from common.files import checkpoint, checkpoint_versions, checkpoints
from common.model_files import contradiction, read_header

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
# Files besides the weights that determine how text is tokenized, which tokens end a turn, and how the model computes.
MEANING = (
    *TOKENIZERS,
    *("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json", "config.json"),
)
WEIGHT_FILES = ("*.safetensors", "*.bin")
SAMPLES, SAMPLE_BYTES = 16, 1 << 16  # of a file, for its fingerprint
LFS = b"version https://git-lfs"
# Bytes per number of safetensors' types.
WIDTHS = {"F64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names of a mixture's experts in a layer
# Names of the context length in model configurations; if there are several, the smallest counts.
KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# Kinds of rotary embeddings whose models state the length after scaling.
ALREADY_SCALED = {"default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}
HUB_SECONDS = 5.0
# Words in the errors of transformers, vLLM and huggingface_hub, and what they mean.
HUB_FAILURES = (
    (
        ("gated", "401", "403", "restricted"),
        "may not be downloaded by you: accept its licence on the hub, then `hf auth login`",
    ),
    (
        ("not a valid model identifier", "repository not found", "404"),
        "is neither a folder here nor a model of the Hugging Face hub; check the name",
    ),
    (
        ("connect", "offline", "resolve", "timed out"),
        "is not a folder here, and the Hugging Face hub cannot be reached to download it; give the path of a folder, "
        "or copy one here with `hf download`",
    ),
)


def check_model_folder(path: str, weights: bool = True, tokenizer: bool = False, key: str = "model.path") -> None:
    """Check that a model can be trained, if it is a folder and not a Hugging Face name.

    Args:
        weights: whether its weights must be there and readable.
        tokenizer: whether it must have a tokenizer, which vLLM needs.
        key: the setting that names it.

    Raises:
        UserError: it is not there, or its configuration or weights cannot be read.
    """
    folder = Path(path)
    if not _is_folder(folder, key):
        if path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise UserError(
                f"{key} = {path!r}: there is no such folder, and it is not a Hugging Face name "
                f"(owner/name){_hint(path)}"
            )
        if path.count("/") == 1 and folder.parent.is_dir():
            raise UserError(_not_there(folder, key))
        # Of folders `owner/name`, suggest only those with exactly this name: names on the hub differ by little.
        owners = [place.parts[0] for place in Path().glob(f"*/{glob.escape(folder.name)}/config.json")]
        near = nearest(path, [place.parent.name for place in Path().glob("*/config.json")])
        if owner := nearest(folder.parent.name, owners):
            near = f"{owner}/{folder.name}"
        if near:
            raise UserError(f"{key} = {path!r}: there is no such folder; did you mean {near}?")
        return
    from safetensors import SafetensorError, safe_open

    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise UserError(f"{key} = {path!r} {_without_config(folder)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"not JSON ({error})"
        raise UserError(f"{key} = {path!r}: cannot read config.json: {reason}; copy it from the original") from None
    if not isinstance(config, dict):
        raise UserError(f"{key} = {path!r}: config.json is not a JSON object; copy it from the original")
    if not weights:
        return
    if tokenizer and not any((folder / name).exists() for name in TOKENIZERS):
        raise UserError(
            f"{key} = {path!r} has no tokenizer ({TOKENIZERS[0]}); write it there with "
            "AutoTokenizer.from_pretrained(ORIGINAL).save_pretrained(FOLDER)"
        )
    files = sorted(folder.glob("*.safetensors"))
    if not files and not any(folder.glob("*.bin")):
        raise UserError(f"{key} = {path!r} has no weights (*.safetensors or *.bin)")
    for file in files:
        try:
            with safe_open(file, "numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise UserError(f"{key} = {path!r}: {_unreadable(file, error)}") from None
    if problem := contradiction(folder, config, tokenizer):
        raise UserError(f"{key} = {path!r}: {problem}")


def exported_model(path: str, key: str = "model.path") -> str:
    """The model folder that a path names: of a run folder the newest export, of a checkpoint its own; else the path.

    Raises:
        UserError: no checkpoint of the run folder has an export, or the path cannot be read.
    """
    folder = Path(path)
    if not _is_folder(folder, key):
        return path
    if (folder / "config.json").is_file() or not is_run_folder(folder):
        export = folder / "hf"
        return str(export) if (export / "config.json").is_file() else path
    for version in reversed(checkpoint_versions(folder)):
        if ((export := checkpoint(folder, version) / "hf") / "config.json").is_file():
            return str(export)
    raise UserError(f"{key} = {path!r} is a run folder without an exported checkpoint; learner.export=true writes them")


def _is_folder(path: Path, key: str) -> bool:
    """Whether a folder is there, and may be searched; raises `UserError` if the system does not say, or refuses."""
    try:
        is_folder = path.is_dir()
        (path / "config.json").exists()
    except OSError as error:
        raise UserError(f"{key} = '{path}' cannot be read: {error.strerror}") from None
    return is_folder


def is_run_folder(folder: Path) -> bool:
    return checkpoints(folder).is_dir()


def _hint(path: str) -> str:
    if "://" in path:
        return f"; give only the end of the address, {'/'.join(path.rstrip('/').split('/')[-2:])}"
    return "; ~ is not expanded here, write the folder out" if path.startswith("~") else ""


def _without_config(folder: Path) -> str:
    if (folder / "adapter_config.json").exists():
        return "is an adapter (LoRA), not a model; merge it into its base model with merge_and_unload()"
    below = sorted(entry.parent.name for entry in folder.glob("*/config.json"))
    return "has no config.json, so it is not a model folder" + (
        f"; it has models in {', '.join(below)}" if below else ""
    )


def _unreadable(file: Path, error: Exception) -> str:
    """Why weights cannot be read: most often their download never started or was cut off."""
    try:
        with file.open("rb") as opened:
            if opened.read(len(LFS)) == LFS:
                return f"{file.name} is a Git LFS pointer, not the weights; run `git lfs pull` in that folder"
    except OSError as reason:
        return f"cannot read {file.name}: {reason.strerror}"
    return f"cannot read {file.name}: {error}; it is damaged, or not all of it was copied: download it again"


def _not_there(folder: Path, key: str) -> str:
    """Why `owner/name` is not taken for a model to download: a folder `owner` is here."""
    siblings = sorted(entry.name for entry in folder.parent.iterdir() if entry.is_dir())
    near = nearest(folder.name, siblings)
    there = f"did you mean {folder.parent / near}?" if near else f"{folder.parent} has {', '.join(siblings) or 'none'}"
    return (
        f"{key} = '{folder}': there is no such folder; {there} (for the model of this name on the Hugging Face "
        f"hub, start from where no folder is called {folder.parent})"
    )


def weights_fingerprint(path: str) -> str:
    """An id of a model folder's weights, the same wherever the folder lies; a Hugging Face name is its own id.

    Sizes and samples of the files are enough: training changes some weights everywhere in a model.
    """
    if not Path(path).is_dir():
        return path
    return _sampled(_weight_files(Path(path)))


def _weight_files(folder: Path) -> list[Path]:
    return sorted(file for pattern in WEIGHT_FILES for file in folder.glob(pattern))


def _sampled(files: Iterable[Path]) -> str:
    """Digest of the files' names, sizes and samples of their content."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as data:
            for part in range(SAMPLES):
                data.seek(size * part // SAMPLES)
                digest.update(data.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def cached_folder(name: str) -> Path | None:
    """The folder in the Hugging Face hub's cache that a name was last loaded from; None if there is none."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(name, "config.json")
    except ValueError:  # a path, which is not a name on the hub
        return None
    return Path(config).parent if isinstance(config, str) else None


def model_digests(folder: Path, missing: str = "", weights: bool = False) -> dict[str, str]:
    """Digests of the files in a model folder that give tokens their meaning.

    Args:
        missing: digest of a file that is not there; if empty, such files are left out.
        weights: whether to add digests of samples of the weights.
    """
    digests = {file.name: _sampled([file]) for file in _weight_files(folder)} if weights else {}
    for name in MEANING:
        file = folder / name
        if file.is_file():
            digests[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        elif missing:
            digests[name] = missing
    return digests


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Number of parameters, and size of the files in bytes."""

    parameters: int
    stored: int


def model_size(folder: Path) -> ModelSize | None:
    """Size of the model in a folder, from the headers of its *.safetensors; None if none can be read."""
    parameters = stored = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            stored += os.stat(path).st_size
            for tensor in read_header(path).values():
                begin, end = tensor["data_offsets"]
                parameters += (end - begin) // WIDTHS.get(tensor["dtype"], 2)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    return ModelSize(parameters, stored) if stored else None


def context_length(config: Mapping[str, Any]) -> int | None:
    """The longest text in tokens, as vLLM computes it from the content of `config.json`; None if that does not say."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        return None
    lengths = [value for key in KEYS if isinstance(value := text.get(key), int)]
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    is_scaled = isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type", "default")) not in ALREADY_SCALED
    if not lengths or is_scaled or "gemma3" in str(text.get("model_type")):
        return None
    # `model_max_length` may extend the length that the model was trained for.
    allowed = text.get("model_max_length")
    return max(min(lengths), allowed if isinstance(allowed, int) else 0)


def end_ids(path: str) -> tuple[int, ...]:
    """Ids of the tokens that end a text of a model, as its generation_config.json says, or else its config.json.

    Empty if neither says so, or if the model is neither a folder nor in the cache of the Hugging Face hub.
    """
    folder = Path(path) if Path(path).is_dir() else cached_folder(path)
    if folder is None:
        return ()
    for name in ("generation_config.json", "config.json"):
        try:
            content = json.loads((folder / name).read_text())
            ids = content.get("eos_token_id", content.get("text_config", {}).get("eos_token_id"))
        except (OSError, ValueError, AttributeError):
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if ends := tuple(i for i in ids if isinstance(i, int)):
            return ends
    return ()


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether the content of a `config.json` is that of a mixture of experts."""
    text = config.get("text_config", config)
    return isinstance(text, Mapping) and any(isinstance(n := text.get(key), int) and n > 1 for key in EXPERTS)


def hub_answers() -> bool:
    """Whether the Hugging Face hub, or what HF_ENDPOINT names, answers at once; False if HF_HUB_OFFLINE is set."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=HUB_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True  # it answered
    except (OSError, ValueError):
        return False


def download_failure(path: str, error: Exception) -> str | None:
    """Why a model of the Hugging Face hub is not here, as one line; None if the error is about something else."""
    if Path(path).is_dir():
        return None
    text = str(error).replace(path, "").lower()  # a name may have such words, or "404"
    for words, problem in HUB_FAILURES:
        if any(word in text for word in words):
            return f"model.path = {path!r} {problem}"
    return None
