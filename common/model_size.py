"""How large a model on disk is, from the headers of its files; nothing is loaded."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

WIDTHS = {"F64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}
HEADER_LIMIT = 100 << 20  # of the safetensors format


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Number of parameters, and size of the files in bytes."""

    parameters: int
    stored: int


def model_size(folder: Path) -> ModelSize | None:
    """Size of the model in a folder, from the headers of its *.safetensors; None where none can be read."""
    parameters = stored = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > HEADER_LIMIT:
                    return None
                header = json.loads(file.read(length))
            stored += os.stat(path).st_size
            for name, tensor in header.items():
                if name != "__metadata__":
                    begin, end = tensor["data_offsets"]
                    parameters += (end - begin) // WIDTHS.get(tensor["dtype"], 2)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    return ModelSize(parameters, stored) if stored else None
