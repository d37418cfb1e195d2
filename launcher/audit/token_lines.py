"""The lines of the audit about tokens: the learner trained on the sampled ones, and its figures follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from launcher.audit.evidence import Evidence
from launcher.audit.journal_lines import some
from launcher.audit.tokens import SampledTokens, TrainedRow

ROUNDED = 2.1e-5  # difference of two roundings of one number to five digits
# Mean difference of two log-probs of one token under the same weights: a fixed part, and a share of their mean size.
FIXED, RELATIVE = 0.02, 0.1


def whole_episodes(run: Evidence) -> str:
    """A kept episode has its messages, and as many turns, rows, tokens and versions as it says."""
    answers = (answer for some_answers in run.folder.answers.values() for answer in some_answers)
    return some(f"{one.task_id}: {one.flaw}" for one in (*run.folder.rollouts, *answers) if one.flaw)


def sampled(run: Evidence) -> str:
    """The learner received the ids, log-probs, versions and experts that the generator has recorded."""
    wrong = []
    for number, row in _rows(run):
        episode = run.kept.get(row.task_id)
        if episode is None or not episode.tokens:
            continue
        if row.row >= len(episode.tokens):
            wrong.append(f"{row.task_id} in batch {number}: it has no row {row.row}")
        elif differing := _differing(row.sampled, episode.tokens[row.row]):
            wrong.append(f"{row.task_id} in batch {number}, row {row.row}: {differing}")
    return some(wrong)


def _differing(one: SampledTokens, other: SampledTokens) -> str:
    if not np.array_equal(one.ids, other.ids):
        return "other token ids"
    if not np.array_equal(one.versions, other.versions):
        return "other versions"
    if not np.allclose(one.logprobs, other.logprobs, rtol=1e-6, atol=ROUNDED):
        return "other log-probs of the rollout"
    return "" if np.array_equal(one.experts, other.experts) else "other experts"


def agreement(run: Evidence) -> str:
    """Log-probs of tokens that the newest weights sampled are the learner's, in the first optimizer step of a batch."""
    wrong = []
    for number, rows in run.folder.trained.items():
        first = [row for row in rows if row.mini_batch == 0]
        fresh = [row.sampled.versions == number for row in first]
        ours = [row.logprobs[new] for row, new in zip(first, fresh, strict=True)]
        theirs = [row.sampled.logprobs[new] for row, new in zip(first, fresh, strict=True)]
        if not sum(map(len, ours)):
            continue
        one, other = np.concatenate(ours), np.concatenate(theirs)
        difference, size = float(np.abs(one - other).mean()), float(np.abs(other).mean())
        if not difference <= (run.config.generator.logprob_tolerance or FIXED + RELATIVE * size):
            wrong.append(f"batch {number}: {difference:.3g} apart on average, of {size:.3g}")
    return some(wrong)


def teachers(run: Evidence) -> str:
    """Each token of an episode whose source has a teacher has finite scores, which are log-probs."""
    if not all(run.config.for_source(source).teacher.is_set for source in run.config.data.sources("train")):
        return ""
    wrong = []
    for number, row in _rows(run):
        if row.teacher is None or not (row.teacher <= ROUNDED).all():  # NaN is not
            wrong.append(f"{row.task_id} in batch {number}")
    return some(wrong)


def critics_returns(run: Evidence) -> str:
    """A critic's returns and advantages follow from its values and the rewards, as the learner computes them (GAE)."""
    if not run.config.algorithm.has_critic:
        return ""
    first = run.unchanged_since(*(f"critic.{name}" for name in ("gae_lambda", "return_lambda", "warmup_steps")))
    return some(problem for number in run.folder.trained if number >= first for problem in _judged(run, number))


def _judged(run: Evidence, number: int) -> Iterator[str]:
    settings, clip = run.config.critic, run.config.sampler.advantage.clip or math.inf
    estimates, advantages = [], []
    for row in run.folder.trained[number]:
        if row.values is None or row.returns is None or row.token_advantages is None:
            yield f"{row.task_id} in batch {number} has no values"
            return
        rewards = _rewards(row.values, row.returns, settings.return_lambda)
        by_turn = run.config.algorithm.turn_advantage == "turn"
        _, reward = run.rewards.get(row.task_id, ("", None))
        expected = np.zeros(len(rewards))
        expected[-1] = 0.0 if reward is None else run.replay.tracker.rescale(reward)
        if not by_turn and reward is not None and not np.allclose(rewards, expected, atol=4 * ROUNDED):
            yield f"{row.task_id} in batch {number}: its reward is {reward:g}, its returns add up to {rewards.sum():g}"
        estimates.append(_gae(rewards, row.values, settings.gae_lambda))
        advantages.append(row.token_advantages)
        if number < settings.warmup_steps and not by_turn and (row.token_advantages != row.advantages[0]).any():
            yield f"{row.task_id} in batch {number}: other advantages than the sampler's before the critic's are used"
    if number >= settings.warmup_steps and estimates:
        yield from _normalised(number, np.concatenate(estimates), np.concatenate(advantages), clip)


def _normalised(number: int, estimates: np.ndarray, advantages: np.ndarray, clip: float) -> Iterator[str]:
    """The advantages of a batch are its estimates, shifted and scaled.

    Shift and scale come from the whole batch, of which only some samples are kept; so they are fitted to these.
    """
    inside = np.abs(advantages) < clip - ROUNDED
    estimates, advantages = estimates[inside], advantages[inside]
    if len(estimates) < 3 or np.ptp(estimates) < 100 * ROUNDED:
        return
    scale, shift = np.polyfit(estimates, advantages, 1)
    furthest = float(np.abs(scale * estimates + shift - advantages).max())
    if scale <= 0 or furthest > ROUNDED * (1 + 4 * scale):
        yield f"batch {number}: advantages are {scale:.3g} times the estimates, and up to {furthest:.2g} off"


def _rewards(values: np.ndarray, returns: np.ndarray, lambda_: float) -> np.ndarray:
    """The reward at each token of a row, from G_t = r_t + (1 - lambda) V_(t+1) + lambda G_(t+1) [M]."""
    later = (1 - lambda_) * np.append(values[1:], 0.0) + lambda_ * np.append(returns[1:], 0.0)
    rewards = returns - later
    # Most tokens have no reward; without this, their rounding errors would add up in the estimates of a long row.
    return np.where(np.abs(rewards) < 4 * ROUNDED, 0.0, rewards)


def _gae(rewards: np.ndarray, values: np.ndarray, lambda_: float) -> np.ndarray:
    """Generalised advantage estimates of a row [M] (arXiv 1506.02438)."""
    errors = rewards + np.append(values[1:], 0.0) - values
    estimates = np.zeros(len(errors) + 1)
    for place in reversed(range(len(errors))):
        estimates[place] = errors[place] + lambda_ * estimates[place + 1]
    return estimates[:-1]


def critics_metrics(run: Evidence) -> str:
    """A critic learned in each step, at its learning rate; its reported mean value is that of the batch's tokens."""
    if not run.config.algorithm.has_critic:
        return ""
    metrics = run.folder.metrics
    names = ("lr", "loss", "grad_norm", "value_mean")
    written = {name: metrics.series(f"critic/{name}", "learner").at() for name in names}
    rate = run.config.critic.rate(run.config.learner.lr)
    first = run.unchanged_since("critic.lr", "learner.lr")
    wrong = []
    for version in metrics.series("batch/samples", "learner").versions.tolist():
        lr, loss, norm, mean = (written[name].get(version) for name in names)
        if loss is None or norm is None or lr is None or (loss > 0) != (norm > 0) or not loss:
            wrong.append(f"version {version}: loss {loss}, gradient {norm}, learning rate {lr}")
        elif version > first and not math.isclose(lr, rate, rel_tol=1e-6):
            wrong.append(f"version {version}: learning rate {lr:g}, not {rate:g}")
        elif (expected := _mean_value(run, version - 1)) is not None and abs((mean or 0.0) - expected) > 1e-4:
            wrong.append(f"version {version}: mean value {mean}, by its tokens {expected:.6g}")
    return some(wrong)


def _mean_value(run: Evidence, number: int) -> float | None:
    """The mean of a batch's values; None unless all of its samples are kept."""
    rows = run.folder.trained.get(number, [])
    if {row.task_id for row in rows} != set(run.batches.get(number, ())):
        return None
    values = [row.values for row in rows if row.values is not None]
    return float(np.concatenate(values).mean()) if values else None


def _rows(run: Evidence) -> Iterator[tuple[int, TrainedRow]]:
    for number, rows in run.folder.trained.items():
        for row in rows:
            yield number, row


LINES = {
    "kept episodes have the messages and tokens that they count": whole_episodes,
    "the learner trained on the tokens that were sampled": sampled,
    "log-probs of generator and learner agree under the same weights": agreement,
    "each kept token has its teacher's score": teachers,
    "a critic's returns and advantages follow from its values": critics_returns,
    "a critic learned in each step": critics_metrics,
}
