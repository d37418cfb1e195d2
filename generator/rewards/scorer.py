"""The run's reward: a weighted sum of parts, and a simulated user's rewards for single turns."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from common.answers import in_range
from common.config import Config
from common.errors import UserError
from common.messages import Failure
from generator.rewards.outcome import Outcome, Score, vote
from generator.rewards.pool import Pool, RewardFailed
from generator.rewards.registry import BUILTIN, check_reward, has_answer, make_reward

if TYPE_CHECKING:
    from sandbox_client import Sandbox

TURNS = "turns"  # name of the part that comes from single turns


class OutOfRange(ValueError):
    """A reward lies outside `sampler.tracker.reward_range`."""

    failure = Failure.OUT_OF_RANGE


class Scorer:
    """Scores episodes as `episode.reward` says, in one event loop; close it before that loop ends.

    Cheap rewards are computed at once, those that wait for a server are coroutines, and all others (a user's own
    among them) run in processes that are killed when they take too long.

    Args:
        sandbox: returns the sandbox that programs run in, which the caller closes; needed if `code` is a part.

    Raises:
        UserError: a reward is unknown, its options are wrong, or its values cannot lie in the declared range.
    """

    def __init__(self, config: Config, sandbox: Callable[[], Sandbox] | None = None) -> None:
        episode = config.episode
        self._weights = dict(episode.reward_weights)
        self._allowed = config.sampler.tracker.reward_range
        self._turn_rewards = episode.turn_rewards
        self._local: dict[str, Any] = {}
        pooled: dict[str, dict[str, Any]] = {}
        for name in self._weights:
            options = episode.reward_options.get(name, {})
            fixed: dict[str, Any] = {}
            if name not in BUILTIN:
                check_reward(name, options)
                pooled[name] = options
                continue
            if name == "code":
                assert sandbox is not None
                options = {"memory_mb": config.sandbox.memory_mb} | options
                fixed = {"sandbox": sandbox()}
            self._local[name] = make_reward(name, options, fixed)
            if self._local[name].in_pool:
                pooled[name] = options
        self._check_range()
        self._answers = next(filter(has_answer, self._weights), None)
        self._pool = Pool(pooled, episode.reward_workers, episode.reward_timeout, episode.reward_memory_mb)
        self._pooled = frozenset(pooled)

    async def score(self, outcome: Outcome) -> Score:
        """Reward of one episode.

        Raises:
            TimeoutError: a part took too long, and was killed.
            RewardFailed, WorkerDied: a part failed.
            OutOfRange: the reward is outside the declared range.
            ValueError: rewards of turns are not finite.
        """
        values = {name: await self._part(name, outcome) for name in self._weights}
        parts = {name: value for name, value in values.items() if value is not None}
        if not parts:
            raise RewardFailed(f"reward {next(iter(values))!r}: returned [None], and no other part gives a number")
        low, high = self._allowed
        # Rounded once, not after each part.
        final = math.fsum(self._weights[name] * value for name, value in parts.items())
        if outcome.turn_rewards and self._turn_rewards != "ignore":
            parts[TURNS] = joined(outcome.turn_rewards, self._turn_rewards)
            return Score(min(max(final + parts[TURNS], low), high), parts, final)
        try:
            final = in_range(final, low, high)
        except ValueError:
            shown = ", ".join(f"{name} {value:g}" for name, value in parts.items())
            raise OutOfRange(
                f"reward {final:g} ({shown}) is outside {self._range()}; declare its range there"
            ) from None
        return Score(final, parts, final)

    async def answer(self, outcome: Outcome) -> str:
        """The final answer that the reward compared, for a majority vote; empty if there is none.

        In a weighted sum, the first part that compares an answer gives it. Raises like `score`.
        """
        name = self._answers
        if name is None:
            return ""
        if name in self._pooled:
            return await self._pool.answer(name, outcome)
        return vote(self._local[name].answer(outcome))

    async def close(self) -> None:
        """End the processes and close the connections."""
        await self._pool.close()
        for reward in self._local.values():
            if close := getattr(reward, "close", None):
                await close()

    async def _part(self, name: str, outcome: Outcome) -> float | None:
        if name in self._pooled:
            return await self._pool.score(name, outcome)
        score: float | Awaitable[float] = self._local[name].score(outcome)
        return score if isinstance(score, float) else await score

    def _check_range(self) -> None:
        """Check the range of the sum, if it is known before the first episode."""
        bounds = {name: part.bounds for name, part in self._local.items() if part.bounds is not None}
        if len(bounds) < len(self._weights):
            return
        ends = [sorted(weight * end for end in bounds[name]) for name, weight in self._weights.items()]
        least, most = math.fsum(low for low, _ in ends), math.fsum(high for _, high in ends)
        low, high = self._allowed
        try:
            in_range(least, low, high)
            in_range(most, low, high)
        except ValueError:
            raise UserError(
                f"episode.reward = {self._weights} lies within [{least:g}, {most:g}], which exceeds "
                f"{self._range()}; declare that range, or change the weights"
            ) from None

    def _range(self) -> str:
        low, high = self._allowed
        return f"sampler.tracker.reward_range [{low:g}, {high:g}]"


def joined(turn_rewards: Sequence[float], how: str) -> float:
    """The amount that rewards of single turns add to the final score; raises `ValueError` if one is not finite."""
    if not all(math.isfinite(reward) for reward in turn_rewards):
        raise ValueError(f"turn rewards {list(turn_rewards)} are not all finite numbers")
    if how == "last":
        return float(turn_rewards[-1])
    total = math.fsum(turn_rewards)
    return total / len(turn_rewards) if how == "mean" else total


def returns_to_go(final: float, turn_rewards: Sequence[float], reward_range: tuple[float, float]) -> list[float]:
    """The return of each assistant turn t: clip(u_t + ... + u_T + final score, low, high).

    The undiscounted return of Sutton & Barto (2nd edition, equation 3.7), by which REINFORCE weights each action
    (their section 13.3); an action here is a turn, as in MT-GRPO (arXiv 2505.11821). Each return is clipped like the
    episode's reward, so the first one is that reward.

    Args:
        final: the final score, before rewards of single turns were added.
        turn_rewards: u, the simulated user's reward of each assistant turn, 0 if the user was not asked [T].
        reward_range: lowest and highest reward, `sampler.tracker.reward_range`.
    """
    low, high = reward_range
    # `fsum` rounds once, as the scorer does: the first return is the reward to the last bit.
    totals = (final + math.fsum(turn_rewards[turn:]) for turn in range(len(turn_rewards)))
    return [min(max(total, low), high) for total in totals]
