"""`spo-learner` as a process: it waits, trains, survives SIGKILL and SIGTERM, and says in one line what is wrong."""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.learner_run import SAMPLES, STEPS, Run, assert_same_end
from tests.support.streams import put_back, saved_keys

REINFORCE = {"loss": "reinforce"}
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def straight(redis_server, tmp_path_factory, model):
    """A run that nothing disturbed."""
    run = Run(redis_server.url, "straight", tmp_path_factory.mktemp("straight"), model, algorithm=REINFORCE)
    run.start()
    run.send(*range(STEPS))
    run.finish()
    return run


def test_killed_or_stopped_it_goes_on_and_ends_the_same(runs, own_redis):
    killed, stopped = (runs(name, max_left_out=1.0) for name in ("killed", "stopped"))
    own_redis.kill()
    killed.start()
    stopped.start("--unfinished-code=143")
    killed.wait(lambda: "waiting for redis" in killed.log.read_text())
    own_redis.start()
    for run in (killed, stopped):
        # An advantage that every turn of a sample has is the sample's.
        by_turn = run is stopped
        run.send(0, by_turn=by_turn)
        run.send(1, missing=(0, 5), by_turn=by_turn)
        run.send(2, by_turn=by_turn)

    killed.send(3)
    killed.send(4, missing=range(SAMPLES))
    killed.wait_for(5)
    # What only the newest checkpoint holds, or none, is still in Redis.
    killed.wait(lambda: killed.left() == (3, 24))
    killed.kill()
    # What a kill in the middle of saving leaves behind, and a machine that lost its power after it.
    for name in (".unfinished", "step_9"):
        shutil.copytree(killed.checkpoints / "step_2", killed.checkpoints / name)
    (killed.checkpoints / "step_9" / "checkpoint.json").unlink()
    (killed.checkpoints / "step_4" / "checkpoint.json").write_bytes(b"")

    stopped.wait_for(3)
    stopped.stop(code=143)  # as a job asks for
    assert stopped.left() == (1, 12), "and what only the newest checkpoint holds"
    assert (stopped.checkpoints / "step_3").is_dir()

    stopped.send(3)
    stopped.send(4, missing=range(SAMPLES))
    killed.start()
    stopped.start("--unfinished-code=143")
    for run in (killed, stopped):
        run.send(5)
    killed.finish()
    stopped.wait_for(STEPS)
    stopped.stop(code=143)  # others still evaluate
    stopped.start("--unfinished-code=143")
    stopped.finish()
    assert "checkpoint skipped" in killed.log.read_text()
    assert (killed.starts(), stopped.starts()) == ([0, 2], [0, 3, 6])
    trained = {step.version: step.metrics for step in killed.steps() if step.metrics}
    assert sorted(trained) == list(range(1, STEPS + 1))
    assert [metrics["batch/samples"] for metrics in trained.values()] == [SAMPLES] * STEPS
    assert [trained[version]["batch/left_out"] for version in (1, 2, 5)] == [0, 2, 12]
    assert trained[5]["actor/skipped_steps"] == 1
    assert trained[6]["staleness/max"] == 1
    assert_same_end(killed, stopped)


def test_training_goes_on_while_a_checkpoint_is_written_even_if_the_run_is_over(runs, straight, tmp_path):
    gate = tmp_path / "gate"
    gate.touch()
    variables = {"SLOW_DISK_GATE": str(gate), "PYTHONPATH": str(ROOT)}
    run = runs("slow", algorithm={"loss": "tests.support.slow_disk:loss"})
    run.start(**variables)
    run.send(0, 1)
    run.wait(lambda: (run.checkpoints / "step_2").is_dir())
    with gate.open() as closed:
        fcntl.flock(closed, fcntl.LOCK_EX)
        run.send(2, 3, 4)
        run.wait_for(5)
        assert [path.name for path in run.checkpoints.glob("step_*")] == ["step_2"]
        assert run.left() == (5, 60), "no batch is released before the checkpoint that holds it is on the disk"
        run.kill()  # in the middle of writing
    run.start(**variables)
    run.wait(lambda: (run.checkpoints / "step_4").is_dir())
    with gate.open() as closed:
        fcntl.flock(closed, fcntl.LOCK_EX)
        run.send(5)
        run.wait_for(STEPS)
        run.broker.finish()
        run.kill()
    run.start(**variables)
    run.end(0)
    assert run.starts() == [0, 2, 4]
    assert_same_end(run, straight)
    assert not list(run.checkpoints.glob(".unfinished*"))
    assert run.left() == (0, 0)
    # The batches are freed: a last checkpoint that is damaged afterwards is not taken for one.
    (run.checkpoints / f"step_{STEPS}" / "checkpoint.json").write_bytes(b"")
    run.start(**variables)
    (line,) = run.errors()
    assert "the newest checkpoint in" in line
    assert "is of version 4" in line


def test_a_run_that_is_over_before_its_last_step_ends_with_a_checkpoint(runs):
    run = runs("early")
    run.start()
    run.send(0, 1, 2)
    run.wait_for(3)
    run.broker.finish()
    run.end(0)
    assert (run.checkpoints / "step_3" / "checkpoint.json").exists()
    assert run.left() == (0, 0)


def test_too_many_samples_without_tokens_end_it_at_the_newest_checkpoint(runs):
    run = runs("emptied")
    run.start()
    run.send(0, 1)
    run.send(2, missing=range(3))
    run.send(3, missing=range(2, 10))
    (line,) = run.errors()
    assert "11 samples of the last 4 batches, of 12 each, could not be trained on" in line
    assert "has evicted no key itself" in line
    assert max(step.version for step in run.steps()) == 3
    # As the line says, it goes on with what is left.
    text = run.config.read_text()
    run.config.write_text(text.replace("max_left_out: 0.1", "max_left_out: 1.0"))
    assert text != run.config.read_text()
    run.start()
    run.send(4, 5)
    run.finish()


def test_a_learner_replaced_while_it_stood_still_changes_nothing(runs):
    run = runs("fenced", broker={"dead_after": 2})
    first = run.start()
    run.send(0)
    run.wait_for(1)
    first.send_signal(signal.SIGSTOP)
    second = run.start()
    run.send(1, 2)
    run.wait_for(3)
    address, steps = run.broker.endpoint("weights"), run.steps()
    first.send_signal(signal.SIGCONT)
    (line,) = run.errors(first)
    assert "run 'fenced' has another learner now" in line
    assert (run.broker.endpoint("weights"), run.steps()) == (address, steps)
    # Both beat under one name: the one that woke may have done so once more.
    run.wait(lambda: [process["pid"] for process in run.broker.processes().values()] == [second.pid])
    run.send(*range(3, STEPS))
    run.finish()


def test_an_empty_redis_is_noticed_and_the_newest_pair_continued(runs, straight):
    lost = runs("lost", algorithm=REINFORCE)
    lost.start()
    lost.send(*range(4))
    lost.wait_for(4)
    lost.wait(lambda: (lost.checkpoints / "step_4").is_dir())
    lost.write_tracker(2)  # the sampler had saved its state with the first checkpoint only

    lost.broker.redis.flushall()
    assert "Redis has lost run 'lost'" in lost.errors()[-1]
    lost.start()
    line = lost.errors()[-1]
    assert "holds a checkpoint of version 4" in line
    assert "--resume" in line

    lost.start("--resume")
    lost.send(*range(2, STEPS))
    lost.finish()
    assert lost.starts() == [2]
    assert_same_end(lost, straight)  # the optimizer's state was not lost


def test_a_redis_without_its_last_batch_has_it_start_again(runs):
    run = runs("behind")
    run.start()
    run.send(0)
    run.wait_for(1)
    older = saved_keys(run.broker)
    run.send(1, 2)
    run.wait_for(3)
    run.wait(lambda: (run.checkpoints / "step_2").is_dir())
    run.write_tracker(2)
    put_back(run.broker, older)
    assert "Redis came back with an older state" in run.errors(code=1)[-1]
    assert [step.version for step in run.steps()] == [0, 1], "nothing of what is lost is announced"
    run.start()
    run.send(*range(2, STEPS))
    run.finish()
    assert run.starts() == [0, 2]


def test_user_errors_are_one_line_and_exit_code_2(runs):
    foreign, ahead, full = runs("foreign"), runs("ahead"), runs("full", export=False)
    diverged = runs("diverged", lr=1e6, checkpoint_every=1)
    diverged.send(*range(STEPS))
    (foreign.checkpoints / "step_4").mkdir(parents=True)
    metadata = {"ranks": 2, "zero_stage": 0, "dtype": "bfloat16", "files": {}}
    (foreign.checkpoints / "step_4" / "checkpoint.json").write_text(json.dumps(metadata))
    ahead.send(3)
    full.send(0, 1)
    full.checkpoints.parent.mkdir()
    full.checkpoints.write_text("a file where the folder should be")
    wrong = {
        foreign: "dtype = 'bfloat16' (here 'float32')",
        ahead: "batch 3 is next",
        full: "cannot write checkpoint",
        diverged: "diverged at step ",
    }
    for run in wrong:
        run.start(*["--resume"] * (run is foreign))
    for run, words in wrong.items():
        (line,) = run.errors()
        assert words in line
    assert full.left() == (2, 24), "a batch that could not be saved is not acknowledged"


def test_in_a_full_redis_it_saves_early_and_frees_batches(runs):
    run = runs("full", checkpoint_every=100)
    run.send(0, 1, 2)
    run.start()
    run.wait_for(3)
    assert run.left() == (3, 36)
    run.broker.redis.config_set("maxmemory", 1)  # from now on Redis refuses what needs memory
    run.wait(lambda: run.left() == (0, 0))
    assert (run.checkpoints / "step_3" / "checkpoint.json").exists()
    assert [step.version for step in run.steps() if step.checkpoint] == [3]
    run.kill()
    run.start()
    run.wait(lambda: sum(step.version == 3 for step in run.steps()) == 3)
    run.broker.finish()
    run.end(0)
