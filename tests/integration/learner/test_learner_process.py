"""`spo-learner` as a process: it waits, trains, survives SIGKILL and SIGTERM, and says in one line what is wrong."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.config import WeightsConfig
from common.messages import Step
from common.streams.broker import Broker
from common.streams.steps import StepReader
from common.tracker_file import path_of
from common.weights.wire import Manifest
from generator.weights.weight_client import WeightClient
from tests.support.batch import send_batch
from tests.support.forked import Forked, forked_module
from tests.support.learner import learner_config, save_tiny_model
from tests.support.weights import pulled

pytestmark = pytest.mark.integration

STEPS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


class Run:
    """A run whose sampler and generators are this test."""

    def __init__(self, url: str, name: str, folder: Path, model: str, **learner: Any) -> None:
        self.folder, self.model, self.log = folder, model, folder / f"{name}.log"
        config = learner_config(
            model,
            folder,
            run={"name": name, "steps": STEPS, "experiment": name},
            broker={"url": url, "wait": 60} | learner.pop("broker", {}),
            **{"checkpoint_every": 2} | learner,
        )
        self.config = folder / f"{name}.yaml"
        self.config.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
        self.checkpoints = folder / name / "checkpoints"
        self.broker = Broker(redis.Redis.from_url(url), name)
        self.processes: list[Forked] = []

    def start(self, *arguments: str, **variables: str) -> Forked:
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
        command = ["-c", str(self.config), "--local_rank=0", *arguments]
        self.processes.append(forked_module("learner.cli", command, environment=environment, log=self.log))
        return self.processes[-1]

    def send(self, number: int, *, missing: tuple[int, ...] = (), by_turn: bool = False) -> None:
        """Put one batch and its payloads where the sampler and the generators would."""
        send_batch(self.broker, number, missing=missing, by_turn=by_turn)

    def steps(self) -> list[Step]:
        return StepReader(self.broker).read()

    def wait(self, condition: Callable[[], bool], process: Forked) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def wait_for(self, version: int, process: Forked) -> None:
        reader = StepReader(self.broker)
        while not any(step.version >= version for step in reader.read(block_ms=500)):
            assert process.poll() is None, self.log.read_text()

    def left(self) -> tuple[int, int]:
        """Batches and payloads still in Redis."""
        batches = self.broker.redis.xlen(self.broker.key("batches"))
        return batches, len(self.broker.redis.keys(self.broker.key("payload:*").replace("{", "[{]")))

    def weights(self) -> dict[str, np.ndarray]:
        return load_file(self.checkpoints / f"step_{STEPS}" / "hf" / "model.safetensors")

    def finish(self, process: Forked) -> int:
        self.broker.finish()
        return process.wait(timeout=60)


@pytest.fixture
def runs(own_redis, tmp_path, model):
    """Makes runs on a server of the test's own; ends their processes."""
    made: list[Run] = []

    def make(name: str, **learner: Any) -> Run:
        made.append(Run(own_redis.url, name, tmp_path, model, **learner))
        return made[-1]

    yield make
    for process in (process for run in made for process in run.processes):
        process.kill()
        process.wait()


def test_killed_or_stopped_it_goes_on_where_it_was_and_ends_the_same(runs, own_redis):
    killed, stopped = runs("killed"), runs("stopped")
    own_redis.kill()
    processes = {run: run.start() for run in (killed, stopped)}
    killed.wait(lambda: "waiting for redis" in killed.log.read_text(), processes[killed])
    own_redis.start()
    for run in (killed, stopped):
        for number in range(3):
            # An advantage that every turn of a sample has is the sample's.
            run.send(number, missing=(0, 5) if number == 1 else (), by_turn=run is stopped)

    for number in (3, 4):
        killed.send(number, missing=tuple(range(12)) if number == 4 else ())
    killed.wait_for(5, processes[killed])
    processes[killed].kill()
    processes[killed].wait()
    assert killed.left() == (3, 24), "what only the newest checkpoint holds, or none, is still in Redis"
    # What a kill in the middle of saving leaves behind, and a machine that lost its power after it.
    shutil.copytree(killed.checkpoints / "step_2", killed.checkpoints / ".unfinished")
    shutil.copytree(killed.checkpoints / "step_2", killed.checkpoints / "step_9")
    (killed.checkpoints / "step_9" / "checkpoint.json").unlink()
    (killed.checkpoints / "step_4" / "checkpoint.json").write_bytes(b"")

    stopped.wait_for(3, processes[stopped])
    processes[stopped].send_signal(signal.SIGTERM)
    assert processes[stopped].wait(timeout=60) == 0, stopped.log.read_text()
    assert stopped.left() == (1, 12), "and what only the newest checkpoint holds"
    assert (stopped.checkpoints / "step_3").is_dir()

    for number in (3, 4):
        stopped.send(number, missing=tuple(range(12)) if number == 4 else ())
    for run in (killed, stopped):
        processes[run] = run.start()
        run.send(5)
    for run in (killed, stopped):
        run.wait_for(STEPS, processes[run])
        assert run.finish(processes[run]) == 0
        assert run.left() == (0, 0)

    assert "checkpoint set aside" in killed.log.read_text()
    resumed = [step.version for step in killed.steps() if not step.metrics]
    assert resumed == [0, 2]
    assert [step.version for step in stopped.steps() if not step.metrics] == [0, 3]
    trained = {step.version: step for step in killed.steps() if step.metrics}
    assert sorted(trained) == list(range(1, STEPS + 1))
    assert all(step.metrics["batch/samples"] == 12 for step in trained.values())
    assert trained[2].metrics["batch/left_out"] == 2
    assert trained[5].metrics["batch/left_out"] == 12
    assert trained[5].metrics["actor/skipped_steps"] == 1
    assert trained[6].metrics["staleness/max"] == 1

    ours, theirs = killed.weights(), stopped.weights()
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)


def test_a_learner_that_was_replaced_while_it_stood_still_changes_nothing_and_says_so(runs):
    run = runs("fenced", broker={"dead_after": 2, "heartbeat": 0.2})
    first = run.start()
    run.send(0)
    run.wait_for(1, first)
    first.send_signal(signal.SIGSTOP)
    second = run.start()
    for number in range(1, 3):
        run.send(number)
    run.wait_for(3, second)
    address = run.broker.endpoint("weights")
    told = run.steps()
    first.send_signal(signal.SIGCONT)
    assert first.wait(timeout=60) == 2, run.log.read_text()
    (line,) = lines(run)
    assert "run 'fenced' has another learner now" in line
    assert "Traceback" not in run.log.read_text()
    assert run.broker.endpoint("weights") == address
    assert run.steps() == told
    # Both beat under one name: the one that woke may have done so once more.
    run.wait(lambda: [process["pid"] for process in run.broker.processes().values()] == [second.pid], second)
    for number in range(3, STEPS):
        run.send(number)
    run.wait_for(STEPS, second)
    assert run.finish(second) == 0
    assert run.left() == (0, 0)


def test_an_empty_redis_is_noticed_and_the_newest_pair_of_checkpoint_and_tracker_continued(runs, own_redis):
    lost, straight = runs("lost"), runs("straight")
    undisturbed = straight.start()
    process = lost.start()
    for number in range(STEPS):
        straight.send(number)
        if number < 4:
            lost.send(number)
    lost.wait_for(4, process)
    straight.wait_for(STEPS, undisturbed)
    assert straight.finish(undisturbed) == 0
    lost.wait(lambda: (lost.checkpoints / "step_4").is_dir(), process)
    # The sampler had saved its state with the first checkpoint only.
    saved = path_of(lost.checkpoints.parent, 2)
    saved.parent.mkdir()
    np.savez(saved)

    lost.broker.redis.flushall()
    assert process.wait(timeout=60) == 2, lost.log.read_text()
    assert "Redis has lost run 'lost'" in lines(lost)[-1]
    refused = lost.start()
    assert refused.wait(timeout=120) == 2, lost.log.read_text()
    assert "holds a checkpoint of version 4" in lines(lost)[-1]
    assert "--resume" in lines(lost)[-1]
    assert "Traceback" not in lost.log.read_text()

    resumed = lost.start("--resume")
    for number in range(2, STEPS):
        lost.send(number)
    lost.wait_for(STEPS, resumed)
    assert lost.finish(resumed) == 0
    assert [step.version for step in lost.steps() if not step.metrics] == [2]
    ours, theirs = lost.weights(), straight.weights()
    assert all((ours[name] == theirs[name]).all() for name in theirs), "the optimizer's state was not lost"
    assert lost.left() == (0, 0)


def lines(run: Run) -> list[str]:
    return [line for line in run.log.read_text().splitlines() if line.startswith("error:")]


def test_user_errors_are_one_line_and_exit_code_2(runs, tmp_path):
    unreadable = runs("unreadable")
    text = unreadable.config.read_text()
    path = yaml.safe_load(text)["model"]["path"]
    (tmp_path / "empty").mkdir()
    unreadable.config.write_text(text.replace(path, str(tmp_path / "empty")))
    foreign = runs("foreign")
    (foreign.checkpoints / "step_4").mkdir(parents=True)
    (foreign.checkpoints / "step_4" / "checkpoint.json").write_text('{"ranks": 2, "zero_stage": 0, "dtype": "float32"}')
    ahead = runs("ahead")
    ahead.send(3)
    full = runs("full", export=False)
    full.send(0)
    full.send(1)
    full.checkpoints.parent.mkdir()
    full.checkpoints.write_text("a file where the folder should be")
    lossless = runs("lossless")
    wrong = (unreadable, foreign, ahead, full, lossless)
    more = {foreign: ["--resume"], lossless: ["-o", "algorithm.loss=math:hypot"]}
    processes = [run.start(*more.get(run, [])) for run in wrong]
    for run, process in zip(wrong, processes, strict=True):
        assert process.wait(timeout=120) == 2, run.log.read_text()
        assert len(lines(run)) == 1, run.log.read_text()
        assert "Traceback" not in run.log.read_text()
    assert str(tmp_path / "empty") in lines(unreadable)[0]
    assert "ranks = 2 (here 1)" in lines(foreign)[0]
    assert "batch 3 is next" in lines(ahead)[0]
    assert "cannot write checkpoint" in lines(full)[0]
    assert "algorithm.loss = 'math:hypot' failed on a trial batch: TypeError" in lines(lossless)[0]
    assert full.left() == (2, 24), "a batch that could not be saved is not acknowledged"


def pair(run: Run, *second: str) -> list[Forked]:
    """Two ranks, the second with arguments of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    return [run.start(*second * rank, RANK=str(rank), LOCAL_RANK=str(rank), **rendezvous) for rank in range(2)]


def served_manifest(run: Run) -> Manifest:
    """The newest manifest that generators get."""
    client = WeightClient(lambda: run.broker.endpoint("weights"), WeightsConfig())
    with contextlib.closing(client), pulled(client) as weights:
        return weights.manifest


@torch.no_grad()
def exported_logprobs(run: Run, token_ids: list[int]) -> list[float]:
    """Log-probs of a prompt's tokens but the first by the last checkpoint's export."""
    model = AutoModelForCausalLM.from_pretrained(run.checkpoints / f"step_{STEPS}" / "hf", dtype=torch.float32)
    ids = torch.tensor([token_ids])
    return model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()


def test_two_ranks_share_a_run_whose_weights_lie_in_pieces(runs):
    run = runs("pair", zero_stage=3, mini_batches=2, checkpoint_every=4)
    for number in range(STEPS):
        run.send(number, missing=(1,) if number == 2 else ())
    ranks = pair(run)
    run.wait_for(STEPS, ranks[0])
    manifest = served_manifest(run)
    assert [run.finish(process) for process in ranks] == [0, 0], run.log.read_text()
    assert manifest.version == STEPS
    assert manifest.check_logprobs == pytest.approx(exported_logprobs(run, manifest.check_token_ids), abs=1e-4)
    trained = [step for step in run.steps() if step.metrics]
    assert [step.version for step in trained] == list(range(1, STEPS + 1))
    assert [step.metrics["batch/left_out"] for step in trained] == [0, 0, 1, 0, 0, 0]
    assert run.left() == (0, 0)
    original = load_file(Path(run.model) / "model.safetensors")
    assert run.weights().keys() == original.keys()


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("learner.lr=0.5", "was started with another configuration: learner.lr (here "),
        ("learner.deepspeed={wall_clock_breakdown: true}", "another configuration than rank 0: learner.deepspeed"),
        ("run.output_dir=elsewhere", "is not that of rank 0: each rank writes its piece of a checkpoint"),
    ],
)
def test_ranks_that_have_not_the_same_in_hand_all_leave_and_say_so(runs, own, said, tmp_path, monkeypatch):
    run = runs("differing")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.chdir(tmp_path)
    ranks = pair(run, "-o", own)
    assert [process.wait(timeout=120) for process in ranks] == [2, 2], run.log.read_text()
    assert len(lines(run)) == 2, run.log.read_text()
    assert all(said in line for line in lines(run))
    assert sum(line.startswith(("error: rank 0: ", "error: rank 1: ")) for line in lines(run)) == 1
    assert "Traceback" not in run.log.read_text()
    assert not list(run.folder.rglob(".ranks-*"))


def test_a_port_that_is_taken_on_the_first_rank_is_named(runs):
    run = runs("taken")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        rank = run.start(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        assert rank.wait(timeout=60) == 2, run.log.read_text()
    assert len(lines(run)) == 1, run.log.read_text()
    assert f"rank 0 of 2 did not meet the others at 127.0.0.1:{port} (over lo)" in lines(run)[0]
    assert "Traceback" not in run.log.read_text()


def test_when_a_rank_dies_the_others_say_so_and_end_as_a_crash_does(runs):
    run = runs("widowed")
    first, second = pair(run)
    run.send(0)
    run.wait_for(1, first)
    second.kill()
    assert first.wait(timeout=60) == 1, run.log.read_text()
    (line,) = lines(run)
    assert "another rank has gone; start all ranks again" in line
    assert "Traceback" not in run.log.read_text()
    assert run.left() == (1, 12), "what no checkpoint holds is still in Redis"


def test_a_step_that_redis_has_lost_is_announced_again(runs):
    run = runs("forgetful")
    process = run.start()
    run.send(0)
    run.wait_for(1, process)
    run.broker.redis.delete(run.broker.key("steps"))
    run.wait_for(1, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0, run.log.read_text()


def test_whoever_takes_0_for_done_can_tell_a_stopped_learner_from_a_run_that_is_over(runs):
    run = runs("job")
    in_the_middle = run.start("--unfinished-code=143")
    run.send(0)
    run.wait_for(1, in_the_middle)
    in_the_middle.send_signal(signal.SIGTERM)
    assert in_the_middle.wait(timeout=60) == 143, run.log.read_text()
    assert (run.checkpoints / "step_1").is_dir()

    at_the_end = run.start("--unfinished-code=143")
    for number in range(1, STEPS):
        run.send(number)
    run.wait_for(STEPS, at_the_end)
    at_the_end.send_signal(signal.SIGTERM)
    assert at_the_end.wait(timeout=60) == 143, "others still evaluate"

    successor = run.start("--unfinished-code=143")
    assert run.finish(successor) == 0, run.log.read_text()


def test_in_a_full_redis_it_saves_early_frees_what_it_has_trained_on_and_can_start_again(runs):
    run = runs("full", checkpoint_every=100)
    for number in range(3):
        run.send(number)
    process = run.start()
    run.wait_for(3, process)
    assert run.left() == (3, 36)
    run.broker.redis.config_set("maxmemory", 1)  # from now on Redis refuses what needs memory
    run.wait(lambda: run.left() == (0, 0), process)
    assert (run.checkpoints / "step_3" / "checkpoint.json").exists()
    assert [step.version for step in run.steps() if step.checkpoint] == [3]
    process.kill()
    process.wait()
    process = run.start()
    run.wait(lambda: sum(step.version == 3 for step in run.steps()) == 3, process)
    assert run.finish(process) == 0, run.log.read_text()
