"""Where a sampler starts: from what the last one committed, from a checkpoint, or from nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.streams.ledger import Commit, LedgerState
from common.streams.steps import StepReader
from sampler import checkpoint
from sampler.evaluation import Tally
from sampler.state import InFlight, OpenSample, Row

if TYPE_CHECKING:
    from sampler.loop import Sampler

BEFORE_FIRST_STEP = -1
SLICE = 10_000  # tracker rows of one commit


def restore(sampler: Sampler, state: LedgerState) -> None:
    """Go on where the last commit left the run."""
    scalars = state.scalars
    if int(scalars.get("version", BEFORE_FIRST_STEP)) == BEFORE_FIRST_STEP:
        sampler.log.info("waiting for the learner")
        sampler.presence.status(state="waiting for the learner")
        return
    sampler.version = int(scalars["version"])
    sampler.open.next_id = int(scalars["next_batch"])
    sampler.next_task = int(scalars["next_task"])
    sampler.arrivals = int(scalars["arrivals"])
    sampler.steps = StepReader(sampler.broker, after=scalars["steps_after"].decode())
    for name, value in scalars.items():
        if name.startswith("evaluation:"):
            sampler.evaluations.tallies[int(name.partition(":")[2])] = Tally.unpack(value)
    moved = {int(name.partition(":")[2]): float(v) for name, v in scalars.items() if name.startswith("moved:")}
    known = np.zeros(max(moved, default=0) + 1)
    for version, total in moved.items():
        known[version] = total
    sampler.meter.restore(np.maximum.accumulate(known))
    for prompt_id, data in state.tracker.items():
        i = sampler.tracker.index.get(prompt_id)
        if i is not None:
            row = Row.unpack(data)
            sampler.tracker.restore_row(i, row.alpha, row.beta, row.retired)
            sampler.meter.answered[i] = row.answered
    waiting = [OpenSample.unpack(sample_id, data) for sample_id, data in state.open.items()]
    for sample in sorted(waiting, key=lambda sample: sample.arrival):
        sampler.open.add(sample)
    for task_id, data in state.outstanding.items():
        sampler.admission.dispatched(task_id, InFlight.unpack(data))
    sampler.log.info(
        "going on with the run", version=sampler.version, batches=sampler.open.next_id, waiting=len(sampler.open),
        in_flight=len(sampler.admission.in_flight),
    )  # fmt: skip


def resume(sampler: Sampler, version: int) -> None:
    """The first version seen in a Redis that knows nothing: take the tracker of the learner's checkpoint, if any."""
    if version == 0:
        return
    tracker, meter, path = sampler.tracker, sampler.meter, checkpoint.path_of(sampler.checkpoints, version)
    if not checkpoint.load(path, tracker, meter):
        sampler.log.warning("no tracker checkpoint for this version, values start anew", file=str(path))
        return
    sampler.log.info("tracker restored from a checkpoint", file=str(path))
    known = np.flatnonzero((meter.answered >= 0) | tracker.retired).tolist()
    for start in range(0, len(known), SLICE):
        rows = {tracker.prompt_ids[i]: sampler.row(i).pack() for i in known[start : start + SLICE]}
        sampler.ledger.commit(Commit(tracker=rows))
    moved = meter.moved_by_version().tolist()
    sampler.ledger.commit(Commit(scalars={f"moved:{v}": total for v, total in enumerate(moved)}))
