"""The file of prompts' states (`spo values states`): a model's state at the end of each prompt, as a vector.

An `.npz` with `ids`, the prompts' ids as UTF-8 bytes [N], and `states`, float16 [N, D]: vectors of length 1, or zeros
for a prompt without a state.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.files import replacing


def write_states(path: Path, ids: Sequence[str], states: np.ndarray) -> None:
    """Write the file whole or not at all; raises `UserError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(file, ids=np.array([prompt_id.encode() for prompt_id in ids]), states=states.astype(np.float16))
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error.strerror}") from None


def read_states(path: str, ids: Sequence[str], log: Any) -> np.ndarray:
    """The states of a run's prompts, float16 [N, D]; zeros for those that the file lacks, which are counted in the log.

    Raises:
        UserError: the file cannot be read, is of another form, or has none of the prompts.
    """
    key = f"sampler.tracker.prompt_states = {path}"
    try:
        with np.load(path, allow_pickle=False) as arrays:
            file_ids, states = arrays["ids"], arrays["states"]
    except FileNotFoundError:
        raise UserError(f"{key} does not exist; `spo values states CONFIG --output {path}` writes it") from None
    except (PermissionError, IsADirectoryError) as error:
        raise UserError(f"{key} cannot be read: {error.strerror}") from None
    # TypeError: a single array; RuntimeError: a damaged zip seems to be encrypted, or packed by another method.
    except (OSError, ValueError, KeyError, EOFError, TypeError, RuntimeError, zlib.error, zipfile.BadZipFile):
        raise UserError(f"{key} is not a file of `spo values states`") from None
    has_shape = states.ndim == 2 and file_ids.shape == states.shape[:1]
    if states.dtype != np.float16 or not has_shape or not np.isfinite(states).all():
        raise UserError(
            f"{key} is not a file of `spo values states`: it needs finite states, float16 [N, D], and N ids"
        )
    index = {prompt_id: i for i, prompt_id in enumerate(file_ids.tolist())}
    rows = np.array([index.get(prompt_id.encode(), -1) for prompt_id in ids], np.int64)
    missing = int((rows < 0).sum())
    if missing == len(ids):
        raise UserError(f"{key} has {len(file_ids):,} prompts, but none of data.train; make it with the same data")
    if missing:
        log.warning("prompts without a state are predicted by the mean of all", prompts=missing, of=len(ids))
    own = states[rows]
    own[rows < 0] = 0
    return own
