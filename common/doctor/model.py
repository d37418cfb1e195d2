"""A model folder, as far as it can be judged without loading it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from common.config import Config
from common.doctor.case import Case, mib
from common.doctor.finding import Finding, ok, problem
from common.errors import UserError
from common.model_folder import check_model_folder
from common.role import Role

WIDTHS = {"F64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}
HEADER_LIMIT = 100 << 20  # as the format's own reader has it


@dataclass(frozen=True, slots=True)
class Size:
    """Numbers in a model, and bytes of its files."""

    parameters: int
    stored: int


def model(case: Case, config: Config) -> Finding | None:
    """Whether `model.path` is a model, or a name that one can be fetched by."""
    if case.role not in (Role.GENERATOR, Role.LEARNER):
        return None
    path, name = config.model.path, "model"
    try:
        check_model_folder(path)
    except UserError as error:
        return problem(name, str(error))
    except ImportError:
        return problem(name, "the package safetensors is not installed, and models are read with it")
    if not Path(path).is_dir():
        offline = case.machine.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        return ok(name, f"{path} is no folder here; {'taken from the cache' if offline else 'fetched at the start'}")
    size = size_of(Path(path))
    return ok(name, f"{path}: {size.parameters:,} parameters, {mib(size.stored)}" if size else path)


def size_of(folder: Path) -> Size | None:
    """Of a folder with *.safetensors, from the heads of these files; None where there are none that can be read."""
    parameters = stored = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                if length > HEADER_LIMIT:
                    return None
                head = json.loads(opened.read(length))
            stored += os.stat(file).st_size
            for name, tensor in head.items():
                if name != "__metadata__":
                    begin, end = tensor["data_offsets"]
                    parameters += (end - begin) // WIDTHS.get(tensor["dtype"], 2)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    return Size(parameters, stored) if stored else None
