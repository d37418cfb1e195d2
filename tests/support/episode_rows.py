"""Run folders with episodes in them, as the sampler writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.messages import SampleHeader
from common.payload import pack_record
from sampler.files.episode_files import EpisodeFiles, episode_line

CONVERSATION = [
    {"role": "assistant", "content": "Let me see.<tool_call>...</tool_call>"},
    {"role": "tool", "content": "89", "name": "calculator", "arguments": {"expression": "12*7+5"}},
    {"role": "tool", "content": "error: no tool", "name": "shell", "arguments": {}, "error": True},
    {"role": "assistant", "content": "It is 98."},
    {"role": "user", "content": "That is not right.", "reward": -0.25, "metadata": {"score": 0.5}},
    {"role": "assistant", "content": "89"},
]
TOKENS = {
    "token_ids": [10, 11, 12, 13, 14, 15, 16],
    "model_spans": [[2, 4], [5, 7]],
    "logprobs": [-0.01, -0.5, -2.0, -7.25],
    "version_spans": [[20, 0, 1], [21, 1, 4]],
}

# In the step that trained on them: ratios of about 1, 0.5, 1.2 and 3.
TRAINED = {
    "mini_batch": 1,
    "advantages": [0.75, -0.2],
    "logprobs": [-0.01, -1.2, -1.8, -6.15],
    "entropies": [0.01, 0.7, 1.5, 3.0],
}


def keep_trained(folder: Path, version: int, task_id: str, rank: int = 0, **values: Any) -> None:
    """Write the learner's record of training on an episode with `TOKENS`."""
    path = folder / "training_data" / f"{version}.{rank}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"task_id": task_id, **TRAINED, **values}) + "\n")


def keep(
    folder: Path,
    version: int,
    task_id: str,
    story: dict[str, Any] | None = None,
    *,
    prompt: Any = "What is 2+2?",
    where: str = "rollouts",
    **header: Any,
) -> None:
    """Add an episode to a run folder."""
    record = pack_record({"input": prompt, "output": "4", "gts": "4", "messages": [], **(story or {})})
    values: dict[str, Any] = {
        "prompt_id": f"p-{task_id}", "reason": "stop", "reward": 1.0, "tokens": 30, "model_tokens": 12,
        "oldest_version": version, "newest_version": version + 1, "turns": 1, "seconds": 1.5, "generator": "g1",
    }  # fmt: skip
    sample = SampleHeader(task_id=task_id, **(values | {"record": record} | header))
    about = {"version": version, "value": 0.42}
    EpisodeFiles(folder / where).write(version, [(task_id, episode_line(sample, about, {"input": prompt}))])
