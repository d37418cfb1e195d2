"""Teachers on real vLLM: their scores are the model's at the policy's temperature, and arrive once after a kill."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import PreTrainedModel

from common.config import Config, parse_config
from common.errors import UserError
from common.log import get_logger
from common.payload import Payload
from common.streams import scoring
from common.streams.broker import Broker
from common.streams.inbox import Finished
from common.streams.ledger import SamplerLedger
from common.streams.tasks import TaskInbox
from generator.teacher.model import ModelScorer
from generator.teacher.scores import Scorer, with_scores
from generator.teacher.server import ServerScorer
from tests.conftest import RedisServer
from tests.support.chat_server import chat_server
from tests.support.engine import MAX_MODEL_LEN, random_prompt, reference_logprobs, save_tiny_model
from tests.support.streams import dispatch, finished
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOLERANCE = 1e-4  # largest difference of log-probs in float32
EPISODES = 60


def run_config(folder: Path, temperature: float = 1.0, **sections: Any) -> Config:
    """A run whose policy and teacher are tiny models of the same vocabulary."""
    base: dict[str, Any] = {
        "run": {"name": "test", "output_dir": str(folder / "runs")},
        "model": {"path": str(folder / "policy"), "dtype": "float32", "max_model_len": MAX_MODEL_LEN},
        "data": {"train": "none.jsonl", "max_prompt_tokens": 64},
        "generator": {"temperature": temperature},
        "sampler": {"drift": {"mode": "ledger"}},
        "teacher": {"model": str(folder / "teacher"), "max_concurrency": 4},
    }
    return parse_config(base | sections)


@pytest.fixture
def models(tmp_path: Path) -> PreTrainedModel:
    """The teacher, with transformers; both models are on the disk."""
    save_tiny_model(tmp_path / "policy", seed=0)
    return save_tiny_model(tmp_path / "teacher", seed=1)


def episode(number: int, length: int = 300) -> Payload:
    """Random bytes, of which the model sampled two spans."""
    sampled = length - 40 - 20
    return Payload(
        np.asarray(random_prompt(number, length), np.int32),
        np.array([[40, 100], [120, length]], np.int32),
        np.full(sampled, -1.0, np.float32),
        np.array([[0, 0, sampled]], np.int32),
    )


def expected(model: PreTrainedModel, payload: Payload, temperature: float = 1.0) -> np.ndarray:
    return reference_logprobs(model, payload.token_ids, temperature)[payload.mask()]


def with_scorer(config: Config, kind: Any, act: Callable[[Scorer], Any]) -> Any:
    async def scene() -> Any:
        torch.set_num_threads(1)
        scorer = await kind.start(config, config.teacher, get_logger())
        try:
            return await act(scorer)
        finally:
            await scorer.close()

    return asyncio.run(scene())


@torch.no_grad()
def likeliest(model: PreTrainedModel, payload: Payload, k: int, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probs [M, k] by transformers."""
    logits = model(torch.as_tensor(payload.token_ids, dtype=torch.long)[None]).logits[0, :-1].float()
    top = (logits / temperature).log_softmax(-1).topk(k)
    mask = payload.mask()[1:]
    return top.indices.numpy()[mask], top.values.numpy()[mask]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_models_scores_are_at_the_policys_temperature(
    tmp_path: Path, models: PreTrainedModel, temperature: float
) -> None:
    teacher = {"model": str(tmp_path / "teacher"), "top_k": 30, "form": "loss"}  # more than vLLM's default allows
    config = run_config(tmp_path, temperature, teacher=teacher)
    payloads = [episode(0), episode(1, MAX_MODEL_LEN)]

    async def score(scorer: Scorer) -> list[Payload]:
        return [await with_scores(payload, scorer, k) for payload in payloads for k in (0, 30)]

    scored = with_scorer(config, ModelScorer, score)
    for payload, own, top in zip(payloads, scored[::2], scored[1::2], strict=True):
        assert np.abs(own.teacher_logprobs[:, 0] - expected(models, payload, temperature)).max() < TOLERANCE
        ids, logprobs = likeliest(models, payload, 30, temperature)
        assert (top.teacher_ids == ids).all()
        assert np.abs(top.teacher_logprobs - logprobs).max() < TOLERANCE


def test_a_servers_scores_are_the_models(tmp_path: Path, models: PreTrainedModel) -> None:
    payload = episode(2)

    async def score(scorer: Scorer) -> list[Payload]:
        return [await with_scores(payload, scorer, k) for k in (0, 5)]

    with chat_server(tmp_path / "teacher", "large") as url:
        own, top = with_scorer(run_config(tmp_path, teacher={"url": url}), ServerScorer, score)
    assert np.abs(own.teacher_logprobs[:, 0] - expected(models, payload)).max() < TOLERANCE
    ids, logprobs = likeliest(models, payload, 5, 1.0)
    assert (top.teacher_ids == ids).all()
    assert np.abs(top.teacher_logprobs - logprobs).max() < TOLERANCE


def test_a_teacher_that_vllm_refuses_is_named(tmp_path: Path, models: PreTrainedModel) -> None:
    for teacher, words in (
        ({"engine": {"dtype": "float32"}}, "teacher.engine: set teacher.dtype instead of dtype"),
        ({"engine": {"max_num_seqs": 0}}, "vLLM cannot run teacher.model = "),
    ):
        config = run_config(tmp_path, teacher={"model": str(tmp_path / "teacher")} | teacher)
        with pytest.raises(UserError, match=words):
            with_scorer(config, ModelScorer, None)  # type: ignore[arg-type]


@contextmanager
def teacher_process(file: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """`spo-teacher`, which the end of the block kills with all that it has started."""
    command = [sys.executable, "-m", "generator.teacher.cli", "-c", str(file), "--name", name]
    process = subprocess.Popen(command, start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def freeze_with_leases(process: subprocess.Popen[bytes], held: Callable[[], int]) -> int:
    """Stop a process in the middle of its work; returns how many episodes it has leased."""
    while True:
        eventually(held)
        os.kill(process.pid, signal.SIGSTOP)
        if leases := held():
            return leases
        os.kill(process.pid, signal.SIGCONT)


def test_a_killed_teachers_episodes_arrive_once_with_their_scores(
    tmp_path: Path, models: PreTrainedModel, real_broker: Broker, redis_server: RedisServer
) -> None:
    config = run_config(tmp_path, broker={"url": redis_server.url, "dead_after": 2})
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", by_alias=True)))
    (teacher,) = scoring.teachers(config)
    ledger = SamplerLedger(real_broker, "sampler")
    ledger.acquire()
    dispatch(ledger, EPISODES)
    generator = TaskInbox(real_broker, "generator")
    payloads = {}
    for number, delivery in enumerate(generator.take(EPISODES, 0)):
        payloads[delivery.task.task_id] = payload = episode(number)
        generator.finish([Finished(delivery.entry_id, finished(delivery).header, payload, teacher=teacher)])
    key = real_broker.key(scoring.stream(teacher))

    def held() -> int:
        groups = real_broker.redis.xinfo_groups(key)
        return int(groups[0]["pending"]) if groups else 0

    with teacher_process(file, "killed") as killed:
        lost = freeze_with_leases(killed, held)
    assert lost > 0
    assert ledger.arrived() < EPISODES
    with teacher_process(file, "heir") as heir:
        eventually(lambda: ledger.arrived() == EPISODES)
        real_broker.finish()
        assert heir.wait(600) == 0
    arrived = [header.task_id for _, header in ledger.read(block_ms=0)]
    assert sorted(arrived) == sorted(payloads)
    for task_id, stored in zip(payloads, real_broker.payloads("payload", list(payloads)), strict=True):
        assert stored is not None
        assert np.abs(stored.teacher_logprobs[:, 0] - expected(models, payloads[task_id])).max() < TOLERANCE
    assert real_broker.redis.xlen(key) == held() == 0
    assert real_broker.counters()["finished_twice"] == 0
