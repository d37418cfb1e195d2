"""How the processes of a run share one machine's cores."""

from __future__ import annotations

import os


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def default_generators() -> int:
    """One generator for each four cores: on fewer, a second engine only takes turns with the first."""
    return max(1, cores() // 4)


def environment(role: str, generators: int) -> dict[str, str]:
    """Thread settings of a process that computes, unless the user has set his own.

    The learner and the generators are busy at the same time, so each gets its share of the cores.
    """
    share = max(1, cores() // (generators + 1))
    settings = {"OMP_NUM_THREADS": str(share)}
    if role == "generator":
        # Threads are not bound to cores: several engines on one machine would all be bound to the same ones.
        settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return {name: value for name, value in settings.items() if name not in os.environ}
