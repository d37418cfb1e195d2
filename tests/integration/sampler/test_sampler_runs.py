"""Whole runs of the sampler on a real redis-server; each evaluation is answered by one version, whatever dies."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.config import Config
from common.streams.agreement import agree
from common.streams.broker import Broker
from common.streams.early_stop import to_continue
from common.streams.ledger import Commit, SamplerLedger
from common.streams.presence import Presence
from sampler.loop import Sampler
from tests.support.sampler import NoopGenerator, NoopLearner, make_config, replayed, reward_of, write_prompts
from tests.support.sampler_driving import audited, committed_counts, drive, start, started


def recorded(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "default/tensorboard/sampler"), size_guidance={"scalars": 0}).Reload()


def test_a_run_from_the_first_evaluation_to_the_last(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=5, run={"log_to": ["tensorboard"]})
    drive(sampler, generator, learner)
    sampler.metrics.close()  # `run` opens them again
    sampler.run()
    assert broker.finished()
    audited(broker, sampler.config)
    assert committed_counts(broker) == replayed(sampler.config, sampler.prompts.ids, generator.headers, 6)

    assert [result["version"] for result in broker.evaluations()] == [0, 2, 4, 6]
    evaluated = [task for task in generator.tasks if task.kind == "eval"]
    assert Counter(task.min_version for task in evaluated) == {0: 5, 2: 5, 4: 5, 6: 5}
    assert generator.tasks[0].kind == "eval", "held-out prompts are asked before the first training prompt"
    last = broker.evaluations()[-1]
    rewards = [reward_of(task) for task in evaluated if task.min_version == 6]
    assert (last["accuracy"], last["samples"]) == (sum(rewards) / 5, 5)
    rows = [json.loads(line) for line in (tmp_path / "default/validation_data/6.jsonl").read_text().splitlines()]
    expected = [(f"e6-{n}", f"heldout {n}", [6, 6]) for n in range(5)]
    assert [(row["task_id"], row["input"], row["versions"]) for row in rows] == expected

    sampler.metrics.close()
    events = recorded(tmp_path)
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Scalars("validation/accuracy")] == [0, 2, 4, 6]
    assert {"tracker/drift_mean", "tracker/rho_mean", "tracker/n_eff_mean"} <= set(events.Tags()["scalars"])
    assert b"batch_size: 8" in events.Tensors("configuration")[0].tensor_proto.string_val[0]
    assert {"staleness/total", "staleness/in_flight", "staleness/in_queue"} <= set(events.Tags()["histograms"])
    assert sum(events.Histograms("staleness/total")[-1].histogram_value.bucket) == 8


@pytest.mark.parametrize("algorithm", [{"method": "spo"}, {"method": "grpo", "group_size": 4}])
def test_a_run_that_gets_no_better_ends_early_and_can_go_on(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any]
) -> None:
    monkeypatch.setattr("tests.support.sampler.reward_of", lambda task: 0.0)
    sections: dict[str, Any] = {"heldout": 3, "algorithm": algorithm}
    config = make_config(tmp_path, run={"steps": 30, "stop_when": 2, "journal": True}, **sections)
    agree(broker, config)
    generator, learner = NoopGenerator(broker), NoopLearner(broker, folder=config.run.folder)
    sampler = start(config, broker)
    while sampler.state.last_version == 30:
        sampler.round()
        generator.work()
        if learner.work():
            generator.version = learner.version
    sampler = start(config, broker)  # the one that chose the end was killed
    end = sampler.state.last_version
    monkeypatch.setattr("tests.support.sampler.reward_of", lambda task: 1.0)  # better, but the end is chosen
    drive(sampler, generator, learner)
    sampler.run()
    assert (end < 12, learner.version) == (True, end)
    assert [result["version"] for result in broker.evaluations()][-1] == end
    assert audited(broker, config)["dispatched"] == broker.counters()["counted"]

    more = make_config(tmp_path, run={"steps": 60, "stop_when": 2, "journal": True}, **sections)
    agree(broker, more)
    reason = r"no better for 2 evaluations: best 0 at step 0; to continue it, raise run.stop_when = 2"
    assert (broker.finished(), bool(re.search(reason, to_continue(broker, more.run)))) == (True, True)
    more = make_config(tmp_path, run={"steps": 30, "stop_when": 4, "journal": True}, **sections)
    agree(broker, more)
    assert not broker.finished()
    sampler = start(more, broker)
    assert sampler.state.last_version == 30
    drive(sampler, generator, learner)
    assert end < learner.version == sampler.state.last_version < 30
    audited(broker, more)


def test_a_sampler_without_work_says_that_the_learner_is_gone(broker: Broker, tmp_path: Path) -> None:
    Presence(broker, "learner", "learner").beat()
    sampler, generator, _ = started(broker, tmp_path)
    broker.redis.zincrby(broker.key("alive"), -920_000, "learner")
    with capture_logs() as logs:
        sampler.round()
        sampler.report(now=True)
        assert not any("gone" in line["event"] for line in logs), "tasks are on their way"
        while sampler.state.admission.in_flight:
            generator.work()
            sampler.round()
        sampler.report(now=True)
    (line,) = [line["event"] for line in logs if "gone" in line["event"]]
    assert line.startswith("the learner has been gone for 92")


def two_sources(folder: Path) -> Config:
    """Three tasks of `train` to each of `few`, and two held-out sets."""
    write_prompts(folder / "few.jsonl", "few", 4)
    few = str(folder / "few.jsonl")
    own = {"system_prompt": "be brief", "episode": {"max_assistant_turns": 2}}
    train = [{"path": str(folder / "train.jsonl"), "weight": 3}, {"path": few} | own]
    heldout = [{"path": str(folder / "heldout.jsonl")}, {"path": few, "name": "old"}]
    return make_config(folder, heldout=2, data={"train": train, "heldout": heldout}, run={"log_to": ["tensorboard"]})


def test_each_source_gets_its_share_and_has_metrics_of_its_own(broker: Broker, tmp_path: Path) -> None:
    config = two_sources(tmp_path)
    generator, learner = NoopGenerator(broker), NoopLearner(broker, folder=config.run.folder)
    sampler = start(config, broker)
    drive(sampler, generator, learner)
    sampler.metrics.close()
    audited(broker, config)
    trained = [task for task in generator.tasks if task.kind == "train"]
    assert Counter(task.source for task in trained)["few"] == pytest.approx(len(trained) / 4, abs=2)
    assert all(task.prompt_id.startswith(f"{task.source}/") for task in generator.tasks)
    assert all(str(task.prompt).startswith(task.source) for task in trained)
    evaluated = Counter(task.source for task in generator.tasks if task.kind == "eval")
    assert evaluated == {"heldout": 2 * 4, "old": 4 * 4}, "every held-out prompt, at the start and at versions 2, 4, 6"
    events = recorded(tmp_path)
    for name in ("train", "few"):
        samples = {event.step: event.value for event in events.Scalars(f"source/{name}/samples")}
        means = {event.step: event.value for event in events.Scalars(f"source/{name}/reward")}
        rewards = [reward_of(task) for task in trained if task.source == name]
        assert sum(samples.values()) == len(rewards)
        assert sum(samples[step] * mean for step, mean in means.items()) == pytest.approx(sum(rewards))


def rows(folder: Path, version: int) -> list[dict[str, Any]]:
    path = folder / f"default/validation_data/{version}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def shown_progress(sampler: Sampler) -> str | None:
    """Answers of the evaluation under way, as `spo status` reads them."""
    sampler.report(now=True)
    sampler.presence.beat()
    shown: str | None = sampler.ledger.broker.processes()["sampler"]["evaluating"]
    return shown


def test_training_goes_on_while_an_evaluation_is_answered(broker: Broker, tmp_path: Path) -> None:
    config = make_config(tmp_path, heldout=9, sampler={"batch_size": 4, "max_staleness": 3}, run={"steps": 12})
    keeper, other = NoopGenerator(broker, "keeper"), NoopGenerator(broker, "other")
    learner = NoopLearner(broker, folder=config.run.folder)
    sampler = start(config, broker)
    sampler.round()
    assert keeper.work(1) == 1
    while learner.version < 3:
        sampler.round()
        other.loaded = learner.version
        other.finish(other.inbox.lease(-1, 64, 64).deliveries)
        sampler.round()
        learner.work()
    assert other.inbox.lease(3, 64, 0) == ("", []), "the evaluation is not for newer weights"
    keeper.version = learner.version
    assert keeper.work(8) == 8
    sampler.round()
    assert [row["versions"] for row in rows(tmp_path, 0)] == [[0, 0]] * 9
    drive(sampler, keeper, learner)
    versions = [result["version"] for result in broker.evaluations()]
    assert versions[:2] == [0, 3], "the one that was due at 2 waited for the first"
    audited(broker, config)


def test_an_evaluation_outlives_its_version(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=6)
    dying = NoopGenerator(broker, "dying")
    dying.work(2)
    hung = dying.inbox.lease(0, 2, 0).deliveries
    sampler.round()
    begun, late = shown_progress(sampler), dying.inbox.lease(0, 1, 0).deliveries
    with monkeypatch.context() as patched:
        patched.setattr(broker, "dead_after", 0.0)  # no generator with the version has been seen for so long
        while sampler.state.evaluation_name(0) == "e0":
            sampler.evaluations._check_at = 0.0
            sampler.round()
    assert sampler.state.evaluation_name(0) == "e0.1"
    assert (begun, shown_progress(sampler)) == ("2/6", "0/6")
    assert dying.inbox.beat([delivery.entry_id for delivery in hung]).lost == {delivery.entry_id for delivery in hung}
    assert dying.finish(hung + late) == 0, "no sampler waits for these any more"
    drive(sampler, generator, learner)
    counters = audited(broker, sampler.config)
    assert counters["superseded"] == 4
    assert counters["ignored"] == 2
    assert shown_progress(sampler) is None, "no evaluation is under way"
    assert counters["evaluated"] == 6 * len(broker.evaluations())
    assert [row["task_id"] for row in rows(tmp_path, 0)] == [f"e0.1-{n}" for n in range(6)]


@pytest.mark.parametrize("answered", [2, 6])
def test_an_evaluation_whose_data_lost_rows_starts_again(broker: Broker, tmp_path: Path, answered: int) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=6)
    generator.work(1)
    sampler.round()
    # The sampler dies with these not counted.
    generator.work(answered)
    write_prompts(tmp_path / "heldout.jsonl", "heldout", 3)
    drive(start(sampler.config, broker), generator, learner)
    assert audited(broker, sampler.config)["evaluated"] == sum(result["samples"] for result in broker.evaluations())
    for result in broker.evaluations():
        lines = rows(tmp_path, result["version"])
        assert [line["input"] for line in lines] == [f"heldout {i}" for i in range(3)]
        assert result["samples"] == 3


def test_without_one_before_training_it_follows_an_interval(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=2, eval={"every": 4, "before_training": False})
    drive(sampler, generator, learner)
    assert [result["version"] for result in broker.evaluations()] == [4, 6]
    audited(broker, sampler.config)


def test_an_evaluation_is_sent_in_slices(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sampler.evaluation.SLICE", 4)
    sent: list[int] = []
    commit = SamplerLedger.commit

    def recorded(self: SamplerLedger, changes: Commit) -> int:
        sent.append(sum(task.kind == "eval" for task, _ in changes.dispatch))
        return commit(self, changes)

    monkeypatch.setattr(SamplerLedger, "commit", recorded)
    sampler, generator, learner = started(broker, tmp_path, heldout=30)
    sampler = start(sampler.config, broker)
    for _ in range(40):
        sampler.round()
    assert sum(sent) < 30, "the next slices wait for answers to the first"
    drive(sampler, generator, learner)
    assert max(sent) == 4
    audited(broker, sampler.config)
    assert {result["samples"] for result in broker.evaluations()} == {30}


def test_the_last_evaluation_needs_no_memory_to_be_freed(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sampler.evaluation.SLICE", 4)
    sampler, generator, learner = started(broker, tmp_path, heldout=30)
    monkeypatch.setattr(sampler.memory, "is_short", lambda: sampler.state.version >= sampler.state.last_version)
    drive(sampler, generator, learner)
    assert broker.evaluations()[-1]["version"] == sampler.config.run.steps
    audited(broker, sampler.config)


def test_figures_of_each_set_and_of_each_value_of_a_column(broker: Broker, tmp_path: Path) -> None:
    for name, levels in (("aime", ["1", "2", None]), ("hmmt", ["2", "2", "3"])):
        lines = [{"prompt": f"{name} {i}", "answer": i, "level": level} for i, level in enumerate(levels)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    heldout = [{"path": str(tmp_path / f"{name}.jsonl")} for name in ("aime", "hmmt")]
    evaluated = {"every": 0, "samples": 2, "by_column": "level", "limit": 2}
    data = {"train": str(tmp_path / "train.jsonl"), "heldout": heldout}
    drive(*started(broker, tmp_path, data=data, eval=evaluated))
    figures = broker.evaluations()[-1]["figures"]
    groups = {name.rpartition("/")[0] for name in figures}
    assert groups == {"", "aime", "hmmt", "level=1", "level=2"}, "the first two rows of each set"
    assert {name for name in figures if "/" not in name} == {
        "accuracy", "reward", "samples", "set_aside", "avg@2", "maj@2", "pass@1", "pass@2",
    }  # fmt: skip
    assert [figures[f"{group}/samples"] for group in ("aime", "hmmt", "level=1", "level=2")] == [4, 4, 2, 6]
