"""Time to select 1,024 of a million prompts, with thousands in flight. `python -m benchmarks.selection`."""

from __future__ import annotations

import statistics
import time

import numpy as np

from benchmarks import options
from common.config import SelectionConfig, TrackerConfig
from common.errors import reports_user_errors
from sampler.values.tracker import ValueTracker

WANTED = 1024
IN_FLIGHT = (0, 5120)
REPEATS = 20


def measure(prompts: int, in_flight: int, solved: float) -> float:
    """Median milliseconds of a selection, where a part of the prompts is (nearly) always answered well."""
    rng = np.random.default_rng(0)
    tracker = ValueTracker([f"{i:016x}" for i in range(prompts)], TrackerConfig(), SelectionConfig())
    state = tracker.state_dict()
    values = np.where(rng.random(prompts) < solved, 0.99, rng.random(prompts))
    state["alpha"], state["beta"] = 8 * values, 8 * (1 - values)
    tracker.load_state_dict(state)
    exclude = [tracker.prompt_ids[i] for i in rng.choice(prompts, in_flight, replace=False)]
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        chosen = tracker.select(WANTED, rng, exclude)
        times.append(1000 * (time.perf_counter() - started))
        assert len(set(chosen)) == WANTED
    return statistics.median(times)


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("--prompts", type=options.at_least(max(IN_FLIGHT) + WANTED), default=1_000_000)
    args = parser.parse_args()
    print(f"{WANTED:,} of {args.prompts:,} prompts, median of {REPEATS}")
    for in_flight in IN_FLIGHT:
        for solved in (0.0, 0.95):
            print(
                f"  {in_flight:>5} in flight, {solved:4.0%} solved: {measure(args.prompts, in_flight, solved):6.2f} ms"
            )


if __name__ == "__main__":
    main()
