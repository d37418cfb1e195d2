"""Fixed-seed runs of the learner, recorded once, so that a change of its code shows in its numbers.

`python -m tests.support.recorded_runs record` writes the metrics and weights of every run to
`tests/golden/learner_runs.json`; `... compare` trains again and prints, run by run, how far the numbers are from the
recorded ones. Bits agree only on the processor that recorded them; elsewhere sums are taken in another order.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.support.learner import JOB, run_ranks, save_tiny_model

RECORD = Path(__file__).parents[1] / "golden" / "learner_runs.json"
RANKS = (1, 2)
START, BATCHES = 3, 3
# Metrics that depend on the clock.
TIMED = ("tokens/per_second",)
ROWS = {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.7_1.5"}
BOTH = {"rollout_is": "token", "rollout_rs": "token_k1,seq_mean_k1", "rollout_rs_threshold": "0.5_1.8,0.7_1.5"}
BY_AGE = {"rollout_token_veto_threshold": 1e-3, "thresholds_by_age": [1.0, 0.9, 0.8, 0.7, 0.6]}
SKYRL = {
    "tis_ratio_type": "sequence", "token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 1.8,
    "outlier_token_is_threshold_low": 0.01, "sequence_mask_metric": "geometric",
    "geo_mask_low": 0.7, "geo_mask_high": 1.5,
}  # fmt: skip
SKYRL_TOKEN = {"tis_ratio_type": "token", "sequence_mask_metric": "product"}
BY_ROW = {"aggregation": "seq-mean-token-mean"}
PENALTIES = {"entropy_coef": 0.3, "kl_coef": 0.5, "kl_estimator": "k2", "negative_max_prob": 0.02}


def algorithms(reference: str) -> dict[str, dict[str, Any]]:
    """The `algorithm` section of every recorded run; `reference` is the model folder of the KL penalty."""
    return {
        "recommended": {},
        "verl token and row rejection": {"correction": BOTH},
        "verl sequence weights": {
            "correction": {**ROWS, "rollout_is": "sequence"},
            "aggregation": "seq-mean-token-sum",
        },
        "verl normalised": {"correction": {**BOTH, "rollout_is_batch_normalize": True}},
        "verl veto, by age": {"correction": {**ROWS, **BY_AGE}, **BY_ROW},
        "skyrl sequence": {"correction": {"skyrl": SKYRL}},
        "skyrl token": {"correction": {"skyrl": SKYRL_TOKEN}, **BY_ROW},
        "interpolate": {"proximal": "interpolate", "correction": BOTH},
        "compare": {"proximal": "compare", "correction": ROWS},
        "bypass ppo": {"correction": {"preset": "bypass_ppo_clip_k3_rs", "rollout_rs_threshold": 0.2}},
        "bypass gradient": {"correction": {"preset": "bypass_pg_geo_rs_seq_tis", "rollout_rs_threshold": "0.7_1.5"}},
        "sao": {"correction": {"preset": "sao"}},
        "vcpo": {"correction": {"preset": "vcpo"}},
        "gspo": {"loss": "gspo", "correction": ROWS, **BY_ROW},
        "cispo": {"loss": "cispo", "correction": ROWS},
        "sapo": {"loss": "sapo", "correction": ROWS, **BY_ROW},
        "penalties": {**PENALTIES, "reference": reference, "correction": BOTH},
    }


def train_all(folder: Path) -> dict[str, Any]:
    """Train every run on one and on two ranks; its metrics by step, and a digest of each weight tensor."""
    model, reference = save_tiny_model(folder / "model"), save_tiny_model(folder / "reference", seed=1)
    sections = algorithms(reference)
    results: dict[str, Any] = {}
    for ranks in RANKS:
        runs = folder / str(ranks)
        runs.mkdir()
        common = {**JOB, "model": model, "start": START, "steps": START + BATCHES, "age": 1}
        learner = {"token_budget": 100, "mini_batches": 2}
        jobs = {
            f"{number}": {**common, "learner": {**learner, "algorithm": section}}
            for number, section in enumerate(sections.values())
        }
        for name, result in zip(sections, run_ranks(ranks, jobs, runs).values(), strict=True):
            steps = [{key: value for key, value in step.items() if key not in TIMED} for step in result["metrics"]]
            weights = {key: _digest(value) for key, value in result["weights"].items()}
            results[f"{name}, {ranks} rank{'s' * (ranks > 1)}"] = {"metrics": steps, "weights": weights}
    return results


def _digest(weight: torch.Tensor) -> dict[str, Any]:
    """A digest that shows whether a tensor is the same, and how far off it is if not."""
    values = weight.detach().double().flatten()
    generator = torch.Generator().manual_seed(0)
    projections = torch.randn(4, len(values), generator=generator, dtype=torch.float64) @ values
    return {
        "sha256": hashlib.sha256(weight.detach().contiguous().numpy().tobytes()).hexdigest()[:16],
        "norm": float(values.norm()),
        "projections": projections.tolist(),
    }


def differences(recorded: dict[str, Any], now: dict[str, Any]) -> tuple[bool, float, str]:
    """Whether one run's weights are the same to the last bit, and its largest relative difference and where that is."""
    worst, where = 0.0, "nothing"
    same = True
    for step, (before, after) in enumerate(zip(recorded["metrics"], now["metrics"], strict=True)):
        for key in sorted(before):  # a metric that came later is in no record
            if key not in after:
                return False, math.inf, f"step {step}: {key} is missing"
            gap = abs(before[key] - after[key]) / max(1.0, abs(before[key]))
            if gap > worst:
                worst, where = gap, f"step {step}: {key} {before[key]!r} -> {after[key]!r}"
    for name, before in recorded["weights"].items():
        after = now["weights"][name]
        same = same and before["sha256"] == after["sha256"]
        gaps = [abs(a - b) / before["norm"] for a, b in zip(before["projections"], after["projections"], strict=True)]
        if max(gaps) > worst:
            worst, where = max(gaps), f"weight {name}"
    return same, worst, where


def main(command: str) -> int:
    """Record the runs, or compare them with the record; returns 1 if a run is more than 1e-6 off."""
    with tempfile.TemporaryDirectory() as folder:
        now = train_all(Path(folder))
    if command == "record":
        RECORD.write_text(json.dumps(now, sort_keys=True, separators=(",", ":")) + "\n", encoding="utf-8")
        return 0
    recorded, failed = json.loads(RECORD.read_text(encoding="utf-8")), 0
    for name, run in recorded.items():
        same, worst, where = differences(run, now[name])
        failed += worst > 1e-6
        bits = "weights bit for bit" if same else "weights differ"
        print(f"{name:38} {bits}; largest difference {worst:.1e}: {where}")
    print(f"{len(recorded)} runs, {failed} more than 1e-6 off")
    return min(failed, 1)


if __name__ == "__main__":
    if sys.argv[1:] not in (["record"], ["compare"]):
        sys.exit("usage: python -m tests.support.recorded_runs record|compare")
    sys.exit(main(sys.argv[1]))
