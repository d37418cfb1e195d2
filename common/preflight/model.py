"""The model's folder, as far as it can be checked without loading the model."""

from __future__ import annotations

from pathlib import Path

from common.config import Config
from common.errors import UserError
from common.model_folder import check_model_folder
from common.preflight.context import Context
from common.preflight.finding import Finding, ok, problem
from common.role import Role


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
    if not Path(path).is_dir():
        offline = context.machine.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        return ok(name, f"{path} is no folder here; {'taken from the cache' if offline else 'downloaded at the start'}")
    return ok(name, path)
