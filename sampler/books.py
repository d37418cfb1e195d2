"""What the sampler has counted at a version of the weights, for a run that continues there without its Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgpack

from sampler.records import EvaluationCounts
from sampler.state import SamplerState

# Counted by scripts as the sampler's own counters are by its commits: what is made up here must be theirs too.
FINISHED, COUNTED, LOST, SUPERSEDED = "finished", "counted", "lost", "superseded"


class Lost(NamedTuple):
    """What went with Redis: tasks in flight, and counted samples that no batch before this version had."""

    tasks: int
    samples: int


def pack_books(state: SamplerState, counters: Mapping[str, int], results: Mapping[str, bytes]) -> bytes:
    """The books as of the last commit.

    Args:
        counters: the run's.
        results: packed results of complete evaluations, by version.
    """
    return msgpack.packb(
        {
            "next_task": state.next_task,
            "arrivals": state.arrivals,
            "refilled": state.refilled,
            "evaluated_to": state.evaluated_to,
            "evaluations": {str(due): counts.pack() for due, counts in state.evaluations.items()},
            "results": dict(results),
            "counters": dict(counters),
            "in_flight": len(state.admission.in_flight),
            "waiting": len(state.open) + state.admission.arrived,
            "batches_ahead": max(0, state.open.next_id - state.version),
        }
    )


def restore_books(state: SamplerState, data: bytes, batch_size: int) -> Lost:
    """Let a new state go on with these books, and close in them what went with Redis.

    A task that was in flight is counted as `lost`; admission has others sent in its place. A counted sample that no
    batch before the version had, and whose tokens are gone, stays in the tracker and is counted in `lost_samples`.
    """
    books = msgpack.unpackb(data)
    state.next_task, state.arrivals = books["next_task"], books["arrivals"]
    state.refilled, state.evaluated_to = books["refilled"], books["evaluated_to"]
    results = {int(version): packed for version, packed in books["results"].items()}
    state.restore_evaluations(
        {int(due): EvaluationCounts.unpack(packed) for due, packed in books["evaluations"].items()}, results
    )
    counters: dict[str, int] = books["counters"]
    unmade = min(books["batches_ahead"] * batch_size, counters.get("batched", 0))
    lost = Lost(books["in_flight"], books["waiting"] + unmade)
    # Answers that had come, and were not counted yet, are among the tasks in flight.
    answered = counters.get(COUNTED, 0) - counters.get(SUPERSEDED, 0) - counters.get(LOST, 0)
    counters[FINISHED] = min(counters.get(FINISHED, 0), answered)
    counters[COUNTED] = counters.get(COUNTED, 0) + lost.tasks
    counters[LOST] = counters.get(LOST, 0) + lost.tasks
    counters["batched"] = counters.get("batched", 0) - unmade
    counters["lost_samples"] = counters.get("lost_samples", 0) + lost.samples
    for name, total in counters.items():
        state.count(name, total)
    return lost
