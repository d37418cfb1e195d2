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
        ages = batch.batch_id - np.array(batch.oldest_versions)
        self.staleness = float(ages.mean())
        values = {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "advantage/max": float(advantages.max()),
            "advantage/min": float(advantages.min()),
            "tokens/mean": float(np.mean(batch.tokens)),
            "tokens/model_mean": float(np.mean(batch.model_tokens)),
            "staleness/mean": self.staleness,
            "staleness/max": float(ages.max()),
            "staleness/in_flight_mean": _mean(closed.in_flight),
            "staleness/in_queue_mean": _mean(closed.in_queue),
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


def staleness_counts(closed: ClosedBatch) -> dict[str, Counter[int]]:
    """Histograms of a batch's staleness in versions: in all, on the way, and waiting."""
    batch = closed.manifest
    return {
        "staleness/total": Counter(batch.batch_id - oldest for oldest in batch.oldest_versions),
        "staleness/in_flight": closed.in_flight,
        "staleness/in_queue": closed.in_queue,
    }


def shown(values: dict[str, Any]) -> dict[str, Any]:
    """Values for people: without those that are not known yet."""
    return {name: value for name, value in values.items() if value is not None and value == value}


def _mean(counts: Counter[int]) -> float:
    return sum(key * n for key, n in counts.items()) / max(1, counts.total())
