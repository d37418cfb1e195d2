"""The books of a run: its counters, and whether they balance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# What each counter counts; those of other releases are shown without words.
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
    "set_aside": "tasks that failed on every attempt",
    "superseded": "tasks of evaluations that were started anew",
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


@dataclass(frozen=True, slots=True)
class Balance:
    """One equation of the books, with its numbers; `holds` is None while tasks are on their way."""

    equation: str
    numbers: str
    holds: bool | None


def balances(counters: Mapping[str, int], is_over: bool) -> list[Balance]:
    """Whether all that was dispatched was counted, and where each counted sample went; empty without counters.

    The equations of docs/operations.md, "A Redis that is lost".
    """
    if "dispatched" not in counters:
        return []
    of = {name: counters.get(name, 0) for name in (*MEANINGS, *counters)}
    on_their_way = of["dispatched"] - of["counted"]
    went = of["batched"] + of["late"] + of["abandoned"] + of["refilled"] + of["lost_samples"]
    waiting = of["rewarded"] - went
    accounted = of["finished"] + of["superseded"] + of["lost"]
    return [
        Balance(
            "dispatched = counted + on their way",
            f"{of['dispatched']:,} = {of['counted']:,} + {on_their_way:,}",
            on_their_way == 0 if is_over else None if on_their_way >= 0 else False,
        ),
        Balance(
            "counted = finished + superseded + lost",
            f"{of['counted']:,} = {of['finished']:,} + {of['superseded']:,} + {of['lost']:,}",
            of["counted"] == accounted if is_over else None,
        ),
        Balance(
            "rewarded = batched + late + abandoned + refilled + lost samples + waiting for a batch",
            f"{of['rewarded']:,} = {of['batched']:,} + {of['late']:,} + {of['abandoned']:,} + {of['refilled']:,} + "
            f"{of['lost_samples']:,} + {waiting:,}",
            waiting >= 0 if is_over else None if waiting >= 0 else False,
        ),
    ]
