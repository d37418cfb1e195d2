"""A language model plays the user, behind a real vLLM server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from generator.chat_api import ChatApi, ChatUnavailable
from generator.users import conversation
from generator.users.llm import LlmUser
from launcher.quickstart.tiny_model import build_tokenizer
from tests.support.chat_server import chat_server
from tests.support.engine import save_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = [{"role": "user", "content": "2+2?"}]
# Random weights say anything, also nothing; these say 4.
FOUR = {"logit_bias": {build_tokenizer().encode("4")[0]: 100}}


async def ask_many(url: str) -> list[str]:
    api = ChatApi(url, "tiny", concurrency=8)
    try:
        return await asyncio.gather(*(api.complete(PROMPT, max_tokens=3, **FOUR) for _ in range(16)))
    finally:
        await api.close()


async def ask_for_another_model(url: str) -> None:
    api = ChatApi(url, "large")
    try:
        await api.complete(PROMPT)
    finally:
        await api.close()


async def converse(url: str) -> list[str]:
    """The user's texts to an assistant that repeats itself."""
    user = LlmUser(base_url=url, model="tiny", persona="You like numbers.", max_tokens=3, max_turns=3, parameters=FOUR)
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


def test_a_model_behind_vllm_plays_the_user(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, seed=0)
    with chat_server(tmp_path, "tiny") as url:
        assert asyncio.run(ask_many(url)) == ["444"] * 16
        with pytest.raises(ChatUnavailable, match="HTTP 404: .*large"):
            asyncio.run(ask_for_another_model(url))
        assert asyncio.run(converse(url)) == ["444"] * 3
