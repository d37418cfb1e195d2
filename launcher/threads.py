"""How the processes of a run share one machine's cores."""

from __future__ import annotations

import os


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def default_generators() -> int:
    """One generator for each four cores: on fewer, a second engine only takes turns with the first."""
    return max(1, cores() // 4)


def environment(name: str, generators: int) -> dict[str, str]:
    """Thread settings of the process of this name, as far as the user has not set his own.

    The learner and the generators compute at the same time, so each gets its share of the cores.
    """
    if name.startswith(("learner", "generator")) and "OMP_NUM_THREADS" not in os.environ:
        return {"OMP_NUM_THREADS": str(max(1, cores() // (generators + 1)))}
    return {}
