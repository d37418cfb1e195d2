"""The rows of the live view about GPUs and vLLM's engines, from the newest heartbeats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from launcher.run.progress import Progress

Figures = Mapping[str, float]
LEAST = "gpu/least_utilisation"


def gpu_rows(progress: Progress) -> Iterator[tuple[str, str, str]]:
    """A row for the GPUs of each side that has some: how busy they are, and what each does on average."""
    learner, generators = progress.measured("learner"), progress.measured("generator")
    sides = {
        "learner": (learner, progress.metric("tokens/per_second_per_gpu"), progress.metric("gpu/mfu")),
        "generators": (generators, _mean(generators, "generator/tokens_per_second_per_gpu"), None),
        "teachers": ([progress.teacher_gpus()], None, None),
    }
    for side, (processes, rate, mfu) in sides.items():
        if gpus := [figures for figures in processes if figures.get("gpu/count")]:
            count = sum(figures["gpu/count"] for figures in gpus)
            shares = [figures[LEAST] for figures in gpus if LEAST in figures]
            parts = [
                f"{count:.0f}",
                _shown("the least busy {:.0%}", min(shares, default=None) if count > 1 else None),
                _shown("{:.0f} GB", _mean(gpus, "gpu/memory_gb")),
                _shown("{:.0f} W", _mean(gpus, "gpu/watts")),
                _shown("{:,.0f} tokens/s each", rate),
                _shown("MFU {:.0%}", mfu),
            ]
            busy = _shown("{:.0%} busy", _mean(gpus, "gpu/utilisation")) or "–"
            yield f"GPUs, {side}", busy, ", ".join(filter(None, parts))


def engine_rows(progress: Progress) -> Iterator[tuple[str, str, str]]:
    """A row for the generators' engines, once they have computed something."""
    engines = progress.measured("generator")
    batch = _mean(engines, "engine/batch_size")
    if batch is not None:
        preempted = sum(figures.get("engine/preemptions", 0.0) for figures in engines)
        parts = [
            _shown("KV cache {:.0%} full", _mean(engines, "engine/cache_used")),
            _shown("prefix hits {:.0%}", _mean(engines, "engine/prefix_hits")),
            f"{preempted:,.0f} preemption{'s' * (preempted != 1)}",
        ]
        yield "vLLM", f"{batch:,.1f} at once", ", ".join(filter(None, parts))


def _shown(form: str, value: float | None) -> str:
    return "" if value is None else form.format(value)


def _mean(processes: Sequence[Figures], name: str) -> float | None:
    """The mean of those that have the figure, weighted by their GPUs; None if none has."""
    known = [(figures[name], figures.get("gpu/count") or 1.0) for figures in processes if name in figures]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None
