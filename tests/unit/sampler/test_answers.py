"""Answers: a run without training steps writes each once, whatever is killed when; avg@k, maj@k and pass@k."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import structlog
from structlog.testing import capture_logs

from common.config import Config, parse_config
from common.errors import UserError
from common.messages import Kind
from common.streams.broker import Broker
from sampler.answers import Answers, load_questions
from sampler.evaluation_metrics import Response, maj_at_k, pass_at_k, powers_of_two, summarize, summarize_groups
from sampler.files.answer_file import AnswerFile, Request, read_answers
from sampler.loop import Sampler
from tests.support.sampler import NoopGenerator, make_config, write_prompts
from tests.support.sampler_driving import start

LOG = structlog.get_logger()
PROMPTS, RESPONSES = 12, 3


class Killed(Exception): ...


class Asked:
    def __init__(self, config: Config, broker: Broker) -> None:
        self.config, self.broker, self.generator = config, broker, NoopGenerator(broker)
        self.path = Path(config.run.output_dir) / "answers.jsonl"

    def begin(self, kind: Kind = "values", responses: int = RESPONSES, config: Config | None = None) -> Sampler:
        return start(config or self.config, self.broker, request=Request(kind, responses, self.path))

    def drive(self, sampler: Sampler, **changes: Any) -> None:
        for _ in range(1000):
            if sampler.over():
                return
            sampler.round()
            sampler.failures.check()
            self.generator.work(5, **changes)
        raise AssertionError("it did not end")

    def rows(self) -> list[dict[str, Any]]:
        return list(read_answers(self.path))

    def each_once(self, responses: int = RESPONSES) -> None:
        answered = [row["task_id"] for row in self.rows()]
        assert len(answered) == len(set(answered)) == PROMPTS * responses
        counters, redis, key = self.broker.counters(), self.broker.redis, self.broker.key
        assert counters["dispatched"] == counters["counted"] == counters["finished"]
        assert redis.hlen(key("outstanding")) == redis.xlen(key("samples")) == redis.xlen(key("tasks")) == 0
        assert redis.keys(key("payload:") + "*") == []


@pytest.fixture
def run(broker: Broker, tmp_path: Path) -> Asked:
    data = {"train": str(tmp_path / "train.jsonl"), "heldout": str(tmp_path / "train.jsonl")}
    return Asked(make_config(tmp_path, prompts=PROMPTS, run={"steps": 0}, data=data), broker)


def test_every_prompt_is_answered_as_often_as_asked(run: Asked) -> None:
    sampler = run.begin()
    sampler.round()
    assert len(sampler.state.admission.in_flight) == 16, "as many as in training"
    run.drive(sampler)
    run.each_once()
    rewards = {header.task_id: header.reward for header in run.generator.headers}
    for row in run.rows():
        assert row["input"] == f"train {row['gts']}"
        assert (row["output"] in ("a", str(row["gts"])), row["step"], row["source"]) == (True, 0, "train")
        assert row["score"] == rewards[row["task_id"]]
    assert {task.kind for task in run.generator.tasks} == {"values"}
    assert not run.broker.finished(), "generators of the run wait for the next request"
    run.drive(run.begin(responses=RESPONSES + 2))
    assert len(run.generator.headers) == PROMPTS * (RESPONSES + 2), "more responses ask only for the missing"
    run.each_once(RESPONSES + 2)


@pytest.mark.parametrize("at", ["before the file", "before the commit", "after the commit"])
def test_killed_again_and_again_it_writes_each_once(run: Asked, at: str) -> None:
    """Every second process does one round, the others are killed in theirs."""
    for turn in range(200):
        sampler = run.begin()
        if sampler.over():
            break
        if turn % 2 and at != "after the commit":
            assert isinstance(sampler.evaluations, Answers)
            part, name = (sampler.evaluations.file, "append") if at == "before the file" else (sampler.ledger, "commit")
            with patch.object(part, name, side_effect=Killed), pytest.raises(Killed):
                sampler.round()
        else:
            sampler.round()
            run.generator.work(4)
    assert turn > PROMPTS * RESPONSES / 8
    run.each_once()


def test_a_line_that_a_kill_cut_short_is_asked_again(run: Asked) -> None:
    run.drive(run.begin())
    run.path.write_bytes(run.path.read_bytes()[:-7])
    with capture_logs() as logs:
        again = run.begin()
    assert [line["line"] for line in logs if line["log_level"] == "warning"] == [PROMPTS * RESPONSES]
    run.drive(again)
    assert len(run.generator.headers) == PROMPTS * RESPONSES + 1
    run.each_once()


def test_the_next_call_asks_again_what_was_skipped(run: Asked) -> None:
    sampler = run.begin()
    sampler.round()
    run.generator.work(4, status="set_aside", reason="the sandbox is away")
    run.drive(sampler)
    assert isinstance(sampler.evaluations, Answers)
    assert sampler.evaluations.reasons == {"the sandbox is away": 4}
    assert len(run.rows()) == PROMPTS * RESPONSES - 4
    run.drive(run.begin())
    run.each_once()


def test_it_ends_when_nothing_is_answered_any_more(run: Asked) -> None:
    with pytest.raises(UserError, match="tasks in a row were skipped.*the sandbox is away"):
        run.drive(run.begin(responses=20), status="set_aside", reason="the sandbox is away")


def test_answers_to_another_request_are_not_written(run: Asked) -> None:
    run.begin(kind="eval").round()
    run.drive(run.begin())
    assert {row["task_id"].partition("-")[0] for row in run.rows()} == {f"values{n}" for n in range(RESPONSES)}
    run.each_once()


def test_a_lost_task_is_sent_again(run: Asked) -> None:
    sampler, tasks = run.begin(), run.broker.key("tasks")
    sampler.round()
    entry, fields = run.broker.redis.xrange(tasks)[0]
    run.broker.redis.xdel(tasks, entry)
    sampler.lost.ids = [fields[b"id"].decode()]
    run.drive(sampler)
    run.each_once()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"task_id": "values0-a", "prompt_id": "a"}\n{"input": "x", "score": 1}\n', "line 2 is not an answer"),
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


def questions(kind: Kind, folder: Path, config: Config, data: str | None = None) -> list[tuple[Any, str]]:
    prompts = load_questions(config, Request(kind, 1, folder / "answers.jsonl", data), LOG)
    return [(prompts[i].prompt, prompts.source(i)) for i in range(len(prompts))]


def test_a_subset_is_read_with_the_settings_of_its_source(tmp_path: Path) -> None:
    (tmp_path / "subset.jsonl").write_text('{"question": "a?", "answer": "1"}\n')
    sums = {"name": "sums", "path": "gone.jsonl", "prompt_column": "question"}
    both = {"train": [sums, {"name": "words", "path": "also_gone.jsonl"}]}
    config = parse_config({"model": {"path": "none"}, "data": both})
    assert questions("values", tmp_path, config, f"sums={tmp_path / 'subset.jsonl'}") == [("a?", "sums")]
    for data in ("subset.jsonl", "sum=subset.jsonl"):
        with pytest.raises(UserError, match=r"data\.train has sums, words; name the one that it is a part of"):
            questions("values", tmp_path, config, data)


def test_an_evaluation_asks_the_first_of_each_source(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_prompts(tmp_path / f"{name}.jsonl", name, 5)
    heldout = [{"path": str(tmp_path / f"{name}.jsonl")} for name in ("a", "b")]
    tree = {"model": {"path": "none"}, "data": {"train": "gone.jsonl", "heldout": heldout}, "eval": {"limit": 2}}
    asked = questions("eval", tmp_path, parse_config(tree))
    assert asked == [("a 0", "a"), ("a 1", "a"), ("b 0", "b"), ("b 1", "b")]


def test_answers_name_the_groups_of_an_evaluation(run: Asked) -> None:
    lines = [json.dumps({"prompt": f"{i}?", "answer": i, "level": i % 2, "id": i}) for i in range(33)]
    run.path.with_name("train.jsonl").write_text("\n".join(lines))

    def by(column: str) -> Sampler:
        evaluated = run.config.eval.model_copy(update={"by_column": column})
        return run.begin("eval", 1, run.config.model_copy(update={"eval": evaluated}))

    run.drive(by("level"))
    assert {row["input"]: row["groups"] for row in run.rows()} == {f"{i}?": [f"level={i % 2}"] for i in range(33)}
    for column, words in (("levl", "no row of data.heldout; did you mean 'level'"), ("id", "33 different values in")):
        with pytest.raises(UserError, match=f"eval.by_column = '{column}' .*{words}"):
            by(column)


def first_majority(order: list[tuple[float, str]]) -> float:
    """Score of the first response with the most frequent answer; among equals, the answer that came first."""
    votes = Counter(answer for _, answer in order if answer)
    if not votes:
        return 0.0
    winner, _ = votes.most_common(1)[0]  # the first of those with most votes
    return next(score for score, answer in order if answer == winner)


@pytest.mark.parametrize("seed", range(5))
def test_maj_at_k_is_the_mean_over_all_orders(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    answers = rng.choice(["", "1", "2", "3"], n).tolist()
    scores = rng.integers(0, 2, n).astype(float).tolist()
    responses = list(zip(scores, answers, strict=True))
    expected = fmean(first_majority(list(order)) for order in itertools.permutations(responses))
    assert maj_at_k(scores, answers) == pytest.approx(expected)


def test_ties_count_half_and_missing_answers_do_not_vote() -> None:
    assert maj_at_k([1, 1, 0, 0], ["a", "a", "b", "b"]) == 0.5
    assert maj_at_k([1, 0, 0, 0], ["a", "", "", ""]) == 1.0
    assert maj_at_k([1, 1], ["", ""]) == 0.0, "there is no vote"
    assert maj_at_k([1, 0, 0], ["a", "a", "b"]) == 0.5, "the same answer, once in the wrong form"
    assert math.isnan(maj_at_k([], []))


@pytest.mark.parametrize("n", [1, 4, 6])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_response(n: int) -> None:
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
        assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_what_cannot_be_drawn(n: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {n} responses"):
        pass_at_k(n, correct, k)


@pytest.mark.parametrize(("n", "ks"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])])
def test_pass_at_k_is_given_for_powers_of_two_and_for_n(n: int, ks: list[int]) -> None:
    assert powers_of_two(n) == ks


ROWS = [
    Response(0, 1.0, "4"), Response(0, 0.0, "5"), Response(0, 0.0, "5"), Response(0, 0.5, ""),
    Response(1, 1.0, "7"), Response(1, 1.0, "7"), Response(1, None), Response(1, 0.0, "8"),
]  # fmt: skip


def test_a_summary_is_a_mean_and_counts_what_was_skipped() -> None:
    assert summarize(ROWS, samples=4) == pytest.approx(
        {
            "accuracy": 3 / 7,
            "reward": 3.5 / 7,
            "samples": 7,
            "set_aside": 1,
            "avg@4": (1 / 4 + 2 / 3) / 2,
            "maj@4": (0 + 1) / 2,
            "pass@1": (1 / 4 + 2 / 3) / 2,
            "pass@2": (1 / 2 + 1) / 2,
            "pass@4": 1.0,  # of the prompt with four responses
        }
    )
    assert summarize(ROWS[:1], samples=1) == {"accuracy": 1.0, "reward": 1.0, "samples": 1.0, "set_aside": 0.0}
    lenient = summarize(ROWS, samples=4, right_from=0.5)
    assert (lenient["accuracy"], lenient["reward"], lenient["pass@4"]) == (4 / 7, 3.5 / 7, 1.0)
    unnamed = summarize([Response(0, 1.0), Response(0, 1.0)], samples=2)
    assert (unnamed["avg@2"], math.isnan(unnamed["maj@2"])) == (1.0, True), "there is nothing to vote on"
    nothing = summarize([Response(0, None)], samples=2)
    assert (nothing.pop("samples"), nothing.pop("set_aside")) == (0.0, 1.0)
    assert len(nothing) == 6
    assert all(map(math.isnan, nothing.values()))


def test_groups_have_figures_of_their_own() -> None:
    figures = summarize_groups(ROWS, [["easy"]] * 4 + [["hard", "level=3"]] * 4, samples=4)
    expected = summarize(ROWS, samples=4)
    for group, rows in (("easy", ROWS[:4]), ("hard", ROWS[4:]), ("level=3", ROWS[4:])):
        expected |= {f"{group}/{name}": value for name, value in summarize(rows, samples=4).items()}
    assert figures == pytest.approx(expected, nan_ok=True)
