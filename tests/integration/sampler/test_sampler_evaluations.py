"""Each evaluation is answered by one version of the weights, whatever dies and however fast training goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.streams.broker import Broker
from common.streams.ledger import Commit, SamplerLedger
from sampler.loop import Sampler
from tests.support.sampler import NoopGenerator, NoopLearner, make_config, write_prompts
from tests.support.sampler_driving import audited, drive, start, started


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


def test_when_the_version_is_gone_the_evaluation_starts_again(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=6)
    sampler.round()
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
    sampler.round()
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


def test_answers_of_two_versions_are_never_mixed(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=3)
    sampler.round()
    generator.work(1)
    generator.work(1, newest_version=1)
    sampler.round()
    assert sampler.state.evaluation_name(0) == "e0.1"
    drive(sampler, generator, learner)
    audited(broker, sampler.config)


def test_without_one_before_training_it_follows_an_interval(broker: Broker, tmp_path: Path) -> None:
    sampler, generator, learner = started(broker, tmp_path, heldout=2, eval={"every": 4, "before_training": False})
    drive(sampler, generator, learner)
    assert [result["version"] for result in broker.evaluations()] == [4, 6]
    audited(broker, sampler.config)


def test_an_evaluation_is_sent_in_slices_also_by_a_successor(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sampler.evaluation.SLICE", 4)
    sent: list[int] = []
    commit = SamplerLedger.commit

    def recorded(self: SamplerLedger, changes: Commit) -> int:
        sent.append(sum(task.kind == "eval" for task, _ in changes.dispatch))
        return commit(self, changes)

    monkeypatch.setattr(SamplerLedger, "commit", recorded)
    sampler, generator, learner = started(broker, tmp_path, heldout=30)
    sampler.round()
    sampler = start(sampler.config, broker)
    for _ in range(40):
        sampler.round()
    assert sum(sent) < 30, "the next slices wait for answers to the first"
    drive(sampler, generator, learner)
    assert max(sent) == 4
    audited(broker, sampler.config)
    assert {result["samples"] for result in broker.evaluations()} == {30}


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
