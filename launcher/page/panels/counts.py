"""The panel that shows whether every task is accounted for: counters, their balance, audit and dead letters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.folder.run import Run
from launcher.page.charts import panel, table

MOST_LETTERS = 50  # reasons of dead letters
MEANINGS = {
    "dispatched": "tasks sent to generators",
    "counted": "results that were counted",
    "finished": "results that generators delivered",
    "finished_twice": "second results of a task, dropped",
    "evaluated": "results of evaluations",
    "rewarded": "training samples that informed the tracker",
    "batched": "samples in batches",
    "batches_released": "batches whose payloads were freed",
    "late": "samples too old to train on",
    "set_aside": "tasks that failed on every attempt, skipped",
    "superseded": "tasks of evaluations that were started again",
    "sent_again": "tasks that had vanished from Redis and were sent again",
    "lost": "tasks in flight that were lost with Redis",
    "lost_samples": "samples that were lost with Redis",
    "abandoned": "samples of groups that could not be completed",
    "refilled": "samples of degenerate groups that were replaced by others",
    "ignored": "results that no longer counted",
    "grouped": "samples in complete groups",
    "degenerate": "samples in complete groups whose rewards were all equal",
    "dead": "dead letters",
}
ON_THE_WAY = "the run continues, or was cut off"


def balances(counters: Mapping[str, int], is_over: bool) -> list[tuple[str, str, str]]:
    """Each equation of docs/operations.md, "A Redis that is lost", with its numbers, and whether it holds.

    The list is empty if there are no counters.
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


def counts_panel(run: Run) -> dict[str, Any]:
    """Tables of the balance, the counters, the dead letters, and the audit of a chaos run."""
    counters = run.counters
    audit = [
        [str(check.get("name", "")), f"✗ {check['problem']}" if check.get("problem") else "✓ holds"]
        for check in run.folder.audit()
    ]
    letters = [[count, reason] for reason, count in run.redis.letters.most_common(MOST_LETTERS)]
    dead = counters.get("dead", 0)
    charts = [
        table("balances", "Balance of the counts", ("equation", "numbers", ""),
              balances(counters, run.state == "finished"), "No counters are known yet."),
        table("counters", "What became of every task", ("counter", "number", "meaning"),
              [[name.replace("_", " "), value, MEANINGS.get(name, "")] for name, value in sorted(counters.items())],
              "No counters are known yet."),
        table("letters", "Dead letters", ("count", "reason"), letters,
              f"{dead:,}: `spo dead {run.folder.path}` shows them." if dead else "None."),
    ]  # fmt: skip
    if audit:
        charts.append(table("audit", "Audit of the journal, by spo chaos", ("check", "result"), audit))
    return panel("counts", "Counts", charts)
