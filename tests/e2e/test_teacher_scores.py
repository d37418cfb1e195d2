"""Models behind real vLLM: scores of a teacher are the model's at the policy's temperature; one plays the user."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from common.config import Config, parse_config
from common.log import get_logger
from common.payload import Payload
from generator.chat_api import ChatApi
from generator.teacher.server import start_servers
from generator.users import conversation
from generator.users.llm import LlmUser
from launcher.layout.layout import Choice, lay_out
from launcher.quickstart.tiny_model import build_tokenizer
from launcher.run.supervisor import Supervisor
from launcher.run.teacher_servers import start_teachers
from tests.support.chat_server import chat_server
from tests.support.engine import MAX_MODEL_LEN, random_prompt, reference_logprobs, save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOLERANCE = 1e-4  # largest difference of log-probs in float32
SILENT: Any = SimpleNamespace(status=lambda **_: None)  # a generator's presence
NOTHING: Any = (None, None, None)  # a server looks at an episode's payload alone


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


def taught(config: Config, payloads: Sequence[Payload], top_ks: Sequence[int]) -> list[list[Payload]]:
    """The payloads with the scores of the configuration's only teacher, for each K."""

    async def ask(top_k: int) -> list[Payload]:
        changed = config.model_copy(update={"teacher": config.teacher.model_copy(update={"top_k": top_k})})
        ((_, server),) = (await start_servers(changed, SILENT, get_logger())).items()
        try:
            return list(await asyncio.gather(*(server.taught(*NOTHING, payload) for payload in payloads)))
        finally:
            await server.close()

    async def scene() -> list[list[Payload]]:
        return [await ask(top_k) for top_k in top_ks]

    return asyncio.run(scene())


@contextmanager
def served(config: Config) -> Iterator[None]:
    """The teachers that `spo run` would start, until the end of the block; one that dies fails the test."""
    supervisor = Supervisor(config.run.folder / "logs", get_logger(), max_restarts=0)
    try:
        start_teachers(config, lay_out(config, Choice(1)), supervisor)
        while not is_ready(config):
            supervisor.poll()
            time.sleep(0.5)
        yield
    finally:
        supervisor.stop(grace=0.0)


def is_ready(config: Config) -> bool:
    """Whether the first teacher's server answers."""
    socket = str(config.teacher_socket(*config.served_teachers()).resolve())
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=socket)) as client:
            return client.get("http://localhost/health").status_code == 200
    except httpx.TransportError:
        return False


@torch.no_grad()
def likeliest(model: PreTrainedModel, payload: Payload, k: int, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probs [M, k] by transformers."""
    logits = model(torch.as_tensor(payload.token_ids, dtype=torch.long)[None]).logits[0, :-1].float()
    top = (logits / temperature).log_softmax(-1).topk(k)
    mask = payload.mask()[1:]
    return top.indices.numpy()[mask], top.values.numpy()[mask]


def test_a_served_models_scores_are_at_the_policys_temperature(tmp_path: Path, models: PreTrainedModel) -> None:
    temperature = 0.7
    teacher = {"model": str(tmp_path / "teacher"), "top_k": 30, "form": "loss"}  # more than vLLM's default allows
    config = run_config(tmp_path, temperature, teacher=teacher)
    payloads = [episode(0), episode(1, MAX_MODEL_LEN)]
    with served(config):
        own, top = taught(config, payloads, [0, 30])
    for payload, one, more in zip(payloads, own, top, strict=True):
        assert np.abs(one.teacher_logprobs[:, 0] - expected(models, payload, temperature)).max() < TOLERANCE
        ids, logprobs = likeliest(models, payload, 30, temperature)
        assert (more.teacher_ids == ids).all()
        assert np.abs(more.teacher_logprobs - logprobs).max() < TOLERANCE


PROMPT = [{"role": "user", "content": "2+2?"}]
# Random weights say anything, also nothing; these say 4.
FOUR = {"logit_bias": {build_tokenizer().encode("4")[0]: 100}}


async def ask_many(url: str) -> list[str]:
    api = ChatApi(url, "large", concurrency=8)
    try:
        return await asyncio.gather(*(api.complete(PROMPT, max_tokens=3, **FOUR) for _ in range(16)))
    finally:
        await api.close()


async def converse(url: str) -> list[str]:
    """The user's texts to an assistant that repeats itself."""
    user = LlmUser(base_url=url, model="large", persona="You like numbers.", max_tokens=3, max_turns=3, parameters=FOUR)
    messages, texts = list(PROMPT), []
    async with conversation(user, "e", row={"goal": "to know what 2+2 is"}, answer="4", messages=PROMPT) as talking:
        while True:
            messages.append({"role": "assistant", "content": "4"})
            turn = await talking.respond(messages)
            if turn.stop:
                await user.close()
                return texts
            messages.append({"role": "user", "content": turn.text})
            texts.append(turn.text)


def test_a_server_of_vllm_scores_and_plays_the_user(tmp_path: Path, models: PreTrainedModel) -> None:
    payload = episode(2)
    with chat_server(tmp_path / "teacher", "large") as url:
        ((own,), (top,)) = taught(run_config(tmp_path, teacher={"url": url}), [payload], [0, 5])
        assert asyncio.run(ask_many(url)) == ["444"] * 16
        assert asyncio.run(converse(url)) == ["444"] * 3
    assert np.abs(own.teacher_logprobs[:, 0] - expected(models, payload)).max() < TOLERANCE
    ids, logprobs = likeliest(models, payload, 5, 1.0)
    assert (top.teacher_ids == ids).all()
    assert np.abs(top.teacher_logprobs - logprobs).max() < TOLERANCE
