"""What waiting for groups costs where episodes have long tails: in simulation, and on the real pipeline.

`python -m benchmarks.group_free`. The setting is that of the agentic simulation in the SPO paper (arXiv 2509.13232):
24 samples are wanted and the fastest 24 of 48 episodes are taken, in 112 s; with groups it takes 486 s, 4.35 times as
long. Ours, since we know no more of it: groups of 8, of which 6 are started too, and the first 3 that are complete are
taken; or only the 3 that are needed. Latencies are those of `benchmarks.slow_tool`.

Two things are measured, each simulated and real (`benchmarks.group_free_run`):

- one wave: 48 episodes start together, until the first batch. This is the paper's setting.
- continuous: batch after batch as SPO does it. New episodes start with each batch, and what was slow comes later: it
  must be in a batch before it is older than `sampler.max_staleness` versions, and nothing is thrown away.

The results file gets the seconds of every phase of the real runs; `--plot` draws it. Each real phase is simulated too,
with the very latencies that it had: in a continuous run a few slow episodes decide.
"""

from __future__ import annotations

import heapq
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import options
from benchmarks.slow_tool import CALLS, GENERATION, SCALE, SlowTool, episode_seconds
from common.config import SamplerConfig
from common.errors import reports_user_errors
from sampler.admission import Admission
from sampler.records import DispatchedTask

STARTED, WANTED, GROUP = 48, 24, 8
PUBLISHED = 4.35  # the paper's speed-up
SIGMAS = (0.0, 0.5, 1.0, 1.5)
ONE_WAVE = 1  # `sampler.max_staleness` with which 48 episodes are under way
STALENESS = (1, 4, 16)  # of continuous runs; (staleness + 1) * 24 episodes are under way
DEFAULT = 4  # of `sampler.max_staleness`: the one that is measured
HERE = Path(__file__).parent


def first_batch(seconds: np.ndarray, group: int) -> np.ndarray:
    """When `WANTED` samples are there, where episodes start together and count in whole groups only.

    Args:
        seconds: of each episode, [..., episodes].
        group: episodes of a group, which are neighbours; 1: group-free.

    Returns:
        Seconds, [...].
    """
    of_groups = seconds.reshape(*seconds.shape[:-1], -1, group).max(-1)
    return np.sort(of_groups, -1)[..., WANTED // group - 1]


def batch_ends(seconds: Sequence[float], staleness: int, group: int, batches: int) -> np.ndarray:
    """When each batch is full, in a run that goes on and whose learner takes no time; by the sampler's own admission.

    Args:
        seconds: of each episode, in the order of their dispatch; enough for all batches.
        staleness: `sampler.max_staleness`.
        group: as above. An episode counts as under way until its whole group has ended.
    """
    admission = Admission(SamplerConfig(batch_size=WANTED, max_staleness=staleness), steps=len(seconds) // WANTED)
    under_way: list[tuple[float, int]] = []
    ended: Counter[int] = Counter()  # episodes by group
    versions: list[int] = []  # of dispatch, by episode
    waiting: list[int] = []  # versions of the samples that wait for a batch, in the order of arrival
    now, announced = 0.0, 0
    ends: list[float] = []
    while len(ends) < batches:
        # Each batch that has been full is a version by now. They come one by one, each with its new episodes.
        for version in range(announced, len(ends) + 1):
            for _ in range(admission.room(version, len(ends), len(waiting))):
                episode = len(versions)
                versions.append(version)
                admission.add(str(episode), DispatchedTask(str(episode), False, version, 0.0))
                heapq.heappush(under_way, (now + seconds[episode], episode))
        announced = len(ends)
        now, episode = heapq.heappop(under_way)
        ended[episode // group] += 1
        if ended[episode // group] == group:
            members = range(episode // group * group, (episode // group + 1) * group)
            for member in members:
                admission.remove(str(member))
                waiting.append(versions[member])
        while len(waiting) >= WANTED and not admission.must_wait(len(ends), Counter(waiting)):
            waiting = sorted(waiting)[WANTED:]  # the oldest weights first
            ends.append(now)
    return np.array(ends[:batches])


def simulate(sigma: float, waves: int, runs: int, batches: int = 300, seed: int = 0) -> dict[str, Any]:
    """The figures of one tail: seconds of a batch, group-free and grouped, the speed-up, and a band of 90%.

    Args:
        runs: continuous runs for each staleness.
        batches: of each of them.

    Returns:
        Figures of one wave, the band being that of single waves; `three_groups`, the speed-up where the grouped side
        starts no more than it needs; `continuous`, by staleness figures of continuous runs.
    """
    rng = np.random.default_rng(seed)
    seconds = episode_seconds(rng, sigma, (waves, STARTED))
    free, grouped = first_batch(seconds, 1), first_batch(seconds, GROUP)
    figures = _figures(free, grouped)
    three_groups = first_batch(seconds[:, :WANTED], GROUP).mean() / free.mean()
    continuous = {}
    for staleness in STALENESS:
        streams = episode_seconds(rng, sigma, (runs, (batches + staleness + 1) * WANTED)).tolist()
        continuous[staleness] = _figures(
            *([_seconds_a_batch(batch_ends(stream, staleness, group, batches), staleness).mean() for stream in streams]
              for group in (1, GROUP))
        )  # fmt: skip
    return figures | {"sigma": sigma, "three_groups": three_groups, "continuous": continuous}


def _figures(free: Sequence[float] | np.ndarray, grouped: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """Means, their ratio, and where 90% of the ratios lie."""
    ratios = np.array(grouped) / np.array(free)
    means = {"free": np.mean(free), "grouped": np.mean(grouped), "speedup": np.mean(grouped) / np.mean(free)}
    return means | {"band": tuple(np.quantile(ratios, (0.05, 0.95)).tolist()), "measured": len(ratios)}


def measured(rows: Sequence[dict[str, Any]], sigma: float, continuous: bool) -> dict[str, Any] | None:
    """Figures of the real waves or continuous phases, in the setting's seconds; None where there are none.

    Args:
        rows: as `group_free_run.measure` gives them.
    """
    phases = [row for row in rows if row["sigma"] == sigma and bool(row["ahead"]) == continuous]
    if not phases:
        return None
    free, grouped = (np.concatenate([_seconds(row, side) for row in phases]) / SCALE for side in ("free", "grouped"))
    return _figures(free, grouped)


def replayed(row: dict[str, Any]) -> dict[str, Any]:
    """A real phase as the simulation has it, with the very latencies that its tasks had."""
    tool = SlowTool([(sys.maxsize, row["sigma"])])
    tasks = range(row["first_task"], row["first_task"] + (row["ahead"] + row["staleness"] + 1) * WANTED)
    seconds = [(CALLS + 1) * GENERATION + sum(tool.seconds(str(task))) for task in tasks]
    ends = {
        side: (SCALE * batch_ends(seconds, row["staleness"], group, row["ahead"] + 1)).tolist()
        for side, group in (("free", 1), ("grouped", GROUP))
    }
    return row | ends


def _seconds(row: dict[str, Any], side: str) -> np.ndarray:
    """Seconds of a wave until its first batch; of a continuous phase, of a batch in each stretch."""
    times = np.array(row[side])
    return _seconds_a_batch(times, row["staleness"]) if row["ahead"] else times


def _seconds_a_batch(ends: np.ndarray, staleness: int) -> np.ndarray:
    """Seconds of a batch in each stretch of as many batches as start at once, but for the first ones.

    Neighbours are full at the same time, since they wait for the same episodes.
    """
    stride = staleness + 1
    return np.diff(ends[staleness::stride]) / stride


def table(simulated: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> str:
    """Seconds of a batch and speed-ups by sigma, as text."""
    lines = [f"the paper: 112 s group-free, 486 s grouped, {PUBLISHED:.2f}x"]
    for figures in simulated:
        spare = f"{figures['three_groups']:.2f}x if no more than {WANTED} are started grouped"
        lines += [f"sigma {figures['sigma']:g}", f"  one wave, simulated: {_line(figures, 'waves')}; {spare}"]
        lines += _real("one wave", rows, figures["sigma"], continuous=False)
        for staleness, run in figures["continuous"].items():
            lines.append(f"  continuous, max_staleness {staleness}, simulated: {_line(run, 'runs')}")
        lines += _real(f"continuous, max_staleness {DEFAULT}", rows, figures["sigma"], continuous=True)
    return "\n".join(lines)


def _real(name: str, rows: Sequence[dict[str, Any]], sigma: float, continuous: bool) -> list[str]:
    """What was measured, and the same simulated with the latencies that there were."""
    real = measured(rows, sigma, continuous)
    same = measured([replayed(row) for row in rows], sigma, continuous)
    what = f"stretches of {DEFAULT + 1} batches" if continuous else "waves"
    return [f"  {name}, real: {_line(real, what)}", f"    and simulated: {_line(same, what)}"] if real and same else []


def _line(figures: dict[str, Any], what: str) -> str:
    low, high = figures["band"]
    return (
        f"{figures['free']:.0f} s group-free, {figures['grouped']:.0f} s grouped, {figures['speedup']:.2f}x "
        f"(90% of {figures['measured']} {what}: {low:.2f} to {high:.2f})"
    )


def measure_all(waves: int, batches: int, sigmas: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Rows of the real pipeline: waves, then two continuous phases for each sigma."""
    from benchmarks.group_free_run import measure

    yield from measure(ONE_WAVE, [(sigma, 0) for _ in range(waves) for sigma in sigmas])
    yield from measure(DEFAULT, [(sigma, batches) for _ in range(2) for sigma in sigmas])


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="few of everything, to see that it works; keeps nothing")
    parser.add_argument("--simulation", action="store_true", help="measure nothing; show what the results file has")
    picture = HERE.parent / "docs" / "group-free.png"
    parser.add_argument(
        "--plot", type=options.new_file, nargs="?", const=picture, metavar="PNG", help="the same, and draw it"
    )
    parser.add_argument(
        "--results", type=options.new_file, default=HERE / "results" / "group_free.jsonl", help="file of all rows"
    )
    parser.add_argument("--waves", type=options.positive, default=8, help="real waves for each sigma")
    parser.add_argument("--batches", type=options.positive, default=30, help="batches of a real continuous phase")
    args = parser.parse_args()
    sigmas: tuple[float, ...] = SIGMAS
    size = 10_000, 10
    waves, batches = args.waves, args.batches
    if args.quick:
        sigmas, size, waves, batches = (0.0, 1.0), (200, 1), 1, 2 * (DEFAULT + 1)
    rows: list[dict[str, Any]] = []
    if args.simulation or args.plot:
        rows = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    else:
        for row in measure_all(waves, batches, sigmas):
            rows.append(row)
            seconds = f"{row['free'][-1]:.1f} s group-free, {row['grouped'][-1]:.1f} s grouped"
            print(f"sigma {row['sigma']:g}, {row['ahead'] + 1} batches: {seconds}", file=sys.stderr)
            if not args.quick:
                args.results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table([simulate(sigma, *size) for sigma in sigmas], rows))
    if args.plot:
        from benchmarks.group_free_plot import plot

        plot(rows, args.plot)


if __name__ == "__main__":
    main()
