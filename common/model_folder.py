"""Names what is wrong with a model folder before a library does so in a page of tracebacks."""

from __future__ import annotations

import json
from pathlib import Path

from common.errors import UserError


def check_model_folder(path: str) -> None:
    """Check that `model.path`, where it is a folder and not a Hugging Face name, can be a model.

    Raises:
        UserError: it is not there, or its configuration or weights cannot be read.
    """
    folder = Path(path)
    if not folder.is_dir():
        if path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise UserError(
                f"model.path = {path!r}: there is no such folder, and it is no Hugging Face name (owner/name)"
            )
        return
    from safetensors import SafetensorError, safe_open

    try:
        json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"model.path = {path!r}: cannot read config.json: {error}") from None
    weights = sorted(folder.glob("*.safetensors"))
    if not weights and not any(folder.glob("*.bin")):
        raise UserError(f"model.path = {path!r} has no weights (*.safetensors or *.bin)")
    for file in weights:
        try:
            with safe_open(file, "numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise UserError(f"model.path = {path!r}: cannot read {file.name}: {error}") from None
