"""TRL's GRPO on the task of `benchmarks.small_episodes`, which runs this file with a Python that has TRL.

Prints a JSON object: for each step its end in seconds, the process's CPU seconds by then, and its mean reward. Needs
nothing of this project.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


def exact(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the response is the answer."""
    return [float(turns[0]["content"].strip() == right) for turns, right in zip(completions, answer, strict=True)]


class Clock(TrainerCallback):
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Called after each step."""
        if logs and "reward" in logs:
            self.steps.append({"time": time.time(), "cpu": time.process_time(), "reward": float(logs["reward"])})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    rows = load_dataset("json", data_files=str(args.folder / "train.jsonl"), split="train")
    rows = rows.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    clock = Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(args.folder / "model"),
        reward_funcs=exact,
        train_dataset=rows,
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=str(args.folder / "trl"),
            per_device_train_batch_size=args.batch,
            num_generations=args.group,
            max_completion_length=args.max_tokens,
            max_steps=args.steps,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            beta=0.0,
            temperature=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        ),
    )
    trainer.train()
    print(json.dumps(clock.steps))


if __name__ == "__main__":
    main()
