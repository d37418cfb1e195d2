"""An episode of several rows, as it is sent and as people read it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import structlog

from common.messages import Task
from common.payload import decode_payload, encode_payload, open_record
from generator.episode.episode import Episode, TokenRow, Transcript, make_record
from generator.episode.parts import RunParts
from generator.task_runner import TaskRunner, _counts
from launcher.audit.rewards import outcomes
from launcher.quickstart.tiny_model import build_tokenizer
from sampler.prompts.prompt_set import Prompt
from tests.support.episode import TEMPLATE, TOKENIZER, ScriptedEngine, completion, configured
from tests.support.event_loop import in_event_loop


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
