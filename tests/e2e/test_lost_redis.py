"""Redis is wiped in the middle of a quickstart: one command resumes it, with all that the checkpoint holds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.config import BrokerConfig, load_config
from common.streams.broker import Broker, connect
from common.streams.steps import StepReader
from common.tracker_file import is_whole, path_of
from launcher.quickstart.cache import key
from launcher.quickstart.tiny_model import build_model, build_tokenizer, save
from launcher.tasks import DEFAULT
from tests.conftest import RedisServer
from tests.support.quickstart import started_quickstart

pytestmark = pytest.mark.e2e
STEPS, BATCH, HELDOUT = 6, 32, 8


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A cache in which the quickstart finds a model that has learned nothing; half of what it says earns it."""
    tokenizer = build_tokenizer(DEFAULT.extra_tokens)
    save(build_model(tokenizer, seed=0), tokenizer, tmp_path / "cache" / "spo" / f"warm-start-{key(DEFAULT)}")
    (tmp_path / "parity.py").write_text("def even(text, answer, row):\n    return float(len(text) % 2 == 0)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": path}


@pytest.fixture
def quickstart(environment: dict[str, str], own_redis: RedisServer, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    settings = {
        "episode.reward": "parity:even",
        "sampler.batch_size": BATCH,
        "learner.checkpoint_every": 1,
        "learner.keep_checkpoints": 3,
        "eval.every": 2,
        "eval.limit": HELDOUT,
        "broker.heartbeat": 0.5,
        "broker.dead_after": 3.0,
    }
    steps = "--steps", str(STEPS)
    with started_quickstart(tmp_path, own_redis.url, settings, *steps, environment=environment) as process:
        yield process


def wait_for_pair(folder: Path, broker: Broker, quickstart: subprocess.Popen[str]) -> None:
    """Until a checkpoint of learner and sampler is there, after at least two steps."""
    reader, version = StepReader(broker), 0
    while version < 3 or not (folder / f"checkpoints/step_{version - 1}").is_dir():
        version = max([version, *(step.version for step in reader.read(block_ms=200))])
        assert quickstart.poll() is None, "the run ended early"
    assert is_whole(path_of(folder, version - 1))


def test_one_command_resumes_a_run_whose_redis_was_wiped(
    quickstart: subprocess.Popen[str], own_redis: RedisServer, environment: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "quickstart-1"
    broker = connect(BrokerConfig(url=own_redis.url, dead_after=3.0), "quickstart-1")
    wait_for_pair(folder, broker, quickstart)
    broker.redis.flushall()
    assert quickstart.wait(timeout=300) == 2
    assert "Redis has lost run 'quickstart-1'" in (tmp_path / "quickstart.log").read_text()

    command = [sys.executable, "-m", "launcher.cli", "run", str(folder / "config.yaml"), "--resume", "--plain"]
    resumed = subprocess.run(
        [*command, "--generators", "1", "--redis", own_redis.url],
        env=os.environ | environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stdout[-3000:] + resumed.stderr[-3000:]

    counters = broker.counters()
    assert counters["dispatched"] == counters["counted"]
    assert counters["counted"] == counters["finished"] + counters.get("superseded", 0) + counters["lost"]
    assert counters["batched"] == STEPS * BATCH
    assert counters["rewarded"] == STEPS * BATCH + counters.get("late", 0) + counters["lost_samples"]
    versions = [result["version"] for result in broker.evaluations()]
    assert versions == sorted(set(versions))
    assert (versions[0], versions[-1]) == (0, STEPS), "the curve begins where the run began"
    for name in ("tasks", "samples", "batches", "dead"):
        assert broker.redis.xlen(broker.key(name)) == 0
    assert broker.keys_of("payload:") == []

    steps = load_config(folder / "config.yaml").learner.mini_batches * STEPS
    (path,) = folder.glob(f"checkpoints/step_{STEPS}/deepspeed/*_optim_states.pt")
    optimizer = torch.load(path, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]
    moments = optimizer["state"].values()
    assert [int(moment["step"]) for moment in moments] == [steps], "the optimizer has made every step of the run"
