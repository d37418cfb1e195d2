"""A run without training steps: each answer is one line of the file, whatever is killed when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from common.config import Config, parse_config
from common.errors import UserError
from common.messages import Kind
from common.streams.broker import Broker
from common.streams.ledger import LeaseLost, SamplerLedger
from sampler.answer_file import AnswerFile, Request, read_answers
from sampler.answers import Answers, load_questions
from sampler.loop import Sampler
from tests.support.sampler import NoopGenerator, make_config, write_prompts
from tests.support.sampler_driving import start

LOG = structlog.get_logger()
PROMPTS, RESPONSES = 12, 3


class Killed(Exception):
    """Stands for a SIGKILL."""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    data = {"train": str(tmp_path / "train.jsonl"), "heldout": str(tmp_path / "train.jsonl")}
    return make_config(tmp_path, prompts=PROMPTS, run={"steps": 0}, data=data)


def begin(config: Config, broker: Broker, kind: Kind = "values", responses: int = RESPONSES) -> Sampler:
    return start(config, broker, request=Request(kind, responses, Path(config.run.output_dir) / "answers.jsonl"))


def drive(sampler: Sampler, generator: NoopGenerator, n: int = 5, **changes: Any) -> None:
    for _ in range(1000):
        if sampler.over():
            return
        sampler.round()
        sampler.failures.check()
        generator.work(n, **changes)
    raise AssertionError("it did not end")


def rows(config: Config) -> list[dict[str, Any]]:
    return list(read_answers(Path(config.run.output_dir) / "answers.jsonl"))


def each_once(config: Config, broker: Broker, responses: int = RESPONSES) -> None:
    answered = [row["task_id"] for row in rows(config)]
    assert len(answered) == len(set(answered)) == PROMPTS * responses
    counters = broker.counters()
    assert counters["dispatched"] == counters["counted"] == counters["finished"]
    assert broker.redis.hlen(broker.key("outstanding")) == 0
    assert broker.redis.xlen(broker.key("samples")) == broker.redis.xlen(broker.key("tasks")) == 0
    assert broker.redis.keys(broker.key("payload:") + "*") == []


def test_every_prompt_is_answered_as_often_as_asked(config: Config, broker: Broker) -> None:
    generator = NoopGenerator(broker)
    drive(begin(config, broker), generator)
    each_once(config, broker)
    rewards = {header.task_id: header.reward for header in generator.headers}
    for row in rows(config):
        assert row["input"] == f"train {row['gts']}"
        assert (row["output"], row["step"], row["source"]) == ("a", 0, "train")
        assert row["score"] == rewards[row["task_id"]]
    assert {task.kind for task in generator.tasks} == {"values"}
    assert not broker.finished(), "generators of the run wait for the next request"


def test_as_many_are_in_flight_as_in_training(config: Config, broker: Broker) -> None:
    sampler = begin(config, broker, responses=50)
    sampler.round()
    assert broker.redis.xlen(broker.key("tasks")) == len(sampler.state.admission.in_flight) == 16


@pytest.mark.parametrize("at", ["before the file", "before the commit", "after the commit"])
def test_killed_again_and_again_it_writes_each_once(config: Config, broker: Broker, at: str) -> None:
    """Every second process does one round, the others are killed in theirs."""
    generator = NoopGenerator(broker)
    for turn in range(200):
        sampler = begin(config, broker)
        if sampler.over():
            break
        if turn % 2 and at != "after the commit":
            assert isinstance(sampler.evaluations, Answers)
            part, name = (sampler.evaluations.file, "append") if at == "before the file" else (sampler.ledger, "commit")
            setattr(part, name, die)
            with pytest.raises(Killed):
                sampler.round()
        else:
            sampler.round()
            generator.work(4)
    assert turn > PROMPTS * RESPONSES / 8
    each_once(config, broker)


def die(*_: Any) -> None:
    raise Killed


def test_a_line_that_a_kill_cut_short_is_asked_again(config: Config, broker: Broker) -> None:
    generator = NoopGenerator(broker)
    drive(begin(config, broker), generator)
    path = Path(config.run.output_dir) / "answers.jsonl"
    path.write_bytes(path.read_bytes()[:-7])
    with capture_logs() as logs:
        again = begin(config, broker)
    assert [line["line"] for line in logs if line["log_level"] == "warning"] == [PROMPTS * RESPONSES]
    drive(again, generator)
    assert len(generator.headers) == PROMPTS * RESPONSES + 1
    each_once(config, broker)


def test_more_responses_ask_only_for_the_missing(config: Config, broker: Broker) -> None:
    generator = NoopGenerator(broker)
    for responses in (RESPONSES, RESPONSES + 2):
        drive(begin(config, broker, responses=responses), generator)
    assert len(generator.headers) == PROMPTS * (RESPONSES + 2)
    each_once(config, broker, RESPONSES + 2)


def test_the_next_call_asks_again_what_was_skipped(config: Config, broker: Broker) -> None:
    sampler, generator = begin(config, broker), NoopGenerator(broker)
    sampler.round()
    generator.work(4, status="set_aside", reason="the sandbox is away")
    drive(sampler, generator)
    assert isinstance(sampler.evaluations, Answers)
    assert sampler.evaluations.reasons == {"the sandbox is away": 4}
    assert len(rows(config)) == PROMPTS * RESPONSES - 4
    drive(begin(config, broker), generator)
    each_once(config, broker)


def test_it_ends_when_nothing_is_answered_any_more(config: Config, broker: Broker) -> None:
    sampler = begin(config, broker, responses=20)
    with pytest.raises(UserError, match="tasks in a row were set aside.*the sandbox is away"):
        drive(sampler, NoopGenerator(broker), status="set_aside", reason="the sandbox is away")


def test_answers_to_another_request_are_not_written(config: Config, broker: Broker) -> None:
    generator = NoopGenerator(broker)
    begin(config, broker, kind="eval").round()
    drive(begin(config, broker), generator)
    assert {row["task_id"].partition("-")[0] for row in rows(config)} == {f"values{n}" for n in range(RESPONSES)}
    each_once(config, broker)


def test_a_lost_task_is_sent_again(config: Config, broker: Broker) -> None:
    sampler, generator = begin(config, broker), NoopGenerator(broker)
    sampler.round()
    lost = next(iter(sampler.state.admission.in_flight))
    entries = broker.redis.xrange(broker.key("tasks"))
    broker.redis.xdel(broker.key("tasks"), *(entry for entry, fields in entries if fields[b"id"] == lost.encode()))
    sampler.lost.ids = [lost]
    drive(sampler, generator)
    each_once(config, broker)


def test_a_run_has_one_sampler(config: Config, broker: Broker) -> None:
    begin(config, broker)
    with pytest.raises(LeaseLost, match="already has a sampler"):
        SamplerLedger(broker, "another").acquire(wait=0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"task_id": "values0-a", "prompt_id": "a"}\n{"input": "x", "score": 1}\n', "line 2 is no answer"),
        ('{"task_id": "v0-a", "prompt_id": "a"}\n{"task_id": "v0-b", "prompt_id": "b"}\n', r"line 2 .*data \(v0-b\)"),
        (None, "--output .* cannot be written"),
    ],
)
def test_a_file_that_is_of_no_use_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.mkdir() if text is None else path.write_text(text)
    with pytest.raises(UserError, match=words):
        AnswerFile(path, ["a"], LOG)


def test_an_answer_that_json_lacks_is_written_as_text(tmp_path: Path) -> None:
    file = AnswerFile(tmp_path / "answers.jsonl", [], LOG)
    file.append({"values0-a": {"prompt_id": "a", "gts": float("nan"), "output": "\u2028 \ud800"}})
    (row,) = read_answers(tmp_path / "answers.jsonl")
    assert row == {"task_id": "values0-a", "prompt_id": "a", "gts": "nan", "output": "\u2028 \ud800"}


def test_a_subset_is_read_with_the_settings_of_its_source(tmp_path: Path) -> None:
    (tmp_path / "subset.jsonl").write_text('{"question": "a?", "answer": "1"}\n')
    sums = {"name": "sums", "path": "gone.jsonl", "prompt_column": "question"}
    both = {"train": [sums, {"name": "words", "path": "also_gone.jsonl"}]}
    config = parse_config({"model": {"path": "none"}, "data": both})

    def load(data: str) -> Any:
        return load_questions(config, Request("values", 1, tmp_path / "a.jsonl", data), LOG)

    prompts = load(f"sums={tmp_path / 'subset.jsonl'}")
    assert [(prompts[0].prompt, prompts.source(0))] == [("a?", "sums")]
    for data in ("subset.jsonl", "sum=subset.jsonl"):
        with pytest.raises(UserError, match=r"data\.train has sums, words; say which of them it is a part of"):
            load(data)


def test_an_evaluation_asks_the_first_of_each_source(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_prompts(tmp_path / f"{name}.jsonl", name, 5)
    heldout = [{"path": str(tmp_path / f"{name}.jsonl")} for name in ("a", "b")]
    tree = {"model": {"path": "none"}, "data": {"train": "gone.jsonl", "heldout": heldout}, "eval": {"limit": 2}}
    prompts = load_questions(parse_config(tree), Request("eval", 1, tmp_path / "a.jsonl"), LOG)
    assert [prompts[i].prompt for i in range(len(prompts))] == ["a 0", "a 1", "b 0", "b 1"]
    assert [prompts.source(i) for i in range(len(prompts))] == ["a", "a", "b", "b"]


def test_answers_name_the_groups_of_an_evaluation(config: Config, broker: Broker, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"{i}?", "answer": i, "level": i % 2}) for i in range(4)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))

    def by(column: str) -> Sampler:
        evaluated = config.eval.model_copy(update={"by_column": column})
        return begin(config.model_copy(update={"eval": evaluated}), broker, kind="eval", responses=1)

    drive(by("level"), NoopGenerator(broker))
    assert {row["input"]: row["groups"] for row in rows(config)} == {f"{i}?": [f"level={i % 2}"] for i in range(4)}
    with pytest.raises(UserError, match="'levl' is in no row of data.heldout; did you mean 'level'"):
        by("levl")
