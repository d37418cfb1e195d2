"""What the sampler measures: rewards, staleness, drift and speed, for TensorBoard, the log and the display."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from itertools import chain
from typing import Any

import numpy as np

from common.config import Config
from common.messages import SampleHeader
from common.metrics import MetricsWriter
from sampler.batches import ClosedBatch
from sampler.records import EvaluationCounts
from sampler.state import SamplerState
from sampler.value_audit import ValueAudit

RATE_WINDOW = 6  # progress reports that the rate is averaged over


class SamplerMetrics:
    """Collects what happens between two batches, and writes it with the second."""

    def __init__(self, config: Config, state: SamplerState) -> None:
        self.waited: defaultdict[str, float] = defaultdict(float)  # seconds since the last batch, by cause
        self._state = state
        self._writer = MetricsWriter(config.run.folder / "tensorboard" / "sampler")
        self._rewards: deque[float] = deque(maxlen=config.sampler.batch_size)
        self._reward_parts: defaultdict[str, list[float]] = defaultdict(list)  # since the last batch
        names = [source.name for source in config.data.sources("train")]
        # Rewards since the last batch; nothing where there is one source.
        self._by_source: dict[str, list[float]] = {name: [] for name in names} if len(names) > 1 else {}
        self._audit = ValueAudit(state.tracker)
        self._drift: list[tuple[float, float, float]] = []  # (D, rho, N_eff) of each sample since the last batch
        self._staleness: float | None = None  # mean of the last batch
        self._totals_before: Counter[str] = Counter()  # counters of the run, at the last batch
        self._started = time.monotonic()
        self._rate_points: deque[tuple[float, int]] = deque([(self._started, 0)], maxlen=RATE_WINDOW)
        self._samples = 0

    def add(self, header: SampleHeader, value: float, drift: float, rho: float, n_eff: float, source: str = "") -> None:
        """A training sample informed the tracker, whose value of the prompt was `value` before."""
        self._audit.add(value, self._state.tracker.rescale(header.reward))
        self._rewards.append(header.reward)
        if self._by_source:
            self._by_source[source].append(header.reward)
        for name, value in header.reward_parts.items():
            self._reward_parts[name].append(value)
        self._drift.append((drift, rho, n_eff))
        self._samples += 1

    def batch_closed(self, closed: ClosedBatch) -> None:
        """Write the metrics of a batch, and of the samples counted since the one before."""
        step = closed.manifest.batch_id
        for name, counts in self._audit.of_pool().items():
            self._writer.histogram(step, name, counts)
        self._writer.write(step, self.of_batch(closed))
        for name, ages in staleness(closed).items():
            self._writer.histogram(step, f"staleness/{name}", Counter(ages.tolist()))

    def evaluated(self, counts: EvaluationCounts, figures: dict[str, float]) -> None:
        """Write the figures of a complete evaluation, at the version that answered it."""
        values = {f"validation/{name}": value for name, value in figures.items()}
        values |= {"heldout/accuracy": counts.accuracy, "heldout/set_aside": counts.set_aside}
        self._writer.write(counts.version, values)

    def progress(self, accuracy: float | None) -> dict[str, Any]:
        """What people see of the run now; values that are not known yet are left out."""
        now = time.monotonic()
        self._rate_points.append((now, self._samples))
        (then, samples), *_ = self._rate_points
        values = {
            "step": max(self._state.version, 0),
            "reward": sum(self._rewards) / len(self._rewards) if self._rewards else None,
            "accuracy": accuracy,
            "staleness": self._staleness,
            "variance_ratio": self._audit.variance_ratio(),
            "in_flight": len(self._state.admission.in_flight),
            "waiting": len(self._state.open) + self._state.admission.arrived,
            "samples_per_second": (self._samples - samples) / (now - then) if now > then else 0.0,
            **self._state.totals,
        }
        return {name: value for name, value in values.items() if value is not None and value == value}

    def rewind(self, version: int) -> None:
        """The run continues at an earlier version: batches from this one on are made again."""
        self._writer.rewind(version)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()

    def of_batch(self, closed: ClosedBatch) -> dict[str, float]:
        """Scalars of a batch, and of the samples counted since the one before."""
        batch, ages = closed.manifest, staleness(closed)
        advantages = np.array(batch.advantages if batch.turn_advantages is None else [*chain(*batch.turn_advantages)])
        rewards = np.array(batch.rewards)
        self._staleness = float(ages["total"].mean())
        values = {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "advantage/max": float(advantages.max()),
            "advantage/min": float(advantages.min()),
            "advantage/zero": float((advantages == 0).mean()),
            "tokens/mean": float(np.mean(batch.tokens)),
            "tokens/model_mean": float(np.mean([sample.model_tokens for sample in closed.samples])),
            "staleness/mean": self._staleness,
            "staleness/max": float(ages["total"].max()),
            "staleness/in_flight_mean": float(ages["in_flight"].mean()),
            "staleness/in_queue_mean": float(ages["in_queue"].mean()),
        }
        if self._drift:
            drift, rho, n_eff = np.mean(self._drift, axis=0).tolist()
            values |= {"tracker/drift_mean": drift, "tracker/rho_mean": rho, "tracker/n_eff_mean": n_eff}
            self._drift.clear()
        values |= self._audit.of_batch()
        new = self._state.totals - self._totals_before
        if new["grouped"]:
            values["group/degenerate"] = new["degenerate"] / new["grouped"]
        self._totals_before = self._state.totals.copy()
        for name, parts in self._reward_parts.items():
            values.setdefault(f"reward/{name}", sum(parts) / len(parts))
        self._reward_parts.clear()
        for name, of_source in self._by_source.items():
            values[f"source/{name}/samples"] = float(len(of_source))
            if of_source:
                values[f"source/{name}/reward"] = sum(of_source) / len(of_source)
            of_source.clear()
        for cause, seconds in self.waited.items():
            values[f"waiting/{cause}_seconds"] = seconds
            self.waited[cause] = 0.0
        values |= {f"samples/{name}": float(total) for name, total in self._state.totals.items()}
        values["time/seconds"] = time.monotonic() - self._started
        return values


def staleness(closed: ClosedBatch) -> dict[str, np.ndarray]:
    """How many versions the samples of a batch aged, int64 [B] each: in all, in flight, and waiting for the batch."""
    step = closed.manifest.batch_id
    oldest = np.array([sample.oldest_version for sample in closed.samples])
    counted_at = np.array([sample.counted_at for sample in closed.samples])
    return {
        "total": step - oldest,
        "in_flight": np.maximum(0, counted_at - oldest),
        "in_queue": np.maximum(0, step - np.maximum(counted_at, oldest)),
    }
