"""Prompts are answered with fixed weights: each answer is one line of the file, whatever is killed when."""

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
from common.streams.lease import LeaseLost
from common.streams.ledger import SamplerLedger
from sampler.answer_file import AnswerFile, read_answers
from sampler.ask import Asker
from sampler.ask_cli import load_questions
from tests.support.sampler import NoopGenerator, make_config, write_prompts

LOG = structlog.get_logger()
PROMPTS, RESPONSES = 12, 3


class Killed(Exception):
    """Stands for a SIGKILL."""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path, prompts=PROMPTS, run={"steps": 0})


def asker(
    config: Config, broker: Broker, kind: Kind = "values", responses: int = RESPONSES, owner: str = "asker"
) -> Asker:
    prompts = load_questions(config, "values", None, LOG)
    file = AnswerFile(Path(config.run.output_dir) / "answers.jsonl", LOG)
    return Asker(config, prompts, kind, responses, file, SamplerLedger(broker, owner), LOG)


def drive(asking: Asker, generator: NoopGenerator, n: int = 5, **changes: Any) -> None:
    for _ in range(1000):
        if asking.over():
            return
        asking.round()
        generator.work(n, **changes)
    raise AssertionError("it did not end")


def rows(config: Config) -> list[dict[str, Any]]:
    lines = (Path(config.run.output_dir) / "answers.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def each_once(config: Config, broker: Broker, responses: int = RESPONSES) -> None:
    answered = [row["task_id"] for row in rows(config)]
    assert len(answered) == len(set(answered)) == PROMPTS * responses
    counters = broker.counters()
    assert counters["dispatched"] == counters["counted"] == counters["finished"]
    assert broker.redis.hlen(broker.key("outstanding")) == 0
    assert broker.redis.xlen(broker.key("samples")) == broker.redis.xlen(broker.key("tasks")) == 0
    assert broker.redis.keys(broker.key("payload:") + "*") == []


def test_every_prompt_is_answered_as_often_as_asked(config: Config, broker: Broker) -> None:
    asking, generator = asker(config, broker), NoopGenerator(broker)
    asking.begin()
    drive(asking, generator)
    each_once(config, broker)
    rewards = {header.task_id: header.reward for header in generator.headers}
    for row in rows(config):
        assert set(row) >= {"prompt_id", "input", "output", "gts", "score", "step"}
        assert row["input"] == f"train {row['gts']}"
        assert (row["output"], row["step"]) == ("a", 0)
        assert row["score"] == rewards[row["task_id"]]
    assert {task.kind for task in generator.tasks} == {"values"}


def test_never_more_are_in_flight_than_may_be_outstanding_in_training(config: Config, broker: Broker) -> None:
    asking = asker(config, broker, responses=50)
    asking.begin()
    asking.round()
    assert broker.redis.xlen(broker.key("tasks")) == len(asking.in_flight) == 16


@pytest.mark.parametrize("at", ["before the file", "before the commit", "after the commit"])
def test_killed_again_and_again_it_writes_each_answer_once(config: Config, broker: Broker, at: str) -> None:
    """Every second process does one round, the others are killed in theirs."""
    generator = NoopGenerator(broker)
    for turn in range(200):
        asking = asker(config, broker)
        asking.begin()
        if asking.over():
            break
        if turn % 2 and at != "after the commit":
            part, name = (asking.file, "append") if at == "before the file" else (asking.ledger, "commit")
            setattr(part, name, die)
            with pytest.raises(Killed):
                asking.round()
        else:
            asking.round()
            generator.work(4)
    assert turn > PROMPTS * RESPONSES / 8
    each_once(config, broker)


def die(*_: Any) -> None:
    raise Killed


def test_a_line_that_a_kill_cut_short_is_removed_and_answered_again(config: Config, broker: Broker) -> None:
    asking, generator = asker(config, broker), NoopGenerator(broker)
    asking.begin()
    drive(asking, generator)
    path = asking.file.path
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    with capture_logs() as logs:
        again = asker(config, broker)
    assert [line["line"] for line in logs if line["log_level"] == "warning"] == [PROMPTS * RESPONSES]
    again.begin()
    drive(again, generator)
    assert len(generator.headers) == PROMPTS * RESPONSES + 1
    each_once(config, broker)


def test_more_responses_ask_only_for_those_that_are_missing(config: Config, broker: Broker) -> None:
    generator = NoopGenerator(broker)
    for responses in (RESPONSES, RESPONSES + 2):
        asking = asker(config, broker, responses=responses)
        asking.begin()
        drive(asking, generator)
    assert len(generator.headers) == PROMPTS * (RESPONSES + 2)
    each_once(config, broker, RESPONSES + 2)


def test_what_is_set_aside_is_counted_with_its_reason_and_asked_again_by_the_next_call(
    config: Config, broker: Broker
) -> None:
    asking, generator = asker(config, broker), NoopGenerator(broker)
    asking.begin()
    asking.round()
    generator.work(4, status="set_aside", reason="the sandbox is away")
    drive(asking, generator)
    assert asking.reasons == {"the sandbox is away": 4}
    assert len(rows(config)) == PROMPTS * RESPONSES - 4
    again = asker(config, broker)
    again.begin()
    drive(again, generator)
    each_once(config, broker)


def test_it_ends_when_nothing_is_answered_any_more(config: Config, broker: Broker) -> None:
    asking, generator = asker(config, broker, responses=20), NoopGenerator(broker)
    asking.begin()
    with pytest.raises(UserError, match="tasks in a row were set aside.*the sandbox is away"):
        drive(asking, generator, status="set_aside", reason="the sandbox is away")


def test_answers_of_another_file_are_counted_and_written_nowhere(config: Config, broker: Broker) -> None:
    other, generator = asker(config, broker, kind="eval"), NoopGenerator(broker)
    other.begin()
    other.round()
    asking = asker(config, broker)
    asking.begin()
    drive(asking, generator)
    assert {row["task_id"].partition("-")[0] for row in rows(config)} == {f"values{n}" for n in range(RESPONSES)}
    each_once(config, broker)


def test_a_run_has_one_that_asks(config: Config, broker: Broker) -> None:
    asker(config, broker).begin()
    second = asker(config, broker, owner="another")
    with pytest.raises(LeaseLost, match="already has a sampler"):
        second.ledger.acquire(wait=0)


def test_a_file_with_something_else_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"task_id": "values0-a", "prompt_id": "a"}\n{"input": "x", "score": 1}\n')
    with pytest.raises(UserError, match=r"answers\.jsonl line 2 is no answer"):
        AnswerFile(path, LOG)


def test_a_file_with_answers_to_other_prompts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"task_id": "values0-a", "prompt_id": "a"}\n{"task_id": "values0-b", "prompt_id": "b"}\n')
    file = AnswerFile(path, LOG)
    file.check_prompts({"a", "b"})
    with pytest.raises(UserError, match=r"prompts that are not in the data \(the first: values0-b\)"):
        file.check_prompts({"a"})


def test_a_file_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match=r"--output .*folder\.jsonl cannot be written"):
        AnswerFile(tmp_path / "folder.jsonl", LOG)


def test_an_answer_that_json_does_not_have_is_written_as_text(tmp_path: Path) -> None:
    file = AnswerFile(tmp_path / "answers.jsonl", LOG)
    file.append({"values0-a": {"prompt_id": "a", "gts": float("nan"), "output": "\u2028 \ud800"}})
    (row,) = read_answers(tmp_path / "answers.jsonl")
    assert row == {"task_id": "values0-a", "prompt_id": "a", "gts": "nan", "output": "\u2028 \ud800"}


def test_a_subset_is_read_with_the_settings_of_its_source(tmp_path: Path) -> None:
    (tmp_path / "subset.jsonl").write_text('{"question": "a?", "answer": "1"}\n')
    sums = {"name": "sums", "path": "gone.jsonl", "prompt_column": "question"}
    both = {"train": [sums, {"name": "words", "path": "also_gone.jsonl"}]}
    config = parse_config({"model": {"path": "none"}, "data": both})
    prompts = load_questions(config, "values", f"sums={tmp_path / 'subset.jsonl'}", LOG)
    assert [(prompts[0].prompt, prompts.source(0))] == [("a?", "sums")]
    for data in ("subset.jsonl", "sum=subset.jsonl"):
        with pytest.raises(UserError, match=r"data\.train has sums, words; say which of them it is a part of"):
            load_questions(config, "values", data, LOG)


def test_an_evaluation_asks_the_first_prompts_of_each_source(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_prompts(tmp_path / f"{name}.jsonl", name, 5)
    heldout = [{"path": str(tmp_path / f"{name}.jsonl")} for name in ("a", "b")]
    tree = {"model": {"path": "none"}, "data": {"train": "gone.jsonl", "heldout": heldout}, "eval": {"limit": 2}}
    prompts = load_questions(parse_config(tree), "eval", None, LOG)
    assert [prompts[i].prompt for i in range(len(prompts))] == ["a 0", "a 1", "b 0", "b 1"]
    assert [prompts.source(i) for i in range(len(prompts))] == ["a", "a", "b", "b"]


def test_answers_of_an_evaluation_name_the_groups_that_have_figures_of_their_own(
    config: Config, broker: Broker, tmp_path: Path
) -> None:
    lines = [json.dumps({"prompt": f"{i}?", "answer": i, "level": i % 2}) for i in range(4)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    by_level = config.model_copy(update={"eval": config.eval.model_copy(update={"by_column": "level"})})
    asking = asker(by_level, broker, kind="eval", responses=1)
    asking.begin()
    drive(asking, NoopGenerator(broker))
    assert {row["input"]: row["groups"] for row in rows(config)} == {f"{i}?": [f"level={i % 2}"] for i in range(4)}
    absent = config.model_copy(update={"eval": config.eval.model_copy(update={"by_column": "levl"})})
    with pytest.raises(UserError, match="'levl' is in no row of data.heldout; did you mean 'level'"):
        asker(absent, broker, kind="eval")
