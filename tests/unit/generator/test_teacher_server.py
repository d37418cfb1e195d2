"""A teacher's server: its vocabulary, its scores or one line, and a generator that hands no episode in without them."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from common.config import Config, parse_config
from common.errors import UserError
from common.log import get_logger
from common.messages import InvalidMessage
from common.payload import Payload
from common.streams import dead
from common.streams.broker import Broker
from common.streams.tasks import TaskInbox
from generator.chat_api import ChatUnavailable, ModelApi
from generator.teacher.server import PROBE, TeacherServer, WrongScores, start_servers
from generator.teacher.vocabulary import check_vocabulary
from launcher.quickstart.tiny_model import build_tokenizer
from tests.support.event_loop import used
from tests.support.generator import Rig, evaluate, one
from tests.support.http_double import Double, fails, raw, serve
from tests.support.streams import payload
from tests.support.teacher import Answer, by_id, gives, places
from tests.support.waiting import until

pytestmark = pytest.mark.integration  # it imports transformers, and listens on ports

IDS = np.array([5, 6, 7], np.int32)


def asked(double: Double, act: Callable[[TeacherServer], Awaitable[Any]], top_k: int = 0, **connection: Any) -> Any:
    url = double.url if double.url.startswith("unix:") else f"{double.url}/v1"
    connection = {"attempts": 2, "backoff": 0.0} | connection
    return used(lambda: TeacherServer(ModelApi(url, **connection), "large", top_k), act)


def score(double: Double, top_k: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return asked(double, lambda server: server.logprobs(IDS), top_k)


def taught(double: Double, payload: Payload, **connection: Any) -> Payload:
    nothing: Any = None  # a server looks at an episode's payload alone
    return asked(double, lambda server: server.taught(nothing, nothing, nothing, payload), **connection)


def test_the_tokens_own_scores_or_the_likeliest_are_read() -> None:
    with serve(places(None, {"6": (-1.5, 9)}, {"7": (-2.5, 1)})) as double:
        logprobs, ids = score(double)
    assert double.requests == [{"model": "large", "prompt": [5, 6, 7], "max_tokens": 1, "prompt_logprobs": 0}]
    assert (logprobs.tolist(), ids.shape) == ([[0.0], [-1.5], [-2.5]], (3, 0))
    # By rank, without the token itself.
    second = {"6": (-9.0, 80), "3": (-0.1, 1), "150000": (-2.0, 2)}
    third = {"7": (-1.0, 2), "4": (-0.5, 1)}
    with serve(places(None, second, third)) as double:
        logprobs, ids = score(double, top_k=2)
    assert ids[1:].tolist() == [[3, 150000], [4, 7]]
    assert np.allclose(logprobs[1:], [[-0.1, -2.0], [-0.5, -1.0]])


@pytest.mark.parametrize(
    ("answer", "top_k", "words"),
    [
        (gives({"choices": [{"text": "4"}]}), 0, "no prompt_logprobs, which teachers need"),
        (lambda handler, body: raw(handler, b"<html>"), 0, "no prompt_logprobs.*<html>"),
        (places(None, {"6": (-1.0, 1)}), 0, "scored 2 of 3 tokens"),
        (places(None, {"6": (-1.0, 1)}, {"7": (-1.0, 1)}), 2, "fewer than the 2 likeliest"),
        (gives({"error": "too long"}, 400), 0, "HTTP 400: .*too long"),
    ],
)
def test_answers_without_scores_are_one_line_and_not_asked_for_again(answer: Answer, top_k: int, words: str) -> None:
    with serve(answer) as double, pytest.raises((WrongScores, ChatUnavailable), match=words) as caught:
        score(double, top_k)
    assert "\n" not in str(caught.value)
    assert len(double.requests) == 1


def test_rows_are_scored_apart_and_only_as_far_as_the_model_spoke(tmp_path: Path) -> None:
    payload = Payload(
        np.arange(20, dtype=np.int32),
        np.array([[2, 4], [13, 15], [16, 18]], np.int32),
        np.full(6, -1.0, np.float32),
        np.array([[0, 0, 6]], np.int32),
        np.array([6, 4, 10], np.int32),
    )
    with serve(by_id, socket=tmp_path / "teacher.sock") as double:
        scored = taught(double, payload)
    assert [len(request["prompt"]) for request in double.requests] == [4, 8]
    assert scored.teacher_logprobs.ravel().tolist() == [-2, -3, -13, -14, -16, -17]
    assert scored.logprobs is payload.logprobs
    silent = Payload(np.arange(4, dtype=np.int32), *(np.empty(shape, np.int32) for shape in ((0, 2), 0, (0, 3))))
    with serve(by_id) as double:
        assert taught(double, silent) is silent
    assert double.requests == []


@pytest.mark.parametrize("score", [math.nan, 7.0])
def test_numbers_that_are_no_log_probs_are_refused(score: float) -> None:
    answer = places(None, *({str(one): (score, 1)} for one in range(1, 10)))
    with serve(answer) as double, pytest.raises(InvalidMessage, match="a teacher's log-probs"):
        taught(double, payload())


def test_a_server_that_is_down_is_asked_again_until_it_is_back() -> None:
    with serve(fails(503), fails(503), fails(503), by_id) as double:
        assert taught(double, payload(), attempts=sys.maxsize, seconds=60.0).teacher_logprobs.shape == (6, 1)
    with serve(fails(503)) as double, pytest.raises(ChatUnavailable, match="no result in .* attempts; last: HTTP 503"):
        taught(double, payload(), attempts=sys.maxsize, backoff=0.2, seconds=0.1)


def test_each_source_has_its_teachers_server_and_equal_teachers_share_one(policy: str, tmp_path: Path) -> None:
    sources: list[dict[str, Any]] = [{"path": name, "name": name} for name in "abcd"]
    with serve(gives({"tokens": tokens_of_probe()})) as one, serve(gives({"tokens": tokens_of_probe()})) as other:
        sources[1]["teacher"] = {"url": f"{other.url}/v1"}
        sources[2]["teacher"] = {"model": None}
        sources[3]["teacher"] = {"context": "{answer}"}
        teacher = {"url": f"{one.url}/v1", "url_model": "large"}
        train = [*sources, {"path": "e"}]
        config = parse_config({"model": {"path": policy}, "data": {"train": train}, "teacher": teacher})
        assert started(config) == {"a", "b"}
        assert started(config.model_copy(update={"run": config.run.model_copy(update={"steps": 0})})) == set()


@pytest.fixture
def policy(tmp_path: Path) -> str:
    build_tokenizer().save_pretrained(tmp_path / "policy")
    return str(tmp_path / "policy")


def tokens_of_probe() -> list[int]:
    tokenizer = build_tokenizer()
    return list(tokenizer.encode(PROBE + "".join(tokenizer.all_special_tokens), add_special_tokens=False))


def started(config: Config) -> set[str]:
    async def scene() -> set[str]:
        servers = await start_servers(config, SimpleNamespace(status=lambda **_: None), get_logger())  # type: ignore[arg-type]
        for server in servers.values():
            await server.close()
        return set(servers)

    return asyncio.run(scene())


def start(policy: str, double: Double, **teacher: Any) -> None:
    section = {"url": f"{double.url}/v1", "url_model": "large"} | teacher
    started(parse_config({"model": {"path": policy}, "data": {"train": "t"}, "teacher": section}))


def test_a_server_with_the_policys_tokens_is_taken(policy: str) -> None:
    tokenizer, ids = build_tokenizer(), tokens_of_probe()
    with serve(gives({"tokens": ids})) as double, capture_logs() as logs:
        start(policy, double)
    assert {line["log_level"] for line in logs} == {"info"}
    ids[7] += 1
    before = tokenizer.decode(ids[:7])[-20:]
    words = rf"after {before!r} the policy's next token is {ids[7] - 1} \(.*\) and the teacher's {ids[7]}$"
    with serve(gives({"tokens": ids})) as double, pytest.raises(UserError, match=words):
        start(policy, double)
    with serve(gives({"tokens": ids[:7]})) as double, pytest.raises(UserError, match="and the teacher's nothing"):
        start(policy, double)
    with serve(gives({"detail": "Not Found"}, 404)) as double, capture_logs() as logs:
        start(policy, double)
    assert [line["log_level"] for line in logs] == ["info", "warning"]
    with serve(gives({"error": "wrong key"}, 401)) as double, pytest.raises(UserError, match="teacher.url.*HTTP 401"):
        start(policy, double)
    with pytest.raises(UserError, match=r"teacher.model = 'large' is served by `spo run`.*set teacher.url$"):
        start(policy, double, url=None, url_model=None, model="large")


def test_the_first_token_that_differs_is_named_and_a_larger_vocabulary_fits(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    small, large, other = (str(tmp_path / name) for name in ("small", "large", "other"))
    for folder in (small, other):
        tokenizer.save_pretrained(folder)
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace("<tool_response>", "<result>"), encoding="utf-8")
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(large)
    check_vocabulary(small, small, False)
    check_vocabulary(small, large, False)
    last, first = len(build_tokenizer()), tokenizer.encode("<tool_response>\n")[0]
    with pytest.raises(UserError, match=f"token {last} is '<one>' for the policy and no token for the teacher"):
        check_vocabulary(large, small, False)
    with pytest.raises(UserError, match=rf"token {first} is .*tool_response.* for the policy and .*result.* for the"):
        check_vocabulary(small, other, False)
    with pytest.raises(UserError, match=r"^teacher.model = '.*nothing': its tokenizer cannot be read: [^\n]+$"):
        check_vocabulary(small, str(tmp_path / "nothing"), False)


@contextmanager
def generator_taught_by(broker: Broker, *answers: Answer, source: str = "t") -> Iterator[tuple[Rig, Double]]:
    """A generator of a run whose teacher's server answers so, and is asked once a time."""
    with serve(*answers) as double:
        server = TeacherServer(ModelApi(f"{double.url}/v1", attempts=1), "large", 0)
        yield Rig(broker, teachers={source: server}, teacher={"url": f"{double.url}/v1"}), double


def holding(released: threading.Event) -> Answer:
    return lambda handler, body: released.wait() and by_id(handler, body)


def stored(broker: Broker) -> list[Payload | None]:
    return broker.payloads("payload", ["t0", "t1", "t2"])


def test_each_training_episode_arrives_with_its_scores_and_no_other_is_scored(fake_broker: Broker) -> None:
    async def story(rig: Rig) -> Any:
        evaluate(rig, "e0", 2)
        rig.dispatch(3)
        return await rig.headers(5)

    with generator_taught_by(fake_broker, by_id) as (rig, double):
        headers = rig.play(story)
    assert ([header.status for header in headers], len(double.requests)) == (["ok"] * 5, 3)
    for tokens in stored(fake_broker):
        assert tokens is not None
        assert tokens.teacher_logprobs.ravel().tolist() == [-float(one) for one in tokens.token_ids[tokens.mask()]]


@pytest.mark.parametrize(("answers", "status"), [((fails(503), by_id), "ok"), ((fails(503),), "set_aside")])
def test_an_attempt_without_scores_is_repeated_and_counts_once(fake_broker, answers, status) -> None:
    with generator_taught_by(fake_broker, *answers) as (rig, double):
        header = one(rig)
    assert (header.status, len(double.requests)) == (status, 2)
    assert header.model_tokens > 0
    if status == "ok":
        assert (rig.generator.metrics.failed, fake_broker.counters()["finished"]) == (1, 1)
        return
    assert header.reason.startswith("ChatUnavailable: ")
    assert stored(fake_broker) == [None] * 3
    ((_, letter),) = dead.list_dead(fake_broker)
    assert letter["stream"] == "tasks"


def test_an_episode_that_waits_for_scores_leaves_its_slot_to_others(fake_broker: Broker) -> None:
    released = threading.Event()

    async def story(rig: Rig) -> Any:
        rig.dispatch(6)  # of which four may be under way
        await until(lambda: rig.engine.calls == 6)
        await until(lambda: sum(lease.awaits_scores for lease in rig.generator.leased) == 6)
        assert (rig.generator.slots_taken, rig.generator.room()) == (0, 4)
        released.set()
        return await rig.headers(6)

    with generator_taught_by(fake_broker, holding(released)) as (rig, _):
        assert len(rig.play(story)) == 6


def test_a_stop_hands_back_what_waits_for_scores(fake_broker: Broker) -> None:
    released = threading.Event()

    async def story(rig: Rig) -> None:
        rig.dispatch(2)
        await until(lambda: sum(lease.awaits_scores for lease in rig.generator.leased) == 2)

    with generator_taught_by(fake_broker, holding(released)) as (rig, _):
        try:
            rig.play(story)
        finally:
            released.set()
    deliveries = TaskInbox(fake_broker, "two").take(5, 0)
    assert sorted((one.task.task_id, one.attempt) for one in deliveries) == [("t0", 1), ("t1", 1)]
