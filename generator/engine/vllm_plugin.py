"""The plugin that vLLM loads in each of its processes, by the entry point `spo_weights` in `vllm.general_plugins`."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util

from common.process import die_with_parent

BACKEND = "spo"  # what vLLM calls our weight transfer engine
ENGINE = ("generator.weights.weight_engine", "SharedMemoryWeightEngine")  # its module and class
ENTRY_POINT = "spo_weights"


def register() -> None:
    """Make our weight transfer engine known; vLLM may call this several times.

    It also makes vLLM's own child processes end with the generator: one that is killed could not end them itself, and
    they would go on holding memory.
    """
    _die_with_parent()
    # A forked process has the plugin already and does not load it again.
    multiprocessing.util.register_after_fork(register, lambda _: _die_with_parent())
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(BACKEND, *ENGINE)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None and _is_vllm(multiprocessing.current_process().name):
        die_with_parent(parent.is_alive)


def _is_vllm(process_name: str) -> bool:
    """Whether a child process is one of vLLM's; others may outlive the thread that made them."""
    return process_name.startswith(("EngineCore", "VllmWorker"))
