"""The audit of a run: it holds for a good one, and each of its lines finds what it is there for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakeredis
import pytest
import torch

from common.config import Config, dump_config
from common.files import remove_oldest
from common.log import Timeline
from common.messages import Step, Task
from common.streams.broker import Broker
from common.streams.ledger import JournalEntry, SamplerLedger, read_journal
from launcher.audit import file_lines, journal_lines, token_lines
from launcher.audit.evidence import Evidence
from launcher.audit.lines import REWARDS, audit
from launcher.audit.records import read_redis
from launcher.audit.rewards import Scored, score_again
from launcher.audit.tokens import flaw_of
from learner.batch.gae import gae, normalised, returns
from learner.ranks.world import World
from learner.token_record import DIGITS
from sampler.files.metrics_file import NOT_WRITTEN
from sampler.prompts.prompt_set import load_data
from tests.support.agents import agent_config, kept_line
from tests.support.run_records import RunRecords, made
from tests.support.sampler import NoopGenerator, NoopLearner
from tests.support.sampler_driving import LOG, drive, problems, start
from tests.support.spo_command import Spo

TASK, PROMPT = "t0000003", "no such prompt"


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


def copied(good_run: RunRecords, folder: Path) -> RunRecords:
    """A copy of the good run, to change."""
    shutil.copytree(good_run.folder, folder / good_run.folder.name)
    return RunRecords(folder / good_run.folder.name, good_run.redis)


@pytest.fixture
def run(good_run: RunRecords, tmp_path: Path) -> RunRecords:
    return copied(good_run, tmp_path)


def test_every_line_holds_for_a_good_run(run: RunRecords) -> None:
    lines = audit(run.config(), run.redis, LOG)
    assert [line for line in lines if line.problem or line.note] == []
    assert [line.name for line in lines] == LINES
    assert len(run.redis.evaluations) == 4
    assert any((run.folder / "training_data").iterdir())


def first_of_a_batch(run: RunRecords) -> str:
    return next(sample_ids[0] for entry in run.redis.journal for _, sample_ids in entry.batches)


def batch(change: Callable[[int, list[str]], list[Any]]) -> Callable[[RunRecords], None]:
    return lambda run: run.entry("batches", lambda batches: [change(*batches[0]), *batches[1:]])


def rewarded(change: Callable[[list[Any]], list[Any]]) -> Callable[[RunRecords], None]:
    return lambda run: run.entry("rewards", lambda rewards: [change(rewards[0]), *rewards[1:]])


def kept(**values: Any) -> Callable[[RunRecords], None]:
    return lambda run: run.line("rollouts/2.jsonl", **values)


def answered(**values: Any) -> Callable[[RunRecords], None]:
    return lambda run: run.line("validation_data/4.jsonl", **values)


def trained(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[RunRecords], None]:
    """With other values in every line of training data."""

    def changed(run: RunRecords) -> None:
        for path in (run.folder / "training_data").iterdir():
            run.lines(f"training_data/{path.name}", lambda lines: [line | change(line) for line in lines])

    return changed


def trained_column(name: str, change: Callable[[Any], Any]) -> Callable[[RunRecords], None]:
    return trained(lambda line: {name: [change(one) for one in line[name]]})


def without_metrics(run: RunRecords, log: str = "") -> None:
    """All metrics are gone, and the sampler's log has a line about a disk that was full."""
    (run.folder / "metrics.jsonl").write_text("")
    (run.folder / "logs").mkdir(exist_ok=True)
    (run.folder / "logs" / "sampler.log").write_text(f"12:00:00 [warning  ] {NOT_WRITTEN} {log}\n")


def without_a_line(name: str) -> Callable[[RunRecords], None]:
    return lambda run: run.lines(name, lambda records: records[1:])


def metric(
    process: str, name: str, change: Callable[[float], float | None], **more: float
) -> Callable[[RunRecords], None]:
    """With another value, or none, of a metric of version 4, and with more metrics beside it."""

    def changed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for record in records:
            values = record["values"]
            if (record["version"], record["process"]) == (4, process) and name in values:
                values |= {name: change(values[name]), **more}
        return records

    return lambda run: run.lines("metrics.jsonl", changed)


def evaluation(run: RunRecords, **values: Any) -> None:
    run.set(evaluations=[run.redis.evaluations[0] | values, *run.redis.evaluations[1:]])


def a_kill_between(run: RunRecords) -> None:
    """The learner starts at a version that it never made: neither Redis nor metrics.jsonl has it."""
    run.set(steps=[step for step in run.redis.steps if step.version < 3] + [Step(version=4), *run.redis.steps[5:]])
    metric("learner", "batch/samples", lambda _: None)(run)


WHOLE = "kept episodes have the messages and tokens that they count"
JUDGED = "a critic's returns and advantages follow from its values"
LEARNED = "a critic learned in each step"
FIGURES = "each evaluation's figures follow from its answers"
SCORED = "each token of a step had its teacher's score"


def left_out(run: RunRecords) -> None:
    run.step(-1, metrics=run.redis.steps[-1].metrics | {"batch/left_out": 2.0})


def add(name: str, place: int | str, newest: bool = True) -> Callable[[RunRecords], None]:
    """With one more item in a list of a journal entry: the one that is at a place, or another."""
    return lambda run: run.entry(
        name, lambda items: [*items, items[place] if isinstance(place, int) else place], newest
    )


def counters(**values: int) -> Callable[[RunRecords], None]:
    return lambda run: run.set(counters=run.redis.counters | values)


def remove(name: str) -> Callable[[RunRecords], None]:
    return lambda run: (run.folder / name).unlink()


def twice(name: str) -> Callable[[RunRecords], None]:
    return lambda run: run.lines(name, lambda records: [*records, records[0]])


# For each line of the audit, changes of a good run that it finds.
FAULTS: dict[str, list[Callable[[RunRecords], None]]] = {
    "every commit is in the journal": [lambda run: run.set(journal=run.redis.journal[1:])],
    "the learner trained on each sample of a batch": [
        metric("learner", "batch/samples", lambda count: count, **{"batch/left_out": 1.0}),
        left_out,
    ],
    "nothing is counted before a restoration is complete": [lambda run: run.commit(5, restored={"version": 0})],
    "each task was sent once, or again while it was awaited": [add("dispatched", TASK), add("dispatched", 0, False)],
    "each task was counted once": [add("counted", TASK), add("counted", "t9")],
    "each task that was sent is counted or awaited": [
        lambda run: run.entry("counted", lambda ids: ids[1:]),
        lambda run: run.set(outstanding=["t0000001"]),
    ],
    "each counted task has one end: a reward, or it was skipped": [
        lambda run: run.entry("rewards", lambda rewards: rewards[1:]),
        add("rewards", 0),
        lambda run: run.entry("counters", lambda counters: {**counters, "set_aside": 1}),
    ],
    "batches are consecutive": [batch(lambda number, ids: [number + 1, ids])],
    "no sample is in two batches": [batch(lambda number, ids: [number, [ids[0]] * 8])],
    "each sample of a batch was rewarded before": [batch(lambda number, ids: [number, ["t9999999", *ids[1:]]])],
    "each rewarded sample is in one batch, or dropped, or waits": [
        lambda run: run.commit(-1, discarded=[first_of_a_batch(run)]),
        batch(lambda number, ids: [number, ids[1:]]),
    ],
    "the counters equal those of the journal": [counters(batched=1)],
    "the counters balance": [counters(finished=1)],
    "the learner went from version to version": [
        a_kill_between,
        lambda run: run.set(steps=[step for step in run.redis.steps if step.version != 3]),
    ],
    "no version came before its batch": [lambda run: run.commit(1, version=3)],
    "the last step was made": [lambda run: run.set(steps=run.redis.steps[:-1])],
    "the tracker equals a replay of the journal, bit for bit": [
        rewarded(lambda reward: [*reward[:2], reward[2] * (1 + 2**-52), reward[3]]),
        rewarded(lambda reward: [PROMPT, *reward[1:]]),
    ],
    "the learner trained on the journal's rewards": [
        lambda run: run.step(3, metrics=run.redis.steps[3].metrics | {"reward/mean": 0.3}),
    ],
    "a finished run has left nothing in Redis": [lambda run: run.set(leftovers=["payload:t0000001 (1)"])],
    "every line of the run folder can be read": [
        lambda run: run.append("rollouts/2.jsonl", '{"task_id": "t00'),
        kept(token_ids=None),
    ],
    "metrics.jsonl has the reward of each batch": [
        metric("sampler", "reward/mean", lambda mean: mean + 0.125),
        metric("sampler", "reward/mean", lambda _: None),
        lambda run: without_metrics(run, "versions=5,6 file=metrics.jsonl"),
    ],
    "metrics.jsonl has each step of the learner": [metric("learner", "batch/samples", lambda _: None), without_metrics],
    SCORED: [
        metric("learner", "teacher/tokens", lambda share: share - 1 / 8),
        metric("learner", "teacher/tokens", lambda _: None),
    ],
    "each evaluation has each answer once, all of its version": [
        without_a_line("validation_data/4.jsonl"),
        answered(versions=[3, 4]),
        answered(prompt_id=PROMPT),
    ],
    FIGURES: [
        lambda run: evaluation(run, accuracy=0.99),
        lambda run: run.copy("validation_data/4.jsonl", "validation_data/5.jsonl"),
        remove("validation_data/4.jsonl"),
        metric("sampler", "validation/accuracy", lambda accuracy: 1 - accuracy / 2),
    ],
    "the last version was evaluated, and no evaluation is left open": [
        lambda run: (run.folder / "validation_data/5.jsonl.part").touch(),
        remove("validation_data/6.jsonl"),
    ],
    "each training episode is kept once": [twice("rollouts/2.jsonl")],
    "kept episodes have the journal's rewards and the tracker's values": [
        kept(reward=0.5),
        kept(task_id="t9999999"),
        kept(value=0.987654),
        lambda run: (run.folder / "rollouts/2.jsonl").rename(run.folder / "rollouts/3.jsonl") and None,
    ],
    "all episodes that should be kept are there": [without_a_line("rollouts/2.jsonl")],
    "no kept sample was too old for its batch": [kept(versions=[0, 2]), kept(versions=[9, 9])],
    "training data has the kept samples of each batch": [
        without_a_line("training_data/3.0.jsonl"),
        kept(rows=2),
        twice("training_data/3.0.jsonl"),
    ],
    "advantages follow from the rewards and the values": [
        lambda run: run.line("training_data/3.0.jsonl", advantages=[9.0]),
    ],
    WHOLE: [
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
        trained_column("token_versions", lambda one: one + 1),
        trained(lambda line: {"experts": [1] * 6}),
        trained(lambda line: {"row": 1}),
    ],
    "log-probs of generator and learner agree under the same weights": [
        trained_column("logprobs", lambda one: one / 2),
        trained_column("logprobs", lambda one: None),
    ],
    "each kept token has its teacher's score": [
        trained_column("teacher_logprobs", lambda one: None),
        trained_column("teacher_logprobs", lambda one: 0.5),
        trained(lambda line: {"teacher_logprobs": None}),
    ],
    JUDGED: [
        trained(lambda line: {"token_advantages": line["token_advantages"][::-1]}),
        trained_column("values", lambda one: one / 2),
        trained_column("returns", lambda one: 1 - one),
        trained(lambda line: {"values": None}),
    ],
    LEARNED: [
        metric("learner", "critic/loss", lambda _: 0.0, **{"critic/grad_norm": 0.0}),
        metric("learner", "critic/lr", lambda _: None),
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
        run = copied(good_run, tmp_path / str(number))
        change(run)
        assert line in problems(run.redis, run.config()), f"fault {number}"


FAILS = {"function": "tests.support.agents:scripted", "failure": 0.25}
AGENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "returns another text than the right one it said": ({"reward": "exact"}, {"asks": ["2"], "returns": "3"}),
    "returns data": ({"reward": "length"}, {"asks": ["2"], "returns": {"sum": 2}}),
    "leaves its answer in the last message": ({"reward": "exact"}, {"asks": ["2"]}),
    "sends its reward": ({"reward": "agent"}, {"asks": ["2"], "sends": 0.125, "returns": "two"}),
    "gives one part of the reward": ({"reward": {"agent": 0.5, "exact": 0.5}}, {"asks": ["2"], "returns": 0.5}),
    "is ended before it gives a reward": (
        {"reward": "agent", "max_assistant_turns": 1}, {"asks": ["a", "b"], "returns": 1.0},
    ),
    "fails": ({"reward": "exact", "agent": FAILS}, {"asks": ["2"], "raises": "out of ideas"}),
}  # fmt: skip


def agents_run(folder: Path, kind: str, episode: dict[str, Any], row: dict[str, Any]) -> tuple[Evidence, Path]:
    """A run with one kept episode, which an agent has played, and the file of it."""
    prompt = {"prompt": "What is 1+1?", "answer": "2", "ground_truth": "2"} | row
    (folder / "data.jsonl").write_text(json.dumps(prompt) + "\n")
    data = {"train": f"{folder}/data.jsonl", "heldout": f"{folder}/data.jsonl"}
    config = agent_config({"data": data, "run": {"experiment": "x", "output_dir": str(folder)}}, **episode)
    prompts = load_data(config.data, LOG)
    (task_id,) = prompts.train.ids
    line = kept_line(config, Task(task_id="t", prompt_id=task_id, prompt=prompt["prompt"], answer="2", row=row,
                                  kind=kind, keep=True))  # fmt: skip
    path = config.run.folder / ("rollouts" if kind == "train" else "validation_data") / "0.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(line + b"\n")
    return Evidence(config, prompts, redis=None, folder=None, log=LOG), path  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize("agent", AGENTS)
def test_what_an_agent_gave_is_scored_again(tmp_path: Path, agent: str, kind: str) -> None:
    run, path = agents_run(tmp_path, kind, *AGENTS[agent])
    assert score_again(run) == Scored("", "")
    episode = json.loads(path.read_text())
    assert flaw_of(episode) == ""
    for change in ({"reward": 0.8}, {"scored": {}}):
        path.write_text(json.dumps(episode | change) + "\n")
        assert score_again(run).problem.startswith("1: t ")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda line: line["messages"].pop(), "2 answered requests and replies to 1"),
        (lambda line: line["requests"].clear(), "0 answered requests and replies to 2"),
        (lambda line: line["requests"][1].update(sampled=99), "model_tokens 4, by its requests 101"),
        (lambda line: line["requests"][1].update(prompt=99), "by its requests 101"),
        (lambda line: line["requests"][1].update(row=None), "turns 2, by its requests 1"),
        (lambda line: line["requests"][1].update(row=1), "rows 1, by its requests 2"),
        (lambda line: line.update(tool_calls=1), "tool_calls 1, by its requests 0"),
    ],
)
def test_an_agents_counts_are_those_of_its_requests(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], found: str
) -> None:
    _, path = agents_run(tmp_path, "eval", {"reward": "exact"}, {"asks": ["1", "2"]})
    line = json.loads(path.read_text())
    change(line)
    assert found in flaw_of(line)


@pytest.mark.integration  # the reward runs in a process
@pytest.mark.parametrize("name", ["SizeOfFolder", "size_of_folder"])
def test_a_reward_that_read_an_agents_files_is_not_computed_again(tmp_path: Path, name: str) -> None:
    reward = f"tests.support.some_rewards:{name}"
    run, _ = agents_run(tmp_path, "train", {"reward": reward, "reward_workers": 1}, {"asks": ["2"], "files": "x"})
    for source in ("data.train", "data.heldout"):
        skipped = f"{source} skipped: {reward} may have read the agent's folder, which is gone"
        assert skipped in score_again(run).note.split("; ")


def test_a_second_sending_of_a_lost_task_is_no_fault(run: RunRecords) -> None:
    run.entry("dispatched", lambda ids: [*ids, ids[0]], newest=False)
    run.entry("counters", lambda counters: {**counters, "dispatched": -1, "sent_again": 1}, newest=False)
    run.set(counters=run.redis.counters | {"sent_again": 1})
    assert problems(run.redis, run.config()) == {}


def test_metrics_that_a_full_disk_has_lost_are_not_missed(run: RunRecords) -> None:
    without_metrics(run, "versions=1,2,3 file=metrics.jsonl")
    with (run.folder / "logs" / "sampler.log").open("a") as log:
        log.write(json.dumps({"event": NOT_WRITTEN, "versions": "4,5,6"}) + "\n")
        log.write(f"12:00:00 [warning  ] {NOT_WRITTEN} versions=0 file=metrics.jsonl\n")
    assert problems(run.redis, run.config()) == {}


def test_a_step_that_learned_nothing_needs_no_scores(run: RunRecords) -> None:
    metric("learner", "teacher/tokens", lambda _: 0.0)(run)
    assert problems(run.redis, run.config()).keys() == {SCORED}
    metric("learner", "batch/left_out", lambda _: 0.0, **{"actor/skipped_steps": 1.0})(run)
    assert problems(run.redis, run.config()) == {}


def other_accuracy(run: RunRecords) -> None:
    """Each evaluation's accuracy is that of another `eval.right_from`."""
    run.set(evaluations=[result | {"accuracy": 0.125} for result in run.redis.evaluations])
    run.lines("metrics.jsonl", lambda records: [
        record | {"values": record["values"] | {"validation/accuracy": 0.125}}
        if "validation/accuracy" in record["values"] else record for record in records
    ])  # fmt: skip


CHANGES: dict[str, tuple[Callable[[RunRecords], None], str]] = {
    "critic.gae_lambda": (trained(lambda line: {"token_advantages": line["token_advantages"][::-1]}), JUDGED),
    "critic.return_lambda": (trained_column("returns", lambda one: 1 - one), JUDGED),
    "critic.warmup_steps": (trained_column("token_advantages", lambda one: -one), JUDGED),
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
        columns = {
            "values": values,
            "returns": returns(earned, values, rows, critic.return_lambda),
            "token_advantages": normalised(
                [gae(earned, values, rows, critic.gae_lambda)],
                World(0, 1, torch.device("cpu")),
                config.sampler.advantage.clip,
            )[0],
        }
        of_rows = {name: column.reshape(-1, length).tolist() for name, column in columns.items()}
        others = {name: [0] * length for name in ("token_ids", "token_versions", "logprobs", "rollout_logprobs")}
        return [
            line
            | others
            | {"teacher_logprobs": None}
            | {name: [round(one, DIGITS) for one in of_rows[name][number]] for name in of_rows}
            for number, line in enumerate(lines)
        ]

    for path in (run.folder / "training_data").iterdir():
        run.lines(f"training_data/{path.name}", long)
    assert JUDGED not in problems(run.redis, config.model_copy(update={"critic": critic}))


@pytest.mark.parametrize(("served", "is_good"), [([0, 9, 2], True), ([0, 2, 9], False), ([0, 8, 2], False)])
def test_a_version_that_the_learner_has_lost_may_answer(run: RunRecords, served: list[int], is_good: bool) -> None:
    kept(versions=[2, 9], version_spans=[[2, 0, 3], [9, 3, 6]])(run)
    (task_id,) = [json.loads((run.folder / "rollouts/2.jsonl").read_text().splitlines()[0])["task_id"]]
    spans = {"token_versions": [2, 2, 2, 9, 9, 9]}
    trained(lambda line: spans if line["task_id"] == task_id else {})(run)
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
