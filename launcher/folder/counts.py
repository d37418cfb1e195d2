"""The counters of a run, and whether they balance."""

from __future__ import annotations

from collections.abc import Mapping

MEANINGS = {
    "dispatched": "tasks sent to generators",
    "counted": "results that were counted",
    "finished": "results that generators delivered",
    "finished_twice": "second results of a task, dropped",
    "evaluated": "results of evaluations",
    "rewarded": "training samples that informed the tracker",
    "batched": "samples in batches",
    "batches_released": "batches whose payloads were freed",
    "late": "samples too old for a gradient",
    "set_aside": "tasks that failed on every attempt, skipped",
    "superseded": "tasks of evaluations that were started again",
    "sent_again": "tasks that had vanished from Redis and were sent again",
    "lost": "tasks in flight that went with a lost Redis",
    "lost_samples": "samples that went with a lost Redis",
    "abandoned": "samples of groups that could not be completed",
    "refilled": "samples of degenerate groups that others replaced",
    "ignored": "results that no longer counted",
    "grouped": "samples in complete groups",
    "degenerate": "of those, in groups whose rewards were all equal",
    "dead": "dead letters",
}
ON_THE_WAY = "the run goes on, or was cut off"


def balances(counters: Mapping[str, int], is_over: bool) -> list[tuple[str, str, str]]:
    """Each equation of docs/operations.md, "A Redis that is lost", with its numbers, and whether it holds.

    Empty without counters.
    """
    if "dispatched" not in counters:
        return []
    of = {name: counters.get(name, 0) for name in (*MEANINGS, *counters)}
    on_their_way = of["dispatched"] - of["counted"]
    waiting = of["rewarded"] - sum(of[name] for name in ("batched", "late", "abandoned", "refilled", "lost_samples"))
    accounted = of["finished"] + of["superseded"] + of["lost"]
    return [
        (
            "dispatched = counted + on their way",
            f"{of['dispatched']:,} = {of['counted']:,} + {on_their_way:,}",
            _holds(on_their_way == 0) if is_over else ON_THE_WAY if on_their_way >= 0 else _holds(False),
        ),
        (
            "counted = finished + superseded + lost",
            f"{of['counted']:,} = {of['finished']:,} + {of['superseded']:,} + {of['lost']:,}",
            _holds(of["counted"] == accounted) if is_over else ON_THE_WAY,
        ),
        (
            "rewarded = batched + late + abandoned + refilled + lost samples + waiting for a batch",
            f"{of['rewarded']:,} = {of['batched']:,} + {of['late']:,} + {of['abandoned']:,} + {of['refilled']:,} + "
            f"{of['lost_samples']:,} + {waiting:,}",
            _holds(waiting >= 0) if is_over or waiting < 0 else ON_THE_WAY,
        ),
    ]


def _holds(is_equal: bool) -> str:
    return "✓ holds" if is_equal else "✗ does not hold"
