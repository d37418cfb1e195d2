"""Ranks of one learner as processes: they share a run, agree before they start, and leave together."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.forked import Forked
from tests.support.learner_run import SAMPLES, STEPS, Run, assert_same_end
from tests.support.ports import free_port

pytestmark = pytest.mark.slow


LEFT_OUT = {1: 0, 2: 0, 3: 1, 4: 0, 5: 0, 6: 0}  # of the batch that leads to each version


def send_all(run: Run, kept: bool = False) -> None:
    """Send all batches, of which the third lacks a sample; it is recorded if `kept`."""
    for number in range(STEPS):
        is_third = number == 2
        run.send(number, missing=(1,) if is_third else (), kept=kept and is_third)


def left_out(run: Run) -> dict[int, float]:
    return {step.version: step.metrics["batch/left_out"] for step in run.steps() if step.metrics}


def pair(run: Run, *second: str) -> list[Forked]:
    """Two ranks, the second with arguments of its own."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    return [run.start(*second * rank, RANK=str(rank), LOCAL_RANK=str(rank), **rendezvous) for rank in range(2)]


def test_two_ranks_share_a_run_whose_weights_lie_in_pieces(runs):
    run = runs("pair", zero_stage=3, mini_batches=2, checkpoint_every=4)
    send_all(run)
    stopped = pair(run)
    run.wait_for(2)
    stopped[1].send_signal(signal.SIGTERM)  # of one rank ends all, behind a checkpoint
    run.end(0, *stopped)
    run.finish(*pair(run))
    export = run.checkpoints / f"step_{STEPS}" / "hf"
    assert left_out(run) == LEFT_OUT
    original, trained = (load_file(folder / "model.safetensors") for folder in (Path(run.model), export))
    assert trained.keys() == original.keys()


def test_killed_ranks_that_divide_sequences_end_the_same(runs):
    straight, killed = (runs(name, zero_stage=2, sequence_parallel=2) for name in ("straight", "killed"))
    for run in (straight, killed):
        send_all(run, kept=True)
    ranks = pair(killed)
    killed.wait_for(3)
    for rank in ranks:
        rank.kill()
    for run in (straight, killed):
        run.finish(*pair(run))
        assert left_out(run) == LEFT_OUT
        (record,) = (run.checkpoints.parent / "training_data").iterdir()
        assert record.name == "2.0.jsonl"
        assert len(record.read_text().splitlines()) == SAMPLES - 1
    assert len(killed.starts()) == 2
    assert_same_end(killed, straight)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ("learner.lr=0.5", "another configuration than rank 0: learner.lr (here "),
        ("run.output_dir=elsewhere", "is not that of rank 0: each rank writes its piece of a checkpoint"),
    ],
)
def test_ranks_that_disagree_all_leave_and_say_so(runs, own, words, tmp_path, monkeypatch):
    run = runs("differing")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.chdir(tmp_path)
    lines = run.errors(*pair(run, "-o", own))
    assert [words in line for line in lines] == [True, True]
    assert sum(line.startswith(("error: rank 0: ", "error: rank 1: ")) for line in lines) == 1
    assert not list(run.folder.rglob(".ranks-*"))


def test_a_port_that_is_taken_on_the_first_rank_is_named(runs):
    run = runs("taken")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        run.start(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        (line,) = run.errors()
    assert f"rank 0 of 2 did not meet the others at 127.0.0.1:{port} (over lo)" in line


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stands still"])
def test_when_a_rank_is_gone_the_others_end_as_a_crash_does(runs, fate):
    run = runs("widowed", rank_timeout=2 if fate == signal.SIGSTOP else 1800)
    first, second = pair(run)
    run.send(0)
    run.wait_for(1)
    second.send_signal(fate)
    (line,) = run.errors(first, code=1)
    assert "another rank is gone; start all ranks again" in line
    assert run.left() == (1, 12), "what no checkpoint holds is still in Redis"
