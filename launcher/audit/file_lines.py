"""The lines of the audit about the run folder: metrics, evaluations, kept episodes and training data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from launcher.audit.evidence import Evidence
from launcher.audit.journal_lines import is_training, some, twice_in
from launcher.audit.records import KeptEpisode
from sampler.advantages import normalize
from sampler.evaluation_metrics import Response, summarize

DIGITS = 5  # decimal places of advantages in training data
ROUNDED = 1e-7  # relative: metrics have eight digits


def batch_metrics(run: Evidence) -> str:
    written = run.folder.metrics.series("reward/mean", "sampler").at()
    wrong = []
    for number in run.batches:
        mean, value = run.mean_reward(number), written.get(number + 1)
        if value is None and (number + 1 in run.folder.not_written or number + 1 < run.folder.since["metrics"]):
            continue
        if value is None or not math.isclose(value, mean, rel_tol=ROUNDED, abs_tol=1e-12):
            wrong.append(f"version {number + 1} has {value}, its batch {mean:.8g}")
    return some(wrong)


def step_metrics(run: Evidence) -> str:
    made = {*run.folder.metrics.series("batch/samples", "learner").versions.tolist(), *run.folder.not_written}
    first = max(run.start.version + 1, run.folder.since["metrics"])
    # The sampler writes the metrics of a step when it reads the step; a stopped run may have steps still to be read.
    newest = max((step.version for step in run.redis.steps[: run.redis.read]), default=run.start.version)
    return some(f"version {v}" for v in range(first, newest + 1) if v not in made)


def scores(run: Evidence) -> str:
    """If each source has a teacher, every token that the learner trained on had a teacher's score."""
    sources = run.config.data.sources("train")
    if not all(run.config.for_source(source).teacher.is_set for source in sources):
        return ""
    names = ("batch/samples", "teacher/tokens", "actor/skipped_steps")
    samples, share, skipped = (run.folder.metrics.series(name, "learner").at() for name in names)
    # The share is 0 if the correction has rejected all tokens.
    learned = [v for v in samples if skipped.get(v, 0.0) < run.config.learner.mini_batches]
    return some(f"version {v}: {share.get(v, 0.0):.2%} of its tokens" for v in learned if share.get(v) != 1.0)


def answers_once(run: Evidence) -> str:
    """Each evaluation has each of its tasks once, all answered by its version."""
    wrong = []
    for version, answers in run.folder.answers.items():
        names = {answer.task_id.rpartition("-")[0] for answer in answers}
        asked = Counter(answer.task_id for answer in answers)
        expected = Counter(f"{name}-{n}" for name in names for n in range(len(answers)))
        if len(names) != 1 or asked != expected:
            wrong.append(f"version {version}: {some((asked - expected) + (expected - asked)) or 'several evaluations'}")
        others = [answer.task_id for answer in answers if set(answer.versions) - {version}]
        wrong += [f"version {version}: another version answered {some(others)}"] if others else []
        unknown = [task_id for task_id in asked if task_id in run.course.sent and task_id not in run.course.counted]
        wrong += [f"version {version}: not counted {some(unknown)}"] if unknown else []
        wrong += [f"version {version}: {problem}" for problem in _prompts(run, answers)]
    return some(wrong)


def _prompts(run: Evidence, answers: list[KeptEpisode]) -> Iterator[str]:
    """Each prompt is answered equally often."""
    if run.data.heldout is None:
        return
    times = Counter(answer.prompt_id for answer in answers)
    if unknown := times.keys() - set(run.data.heldout.ids):
        yield f"no held-out prompts {some(unknown)}"
    if len(set(times.values())) > 1:
        yield f"prompts were answered {min(times.values())} to {max(times.values())} times"


def evaluation_figures(run: Evidence) -> str:
    """The figures of each evaluation in Redis and in metrics.jsonl follow from its answers."""
    results = {result["version"]: result for result in run.redis.evaluations}
    missing = {version for version in results if version >= run.folder.since["validation_data"] or version == 0}
    alone = (missing - run.folder.answers.keys()) | (run.folder.answers.keys() - results.keys())
    wrong = [f"version {version} is in only one of Redis and the folder" for version in alone]
    for version in results.keys() & run.folder.answers.keys():
        result, answers = results[version], run.folder.answers[version]
        published = dict(result.get("figures", {}))
        samples = max((int(name[4:]) for name in published if name.startswith("avg@")), default=1)
        responses = [Response(answer.prompt_id, answer.reward, answer.answer) for answer in answers]
        figures = summarize(responses, samples, run.config.right_from)
        if version <= run.folder.changed.get("eval.right_from", -1):
            figures = {name: figures[name] for name in ("reward", "samples", "set_aside")}  # with another right_from
        published |= {name: result.get(name) for name in ("accuracy", "reward", "samples", "set_aside")}
        wrong += [f"version {version}: {problem}" for problem in _differences(published, figures, 1e-12, "Redis")]
        series = {name: run.folder.metrics.series(f"validation/{name}", "sampler") for name in figures}
        written = {name: one.at().get(version) for name, one in series.items()}
        may_lack = version in run.folder.not_written or version < run.folder.since["metrics"]
        if not may_lack or any(value is not None for value in written.values()):
            wrong += [f"version {version}: {line}" for line in _differences(written, figures, ROUNDED, "metrics.jsonl")]
    return some(wrong)


def _differences(found: Mapping[str, float | None], figures: dict[str, float], within: float, where: str) -> list[str]:
    """Names of figures that are missing or differ; a figure without an answer is NaN, which metrics.jsonl omits."""
    wrong = []
    for name, figure in figures.items():
        value = found.get(name)
        value = math.nan if value is None else value
        same = math.isclose(value, figure, rel_tol=within, abs_tol=1e-12) or (math.isnan(value) and math.isnan(figure))
        if not same:
            wrong.append(f"{name} is {value:g} in {where}, {figure:g} by the answers")
    return wrong


def evaluations_made(run: Evidence) -> str:
    if not run.redis.finished or run.data.heldout is None:
        return ""
    last = run.last_version
    missing = [] if last in run.folder.answers else [f"version {last} has no evaluation"]
    return some([*missing, *run.folder.unfinished])


def kept_as_counted(run: Evidence) -> str:
    """A kept episode has the prompt, the version and the reward of the journal."""
    wrong = []
    for episode in run.folder.rollouts:
        if episode.task_id not in run.course.counted:
            # It was written before the restoration, or by a sampler that stopped before its commit.
            if run.redis.finished and not run.start.commits:
                wrong.append(f"{episode.task_id} was never counted")
            continue
        counted = run.rewards.get(episode.task_id, (episode.prompt_id, None))
        if (episode.prompt_id, episode.reward) != counted:
            wrong.append(f"{episode.task_id} has reward {episode.reward} and prompt {episode.prompt_id}, not {counted}")
        if episode.version != run.course.sent.get(episode.task_id):
            wrong.append(f"{episode.task_id} is in the file of version {episode.version}")
        value = run.replay.sent.get(episode.task_id) if run.config.algorithm.method == "spo" else None
        if value is not None and abs(value - (episode.value or 0.0)) > 1e-6:
            wrong.append(f"{episode.task_id} has value {episode.value}, not {value:.6f}")
    return some(wrong)


def kept_all(run: Evidence) -> str:
    """The episodes of every `episode.rollouts_every`-th version are kept, and all skipped episodes."""
    every = run.config.episode.rollouts_every
    if not every or "episode.rollouts_every" in run.folder.changed:
        return ""
    since = run.folder.since["rollouts"]
    absent = {task_id: v for task_id, v in run.course.sent.items() if v >= since and task_id not in run.kept}
    missing = [task_id for task_id, v in absent.items() if task_id in run.rewards and v % every == 0]
    unrewarded = absent.keys() - run.rewards.keys()
    skipped = [task_id for task_id in run.course.counted if task_id in unrewarded and is_training(task_id)]
    # An ignored result may have been its task's last one, and a task that Redis lost has none. Neither leaves an
    # episode, and the journal does not say which tasks these are.
    no_result = run.total("ignored") + run.total("lost")
    return some([*missing, *skipped[no_result:]])


def ages(run: Evidence) -> str:
    """No token of a batch is older than `sampler.max_staleness` allows, or newer than the batch.

    A token may be newer if its version was lost: the learner published it, then restarted at the batch or before it.
    """
    oldest = run.config.sampler.max_staleness
    wrong = []
    for task_id, episode in run.kept.items():
        batch = run.batch_of.get(task_id)
        if batch is None or not episode.versions:
            continue
        first, last = min(episode.versions), max(episode.versions)
        if first < batch - oldest or (last > batch and not _was_lost(run.folder.served, last, batch)):
            wrong.append(f"{task_id} of versions {list(episode.versions)} is in batch {batch}")
    return some(wrong)


def _was_lost(served: list[int], version: int, batch: int) -> bool:
    made = next((place for place, one in enumerate(served) if one >= version), len(served))
    return min(served[made:], default=version) <= batch


def training_data(run: Evidence) -> str:
    """The learner recorded each row of each kept sample of each batch once, and no other."""
    missing = run.folder.metrics.series("batch/left_out", "learner").at()
    wrong = []
    for number, batch in run.batches.items():
        if number < run.folder.since["training_data"]:
            continue
        lines = [row.task_id for row in run.folder.trained.get(number, ())]
        recorded = Counter(name for name in lines if run.course.sent.get(name, 0) >= run.folder.since["rollouts"])
        kept = Counter({task_id: run.kept[task_id].rows for task_id in batch if task_id in run.kept})
        lost = list(kept - recorded)
        if number < run.trained and (len(lost) > missing.get(number + 1, 0) or recorded - kept):
            wrong.append(f"batch {number}: {some([*lost, *(recorded - kept)])}")
    return some(wrong)


def advantages(run: Evidence) -> str:
    """The advantages that the learner trained on are those of the journal's rewards and the tracker's values."""
    config, tracker = run.config, run.replay.tracker
    if config.algorithm.method not in ("spo", "none") or config.algorithm.turn_advantage == "turn":
        return ""
    if config.sampler.advantage.token_weighted or config.algorithm.advantage is not None:
        return ""
    values = run.replay.arrived
    wrong = []
    for number, lines in run.folder.trained.items():
        batch = [task_id for task_id in run.batches.get(number, ()) if task_id in values]
        if len(batch) != len(run.batches.get(number, ())):
            continue  # it has samples of a prompt that has left the data
        baselines = [values[task_id] if config.algorithm.method == "spo" else 0.0 for task_id in batch]
        rewards = [tracker.rescale(run.rewards[task_id][1]) for task_id in batch]
        normalized = normalize(np.subtract(rewards, baselines), None, config.sampler.advantage.clip)
        expected = dict(zip(batch, normalized.tolist(), strict=True))
        for row in lines:
            advantage = expected.get(row.task_id)
            if advantage is not None and any(abs(one - advantage) > 1.01 * 10**-DIGITS for one in row.advantages):
                wrong.append(f"{row.task_id} in batch {number} has {row.advantages[0]:g}, not {advantage:g}")
    return some(wrong)


LINES: dict[str, Callable[[Evidence], str]] = {
    "every line of the run folder can be read": lambda run: some(run.folder.torn),
    "metrics.jsonl has the reward of each batch": batch_metrics,
    "metrics.jsonl has each step of the learner": step_metrics,
    "each token of a step had its teacher's score": scores,
    "each evaluation has each answer once, all of its version": answers_once,
    "each evaluation's figures follow from its answers": evaluation_figures,
    "the last version was evaluated, and no evaluation is left open": evaluations_made,
    "each training episode is kept once": lambda run: some(twice_in(one.task_id for one in run.folder.rollouts)),
    "kept episodes have the journal's rewards and the tracker's values": kept_as_counted,
    "all episodes that should be kept are there": kept_all,
    "no kept sample was too old for its batch": ages,
    "training data has the kept samples of each batch": training_data,
    "advantages follow from the rewards and the values": advantages,
}
