"""A whole run on real vLLM, DeepSpeed and Redis: its sampler is killed, Redis is wiped, and one command resumes it.

`test_deterministic_run.py` kills the other processes, which take longer to come back. The loss and the reward are the
user's own.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import BrokerConfig, load_config
from common.files import tracker_is_whole, tracker_path
from common.messages import Batch
from common.metrics import metric
from common.streams.broker import Broker, connect
from common.streams.steps import StepReader, latest
from launcher.folder.metrics import read_metrics
from launcher.page.episode import trained_view, training_lines
from launcher.trace import read_timelines
from tests.conftest import RedisServer
from tests.support.tracked import TRACKERS, offline, read_back
from tests.support.whole_run import (
    importing,
    json_lines,
    kill,
    settled_counters,
    spo,
    started,
    wait_for_version,
    write_run,
)

pytestmark = pytest.mark.e2e
STEPS, BATCH, HELDOUT = 8, 16, 6
SECTIONS = {
    "run": {"steps": STEPS, "log_to": list(TRACKERS)},
    "sampler": {"batch_size": BATCH, "max_staleness": 2, "tracker": {"reward_range": [-1, 1]}},
    "algorithm": {"turn_advantage": "turn", "loss": "my_parts:soft_clip", "loss_options": {"width": 0.3}},
    # The rate is low so that no batch drifts past `rollout_rs_threshold` whole and has its optimizer step skipped.
    "learner": {"lr": 1e-5, "checkpoint_every": 1, "keep_checkpoints": 3, "exact_every": 1},
    # Nearly every answer of a random model is wrong, and each costs something.
    "episode": {"max_response_tokens": 32, "rollouts_every": 2, "max_assistant_turns": 3, "user": "corrector"}
    | {"user_options": {"message": "No.", "penalty": 0.25}, "reward": "my_parts:likes_letters"},
    "eval": {"every": 4},
}
MODULE = """
def likes_letters(text, answer, row):
    return sum(character.isascii() and character.isalpha() for character in text) / max(len(text), 1)


def soft_clip(tokens, config, width=0.5):
    ratio = tokens.log_ratio.clamp(-width, width).exp() * (tokens.logprobs - tokens.logprobs.detach()).exp()
    return -tokens.advantages * ratio, {"soft_clipped": tokens.log_ratio.abs() > width}
"""


@dataclass
class Ended:
    """What is left of a run that came to its end."""

    base: Path
    broker: Broker
    batches: list[Batch]

    @property
    def folder(self) -> Path:
        return self.base / "runs" / "whole"

    @property
    def episodes(self) -> list[dict[str, Any]]:
        return json_lines(*self.folder.glob("rollouts/*"))


def end_turns_early(model: Path) -> None:
    """Let a ninth of the model's tokens end a turn; the template's own token alone ends one random turn in fifty."""
    path = model / "generation_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"eos_token_id": [settings["eos_token_id"], *range(30)]}))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    base = tmp_path_factory.mktemp("whole")
    server = RedisServer(base)
    server.start()
    config = write_run(base, "whole", SECTIONS, heldout=HELDOUT)
    end_turns_early(base / "model")
    broker = connect(BrokerConfig(url=server.url, dead_after=3.0), "whole")
    here, environment = ("--plain", "--generators", "1", "--redis", server.url), offline(base)
    environment |= importing(base, {"my_parts": MODULE})
    run, log = Ended(base, broker, []), base / "launcher.log"
    with started(log, "run", config, *here, environment=environment) as launcher:
        wait_for_version(broker, 2, launcher)
        kill(broker, "sampler")
        wait_for_pair(run, 5, launcher)
        run.batches += [Batch.unpack(fields[b"batch"]) for _, fields in broker.redis.xrange(broker.key("batches"))]
        broker.redis.flushall()
        assert launcher.wait(timeout=1500) == 2
    assert "Redis has lost run 'whole'" in log.read_text()
    again = spo("run", run.folder / "config.yaml", "--resume", *here, **environment)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    yield run
    server.kill()


def wait_for_pair(run: Ended, version: int, launcher: subprocess.Popen[str]) -> None:
    """Wait until learner and sampler have written a checkpoint of this version or a later one."""
    reader = StepReader(run.broker)
    while not (run.folder / f"checkpoints/step_{version}").is_dir():
        version = max([version, *(step.version - 1 for step in reader.read(block_ms=200))])
        assert launcher.poll() is None, "the run ended early"
    assert tracker_is_whole(tracker_path(run.folder, version))


def test_every_task_is_counted_once(ended: Ended) -> None:
    counters = settled_counters(ended.broker)
    assert counters["batched"] == STEPS * BATCH
    assert counters["rewarded"] == STEPS * BATCH + counters.get("late", 0) + counters["lost_samples"]


def test_a_loss_of_ones_own_trains_and_reports(ended: Ended) -> None:
    step = latest(ended.broker)
    assert step is not None
    assert step.version == STEPS
    assert 0 <= step.metrics["actor/soft_clipped"] <= 1


def test_the_optimizer_has_made_every_step(ended: Ended) -> None:
    steps = load_config(ended.folder / "config.yaml").learner.mini_batches * STEPS
    path = ended.folder / f"checkpoints/step_{STEPS}/deepspeed/mp_rank_00_model_states.pt"
    optimizer = torch.load(path, weights_only=False)["optimizer"]
    assert {int(moment["step"]) for moment in optimizer["state"].values()} == {steps}


def test_evaluations_are_whole_and_of_one_version(ended: Ended) -> None:
    results = ended.broker.evaluations()
    versions = [result["version"] for result in results]
    assert [result["samples"] for result in results] == [HELDOUT] * len(versions)
    assert versions == sorted(set(versions))
    assert (versions[0], versions[-1]) == (0, STEPS), "the curve begins where the run began"
    for version in versions:
        rows = json_lines(ended.folder / "validation_data" / f"{version}.jsonl")
        assert [row["versions"] for row in rows] == [[version, version]] * HELDOUT
        assert all({"input", "output", "gts"} <= set(row) for row in rows)


def test_an_earlier_turn_also_has_the_penalties_that_follow(ended: Ended) -> None:
    of_turns = [turns for batch in ended.batches for turns in batch.turn_advantages or () if len(turns) > 1]
    assert of_turns
    assert all(earlier < later for turns in of_turns for earlier, later in pairwise(turns))


def test_kept_episodes_have_what_training_did_with_them(ended: Ended) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(ended.folder / "checkpoints" / f"step_{STEPS}" / "hf")
    episodes = ended.episodes
    assert {path.stem for path in ended.folder.glob("rollouts/*")} <= {str(version) for version in range(0, STEPS, 2)}
    assert len(episodes) == len({episode["task_id"] for episode in episodes}) >= BATCH
    assert all(len(episode["logprobs"]) == episode["model_tokens"] for episode in episodes)
    views = [
        (episode, view)
        for episode in episodes
        if (view := trained_view(episode, training_lines(ended.folder, episode)))
    ]
    assert len(views) >= BATCH
    # Where the weights that sampled a token train on it first, the ratio is that of two ways to compute one log-prob.
    fresh = [view for episode, view in views if episode["versions"] == [view["version"]] * 2 and not view["mini_batch"]]
    ratios = [ratio for view in fresh for ratio in view["ratios"] if ratio is not None]
    assert ratios
    assert ratios == pytest.approx([1.0] * len(ratios), abs=0.01)


def test_the_engines_gap_is_that_of_rounding_however_stale_a_token_is(ended: Ended) -> None:
    metrics = read_metrics(ended.folder)
    gaps = {
        cause: [name for name in metrics.names() if name.startswith("exact/age_") and name.endswith(f"/{cause}_gap")]
        for cause in ("engine", "staleness")
    }
    assert all(max(metrics.series(name).values) < 1e-4 for name in gaps["engine"])
    stale = [name for name in gaps["staleness"] if "age_0" not in name]
    assert stale
    assert all(min(metrics.series(name).values) > 1e-3 for name in stale)
    assert max(metrics.series("exact/scored").values + metrics.series("exact/mixed").values) == pytest.approx(1.0)


def test_every_tracker_has_every_metric(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", ended.base / "trackio")
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", ended.base / "trackio")
    metrics = read_metrics(ended.folder)
    assert metrics.series("actor/loss").versions.tolist() == list(range(1, STEPS + 1))
    # Redis may lack an evaluation that ended between the newest checkpoint and the loss.
    evaluated = metrics.series("validation/accuracy").versions.tolist()
    assert evaluated[-1] == STEPS
    for tracker in TRACKERS:
        values = read_back(tracker, ended.folder)
        assert {version for version, _ in values["actor/loss"]} == set(range(1, STEPS + 1)), tracker
        last = dict(values["reward/mean"])
        assert [last[v] for v in range(1, STEPS + 1)] == pytest.approx(metrics.series("reward/mean").values), tracker
        assert {version for version, _ in values["validation/accuracy"]} == set(evaluated), tracker
    for name in metrics.names():
        metric(name)  # raises if the table lacks it


def test_the_trace_says_what_the_metrics_say(ended: Ended) -> None:
    events, _ = read_timelines(ended.folder)
    assert {"launcher", "sampler", "learner", "generator-1"} == {event.process for event in events}
    trained = [
        event.end - event.start for event in events if event.end and (event.process, event.name) == ("learner", "train")
    ]
    for seconds in read_metrics(ended.folder).series("seconds/train").values:
        assert min(abs(seconds - of_slice) for of_slice in trained) < 1e-3
    played = {event.details["task"] for event in events if event.lane == "episodes"}
    assert {episode["task_id"] for episode in ended.episodes} <= played
    assert "sampler" in {event.details["process"] for event in events if event.name == "died"}
    assert json.loads((ended.folder / "summary.json").read_text())["steps"] == STEPS
