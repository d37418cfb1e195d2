"""Redis is wiped in the middle of a quickstart with a loss and a reward of the user's own: one command resumes it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from common.config import BrokerConfig, load_config
from common.files import tracker_is_whole, tracker_path
from common.streams.broker import Broker, connect
from common.streams.steps import StepReader, latest
from tests.conftest import RedisServer
from tests.support.whole_run import cache_of_quickstart, importing, options, settled_counters, spo, started

pytestmark = pytest.mark.e2e
STEPS, BATCH, HELDOUT = 12, 64, 8
SETTINGS = {
    "episode.reward": "my_parts:likes_letters",
    "algorithm.loss": "my_parts:soft_clip",
    "algorithm.loss_options": "{width: 0.3}",
    "sampler.batch_size": BATCH,
    "sampler.max_staleness": 0,
    "learner.lr": 1e-3,
    "learner.checkpoint_every": 1,
    "learner.keep_checkpoints": 3,
    "eval.every": 4,
    "eval.limit": HELDOUT,
    "broker.dead_after": 3.0,
}
MODULE = """
def likes_letters(text, answer, row):
    return sum(character.isascii() and character.isalpha() for character in text) / max(len(text), 1)


def soft_clip(tokens, config, width=0.5):
    ratio = tokens.log_ratio.clamp(-width, width).exp() * (tokens.logprobs - tokens.logprobs.detach()).exp()
    return -tokens.advantages * ratio, {"soft_clipped": tokens.log_ratio.abs() > width}
"""


@dataclass
class Resumed:
    """What is left of a run that was resumed and came to its end."""

    broker: Broker
    folder: Path


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resumed]:
    folder = tmp_path_factory.mktemp("lost")
    environment = cache_of_quickstart(folder) | importing(folder, {"my_parts": MODULE})
    server = RedisServer(folder)
    server.start()
    run = Resumed(connect(BrokerConfig(url=server.url, dead_after=3.0), "quickstart-1"), folder / "runs/quickstart-1")
    here = ("--plain", "--generators", "1", "--redis", server.url)
    command = ("quickstart", *here, "--output", folder / "runs", "--steps", STEPS, *options(SETTINGS))
    with started(folder / "quickstart.log", *command, environment=environment) as quickstart:
        wait_for_pair(run, quickstart)
        run.broker.redis.flushall()
        assert quickstart.wait(timeout=1500) == 2
    assert "Redis has lost run 'quickstart-1'" in (folder / "quickstart.log").read_text()
    again = spo("run", run.folder / "config.yaml", "--resume", *here, **environment)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    yield run
    server.kill()


def wait_for_pair(run: Resumed, quickstart: subprocess.Popen[str]) -> None:
    """Wait until a checkpoint of learner and sampler is there, after at least two steps."""
    reader, version = StepReader(run.broker), 0
    while version < 3 or not (run.folder / f"checkpoints/step_{version - 1}").is_dir():
        version = max([version, *(step.version for step in reader.read(block_ms=200))])
        assert quickstart.poll() is None, "the run ended early"
    assert tracker_is_whole(tracker_path(run.folder, version - 1))


def test_one_command_resumes_it_and_its_counts_agree(resumed: Resumed) -> None:
    counters = settled_counters(resumed.broker)
    assert counters["batched"] == STEPS * BATCH
    assert counters["rewarded"] == STEPS * BATCH + counters.get("late", 0) + counters["lost_samples"]
    versions = [result["version"] for result in resumed.broker.evaluations()]
    assert versions == sorted(set(versions))
    assert (versions[0], versions[-1]) == (0, STEPS), "the curve begins where the run began"


def test_the_optimizer_has_made_every_step(resumed: Resumed) -> None:
    steps = load_config(resumed.folder / "config.yaml").learner.mini_batches * STEPS
    (path,) = resumed.folder.glob(f"checkpoints/step_{STEPS}/deepspeed/*_optim_states.pt")
    optimizer = torch.load(path, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]
    assert [int(moment["step"]) for moment in optimizer["state"].values()] == [steps]


def test_a_loss_of_ones_own_trains_and_reports(resumed: Resumed) -> None:
    step = latest(resumed.broker)
    assert step is not None
    assert step.version == STEPS
    assert 0 <= step.metrics["actor/soft_clipped"] <= 1
    # Less than a tenth of what a random model says are letters.
    assert step.metrics["reward/mean"] > 0.2
