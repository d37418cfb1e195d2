"""What the correction and its diagnostics cost, against a learner step and a per-row implementation.

`python -m benchmarks.correction`. Times are the best of several rounds taken in turns within one run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import options
from benchmarks.learner import make_batch, make_config, make_model
from common.config import CorrectionConfig
from common.errors import reports_user_errors
from learner.batch.layout import Layout
from learner.correction import correct_tokens
from learner.ranks.world import start
from learner.stats import Stats
from learner.trainer import Trainer

PRESET = "decoupled_k3_rs_token_tis"
SIZES = (32, 128, 512, 2048, 8192)


@dataclass(frozen=True)
class Cost:
    """Seconds for one batch of rows: all rows at once (`learner.correction`), and row by row."""

    rows: int
    tokens: int
    batched: float
    per_row: float


def costs(sizes: Sequence[int] = SIZES, tokens: int = 43, rounds: int = 20) -> list[Cost]:
    """Both implementations on batches of growing size."""
    config = CorrectionConfig.preset(PRESET)
    results = []
    for rows in sizes:
        old, rollout, ages, lengths = _tokens(rows, tokens)
        layout = Layout.of_lengths(lengths)

        def batched() -> tuple[torch.Tensor, torch.Tensor]:
            stats = Stats()
            part = correct_tokens(old, rollout, layout, config, stats, ages)  # noqa: B023
            stats.reduce()
            assert part.weights is not None
            return part.weights, part.keep

        def per_row() -> tuple[torch.Tensor, torch.Tensor]:
            return row_by_row(old.split(lengths), rollout.split(lengths), ages.split(lengths))  # noqa: B023

        for actual, expected in zip(batched(), per_row(), strict=True):
            torch.testing.assert_close(actual.float(), expected.float())
        few = max(3, rounds * 128 // rows) if rows > 128 else rounds
        best = {
            name: min(_seconds(work) for _ in range(few)) for name, work in (("batched", batched), ("per_row", per_row))
        }
        results.append(Cost(rows, len(old), **best))
    return results


def row_by_row(
    old: tuple[torch.Tensor, ...], rollout: tuple[torch.Tensor, ...], ages: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same preset and the most common diagnostics the obvious way: a loop over rows."""
    weights, keeps = [], []
    sums: dict[str, float] = {}
    for row_old, row_rollout, age in zip(old, rollout, ages, strict=True):
        x = (row_old - row_rollout).clamp(-20, 20)
        k3 = x.exp() - 1 - x
        weights.append(x.exp().clamp(max=2.0))
        keeps.append(torch.full_like(x, float(k3.mean() <= 0.01)))
        row = {
            "kl": -x.sum(),
            "k3": k3.sum(),
            "chi2": (2 * x).exp().sum(),
            "chi2_seq": (2 * x.sum()).clamp(max=40).exp(),
            "high": (x.exp() > 2).sum(),
            "low": (x.exp() < 0.5).sum(),
            "ppl": (-row_old).mean().exp(),
            "rollout_ppl": (-row_rollout).mean().exp(),
        }
        for first, last in ((0, 0), (1, 1), (2, 2), (3, 4), (5, 1 << 30)):
            inside = (age >= first) & (age <= last)
            row |= {f"kl_{first}": -x[inside].sum(), f"high_{first}": (x[inside].exp() > 2).sum()}
        for name, value in row.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return torch.cat(weights), torch.cat(keeps)


def learner_step(samples: int = 128, tokens: int = 64, rounds: int = 10) -> tuple[float, float, int]:
    """Seconds of a whole learner step on the tiny model, of the correction in it, and the batch's model tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        config = make_config(folder, samples)
        preset = CorrectionConfig.preset(PRESET)
        trainer = Trainer(config, start())
        batch = make_batch(config, samples, tokens, seed=0)
        micros = [micro for micros in batch.mini_batches for micro in micros]

        def correction() -> None:
            for micro in micros:
                stats = Stats()
                correct_tokens(
                    micro.rollout_logprobs + 0.01,
                    micro.rollout_logprobs,
                    micro.layout,
                    preset,
                    stats,
                    batch.version - micro.versions,
                )
                stats.reduce()

        def step() -> None:
            trainer.train(batch)

        step()
        step_times, correction_times = [], []
        for _ in range(rounds):
            step_times.append(_seconds(step))
            correction_times.append(_seconds(correction))
        return min(step_times), min(correction_times), sum(micro.model_tokens for micro in micros)


def _tokens(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    generator = torch.Generator().manual_seed(rows)
    lengths = torch.randint(tokens // 2, tokens * 3 // 2, (rows,), generator=generator).tolist()
    count = sum(lengths)
    rollout = -torch.rand(count, generator=generator, dtype=torch.float64)
    old = rollout + 0.12 * torch.randn(count, generator=generator, dtype=torch.float64)
    return old, rollout, torch.randint(0, 8, (count,), generator=generator), lengths


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("--threads", type=options.positive, default=2, help="torch threads")
    parser.add_argument("--rows", type=options.positive, nargs="+", default=SIZES, help="a row of the table each")
    parser.add_argument("--rounds", type=options.positive, default=10, help="the best counts")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    step, correction, tokens = learner_step(rounds=args.rounds)
    print(
        f"learner step {1e3 * step:.1f} ms ({tokens} model tokens), correction and diagnostics in it "
        f"{1e3 * correction:.2f} ms: {100 * correction / step:.2f}%"
    )
    print("| rows | tokens | all at once, ms | ns a token | row by row, ms | ratio |\n|---|---|---|---|---|---|")
    for cost in costs(args.rows, rounds=2 * args.rounds):
        print(
            f"| {cost.rows} | {cost.tokens} | {1e3 * cost.batched:.2f} | {1e9 * cost.batched / cost.tokens:.0f} "
            f"| {1e3 * cost.per_row:.1f} | {cost.per_row / cost.batched:.0f} |"
        )


if __name__ == "__main__":
    main()
