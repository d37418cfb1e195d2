"""Supervised training beside TRL's: the same tokens in the same order, learning rate and precision.

    python -m benchmarks.smollm2 .cache/smollm2
    python -m benchmarks.sft_head_to_head .cache/smollm2 --trl ~/trl/bin/python --steps 50

The rows are problems of several families of reasoning-gym with their answers. `spo sft` packs them, TRL pads them. The
table has each step's two losses, their largest difference, and the tokens a second of each side, prompts included, from
its second step on. Both sides take the first `--threads` cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks import options
from benchmarks.head_to_head.runs import check_trl
from benchmarks.tables import table
from common.errors import reports_user_errors
from common.payload import json_line
from learner.batch.demonstrations import Demonstrations
from sampler.prompts.rows import open_rows

FAMILIES = ("chain_sum", "gcd", "letter_counting", "spell_backward", "number_sorting", "base_conversion")
SCRIPT = Path(__file__).with_name("sft_trl.py")
MAX_TOKENS = 512


class Side(NamedTuple):
    """The loss of each step, and tokens a second."""

    losses: list[float]
    speed: float


def write_rows(path: Path, count: int) -> None:
    """Problems of all families in turn, with their answers."""
    sets = [open_rows(f"reasoning_gym:{name}", "train", {"size": count // len(FAMILIES) + 1}) for name in FAMILIES]
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            row = sets[number % len(sets)][number // len(sets)]
            file.write(json_line({"prompt": row["prompt"], "completion": str(row["answer"])}) + "\n")


def configuration(args: Any, folder: Path) -> dict[str, Any]:
    """The configuration of `spo sft`."""
    learner = {"dtype": args.dtype, "lr": args.lr, "checkpoint_every": args.steps, "export": False}
    return {
        "model": {"path": str(args.model), "dtype": args.dtype, "max_model_len": MAX_TOKENS},
        "data": {"train": str(folder / "rows.jsonl"), "max_prompt_tokens": MAX_TOKENS // 2},
        "run": {"output_dir": str(folder), "log_to": []},
        "learner": learner,
        "sft": {
            "data": str(folder / "rows.jsonl"), "steps": args.steps, "batch_size": args.batch, "shuffle": False,
        },
    }  # fmt: skip


def run_spo(args: Any, folder: Path) -> list[dict[str, float]]:
    """Train by `spo sft`; returns time and loss of each step."""
    (folder / "config.yaml").write_text(yaml.safe_dump(configuration(args, folder)), encoding="utf-8")
    command = [sys.executable, "-m", "launcher.cli", "sft", str(folder / "config.yaml"), "--ranks", "1"]
    subprocess.run(command, check=True, env=_environment(args.threads))
    lines = (folder / "sft" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    entries = map(json.loads, lines)
    return [{"time": one["time"], "loss": one["values"]["sft/loss"]} for one in entries]


def run_trl(args: Any, folder: Path, rows: Demonstrations) -> list[dict[str, float]]:
    """Train by TRL on the tokens that `spo sft` has made; returns time and loss of each step."""
    with (folder / "tokens.jsonl").open("w", encoding="utf-8") as file:
        for number in range(args.steps * args.batch):
            row = rows[number % len(rows)]
            mask = (row.weights > 0).astype(int)
            file.write(json_line({"input_ids": row.token_ids.tolist(), "completion_mask": mask.tolist()}) + "\n")
    sft = {
        "output_dir": str(folder / "trl"), "per_device_train_batch_size": args.batch, "max_steps": args.steps,
        "learning_rate": args.lr, "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0,
        "max_length": MAX_TOKENS, "packing": False, "completion_only_loss": True, "save_strategy": "no",
        "gradient_checkpointing": False, "bf16": args.dtype == "bfloat16",
    }  # fmt: skip
    # With float32 weights, as the learner's masters are.
    settings = {
        "model": str(args.model), "dtype": "float32", "rows": str(folder / "tokens.jsonl"), "threads": args.threads,
        "sft": sft,
    }  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    steps = folder / "steps.jsonl"
    command = [str(args.trl), str(SCRIPT), str(folder / "settings.json"), str(steps)]
    subprocess.run(command, check=True, env=_environment(args.threads))
    return [json.loads(line) for line in steps.read_text(encoding="utf-8").splitlines()]


def _environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads)}


def side(steps: Sequence[dict[str, float]], tokens: Sequence[int]) -> Side:
    """A side's figures.

    Args:
        tokens: of each step's rows.
    """
    seconds = steps[-1]["time"] - steps[0]["time"]
    return Side([one["loss"] for one in steps], sum(tokens[1:]) / seconds if seconds else 0.0)


def report(spo: Side, trl: Side | None) -> str:
    """The table, as Markdown."""
    others = trl.losses if trl is not None else [float("nan")] * len(spo.losses)
    pairs = enumerate(zip(spo.losses, others, strict=True), 1)
    lines = [table(["step", "`spo sft`", "TRL"], [(str(n), f"{own:.5f}", f"{other:.5f}") for n, (own, other) in pairs])]
    lines += ["", f"spo sft: {spo.speed:,.0f} tokens/s"]
    if trl is not None:
        apart = max(abs(own - other) for own, other in zip(spo.losses, trl.losses, strict=True))
        lines += [f"TRL: {trl.speed:,.0f} tokens/s; {spo.speed / trl.speed:.2f} times", f"losses differ by {apart:.2g}"]
    return "\n".join(lines) + "\n"


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("model", type=options.model, help="model folder")
    parser.add_argument("--trl", type=Path, help="a Python in which TRL is installed; without, only spo sft runs")
    parser.add_argument("--steps", type=options.at_least(2), default=50)
    parser.add_argument("--batch", type=options.positive, default=32)
    parser.add_argument("--lr", type=options.above_zero, default=1e-5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=options.positive, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    if args.trl is not None:
        check_trl(args.trl)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", args.steps * args.batch)
        steps = run_spo(args, folder)
        rows = Demonstrations.open(folder / "sft" / "demonstrations" / "train")
        lengths = [len(rows[number % len(rows)].token_ids) for number in range(args.steps * args.batch)]
        tokens = [sum(lengths[start : start + args.batch]) for start in range(0, len(lengths), args.batch)]
        trl = side(run_trl(args, folder, rows), tokens) if args.trl is not None else None
        sys.stdout.write(report(side(steps, tokens), trl))


if __name__ == "__main__":
    main()
