"""Makes torch compute the same bits each time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.errors import UserError

# Read by cuBLAS, which else may choose its workspace by what else runs, and by flash attention in transformers.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}


@contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """Within the block torch takes deterministic algorithms only, and its random numbers begin at a seed.

    Raises:
        UserError: there is none for what the block computes.
    """
    os.environ.update(ENVIRONMENT)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "use_deterministic_algorithms" not in str(error):
            raise
        raise UserError(f"run.deterministic: {str(error).splitlines()[0]}") from error
    finally:
        torch.use_deterministic_algorithms(False)
