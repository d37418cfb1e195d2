"""The audit of a run: it holds for a good one, and each of its lines finds what it is there for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import fakeredis
import pytest
import torch

from common.config import Config, dump_config
from common.files import remove_oldest
from common.log import Timeline
from common.messages import Step
from common.streams.broker import Broker
from common.streams.ledger import JournalEntry, SamplerLedger, read_journal
from launcher.audit import file_lines, journal_lines, token_lines
from launcher.audit.lines import REWARDS, audit
from launcher.audit.records import read_redis
from learner.batch.gae import gae, normalised, returns
from learner.ranks.world import World
from learner.token_record import DIGITS
from sampler.files.metrics_file import NOT_WRITTEN
from tests.support.run_records import RunRecords, made
from tests.support.sampler import NoopGenerator, NoopLearner
from tests.support.sampler_driving import LOG, drive, problems, start
from tests.support.spo_command import Spo

TASK, PROMPT = "t0000003", "no such prompt"
ALONE = World(0, 1, torch.device("cpu"))
FULL = f"12:00:00 [warning  ] {NOT_WRITTEN}"
JUDGED = "a critic's returns and advantages follow from its values"
LEARNED = "a critic learned in each step"
FIGURES = "each evaluation's figures follow from its answers"
SCORED = "each token of a step had its teacher's score"

# Changes of a run, by methods of `RunRecords`.
commit, entry, step, counters = (partial(methodcaller, name) for name in ("commit", "entry", "step", "counters"))
lines, trained, column = (partial(methodcaller, name) for name in ("lines", "trained", "column"))
metric, remove = partial(methodcaller, "metric"), partial(methodcaller, "remove")
kept = partial(methodcaller, "line", "rollouts/2.jsonl")
answered = partial(methodcaller, "line", "validation_data/4.jsonl")


def run_to_its_end(config: Config, broker: Broker) -> None:
    sampler = start(config, broker, SamplerLedger(broker, "sampler under test", journal=True))
    drive(sampler, NoopGenerator(broker, taught=True), NoopLearner(broker, folder=config.run.folder))
    sampler.metrics.close()
    broker.finish()


@pytest.fixture(scope="module")
def good_run(tmp_path_factory: pytest.TempPathFactory) -> RunRecords:
    folder, broker = tmp_path_factory.mktemp("good"), Broker(fakeredis.FakeRedis(), "test", dead_after=60.0)
    config = made(folder)
    run_to_its_end(config, broker)
    return RunRecords(config.run.folder, read_redis(broker))


@pytest.fixture
def run(good_run: RunRecords, tmp_path: Path) -> RunRecords:
    return good_run.copied(tmp_path)


def test_every_line_holds_for_a_good_run(run: RunRecords) -> None:
    lines = audit(run.config(), run.redis, LOG)
    assert [line for line in lines if line.problem or line.note] == []
    assert [line.name for line in lines] == LINES
    assert len(run.redis.evaluations) == 4
    assert any((run.folder / "training_data").iterdir())


def test_a_stopped_run_may_have_steps_that_its_sampler_has_yet_to_read(run: RunRecords) -> None:
    run.metric("learner", "batch/samples", None)
    run.set(finished=False, read=sum(step.version < 4 for step in run.redis.steps))
    (line,) = [line for line in audit(run.config(), run.redis, LOG) if line.name.endswith("each step of the learner")]
    assert line.problem == ""


def rest(items: list[Any]) -> list[Any]:
    return items[1:]


def twice(items: list[Any]) -> list[Any]:
    return [*items, items[0]]


def with_more(item: str) -> Callable[[list[str]], list[str]]:
    return lambda items: [*items, item]


def first(name: str, change: Callable[[list[Any]], list[Any]]) -> methodcaller:
    """Another first batch or reward in the newest entry that has one."""
    return entry(name, lambda items: [change(items[0]), *items[1:]])


def without_metrics(run: RunRecords, *log: str) -> None:
    """All metrics are gone, and the sampler's log has these lines about a disk that was full."""
    (run.folder / "metrics.jsonl").write_text("")
    (run.folder / "logs").mkdir(exist_ok=True)
    (run.folder / "logs" / "sampler.log").write_text("\n".join(log) + "\n")


def a_kill_between(run: RunRecords) -> None:
    """The learner starts at a version that it never made: neither Redis nor metrics.jsonl has it."""
    run.set(steps=[step for step in run.redis.steps if step.version < 3] + [Step(version=4), *run.redis.steps[5:]])
    run.metric("learner", "batch/samples", None)


# For each line of the audit, changes of a good run that it finds.
FAULTS: dict[str, list[Callable[[RunRecords], None]]] = {
    "every commit is in the journal": [lambda run: run.set(journal=run.redis.journal[1:])],
    "the learner trained on each sample of a batch": [
        metric("learner", "batch/samples", lambda count: count, **{"batch/left_out": 1.0}),
        step(-1, {"batch/left_out": 2.0}),
    ],
    "nothing is counted before a restoration is complete": [commit(5, restored={"version": 0})],
    "each task was sent once, or again while it was awaited": [
        entry("dispatched", with_more(TASK)),
        entry("dispatched", twice, newest=False),
    ],
    "each task was counted once": [entry("counted", with_more(TASK)), entry("counted", with_more("t9"))],
    "each task that was sent is counted or awaited": [
        entry("counted", rest),
        lambda run: run.set(outstanding=["t0000001"]),
    ],
    "each counted task has one end: a reward, or it was skipped": [
        entry("rewards", rest),
        entry("rewards", twice),
        entry("counters", lambda counters: {**counters, "set_aside": 1}),
    ],
    "batches are consecutive": [first("batches", lambda batch: [batch[0] + 1, batch[1]])],
    "no sample is in two batches": [first("batches", lambda batch: [batch[0], batch[1][:1] * 8])],
    "each sample of a batch was rewarded before": [first("batches", lambda one: [one[0], ["t9999999", *one[1][1:]]])],
    "each rewarded sample is in one batch, or dropped, or waits": [
        lambda run: run.commit(
            -1, discarded=[entry.batches[0][1][0] for entry in run.redis.journal if entry.batches][:1]
        ),
        first("batches", lambda batch: [batch[0], batch[1][1:]]),
    ],
    "the counters equal those of the journal": [counters(batched=1)],
    "the counters balance": [counters(finished=1)],
    "the learner went from version to version": [
        a_kill_between,
        lambda run: run.set(steps=[step for step in run.redis.steps if step.version != 3]),
    ],
    "no version came before its batch": [commit(1, version=3)],
    "the last step was made": [lambda run: run.set(steps=run.redis.steps[:-1])],
    "the tracker equals a replay of the journal, bit for bit": [
        first("rewards", lambda reward: [*reward[:2], reward[2] * (1 + 2**-52), reward[3]]),
        first("rewards", lambda reward: [PROMPT, *reward[1:]]),
    ],
    "the learner trained on the journal's rewards": [step(3, {"reward/mean": 0.3})],
    "a finished run has left nothing in Redis": [lambda run: run.set(leftovers=["payload:t0000001 (1)"])],
    "every line of the run folder can be read": [
        lambda run: run.append("rollouts/2.jsonl", '{"task_id": "t00'),
        kept(token_ids=None),
    ],
    "metrics.jsonl has the reward of each batch": [
        metric("sampler", "reward/mean", lambda mean: mean + 0.125),
        metric("sampler", "reward/mean", None),
        lambda run: without_metrics(run, f"{FULL} versions=5,6 file=metrics.jsonl"),
    ],
    "metrics.jsonl has each step of the learner": [
        metric("learner", "batch/samples", None),
        lambda run: without_metrics(run, FULL),
    ],
    SCORED: [
        metric("learner", "teacher/tokens", lambda share: share - 1 / 8),
        metric("learner", "teacher/tokens", None),
    ],
    "each evaluation has each answer once, all of its version": [
        lines("validation_data/4.jsonl", rest),
        answered(versions=[3, 4]),
        answered(prompt_id=PROMPT),
    ],
    FIGURES: [
        lambda run: run.set(evaluations=[run.redis.evaluations[0] | {"accuracy": 0.99}, *run.redis.evaluations[1:]]),
        lambda run: shutil.copy(run.folder / "validation_data/4.jsonl", run.folder / "validation_data/5.jsonl"),
        remove("validation_data/4.jsonl"),
        metric("sampler", "validation/accuracy", lambda accuracy: 1 - accuracy / 2),
    ],
    "the last version was evaluated, and no evaluation is left open": [
        lambda run: (run.folder / "validation_data/5.jsonl.part").touch(),
        remove("validation_data/6.jsonl"),
    ],
    "each training episode is kept once": [lines("rollouts/2.jsonl", twice)],
    "kept episodes have the journal's rewards and the tracker's values": [
        kept(reward=0.5),
        kept(task_id="t9999999"),
        kept(value=0.987654),
        lambda run: (run.folder / "rollouts/2.jsonl").rename(run.folder / "rollouts/3.jsonl"),
    ],
    "all episodes that should be kept are there": [lines("rollouts/2.jsonl", rest)],
    "no kept sample was too old for its batch": [kept(versions=[0, 2]), kept(versions=[9, 9])],
    "training data has the kept samples of each batch": [
        lines("training_data/3.0.jsonl", rest),
        kept(rows=2),
        lines("training_data/3.0.jsonl", twice),
    ],
    "advantages follow from the rewards and the values": [
        lambda run: run.line("training_data/3.0.jsonl", advantages=[9.0])
    ],
    "kept episodes have the messages and tokens that they count": [
        answered(messages=[]),
        answered(messages=[{"role": "assistant", "content": "a"}] * 2),
        kept(turns=2),
        kept(tokens=11),
        kept(model_tokens=7),
        kept(rows=2, row_lengths=[10, 0]),
        kept(versions=[1, 2]),
    ],
    "the learner trained on the tokens that were sampled": [
        kept(token_ids=list(range(1, 11))),
        kept(logprobs=[-0.5, -0.4, -0.3, -0.2, -0.1, 0.0]),
        kept(experts=[1] * 6),
        column("token_versions", lambda one: one + 1),
        trained(lambda line: {"experts": [1] * 6}),
        trained(lambda line: {"row": 1}),
    ],
    "log-probs of generator and learner agree under the same weights": [
        column("logprobs", lambda one: one / 2),
        column("logprobs", lambda one: None),
    ],
    "each kept token has its teacher's score": [
        column("teacher_logprobs", lambda one: None),
        column("teacher_logprobs", lambda one: 0.5),
        trained(lambda line: {"teacher_logprobs": None}),
    ],
    JUDGED: [
        trained(lambda line: {"token_advantages": line["token_advantages"][::-1]}),
        column("values", lambda one: one / 2),
        column("returns", lambda one: 1 - one),
        trained(lambda line: {"values": None}),
    ],
    LEARNED: [
        metric("learner", "critic/loss", lambda _: 0.0, **{"critic/grad_norm": 0.0}),
        metric("learner", "critic/lr", None),
        metric("learner", "critic/lr", lambda rate: rate / 2),
    ],
    REWARDS: [
        kept(messages=[{"role": "assistant", "content": "another answer"}], reward=1.0, parts={"exact": 1.0}),
        kept(parts={"exact": 0.25}),
        answered(answer="another"),
    ],
}
LINES = [*journal_lines.LINES, *file_lines.LINES, *token_lines.LINES, REWARDS]


@pytest.mark.parametrize("line", LINES)
def test_each_line_finds_what_is_wrong(good_run: RunRecords, line: str, tmp_path: Path) -> None:
    for number, change in enumerate(FAULTS[line]):
        run = good_run.copied(tmp_path / str(number))
        change(run)
        assert line in problems(run.redis, run.config()), f"fault {number}"


def a_second_sending(run: RunRecords) -> None:
    run.entry("dispatched", twice, newest=False)
    run.entry("counters", lambda counters: {**counters, "dispatched": -1, "sent_again": 1}, newest=False)
    run.counters(sent_again=1)


def a_full_disk(run: RunRecords) -> None:
    of_json = json.dumps({"event": NOT_WRITTEN, "versions": "4,5,6"})
    without_metrics(run, f"{FULL} versions=1,2,3 file=metrics.jsonl", of_json, f"{FULL} versions=0 file=metrics.jsonl")


@pytest.mark.parametrize("change", [a_second_sending, a_full_disk])
def test_what_may_happen_to_a_good_run_is_no_fault(run: RunRecords, change: Callable[[RunRecords], None]) -> None:
    change(run)
    assert problems(run.redis, run.config()) == {}


def test_a_step_that_learned_nothing_needs_no_scores(run: RunRecords) -> None:
    run.metric("learner", "teacher/tokens", lambda _: 0.0)
    assert problems(run.redis, run.config()).keys() == {SCORED}
    run.metric("learner", "batch/left_out", lambda _: 0.0, **{"actor/skipped_steps": 1.0})
    assert problems(run.redis, run.config()) == {}


def other_accuracy(run: RunRecords) -> None:
    """Each evaluation's accuracy is that of another `eval.right_from`."""
    run.set(evaluations=[result | {"accuracy": 0.125} for result in run.redis.evaluations])
    name = "validation/accuracy"
    run.lines("metrics.jsonl", lambda records: [
        record | {"values": record["values"] | {name: 0.125}} if name in record["values"] else record
        for record in records
    ])  # fmt: skip


CHANGES: dict[str, tuple[Callable[[RunRecords], None], str]] = {
    "critic.gae_lambda": (trained(lambda line: {"token_advantages": line["token_advantages"][::-1]}), JUDGED),
    "critic.return_lambda": (column("returns", lambda one: 1 - one), JUDGED),
    "critic.warmup_steps": (column("token_advantages", lambda one: -one), JUDGED),
    "critic.lr": (metric("learner", "critic/lr", lambda rate: rate / 2), LEARNED),
    "eval.right_from": (other_accuracy, FIGURES),
}


@pytest.mark.parametrize("key", CHANGES)
def test_what_came_before_a_setting_changed_is_not_judged_by_it(run: RunRecords, key: str) -> None:
    mutate, line = CHANGES[key]
    mutate(run)
    for step, is_good in ((1, False), (100, True)):
        (run.folder / "changes.jsonl").write_text(json.dumps({"key": key, "step": step}) + "\n")
        assert (line not in problems(run.redis, run.config())) == is_good


def test_rounding_does_not_add_up_in_the_estimates_of_long_rows(run: RunRecords) -> None:
    """With one-step returns and a long horizon, thousands of rounded numbers are in the first token's estimate."""
    config, length = run.config(), 4000
    critic = config.critic.model_copy(update={"gae_lambda": 1.0, "return_lambda": 0.0})
    rewards = {sample: reward for entry in run.redis.journal for _, reward, _, sample in entry.rewards}
    noise = torch.Generator().manual_seed(0)

    def long(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows = torch.arange(len(lines)).repeat_interleave(length)
        values = 0.5 + 0.01 * torch.randn(len(rows), generator=noise)
        earned = torch.zeros(len(rows), dtype=torch.float64)
        earned[length - 1 :: length] = torch.tensor([float(rewards[line["task_id"]]) for line in lines])
        advantages = gae(earned, values, rows, critic.gae_lambda)
        columns = {
            "values": values,
            "returns": returns(earned, values, rows, critic.return_lambda),
            "token_advantages": normalised([advantages], ALONE, config.sampler.advantage.clip)[0],
        }
        texts = {name: column.reshape(-1, length).tolist() for name, column in columns.items()}
        same = dict.fromkeys(("token_ids", "token_versions", "logprobs", "rollout_logprobs"), [0] * length)
        same |= {"teacher_logprobs": None}
        return [
            line | same | {name: [round(one, DIGITS) for one in rows[i]] for name, rows in texts.items()}
            for i, line in enumerate(lines)
        ]

    for path in (run.folder / "training_data").iterdir():
        run.lines(f"training_data/{path.name}", long)
    assert JUDGED not in problems(run.redis, config.model_copy(update={"critic": critic}))


@pytest.mark.parametrize(("served", "is_good"), [([0, 9, 2], True), ([0, 2, 9], False), ([0, 8, 2], False)])
def test_a_version_that_the_learner_has_lost_may_answer(run: RunRecords, served: list[int], is_good: bool) -> None:
    kept(versions=[2, 9], version_spans=[[2, 0, 3], [9, 3, 6]])(run)
    (task_id,) = [json.loads((run.folder / "rollouts/2.jsonl").read_text().splitlines()[0])["task_id"]]
    run.trained(lambda line: {"token_versions": [2, 2, 2, 9, 9, 9]} if line["task_id"] == task_id else {})
    for version in served:
        Timeline(run.folder, "learner").instant("serve", version=version)
    assert (problems(run.redis, run.config()) == {}) == is_good


def test_files_that_were_removed_for_their_age_are_not_missed(run: RunRecords) -> None:
    config = run.config()
    for folder in ("rollouts", "validation_data", "training_data"):
        remove_oldest(run.folder / folder, 1, spare_first=folder == "validation_data")
    assert problems(run.redis, config) != {}
    less = config.run.model_copy(update={"keep_mb": 0})
    assert problems(run.redis, config.model_copy(update={"run": less})) == {}


@pytest.fixture
def journaled(fake_broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run whose Redis is there."""
    config = made(tmp_path)
    run_to_its_end(config, fake_broker)
    (config.run.folder / "config.yaml").write_text(dump_config(config))
    monkeypatch.setattr("launcher.run.reopened._connect", lambda _: fake_broker)
    return config.run.folder


def test_spo_audit_names_what_does_not_hold(journaled: Path, spo: Spo) -> None:
    ran = spo("audit", journaled)
    assert (ran.returncode, ran.stdout.count("\n")) == (0, len(LINES)), ran.stdout
    (journaled / "validation_data" / "5.jsonl.part").touch()
    ran = spo("audit", journaled)
    (failed,) = [line for line in ran.stdout.splitlines() if not line.startswith("holds ")]
    assert ran.returncode == 1
    assert failed.startswith("FAILED the last version was evaluated, and no evaluation is left open: 1: 5.jsonl.part")


def test_a_run_without_a_journal_is_refused(journaled: Path, spo: Spo, fake_broker: Broker) -> None:
    fake_broker.redis.delete(fake_broker.key("journal"))
    for override in ((), ("-o", "run.journal=false")):
        ran = spo("audit", journaled, *override)
        assert (ran.returncode, ran.stderr.count("\n")) == (2, 1), ran.stderr
        assert "run.journal = true" in ran.stderr


def test_keys_that_nobody_owns_are_named(fake_broker: Broker) -> None:
    fake_broker.redis.set(fake_broker.key("payload:t0000001"), b"tokens")
    for stream in ("tasks", "samples"):
        fake_broker.redis.xadd(fake_broker.key(stream), {"id": "t0000002"})
    assert read_redis(fake_broker).leftovers == ["payload:t0000001 (1)", "samples (1)", "tasks (1)"]


def test_a_long_journal_is_read_whole_and_in_order(fake_broker: Broker) -> None:
    for sequence in range(1, 1203):
        entry = JournalEntry(sequence, [("a", 0.1, 0.9, "x")], [f"t{sequence}"], [], [(0, ["x"])], [])
        fake_broker.redis.xadd(fake_broker.key("journal"), {"commit": entry.pack()})
    assert [entry.sequence for entry in read_journal(fake_broker)] == list(range(1, 1203))
