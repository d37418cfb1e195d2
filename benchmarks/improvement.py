"""What a run's evaluations say of its learning, with bands. `python -m benchmarks.improvement RUN_FOLDER`.

Every evaluation asks the same held-out prompts, so versions are compared prompt by prompt: the band of a difference
comes from resampling prompts, with all their responses. What it leaves out is how another seed would have trained.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np

RESAMPLES = 10_000


def read(path: Path) -> dict[str, float]:
    """Mean reward of each prompt of one evaluation; what was set aside counts 0."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for line in path.read_bytes().splitlines():
        row = json.loads(line)
        rewards[row["prompt_id"]].append(row["reward"] if row["status"] == "ok" else 0.0)
    return {prompt: float(np.mean(values)) for prompt, values in rewards.items()}


def band(values: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """Mean, and the 2.5% and 97.5% quantiles of means over resampled prompts. `values` are one a prompt, `[N]`."""
    draws = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(1), (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def versions(folder: Path) -> dict[int, np.ndarray]:
    """Mean reward of each prompt, `[N]`, by version of the weights; the prompts in one order.

    Raises:
        SystemExit: there are no evaluations, or not of the same prompts.
    """
    files = {int(path.stem): path for path in (folder / "validation_data").glob("*.jsonl")}
    if not files:
        raise SystemExit(f"{folder} has no evaluations (validation_data/*.jsonl)")
    rewards = {version: read(path) for version, path in sorted(files.items())}
    first = next(iter(rewards.values()))
    if differing := [version for version, by_prompt in rewards.items() if by_prompt.keys() != first.keys()]:
        raise SystemExit(f"{folder}: version {differing[0]} was asked other prompts than version {next(iter(rewards))}")
    return {version: np.array([by_prompt[prompt] for prompt in first]) for version, by_prompt in rewards.items()}


def main() -> None:
    """Print a line for each evaluation, and one for the difference of the last from the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the run")
    rewards = versions(parser.parse_args().folder)
    for version, values in rewards.items():
        print(f"version {version}: {_percent(values)}, {len(values)} prompts")
    if len(rewards) < 2:
        return
    before, *_, after = rewards.values()
    better, worse = int((after > before).sum()), int((after < before).sum())
    print(f"last - first: {_percent(after - before)}; {better} prompts better, {worse} worse")


def _percent(values: np.ndarray) -> str:
    mean, low, high = band(values)
    return f"{mean:.1%} (95%: {low:.1%} to {high:.1%})"


if __name__ == "__main__":
    main()
