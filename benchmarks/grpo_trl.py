"""TRL's GRPO on a task of ours; `benchmarks.small_episodes` and `benchmarks.head_to_head` run this file with a Python
that has TRL.

    python grpo_trl.py settings.json steps.jsonl

The settings are a JSON object: `model` (folder), `dtype` of its weights, `rows` (JSON lines with `prompt` and
`answer`), `system_prompt` or null, `pattern` (the first group of its last match in a response is the answer; if null,
the whole response is), `threads`, and `grpo`, the arguments of TRL's `GRPOConfig`. Each line of the second file is a
step: its Unix time, the process's CPU seconds by then, the mean reward, the mean tokens of a response and the share of
groups without a signal. Needs nothing of this project.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


def right_answer(pattern: str | None) -> Any:
    """A reward of 1 if a response's answer is the row's."""
    search = re.compile(pattern, re.DOTALL) if pattern is not None else None

    def exact(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        rewards = []
        for turns, right in zip(completions, answer, strict=True):
            text = turns[0]["content"]
            answers = [match[1] for match in search.finditer(text)] if search is not None else []
            rewards.append(float((answers[-1] if answers else text).strip() == right))
        return rewards

    return exact


class Clock(TrainerCallback):
    """Writes a line for each step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Called after each step."""
        if not logs or "reward" not in logs:
            return
        step = {
            "time": time.time(),
            "cpu": time.process_time(),
            "reward": float(logs["reward"]),
            "tokens": float(logs["completions/mean_length"]),
            "no_signal": float(logs["frac_reward_zero_std"]),
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(step) + "\n")


def main() -> None:
    from trl import GRPOConfig, GRPOTrainer

    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(settings["threads"])
    system = settings["system_prompt"]
    before = [{"role": "system", "content": system}] if system else []
    rows = load_dataset("json", data_files=settings["rows"], split="train").select_columns(["prompt", "answer"])
    rows = rows.map(lambda row: {"prompt": [*before, {"role": "user", "content": row["prompt"]}]})
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"])),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        reward_funcs=right_answer(settings["pattern"]),
        train_dataset=rows,
        callbacks=[Clock(Path(sys.argv[2]))],
        args=GRPOConfig(logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, **settings["grpo"]),
    )
    trainer.train()


if __name__ == "__main__":
    main()
