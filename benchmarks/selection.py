"""Time to select 1,024 of a million prompts, with thousands in flight. `python -m benchmarks.selection`."""

from __future__ import annotations

import statistics
import time

import numpy as np

from common.config import SelectionConfig, TrackerConfig
from sampler.tracker import ValueTracker

PROMPTS = 1_000_000
WANTED = 1024
REPEATS = 20


def measure(in_flight: int, solved: float) -> float:
    """Median milliseconds of a selection, where a part of the prompts is (nearly) always answered well."""
    rng = np.random.default_rng(0)
    tracker = ValueTracker([f"{i:016x}" for i in range(PROMPTS)], TrackerConfig(), SelectionConfig())
    state = tracker.state_dict()
    values = np.where(rng.random(PROMPTS) < solved, 0.99, rng.random(PROMPTS))
    state["alpha"], state["beta"] = 8 * values, 8 * (1 - values)
    tracker.load_state_dict(state)
    exclude = [tracker.prompt_ids[i] for i in rng.choice(PROMPTS, in_flight, replace=False)]
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        chosen = tracker.select(WANTED, rng, exclude)
        times.append(1000 * (time.perf_counter() - started))
        assert len(set(chosen)) == WANTED
    return statistics.median(times)


def main() -> None:
    """Print the table."""
    print(f"{WANTED:,} of {PROMPTS:,} prompts, median of {REPEATS}")
    for in_flight in (0, 5120):
        for solved in (0.0, 0.95):
            print(f"  {in_flight:>5} in flight, {solved:4.0%} solved: {measure(in_flight, solved):6.2f} ms")


if __name__ == "__main__":
    main()
