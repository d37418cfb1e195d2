"""`spo-learner` as a process: it waits, trains, survives SIGKILL and SIGTERM, and says in one line what is wrong."""

from __future__ import annotations

import fcntl
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import yaml

from common.files import tracker_path
from tests.support.learner_run import STEPS, lines

pytestmark = pytest.mark.integration


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
    # What only the newest checkpoint holds, or none, is still in Redis.
    killed.wait(lambda: killed.left() == (3, 24), processes[killed])
    processes[killed].kill()
    processes[killed].wait()
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

    assert "checkpoint skipped" in killed.log.read_text()
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


def test_training_goes_on_while_a_checkpoint_is_written_which_counts_when_it_is_and_not_before(runs, tmp_path):
    gate = tmp_path / "gate"
    gate.touch()
    slow, straight = (runs(name, algorithm={"loss": "tests.support.slow_disk:loss"}) for name in ("slow", "straight"))
    variables = {"SLOW_DISK_GATE": str(gate), "PYTHONPATH": str(Path(__file__).parents[3])}
    process = slow.start(**variables)
    slow.send(0)
    slow.send(1)
    slow.wait(lambda: (slow.checkpoints / "step_2").is_dir(), process)
    with gate.open() as closed:
        fcntl.flock(closed, fcntl.LOCK_EX)
        for number in range(2, 5):
            slow.send(number)
        slow.wait_for(5, process)
        assert [path.name for path in slow.checkpoints.glob("step_*")] == ["step_2"]
        assert slow.left() == (5, 60), "no batch is released before the checkpoint that holds it is on the disk"
        process.kill()  # in the middle of writing
        process.wait()
    processes = {slow: slow.start(**variables), straight: straight.start(**variables)}
    slow.send(5)
    for number in range(STEPS):
        straight.send(number)
    for run, process in processes.items():
        run.wait_for(STEPS, process)
        assert run.finish(process) == 0, run.log.read_text()
        assert run.left() == (0, 0)
    assert [step.version for step in slow.steps() if not step.metrics] == [0, 2]
    ours, theirs = slow.weights(), straight.weights()
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    assert not list(slow.checkpoints.glob(".unfinished*"))


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
    saved = tracker_path(lost.checkpoints.parent, 2)
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


def test_user_errors_are_one_line_and_exit_code_2(runs, tmp_path):
    unreadable = runs("unreadable")
    text = unreadable.config.read_text()
    path = yaml.safe_load(text)["model"]["path"]
    (tmp_path / "empty").mkdir()
    unreadable.config.write_text(text.replace(path, str(tmp_path / "empty")))
    foreign = runs("foreign")
    (foreign.checkpoints / "step_4").mkdir(parents=True)
    (foreign.checkpoints / "step_4" / "checkpoint.json").write_text(
        '{"ranks": 2, "zero_stage": 0, "dtype": "bfloat16", "files": {}}'
    )
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
    assert "dtype = 'bfloat16' (here 'float32')" in lines(foreign)[0]
    assert "batch 3 is next" in lines(ahead)[0]
    assert "cannot write checkpoint" in lines(full)[0]
    assert "algorithm.loss = 'math:hypot' failed on a trial batch: TypeError" in lines(lossless)[0]
    assert full.left() == (2, 24), "a batch that could not be saved is not acknowledged"


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
