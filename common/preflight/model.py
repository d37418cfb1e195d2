"""The model's folder, as far as it can be checked without loading the model."""

from __future__ import annotations

import json
from pathlib import Path

from common.config import Config
from common.errors import UserError
from common.model import check_model_folder, context_length
from common.preflight.context import Context
from common.preflight.finding import Finding, ok, problem
from common.process import Role

ALLOWED = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"  # vLLM's switch for those who know better


def model_folder(context: Context, config: Config) -> Finding | None:
    """Whether `model.path` is a model that can be trained, or a name by which one can be downloaded."""
    path, name = config.model.path, "model"
    if context.role not in (Role.GENERATOR, Role.LEARNER):
        return None
    try:
        check_model_folder(path, tokenizer=context.role is Role.GENERATOR)
    except UserError as error:
        return problem(name, str(error))
    except ImportError:
        return problem(name, "the package safetensors is not installed, and models are read with it")
    too_long = _too_long(context, config)
    if too_long:
        return problem(name, too_long)
    if not Path(path).is_dir():
        offline = context.machine.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        return ok(name, f"{path} is no folder here; {'taken from the cache' if offline else 'downloaded at the start'}")
    return ok(name, path)


def _too_long(context: Context, config: Config) -> str | None:
    """Why vLLM would refuse `model.max_model_len`; a page of its own words otherwise."""
    file, wanted = Path(config.model.path) / "config.json", config.model.max_model_len
    if context.role is not Role.GENERATOR or "max_model_len" in config.generator.engine or not file.is_file():
        return None
    length = context_length(json.loads(file.read_text(encoding="utf-8")))
    if length is None or wanted <= length or context.machine.environ.get(ALLOWED, "0") not in ("0", ""):
        return None
    prompts, responses = config.data.max_prompt_tokens, config.episode.max_response_tokens
    return (
        f"model.max_model_len = {wanted}, and {config.model.path} was made for {length} tokens; set "
        f"model.max_model_len={length}, of which prompts may take data.max_prompt_tokens = {prompts} and responses "
        f"episode.max_response_tokens = {responses}"
    )
