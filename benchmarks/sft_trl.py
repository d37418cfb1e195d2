"""TRL's supervised training on given tokens; `benchmarks.sft_head_to_head` runs this file with a Python that has TRL.

    python sft_trl.py settings.json steps.jsonl

The settings are a JSON object: `model` (folder), `dtype` of its weights, `rows` (JSON lines with `input_ids` and
`completion_mask`, in the order of training), `threads`, and `sft`, the arguments of TRL's `SFTConfig`. Each line of the
second file is a step: its Unix time, the process's CPU seconds by then, and its loss. Needs nothing of this project.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


class Clock(TrainerCallback):
    """Writes a line for each step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Called after each step."""
        if logs and "loss" in logs:
            line = json.dumps({"time": time.time(), "cpu": time.process_time(), "loss": float(logs["loss"])})
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def main() -> None:
    from trl import SFTConfig, SFTTrainer

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset if dataset is None else dataset)

    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(settings["threads"])
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"])),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        train_dataset=load_dataset("json", data_files=settings["rows"], split="train"),
        callbacks=[Clock(Path(sys.argv[2]))],
        args=SFTConfig(logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, **settings["sft"]),
    )
    trainer.train()


if __name__ == "__main__":
    main()
