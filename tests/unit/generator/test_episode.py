"""An episode's rows, record, parts and tags, and drift of a previous response."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
import structlog

from common.config import Config
from common.errors import UserError
from common.messages import Task
from common.payload import Payload, decode_payload, encode_payload, open_record
from generator.episode import parts as module
from generator.episode.episode import Episode, TokenRow, Transcript, make_record
from generator.episode.parts import RunParts, UnknownSource
from generator.task_runner import TaskRunner, _counts, drift, rescore
from launcher.audit.rewards import outcomes
from launcher.quickstart.tiny_model import build_tokenizer
from sampler.prompts.prompt_set import Prompt
from tests.support.episode import TEMPLATE, TOKENIZER, ScriptedEngine, completion, configured
from tests.support.event_loop import in_event_loop
from tests.support.golden import GOLDEN
from tests.support.process_sandbox import ProcessSandbox


def row(prompt: str, *turns: tuple[str, int]) -> TokenRow:
    """Turns (text, weight version) that follow one another; before each but the first, a tool said `x`."""
    made = TokenRow(np.asarray(TOKENIZER.encode(prompt), np.int32))
    for number, (text, version) in enumerate(turns):
        if number:
            made.append(np.asarray(TOKENIZER.encode("x"), np.int32))
        made.extend(completion(TOKENIZER.encode(text), version=version))
    return made


def test_rows_of_an_episode_are_sent_one_after_another() -> None:
    episode = Episode([row("1+1", ("2", 3), ("3", 4)), row("2+2", ("4", 4))], Transcript([]))
    payload = decode_payload(encode_payload(episode.payload()))
    assert payload.row_lengths.tolist() == [6, 4] == episode.row_tokens
    assert payload.model_spans.tolist() == [[3, 4], [5, 6], [9, 10]]
    assert payload.versions().tolist() == [3, 4, 4]
    for part, alone in zip(payload.rows(), episode.rows, strict=True):
        whole = Episode([alone], Transcript([])).payload()
        for name in ("token_ids", "model_spans", "logprobs", "version_spans", "row_lengths"):
            np.testing.assert_array_equal(getattr(part, name), getattr(whole, name))
    counts = _counts(episode)
    assert (counts["tokens"], counts["row_tokens"], counts["model_tokens"], counts["turns"]) == (10, [6, 4], 3, 3)
    task = Task(task_id="t", prompt_id="p", prompt="1+1", keep=True)
    record = json.loads(open_record(make_record(task, episode, TEMPLATE)))
    assert (record["row_lengths"], record["output"]) == ([6, 4], "2x3\n4")


@in_event_loop
async def test_reward_record_and_audit_see_the_tags_that_the_template_opened() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template += "{%- if add_generation_prompt -%}{{ '<think>\n' }}{%- endif -%}"
    engine: Any = ScriptedEngine("two</think>2<|im_end|>", tokenizer=tokenizer)
    config = configured(reward="format", reward_options={"format": {"tags": ["<think>", "</think>"]}})
    parts = RunParts(config)
    tasks = TaskRunner(config, engine, parts, "g", structlog.get_logger())
    task = Task(task_id="t", prompt_id="p", prompt="What is 1+1?", keep=True)
    try:
        header, _ = await (await tasks.begin(task)).run()
    finally:
        await parts.close()
    assert header.record is not None
    record = json.loads(open_record(header.record))
    assert (header.reward, record["opened"], record["output"]) == (1, "<think>\n", "two</think>2<|im_end|>")
    line = record | {"reason": header.reason, "model_tokens": header.model_tokens, "turn_rewards": []}
    (outcome,) = outcomes(line, Prompt(task.prompt, None, {}), config, None)
    assert outcome.opened == "<think>\n"


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("<|Assistant|><think>", "<think>"),
        ("<|im_start|>assistant\n<answer>\n<think>", "<answer>\n<think>"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
        ("<|im_start|>user\nuse <think><|im_end|>\n<|im_start|>assistant\n", ""),
        ("what is <think><|assistant|>", ""),
        ("", ""),
    ],
)
def test_tags_that_the_template_opens_in_front_of_a_turn_are_seen(prompt: str, opened: str) -> None:
    assert TEMPLATE.opened(np.asarray(TOKENIZER.encode(prompt, add_special_tokens=False), np.int32)) == opened


def config(*train: dict[str, Any], heldout: Any = None) -> Config:
    return configured({"data": {"train": list(train), "heldout": heldout}})


def test_one_sandbox_serves_all_and_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Any] = []

    class CountedSandbox(ProcessSandbox):
        def __init__(self, _: Any) -> None:
            super().__init__()

        async def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(module, "make_sandbox", CountedSandbox)
    checker = {"checker": "code", "checker_options": {"partial": False}}
    everywhere = {"tools": ["code_interpreter"], "reward": "code", "user": "corrector", "user_options": checker}
    episodes = [everywhere, {"reward": "code"}, {"tools": ["calculator"]}]
    parts = RunParts(config(*({"path": f"{i}.jsonl", "episode": episode} for i, episode in enumerate(episodes))))
    asyncio.run(parts.close())
    assert closed == [parts.shared.sandbox()]
    with pytest.raises(UserError, match=r"data\.train\[b\]: .*'exacts'"):
        RunParts(config({"path": "a.jsonl"}, {"path": "b.jsonl", "episode": {"reward": "exacts"}}))
    parts = RunParts(config({"path": "a.jsonl"}, {"path": "b.jsonl", "answer_column": "solution"}))
    assert len(parts.parts) == 2, "the checker of a simulated user names the answer by its column"


def test_a_task_is_played_by_its_source_on_its_side_and_equal_ones_share_their_parts() -> None:
    def find(parts: RunParts, **fields: Any) -> tuple[str, str]:
        return parts.find(Task(task_id="t", prompt_id="p", prompt="What is 3+4?", **fields))

    longer = {"path": "c.jsonl", "episode": {"max_response_tokens": 5}}
    made = RunParts(config({"path": "a.jsonl"}, {"path": "b.jsonl"}, longer, heldout="a.jsonl"))
    assert find(made, source="b", kind="values") == ("train", "b")
    assert find(made, source="a", kind="eval") == find(made, kind="eval") == ("heldout", "a")
    assert find(RunParts(config({"path": "a.jsonl"})), kind="eval") == ("train", "a")
    with pytest.raises(UnknownSource, match=r"source 'd'; data\.train has a, b, c"):
        find(made, source="d")
    a, b, c = (made.by_source["train", name][1] for name in "abc")
    assert a is b is made.by_source["heldout", "a"][1]
    assert c is not a
    assert c.scorer is a.scorer


class FixedEngine:
    """A token's log-prob is the one at the index that is its id."""

    def __init__(self, logprobs: np.ndarray) -> None:
        self.by_id = logprobs
        self.scored: list[list[int]] = []

    async def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        self.scored.append(token_ids.tolist())
        return np.append(0.0, self.by_id[token_ids[1:]])


def test_golden_a07_drift_is_of_model_tokens_only() -> None:
    inputs, drifts = GOLDEN["A07"]["inputs"], []
    for then, now, mask in zip(inputs["logp_stored"], inputs["logp_now"], inputs["model_token_mask"], strict=True):
        kept = np.asarray(mask, bool)
        # A leading prompt token, since a payload's first token is never sampled.
        spans = np.asarray([(i + 1, i + 2) for i in np.flatnonzero(kept)], np.int32)
        versions = np.array([[0, 0, kept.sum()]], np.int32)
        previous = Payload(np.arange(len(mask) + 1, dtype=np.int32), spans, np.asarray(then)[kept], versions)
        drifts.append(asyncio.run(rescore(FixedEngine(np.concatenate([[0.0], now])), previous)))
    np.testing.assert_allclose(drifts, GOLDEN["A07"]["expected"]["abs_model_tokens_only"], rtol=1e-5)
    assert drift(np.zeros(0), np.zeros(0)) == 0.0


def test_drift_is_over_all_rows_each_scored_by_itself() -> None:
    spans, versions = np.array([[1, 2], [3, 5]], np.int32), np.array([[0, 0, 3]], np.int32)
    engine = FixedEngine(np.array([0.0, -1.0, 0.0, -2.0, -3.0]))
    previous = Payload(np.arange(5, dtype=np.int32), spans, np.array([-1.5, -2.0, -4.5]), versions, np.array([2, 3]))
    assert asyncio.run(rescore(engine, previous)) == pytest.approx((0.5 + 0.0 + 1.5) / 3)
    assert engine.scored == [[0, 1], [2, 3, 4]]
