"""A policy loss and a reward of the user's own train a model: real vLLM, DeepSpeed and Redis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from common.config import BrokerConfig
from common.streams.broker import connect
from common.streams.steps import latest
from launcher.quickstart.tiny_model import build_model, build_tokenizer, save
from tests.conftest import RedisServer

pytestmark = pytest.mark.e2e

STEPS, BATCH = 20, 64
MODULE = '''
"""A loss and a reward of somebody else's."""


def likes_letters(text, answer, row):
    return sum(character.isascii() and character.isalpha() for character in text) / max(len(text), 1)


def soft_clip(tokens, config, width=0.5):
    ratio = tokens.log_ratio.clamp(-width, width).exp() * (tokens.logprobs - tokens.logprobs.detach()).exp()
    return -tokens.advantages * ratio, {"soft_clipped": tokens.log_ratio.abs() > width}
'''


def run_settings(folder: Path, redis_url: str) -> Path:
    """A random tiny model, prompts, and a small run with the module's loss and reward."""
    (folder / "somebodys.py").write_text(MODULE)
    tokenizer = build_tokenizer()
    save(build_model(tokenizer, seed=0), tokenizer, folder / "model")
    rows = [json.dumps({"prompt": f"say {i}", "answer": "-"}) for i in range(100)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    settings = {
        "run": {"name": "own", "experiment": "own", "output_dir": str(folder / "runs"), "steps": STEPS},
        "model": {"path": str(folder / "model"), "dtype": "float32", "max_model_len": 96},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 48},
        "sampler": {"batch_size": BATCH, "max_staleness": 0},
        "generator": {"max_concurrency": 64},
        "learner": {"dtype": "float32", "lr": 1e-3, "checkpoint_every": STEPS, "token_budget": 2048},
        "episode": {"max_response_tokens": 16, "reward": "somebodys:likes_letters"},
        "algorithm": {"loss": "somebodys:soft_clip", "loss_options": {"width": 0.3}},
        "broker": {"url": redis_url},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_a_loss_of_ones_own_trains_and_its_metrics_are_reported(own_redis: RedisServer, tmp_path: Path) -> None:
    config = run_settings(tmp_path, own_redis.url)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "launcher.cli", "run", str(config), "--plain", "--generators", "1"]
    finished = subprocess.run(
        [*command, "--redis", own_redis.url],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    broker = connect(BrokerConfig(url=own_redis.url), "own")
    step = latest(broker)
    assert step is not None
    assert step.version == STEPS
    assert 0 <= step.metrics["actor/soft_clipped"] <= 1
    # A hundredth of what a random model says are letters.
    assert step.metrics["reward/mean"] > 0.1
