"""The lines of the audit about tasks, batches, versions and the tracker: the journal against Redis."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from launcher.audit.evidence import Evidence
from launcher.page.panels.counts import balances
from sampler.records import tracker_rows

MAX_EXAMPLES = 3  # ids that a line names
# Counters that Lua scripts also increase, for each task or result.
BY_SCRIPTS = ("counted", "finished", "finished_twice", "superseded", "batches_released", "dead")


def commits(run: Evidence) -> str:
    wrong = ((number, entry.sequence) for number, entry in enumerate(run.journal, 1) if entry.sequence != number)
    return next((f"in place of commit {number} there is {sequence}" for number, sequence in wrong), "")


def restoration(run: Evidence) -> str:
    # The last commit of a restoration is that of a round, which sends tasks.
    early = run.journal[: max(run.start.commits - 1, 0)]
    return some(task_id for entry in early for task_id in (*entry.dispatched, *entry.counted))


def sendings(run: Evidence) -> str:
    course, counter = run.course, run.total("sent_again")
    if course.wrongly_sent:
        return some(course.wrongly_sent)
    return "" if course.resent == counter else f"{course.resent} were sent again, the counter says {counter}"


def awaited(run: Evidence) -> str:
    return some((run.course.sent.keys() - run.course.counted.keys()) ^ set(run.redis.outstanding))


def ends(run: Evidence) -> str:
    """A training task ends with its reward, as skipped, or as ignored if its prompt has left the data."""
    course = run.course
    early = [
        task_id
        for place, entry in enumerate(run.journal)
        for _, _, _, task_id in entry.rewards
        if course.counted.get(task_id) != place
    ]
    twice = twice_in(task_id for entry in run.journal for _, _, _, task_id in entry.rewards)
    if early or twice:
        return some({*early, *twice})
    without = len([task_id for task_id in course.counted if is_training(task_id) and task_id not in run.rewards])
    skipped, ignored = run.total("set_aside"), run.total("ignored")
    if skipped <= without <= skipped + ignored:
        return ""
    return f"{without} have no reward, but {skipped} were skipped and {ignored} ignored"


def numbers(run: Evidence) -> str:
    found = [number for entry in run.journal for number, _ in entry.batches]
    expected = range(run.start.version, run.start.version + len(found))
    return "" if found == list(expected) else f"they are {found[:9]}..., from {run.start.version} on"


def batched_twice(run: Evidence) -> str:
    return some(twice_in(sample_id for entry in run.journal for _, ids in entry.batches for sample_id in ids))


def batched_early(run: Evidence) -> str:
    rewarded: set[str] = set()
    early: list[str] = []
    for entry in run.journal:
        rewarded.update(task_id for _, _, _, task_id in entry.rewards)
        early += [sample_id for _, sample_ids in entry.batches for sample_id in sample_ids if sample_id not in rewarded]
    return some(early)


def places(run: Evidence) -> str:
    """Each rewarded sample is in one batch, or dropped, or waits for a batch."""
    dropped = [task_id for entry in run.journal for task_id in entry.discarded if task_id in run.rewards]
    found = Counter([*run.batch_of, *dropped, *run.redis.waiting])
    return some(task_id for task_id in {*found, *run.rewards} if found[task_id] != 1 or task_id not in run.rewards)


def counters(run: Evidence) -> str:
    expected: Counter[str] = Counter(dispatched=sum(len(entry.dispatched) for entry in run.journal))
    for entry in run.journal:
        expected.update(entry.counters)
    # A dead letter that was put back counts as sent once more, and its second result is ignored.
    again = run.redis.counters.get("dispatched", 0) - expected["dispatched"]
    expected["dispatched"] += min(max(again, 0), expected["ignored"])
    wrong = [
        f"{name} is {run.redis.counters.get(name, 0)}, not {number}"
        for name, number in expected.items()
        if name not in BY_SCRIPTS and run.redis.counters.get(name, 0) != number
    ]
    return some(wrong)


def balance(run: Evidence) -> str:
    rows = balances(run.redis.counters, run.redis.finished)
    return some(f"{equation}: {figures}" for equation, figures, holds in rows if holds.startswith("✗"))


def versions(run: Evidence) -> str:
    """The learner goes from version to version. It may start again from any that was made, even if Redis has lost
    the announcement and only metrics.jsonl has it.
    """
    made = set(run.folder.metrics.series("batch/samples", "learner").versions.tolist())
    version = newest = -1
    for step in run.redis.steps:
        if version < 0:
            if step.version < run.start.version:
                return f"the first is {step.version}, but the counts begin at {run.start.version}"
        elif step.metrics:
            if step.version not in (version, version + 1):
                return f"version {step.version} was announced after {version}"
        elif skipped := [number for number in range(newest + 1, step.version + 1) if number not in made]:
            return f"the learner started at version {step.version}, but version {skipped[0]} was never made"
        version = step.version
        newest = max(newest, version)
    return ""


def ahead(run: Evidence) -> str:
    """The sampler saw no version before it had made that version's batch, and none that was not announced."""
    batches, version = run.start.version, -1
    for entry in run.journal:
        if -1 < entry.version < version:
            return f"in commit {entry.sequence} version {entry.version} follows {version}"
        version = max(version, entry.version)
        if version > max(batches, run.start.version):
            return f"in commit {entry.sequence} version {version} is there, with {batches} batches"
        batches += len(entry.batches)
    return "" if version <= run.trained else f"the sampler knows version {version}, but the learner {run.trained}"


def last_step(run: Evidence) -> str:
    if not run.redis.finished:
        return ""
    steps, batch = run.last_version, max(run.batches, default=-1)
    version = run.redis.steps[-1].version if run.redis.steps else -1
    if version != steps:
        return f"the last version is {version}, not {steps}"
    return "" if batch == steps - 1 or run.start.version == steps else f"the last batch is {batch}, not {steps - 1}"


def tracker(run: Evidence) -> str:
    """The tracker equals a replay of the journal, bit for bit."""
    replay, rows = run.replay, run.redis.rows
    ours = replay.tracker
    answered = {prompt_id for prompt_id, visits in zip(ours.prompt_ids, ours.visits, strict=True) if visits}
    stored = dict(zip(rows, tracker_rows(rows.values()).tolist(), strict=True))
    visited = {prompt_id for prompt_id, row in stored.items() if row[3]}
    wrong = answered ^ (visited - replay.unknown)
    wrong |= {name for name in answered & visited if stored[name][:4] != ours.row(ours.index[name])[:4]}
    if wrong:
        return some(wrong)
    retired = sum(row[5] for row in stored.values())
    if not run.start.commits and retired != run.total("retired"):
        return f"{retired} prompts are retired, the counter says {run.total('retired')}"
    same = ours.population is None or replay.unknown or ours.population.pack() == run.redis.population
    return "" if same else "the prior differs"


def learned(run: Evidence) -> str:
    """The rewards that the learner reports of each batch are those of the journal."""
    wrong = []
    for step in run.redis.steps:
        batch = step.version - 1
        if not step.metrics or batch not in run.batches:
            continue
        mean = run.mean_reward(batch)
        if not math.isclose(step.metrics.get("reward/mean", math.nan), mean, rel_tol=1e-9, abs_tol=1e-12):
            wrong.append(f"version {step.version}")
    return some(wrong)


def trained_on(run: Evidence) -> str:
    """The learner trained on each sample of each batch: none was left out because its tokens were gone or unusable."""
    name = "batch/left_out"
    left_out = Counter({step.version: int(step.metrics.get(name, 0)) for step in run.redis.steps})
    left_out |= Counter({v: int(number) for v, number in run.folder.metrics.series(name, "learner").at().items()})
    return some(f"version {v}: {number} left out" for v, number in left_out.items())


def is_training(task_id: str) -> bool:
    return task_id.startswith("t")


def some(names: Iterable[str]) -> str:
    """The number of items, and some of them; empty if there are none."""
    listed = sorted(names)
    return f"{len(listed)}: {', '.join(listed[:MAX_EXAMPLES])}" if listed else ""


def twice_in(names: Iterable[str]) -> list[str]:
    return [name for name, times in Counter(names).items() if times > 1]


LINES: dict[str, Callable[[Evidence], str]] = {
    "every commit is in the journal": commits,
    "nothing is counted before a restoration is complete": restoration,
    "each task was sent once, or again while it was awaited": sendings,
    "each task was counted once": lambda run: some(run.course.wrongly_counted),
    "each task that was sent is counted or awaited": awaited,
    "each counted task has one end: a reward, or it was skipped": ends,
    "batches are consecutive": numbers,
    "no sample is in two batches": batched_twice,
    "each sample of a batch was rewarded before": batched_early,
    "each rewarded sample is in one batch, or dropped, or waits": places,
    "the counters equal those of the journal": counters,
    "the counters balance": balance,
    "the learner went from version to version": versions,
    "no version came before its batch": ahead,
    "the last step was made": last_step,
    "the tracker equals a replay of the journal, bit for bit": tracker,
    "the learner trained on the journal's rewards": learned,
    "the learner trained on each sample of a batch": trained_on,
    "a finished run has left nothing in Redis": lambda run: some(run.redis.leftovers) if run.redis.finished else "",
}
