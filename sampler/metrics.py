"""Metrics of a run: the sampler's own, the learner's and the generators', for files and display."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from itertools import chain
from typing import Any

import numpy as np

from common.config import Config
from common.messages import Ending, SampleHeader, Step
from common.streams.broker import Broker
from sampler.batches import ClosedBatch
from sampler.files.metrics_file import Entry, Histogram, MetricsFile
from sampler.process_metrics import ProcessMetrics
from sampler.records import EvaluationCounts
from sampler.state import SamplerState
from sampler.tracker import Visit
from sampler.trackers.feed import TrackerFeed
from sampler.value_audit import ValueAudit

RATE_WINDOW = 6  # progress reports that the rate is averaged over
MEASURED_HERE = ("reward/mean",)  # metrics of the learner that the sampler measures itself

CUT_OFF = (Ending.LENGTH, Ending.MAX_SECONDS)
OF_AGENTS = ("requests", "retries", "refused", "dropped", "prompt_tokens", "kept_tokens")  # counts of a sample's header


class SamplerMetrics:
    """Collects metrics between two batches and writes them with the second, beside those of other processes."""

    def __init__(self, config: Config, state: SamplerState, log: Any) -> None:
        self.waited: defaultdict[str, float] = defaultdict(float)  # seconds since the last batch, by cause
        self._config, self._state, self._log = config, state, log
        self._file: MetricsFile | None = None
        self._feeds: list[TrackerFeed] = []
        self._entries: list[Entry] = []  # to write
        self._newest_step: tuple[int, dict[str, float]] = (-1, {})
        self._episodes = EpisodeMetrics()
        self._processes: ProcessMetrics | None = None
        self._rewards: deque[float] = deque(maxlen=config.sampler.batch_size)
        self._reward_parts: defaultdict[str, list[float]] = defaultdict(list)  # since the last batch
        names = [source.name for source in config.data.sources("train")]
        # Rewards since the last batch; empty if there is only one source.
        self._by_source: dict[str, list[float]] = {name: [] for name in names} if len(names) > 1 else {}
        self._audit = ValueAudit(state.tracker)
        self._visits: list[Visit] = []  # of each sample since the last batch
        self._staleness: float | None = None  # mean of the last batch
        self._totals_before: Counter[str] = Counter()  # counters of the run, at the last batch
        self._started = time.monotonic()
        self._rate_points: deque[tuple[float, int]] = deque([(self._started, 0)], maxlen=RATE_WINDOW)
        self._samples = 0

    def open(self) -> None:
        """Open the files, once this process is the run's sampler."""
        folder = self._config.run.folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file = MetricsFile(folder, self._log, self._config.run.metrics_bytes)
        names = dict.fromkeys(self._config.run.log_to) if self._config.run.has_learner else ()
        self._feeds = [TrackerFeed(name, self._config, self._file.path, self._log) for name in names]

    def write(self) -> None:
        """Append the collected entries to the file, and wake the feeds that send them to experiment trackers."""
        entries, self._entries = self._entries, []
        if self._file is not None and entries:
            is_full = self._file.append(entries)
            for feed in self._feeds:
                if is_full:
                    feed.begin_new_file()
                feed.wake()

    def close(self) -> None:
        """Write what is left, and give the feeds a moment to send it."""
        self.write()
        finished = self._state.version >= self._state.last_version
        for feed in self._feeds:
            feed.stop(finished)
        for feed in self._feeds:
            feed.join()

    def add(self, header: SampleHeader, visit: Visit, source: str = "") -> None:
        """Add a training sample that the tracker has counted."""
        self._audit.add(visit.value_mean, self._state.tracker.rescale(header.reward))
        self._rewards.append(header.reward)
        if self._by_source:
            self._by_source[source].append(header.reward)
        for name, value in header.reward_parts.items():
            self._reward_parts[name].append(value)
        self._visits.append(visit)
        self._episodes.add(header)
        self._samples += 1

    def batch_closed(self, closed: ClosedBatch) -> None:
        """Write the metrics of a batch, and of the samples counted since the last one."""
        histograms = self._audit.of_pool()
        histograms |= {f"staleness/{name}": Histogram.of_integers(ages) for name, ages in staleness(closed).items()}
        self._entries.append(Entry(closed.manifest.batch_id + 1, "sampler", self.of_batch(closed), histograms))

    def evaluated(self, counts: EvaluationCounts, figures: dict[str, float]) -> None:
        """Write the figures of a complete evaluation, at the version that answered it."""
        values = {f"validation/{name}": value for name, value in figures.items()}
        self._entries.append(Entry(counts.version, "sampler", values))

    def trained(self, step: Step) -> None:
        """Write the learner's metrics of a step, once even if its version is announced several times."""
        if step.metrics and self._newest_step != (step.version, step.metrics):
            self._newest_step = (step.version, step.metrics)
            values = {name: value for name, value in step.metrics.items() if name not in MEASURED_HERE}
            self._entries.append(Entry(step.version, "learner", values))

    def observe(self, broker: Broker, now: bool = False) -> None:
        """Write queues, counters and the processes' own metrics, if they are due or `now` is set."""
        processes = self._processes = self._processes or ProcessMetrics(broker)
        if not now and not processes.is_due():
            return
        version, rate = max(self._state.version, 0), {"samples/per_second": self._samples_per_second()}
        self._entries += processes.entries(version, self._state.open_evaluation_name, rate)
        self.write()

    def progress(self) -> dict[str, Any]:
        """Figures for the display; values that are not known yet are left out."""
        self._rate_points.append((time.monotonic(), self._samples))
        values = {
            "step": max(self._state.version, 0),
            "reward": sum(self._rewards) / len(self._rewards) if self._rewards else None,
            "accuracy": self._state.latest_accuracy,
            "staleness": self._staleness,
            "variance_ratio": self._audit.variance_ratio(),
            "in_flight": len(self._state.admission.in_flight),
            "waiting": len(self._state.open) + self._state.admission.arrived,
            "samples_per_second": self._samples_per_second(),
            **self._state.totals,
        }
        # NaN, a figure that is not known, differs from itself.
        return {name: value for name, value in values.items() if value is not None and value == value}

    def discard(self, version: int) -> None:
        """Remove entries of later versions: the run starts at this one and will write them again."""
        if self._file is not None:
            removed = self._file.discard(version)
            for feed in self._feeds:
                feed.discard(version, removed)

    def of_batch(self, closed: ClosedBatch) -> dict[str, float]:
        """Scalars of a batch, and of the samples counted since the last one."""
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
            "response_length/mean": float(np.mean([sample.model_tokens for sample in closed.samples])),
            "response_length/max": float(max(sample.model_tokens for sample in closed.samples)),
            "staleness/in_flight_mean": float(ages["in_flight"].mean()),
            "staleness/in_queue_mean": float(ages["in_queue"].mean()),
        }
        values |= {f"advantage/p{q}": float(np.percentile(advantages, q)) for q in (10, 30, 50, 70, 90)}
        if self._visits:
            means = np.mean(self._visits, axis=0).tolist()
            values |= {f"tracker/{name}": mean for name, mean in zip(Visit._fields, means, strict=True)}
            self._visits.clear()
        values |= self._audit.of_batch() | self._episodes.values()
        self._episodes = EpisodeMetrics()
        new = self._state.totals - self._totals_before
        if new["grouped"]:
            values["group/degenerate"] = new["degenerate"] / new["grouped"]
        self._totals_before = self._state.totals.copy()
        for name, parts in self._reward_parts.items():
            values.setdefault(f"reward/{name}", sum(parts) / len(parts))
        self._reward_parts.clear()
        for name, source_rewards in self._by_source.items():
            values[f"source/{name}/samples"] = float(len(source_rewards))
            if source_rewards:
                values[f"source/{name}/reward"] = sum(source_rewards) / len(source_rewards)
            source_rewards.clear()
        for cause, seconds in self.waited.items():
            values[f"waiting/{cause}_seconds"] = seconds
            self.waited[cause] = 0.0
        values["time/seconds"] = time.monotonic() - self._started
        return values

    def _samples_per_second(self) -> float:
        (then, samples), *_ = self._rate_points
        seconds = time.monotonic() - then
        return (self._samples - samples) / seconds if seconds > 0 else 0.0


def staleness(closed: ClosedBatch) -> dict[str, np.ndarray]:
    """Age of each sample of a batch in weight versions, int64 [B]: in total, in flight, and waiting for the batch."""
    step = closed.manifest.batch_id
    oldest = np.array([sample.oldest_version for sample in closed.samples])
    counted_at = np.array([sample.counted_at for sample in closed.samples])
    return {
        "total": step - oldest,
        "in_flight": np.maximum(0, counted_at - oldest),
        "in_queue": np.maximum(0, step - np.maximum(counted_at, oldest)),
    }


class EpisodeMetrics:
    """Counts the training episodes between two batches."""

    def __init__(self) -> None:
        self._endings: Counter[Ending] = Counter()
        self._episodes = self._rows = self._turns = self._calls = self._errors = 0
        self._seconds = self._longest = 0.0
        self._agents: Counter[str] = Counter()
        self._containers: defaultdict[str, list[float]] = defaultdict(list)  # seconds, by part

    def add(self, header: SampleHeader) -> None:
        self._episodes += 1
        self._endings[Ending(header.reason)] += 1
        self._rows += len(header.row_tokens) or 1
        self._turns += header.turns
        self._calls += header.tool_calls
        self._errors += header.tool_errors
        self._seconds += header.seconds
        self._longest = max(self._longest, header.seconds)
        if header.requests:
            self._agents.update(episodes=1, **{name: getattr(header, name) for name in OF_AGENTS})
        for part, seconds in header.container_seconds.items():
            self._containers[part].append(seconds)

    def values(self) -> dict[str, float]:
        """Means and shares; empty if there was no episode."""
        n = self._episodes
        if n == 0:
            return {}
        values = {
            "response_length/clip_ratio": sum(self._endings[ending] for ending in CUT_OFF) / n,
            "num_turns/mean": self._turns / n,
            "tool_calls/mean": self._calls / n,
            "episode/seconds_mean": self._seconds / n,
            "episode/seconds_max": self._longest,
        }
        if self._rows > n:
            values["num_rows/mean"] = self._rows / n
        if agents := self._agents["episodes"]:
            values |= {f"agent/{name}": self._agents[name] / agents for name in OF_AGENTS[:4]}
            values["agent/kept_prompt_ids"] = self._agents["kept_tokens"] / max(1, self._agents["prompt_tokens"])
        if self._calls:
            values["tool_calls/error_ratio"] = self._errors / self._calls
        values |= {f"container/{part}_seconds": sum(all_) / len(all_) for part, all_ in self._containers.items()}
        values |= {f"ending/{ending}": count / n for ending, count in self._endings.items()}
        return values
