"""`spo-learner` as a process: it waits, trains, survives SIGKILL and SIGTERM, and says in one line what is wrong."""

from __future__ import annotations

import fcntl
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from common.files import tracker_path
from tests.support.learner_run import SAMPLES, STEPS, assert_same_end
from tests.support.streams import put_back, saved_keys

pytestmark = pytest.mark.integration


def test_killed_or_stopped_it_goes_on_and_ends_the_same(runs, own_redis):
    killed, stopped = (runs(name, max_left_out=1.0) for name in ("killed", "stopped"))
    own_redis.kill()
    processes = {run: run.start() for run in (killed, stopped)}
    killed.wait(lambda: "waiting for redis" in killed.log.read_text(), processes[killed])
    own_redis.start()
    for run in (killed, stopped):
        # An advantage that every turn of a sample has is the sample's.
        by_turn = run is stopped
        run.send(0, by_turn=by_turn)
        run.send(1, missing=(0, 5), by_turn=by_turn)
        run.send(2, by_turn=by_turn)

    killed.send(3)
    killed.send(4, missing=range(SAMPLES))
    killed.wait_for(5, processes[killed])
    # What only the newest checkpoint holds, or none, is still in Redis.
    killed.wait(lambda: killed.left() == (3, 24), processes[killed])
    processes[killed].kill()
    processes[killed].wait()
    # What a kill in the middle of saving leaves behind, and a machine that lost its power after it.
    for name in (".unfinished", "step_9"):
        shutil.copytree(killed.checkpoints / "step_2", killed.checkpoints / name)
    (killed.checkpoints / "step_9" / "checkpoint.json").unlink()
    (killed.checkpoints / "step_4" / "checkpoint.json").write_bytes(b"")

    stopped.wait_for(3, processes[stopped])
    processes[stopped].send_signal(signal.SIGTERM)
    assert processes[stopped].wait(timeout=600) == 0, stopped.log.read_text()
    assert stopped.left() == (1, 12), "and what only the newest checkpoint holds"
    assert (stopped.checkpoints / "step_3").is_dir()

    stopped.send(3)
    stopped.send(4, missing=range(SAMPLES))
    for run in (killed, stopped):
        processes[run] = run.start()
        run.send(5)
    for run in (killed, stopped):
        run.finish(processes[run])
    assert "checkpoint skipped" in killed.log.read_text()
    assert (killed.starts(), stopped.starts()) == ([0, 2], [0, 3])
    trained = {step.version: step.metrics for step in killed.steps() if step.metrics}
    assert sorted(trained) == list(range(1, STEPS + 1))
    assert [metrics["batch/samples"] for metrics in trained.values()] == [SAMPLES] * STEPS
    assert [trained[version]["batch/left_out"] for version in (1, 2, 5)] == [0, 2, 12]
    assert trained[5]["actor/skipped_steps"] == 1
    assert trained[6]["staleness/max"] == 1
    assert_same_end(killed, stopped)


def test_training_goes_on_while_a_checkpoint_is_written(runs, tmp_path):
    gate = tmp_path / "gate"
    gate.touch()
    slow, straight = (runs(name, algorithm={"loss": "tests.support.slow_disk:loss"}) for name in ("slow", "straight"))
    variables = {"SLOW_DISK_GATE": str(gate), "PYTHONPATH": str(Path(__file__).parents[3])}
    process = slow.start(**variables)
    slow.send(0, 1)
    slow.wait(lambda: (slow.checkpoints / "step_2").is_dir(), process)
    with gate.open() as closed:
        fcntl.flock(closed, fcntl.LOCK_EX)
        slow.send(2, 3, 4)
        slow.wait_for(5, process)
        assert [path.name for path in slow.checkpoints.glob("step_*")] == ["step_2"]
        assert slow.left() == (5, 60), "no batch is released before the checkpoint that holds it is on the disk"
        process.kill()  # in the middle of writing
        process.wait()
    processes = {slow: slow.start(**variables), straight: straight.start(**variables)}
    slow.send(5)
    straight.send(*range(STEPS))
    for run, process in processes.items():
        run.finish(process)
    assert slow.starts() == [0, 2]
    assert_same_end(slow, straight)
    assert not list(slow.checkpoints.glob(".unfinished*"))


def test_too_many_samples_without_tokens_end_it_at_the_newest_checkpoint(runs):
    run = runs("emptied")
    process = run.start()
    run.send(0, 1)
    run.send(2, missing=range(3))
    run.send(3, missing=range(2, 10))
    (line,) = run.errors(process)
    assert "11 samples of the last 4 batches, of 12 each, could not be trained on" in line
    assert "has evicted no key itself" in line
    assert max(step.version for step in run.steps()) == 3
    # As the line says, it goes on with what is left.
    text = run.config.read_text()
    run.config.write_text(text.replace("max_left_out: 0.1", "max_left_out: 1.0"))
    assert text != run.config.read_text()
    process = run.start()
    run.send(4, 5)
    run.finish(process)


def test_a_learner_killed_at_its_last_checkpoint_writes_it_after_the_run_was_declared_finished(runs, tmp_path):
    gate = tmp_path / "gate"
    gate.touch()
    variables = {"SLOW_DISK_GATE": str(gate), "PYTHONPATH": str(Path(__file__).parents[3])}
    run = runs("last", algorithm={"loss": "tests.support.slow_disk:loss"}, checkpoint_every=3)
    process = run.start(**variables)
    run.send(0, 1, 2)
    run.wait(lambda: (run.checkpoints / "step_3").is_dir(), process)
    with gate.open() as closed:
        fcntl.flock(closed, fcntl.LOCK_EX)
        run.send(3, 4, 5)
        run.wait_for(STEPS, process)
        run.broker.finish()
        process.kill()
        process.wait()
    process = run.start(**variables)
    assert process.wait(timeout=600) == 0, run.log.read_text()
    assert run.starts() == [0, 3]
    assert (run.checkpoints / f"step_{STEPS}" / "hf" / "config.json").is_file()
    assert run.left() == (0, 0)
    # The batches are freed: a last checkpoint that is damaged afterwards is not taken for one.
    (run.checkpoints / f"step_{STEPS}" / "checkpoint.json").write_bytes(b"")
    (line,) = run.errors(run.start(**variables))
    assert "the newest checkpoint in" in line
    assert "is of version 3" in line


def test_a_learner_replaced_while_it_stood_still_changes_nothing(runs):
    run = runs("fenced", broker={"dead_after": 2})
    first = run.start()
    run.send(0)
    run.wait_for(1, first)
    first.send_signal(signal.SIGSTOP)
    second = run.start()
    run.send(1, 2)
    run.wait_for(3, second)
    address, steps = run.broker.endpoint("weights"), run.steps()
    first.send_signal(signal.SIGCONT)
    (line,) = run.errors(first)
    assert "run 'fenced' has another learner now" in line
    assert (run.broker.endpoint("weights"), run.steps()) == (address, steps)
    # Both beat under one name: the one that woke may have done so once more.
    run.wait(lambda: [process["pid"] for process in run.broker.processes().values()] == [second.pid], second)
    run.send(*range(3, STEPS))
    run.finish(second)


def test_an_empty_redis_is_noticed_and_the_newest_pair_continued(runs):
    lost, straight = runs("lost"), runs("straight")
    undisturbed, process = straight.start(), lost.start()
    straight.send(*range(STEPS))
    lost.send(*range(4))
    lost.wait_for(4, process)
    straight.finish(undisturbed)
    lost.wait(lambda: (lost.checkpoints / "step_4").is_dir(), process)
    # The sampler had saved its state with the first checkpoint only.
    saved = tracker_path(lost.checkpoints.parent, 2)
    saved.parent.mkdir()
    np.savez(saved)

    lost.broker.redis.flushall()
    assert "Redis has lost run 'lost'" in lost.errors(process)[-1]
    line = lost.errors(lost.start())[-1]
    assert "holds a checkpoint of version 4" in line
    assert "--resume" in line

    resumed = lost.start("--resume")
    lost.send(*range(2, STEPS))
    lost.finish(resumed)
    assert lost.starts() == [2]
    assert_same_end(lost, straight)  # the optimizer's state was not lost


def test_a_redis_without_its_last_batch_has_it_start_again(runs):
    run = runs("behind")
    process = run.start()
    run.send(0)
    run.wait_for(1, process)
    older = saved_keys(run.broker)
    run.send(1, 2)
    run.wait_for(3, process)
    run.wait(lambda: (run.checkpoints / "step_2").is_dir(), process)
    saved = tracker_path(run.checkpoints.parent, 2)
    saved.parent.mkdir()
    np.savez(saved)
    put_back(run.broker, older)
    assert "Redis came back with an older state" in run.errors(process, code=1)[-1]
    assert [step.version for step in run.steps()] == [0, 1], "nothing of what is lost is announced"
    process = run.start()
    run.send(*range(2, STEPS))
    run.finish(process)
    assert run.starts() == [0, 2]


def test_user_errors_are_one_line_and_exit_code_2(runs):
    foreign, ahead, full = runs("foreign"), runs("ahead"), runs("full", export=False)
    diverged = runs("diverged", lr=1e6, checkpoint_every=1)
    diverged.send(*range(STEPS))
    (foreign.checkpoints / "step_4").mkdir(parents=True)
    (foreign.checkpoints / "step_4" / "checkpoint.json").write_text(
        '{"ranks": 2, "zero_stage": 0, "dtype": "bfloat16", "files": {}}'
    )
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
    processes = {run: run.start(*["--resume"] * (run is foreign)) for run in wrong}
    for run, words in wrong.items():
        (line,) = run.errors(processes[run])
        assert words in line
    assert full.left() == (2, 24), "a batch that could not be saved is not acknowledged"


def test_a_stopped_learner_has_the_exit_code_a_job_asks_for(runs):
    run = runs("job")
    in_the_middle = run.start("--unfinished-code=143")
    run.send(0)
    run.wait_for(1, in_the_middle)
    in_the_middle.send_signal(signal.SIGTERM)
    assert in_the_middle.wait(timeout=600) == 143, run.log.read_text()
    assert (run.checkpoints / "step_1").is_dir()

    at_the_end = run.start("--unfinished-code=143")
    run.send(*range(1, STEPS))
    run.wait_for(STEPS, at_the_end)
    at_the_end.send_signal(signal.SIGTERM)
    assert at_the_end.wait(timeout=600) == 143, "others still evaluate"
    run.finish(run.start("--unfinished-code=143"))


def test_in_a_full_redis_it_saves_early_and_frees_batches(runs):
    run = runs("full", checkpoint_every=100)
    run.send(0, 1, 2)
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
    run.broker.finish()
    assert process.wait(timeout=600) == 0, run.log.read_text()
