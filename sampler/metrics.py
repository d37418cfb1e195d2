"""Figures of the sampler: what happened since the last batch, and how fast."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from sampler.batches import ClosedBatch


class Figures:
    """Collects what the log, the display and TensorBoard show."""

    def __init__(self, recent: int) -> None:
        self.rewards: deque[float] = deque(maxlen=recent)
        self.waited: defaultdict[str, float] = defaultdict(float)  # seconds by cause, since the start
        self.totals: Counter[str] = Counter()  # counters of the run, as far as this process saw them
        self.staleness = float("nan")  # mean of the last batch
        self._parts: defaultdict[str, list[float]] = defaultdict(list)  # rewards by part, since the last batch
        self._drift: list[tuple[float, float, float]] = []  # (D, rho, N_eff) of each sample since the last batch
        self._started = time.monotonic()
        self._counted = 0
        self._counts: deque[tuple[float, int]] = deque([(self._started, 0)], maxlen=6)
        self._reported: dict[str, float] = {}

    def counted(self, reward: float, parts: Mapping[str, float], drift: float, rho: float, effective: float) -> None:
        """A training sample informed the tracker; `parts` is what its reward is made of."""
        self.rewards.append(reward)
        for name, value in parts.items():
            self._parts[name].append(value)
        self._drift.append((drift, rho, effective))
        self._counted += 1

    def reward(self) -> float:
        """Mean reward of recent training samples; NaN before the first."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else float("nan")

    def rate(self, now: float) -> float:
        """Training samples a second over the last few calls, `now` being the time of this one."""
        self._counts.append((now, self._counted))
        (then, before), (now, after) = self._counts[0], self._counts[-1]
        return (after - before) / (now - then) if now > then else 0.0

    def of_batch(self, closed: ClosedBatch) -> dict[str, float]:
        """Scalars of a closed batch and of the samples counted since the one before."""
        batch = closed.manifest
        rewards, advantages = np.array(batch.rewards), np.array(batch.advantages)
        ages = {name: np.array(versions) for name, versions in staleness(closed).items()}
        self.staleness = float(ages["total"].mean())
        values = {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "advantage/max": float(advantages.max()),
            "advantage/min": float(advantages.min()),
            "tokens/mean": float(np.mean(batch.tokens)),
            "tokens/model_mean": float(np.mean([sample.model_tokens for sample in closed.samples])),
            "staleness/mean": self.staleness,
            "staleness/max": float(ages["total"].max()),
            "staleness/in_flight_mean": float(ages["in_flight"].mean()),
            "staleness/in_queue_mean": float(ages["in_queue"].mean()),
        }
        if self._drift:
            drift, rho, effective = np.array(self._drift).T
            values |= {
                "tracker/drift_mean": float(drift.mean()),
                "tracker/rho_mean": float(rho.mean()),
                "tracker/n_eff_mean": float(effective.mean()),
            }
            self._drift.clear()
        for name, parts in self._parts.items():
            values.setdefault(f"reward/{name}", sum(parts) / len(parts))
        self._parts.clear()
        for cause, seconds in self.waited.items():
            values[f"waiting/{cause}_seconds"] = seconds - self._reported.get(cause, 0.0)
        self._reported = dict(self.waited)
        for name, total in self.totals.items():
            values[f"samples/{name}"] = float(total)
        values["time/seconds"] = time.monotonic() - self._started
        return values


def staleness(closed: ClosedBatch) -> dict[str, list[int]]:
    """How many versions the samples of a batch aged, [B] each: in all, in flight, and waiting for the batch."""
    step = closed.manifest.batch_id
    return {
        "total": [step - s.oldest_version for s in closed.samples],
        "in_flight": [max(0, s.counted_at - s.oldest_version) for s in closed.samples],
        "in_queue": [max(0, step - max(s.counted_at, s.oldest_version)) for s in closed.samples],
    }


def shown(values: dict[str, Any]) -> dict[str, Any]:
    """Values for people: without those that are not known yet."""
    return {name: value for name, value in values.items() if value is not None and value == value}
