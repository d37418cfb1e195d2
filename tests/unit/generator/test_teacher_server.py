"""A teacher behind a URL: what its server answers becomes scores, or one line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from common.config import parse_config
from common.errors import UserError
from common.log import get_logger
from generator.chat_api import ChatUnavailable, ModelApi
from generator.teacher.scores import Scores
from generator.teacher.server import PROBE, ServerScorer
from launcher.quickstart.tiny_model import build_tokenizer
from tests.support.http_double import Double, Handler, raw, serve

pytestmark = pytest.mark.integration  # it imports transformers

IDS = np.array([5, 6, 7], np.int32)
Answer = Callable[[Handler, Any], None]


def gives(value: Any, status: int = 200) -> Answer:
    return lambda handler, body: raw(handler, json.dumps(value).encode(), status)


def places(*rows: dict[str, tuple[float, int]] | None) -> Answer:
    """An answer of vLLM's: in each place, log-prob and rank by id."""
    shown = [
        None
        if row is None
        else {key: {"logprob": logprob, "rank": rank, "decoded_token": "x"} for key, (logprob, rank) in row.items()}
        for row in rows
    ]
    return gives({"choices": [{"text": "", "prompt_logprobs": shown}]})


def score(double: Double, top_k: int = 0) -> Scores:
    async def scene() -> Scores:
        scorer = ServerScorer(ModelApi(f"{double.url}/v1", attempts=2, backoff=0.0), "large")
        try:
            return await scorer.score(IDS, top_k)
        finally:
            await scorer.close()

    return asyncio.run(scene())


def test_the_tokens_own_scores_are_asked_for_and_read() -> None:
    with serve(places(None, {"6": (-1.5, 9)}, {"7": (-2.5, 1)})) as double:
        scores = score(double)
    assert double.requests == [{"model": "large", "prompt": [5, 6, 7], "max_tokens": 1, "prompt_logprobs": 0}]
    assert scores.logprobs.tolist() == [[0.0], [-1.5], [-2.5]]
    assert scores.ids.shape == (3, 0)


def test_the_likeliest_are_read_by_rank_and_the_token_itself_is_left_out() -> None:
    second = {"6": (-9.0, 80), "3": (-0.1, 1), "150000": (-2.0, 2)}
    third = {"7": (-1.0, 2), "4": (-0.5, 1)}
    with serve(places(None, second, third)) as double:
        scores = score(double, top_k=2)
    assert scores.ids[1:].tolist() == [[3, 150000], [4, 7]]
    assert np.allclose(scores.logprobs[1:], [[-0.1, -2.0], [-0.5, -1.0]])


@pytest.mark.parametrize(
    ("answer", "top_k", "words"),
    [
        (gives({"choices": [{"text": "4"}]}), 0, "no prompt_logprobs, which teachers need"),
        (gives({"choices": [{"prompt_logprobs": None}]}), 0, "no prompt_logprobs"),
        (gives([]), 0, "no prompt_logprobs"),
        (lambda handler, body: raw(handler, b"<html>"), 0, "not JSON: <html>"),
        (places(None, {"6": (-1.0, 1)}), 0, "scored 2 of 3 tokens"),
        (places(None, {"6": (-1.0, 1)}, {"8": (-1.0, 1)}), 0, "no prompt_logprobs"),
        (places(None, {"6": (-1.0, 1)}, {"7": (-1.0, 1)}), 2, "fewer than the 2 likeliest"),
        (gives({"error": "too long"}, 400), 0, "HTTP 400: .*too long"),
        (gives({"error": "busy"}, 503), 0, "HTTP 503"),
    ],
)
def test_answers_without_scores_are_one_line(answer: Answer, top_k: int, words: str) -> None:
    with serve(answer) as double, pytest.raises(ChatUnavailable, match=words) as caught:
        score(double, top_k)
    assert "\n" not in str(caught.value)


@pytest.fixture
def policy(tmp_path: Path) -> str:
    build_tokenizer().save_pretrained(tmp_path / "policy")
    return str(tmp_path / "policy")


def start(policy: str, double: Double) -> None:
    teacher = {"url": f"{double.url}/v1", "url_model": "large"}
    config = parse_config({"model": {"path": policy}, "data": {"train": "t"}, "teacher": teacher})

    async def scene() -> None:
        await (await ServerScorer.start(config, config.teacher, get_logger())).close()

    asyncio.run(scene())


def test_a_server_with_the_policys_tokens_is_taken(policy: str) -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer.encode(PROBE + "".join(tokenizer.all_special_tokens), add_special_tokens=False)
    with serve(gives({"tokens": ids})) as double, capture_logs() as logs:
        start(policy, double)
    assert logs == []
    ids[7] += 1
    before = tokenizer.decode(ids[:7])[-20:]
    words = rf"after {before!r} the policy's next token is {ids[7] - 1} \(.*\) and the teacher's {ids[7]}$"
    with serve(gives({"tokens": ids})) as double, pytest.raises(UserError, match=words):
        start(policy, double)
    with serve(gives({"tokens": ids[:7]})) as double, pytest.raises(UserError, match="and the teacher's nothing"):
        start(policy, double)


def test_a_server_that_cannot_tokenize_is_taken_with_a_warning(policy: str) -> None:
    with serve(gives({"detail": "Not Found"}, 404)) as double, capture_logs() as logs:
        start(policy, double)
    assert [line["log_level"] for line in logs] == ["warning"]
    with serve(gives({"error": "wrong key"}, 401)) as double, pytest.raises(UserError, match="teacher.url.*HTTP 401"):
        start(policy, double)
