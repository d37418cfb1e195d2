"""Written conversations become the tokens of the episodes that would have had them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from common.config import DataConfig
from generator.chat.conversation import Conversations
from generator.chat.prompts import PromptNotSeen, Prompts
from generator.chat.template import ChatTemplate
from tests.support.templates import ASK, QWEN, of_pieces, shaped, with_template

USER: dict[str, Any] = {"role": "user", "content": "What is 1+1?"}
SAID: dict[str, Any] = {"role": "assistant", "content": "It is 2."}
MORE: dict[str, Any] = {"role": "user", "content": "And 2+2?"}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "calculator", "arguments": {"sum": "1+1"}}}],
}
RESULT: dict[str, Any] = {"role": "tool", "content": "two"}
THOUGHT: dict[str, Any] = {"role": "assistant", "content": "<think>\none and one\n</think>\n\nIt is 2."}
# Opens the thinking before each answer, and shows no thoughts of earlier turns (R1).
OPENED = QWEN.replace(ASK, ASK.replace("assistant\n'", "assistant\n<think>\n'"))
# Puts empty thinking in front of the newest answer (Qwen3).
EMPTY = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.last -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}"
    "{{ m.content.split('</think>')[-1] + '<|im_end|>\n' }}{%- endfor -%}" + ASK
)


def conversations(template: ChatTemplate, wrap: tuple[str, str] | None = None) -> Conversations:
    return Conversations(Prompts(template, DataConfig(train="none.jsonl")), wrap)


def turns_of(template: ChatTemplate, messages: list[dict[str, Any]]) -> list[str]:
    """Text of each turn that would have been sampled."""
    ids, spans = conversations(template).encode(messages, 1)
    return [template.text(ids[start:end]) for start, end in spans]


def with_source(source: str) -> ChatTemplate:
    return ChatTemplate(with_template(source))


SHAPED = {
    "qwen": ["It is 2.<|im_end|>", "It is 2.<|im_end|>"],
    "glm": ["\n<think></think>\nIt is 2.<|user|>"] * 2,
    "harmony": ["<|channel|>final<|message|>It is 2.<|return|>"] * 2,
    "llama": ["It is 2.<|eot_id|>"] * 2,
    "mistral": [" It is 2.</s>"] * 2,
    "gemma": ["It is 2.<turn|>"] * 2,
    "command": ["It is 2.<|/say|><|end_turn|>"] * 2,
    "glm, closed": ["It is 2.<|endoftext|>"] * 2,
    "phi": ["It is 2.<|end|>"] * 2,
}


@pytest.mark.parametrize("shape", SHAPED)
def test_a_turn_is_what_the_model_would_have_sampled_and_the_rest_what_it_would_have_seen(shape: str) -> None:
    _, template = shaped(shape)
    messages = [USER, SAID, MORE, SAID]
    assert turns_of(template, messages) == SHAPED[shape]
    ids, ((start, end), (next_start, next_end)) = conversations(template).encode(messages, 1)
    assert ids[:start].tolist() == template.prompt([USER]).tolist()
    assert ids[end:next_start].tolist() == template.between([MORE], turn=ids[start:end]).tolist()
    assert next_end == len(ids)
    # The last turn alone: earlier ones are as prompts show them.
    ids, ((start, end),) = conversations(template).encode(messages, 3)
    assert ids[:start].tolist() == template.prompt(messages[:3]).tolist()
    assert template.text(ids[start:end]) == SHAPED[shape][1]


def test_calls_and_results_are_as_the_template_renders_them() -> None:
    _, template = shaped("qwen")
    written = '<tool_call>\n{"name": "calculator", "arguments": {"sum": "1+1"}}\n</tool_call><|im_end|>'
    messages = [USER, CALL, RESULT, SAID]
    assert turns_of(template, messages) == [written, "It is 2.<|im_end|>"]
    ids, ((_, end), (start, _)) = conversations(template).encode(messages, 1)
    called = {**RESULT, "name": "calculator"}
    assert ids[end:start].tolist() == template.between([called]).tolist()


def test_results_may_stand_within_the_turn() -> None:
    template = ChatTemplate(with_template(QWEN))
    code, wrap = {"role": "assistant", "content": "<code>1+1</code>"}, ("<output>\n", "\n</output>")
    ids, spans = conversations(template, wrap).encode([USER, code, RESULT, SAID], 1)
    assert [template.text(ids[start:end]) for start, end in spans] == ["<code>1+1</code>", "It is 2.<|im_end|>"]
    assert template.text(ids[spans[0][1] : spans[1][0]]) == "<output>\ntwo\n</output>"


THINKING = {
    "kept, though the template leaves it out": (QWEN, THOUGHT, str(THOUGHT["content"])),
    "as the template has it": (EMPTY, SAID, "<think>\n\n</think>\n\nIt is 2."),
    "as the prompt begins it": (OPENED, THOUGHT, "one and one\n</think>\n\nIt is 2."),
}


@pytest.mark.parametrize("case", THINKING)
def test_thinking_stays_in_every_turn(case: str) -> None:
    source, turn, expected = THINKING[case]
    assert turns_of(with_source(source), [USER, turn, MORE, turn]) == [f"{expected}<|im_end|>"] * 2


def test_a_word_keeps_its_tokens_where_texts_begin_with_a_blank() -> None:
    template = ChatTemplate(of_pieces())
    ids, ((start, end),) = conversations(template).encode([USER, SAID], 1)
    assert ids[:start].tolist() == template.prompt([USER]).tolist()
    assert template.text(ids[start:end]).strip() == "It is 2.<|im_end|>"
    assert not template.tokens.lost(template.text(ids), np.asarray(ids))


def test_markup_of_others_is_text_and_that_of_the_assistant_counts() -> None:
    template = with_source(QWEN)
    asked = {"role": "user", "content": "Say <think>."}
    ids, ((start, _),) = conversations(template).encode([asked, THOUGHT], 1)
    think = template.tokens.encode("<think>").tolist()
    assert ids[:start].tolist() == template.prompt([asked]).tolist()
    assert ids[start : start + 1].tolist() == think
    assert think[0] not in ids[:start]


REFUSED = {
    "message 2 contains '<|im_end|>'": (QWEN, [USER, {"role": "assistant", "content": "a<|im_end|>b"}]),
    "follows another one": (QWEN, [USER, SAID, SAID]),
    "has no reasoning": (OPENED, [USER, SAID]),
    "its reasoning_content": (OPENED, [USER, {**SAID, "reasoning_content": "one and one"}]),
    "message 1 holds half a surrogate pair": (QWEN, [{**USER, "content": "a\ud800"}, SAID]),
    "message 2 holds half a surrogate pair": (QWEN, [USER, {**SAID, "content": "a\ud800"}]),
    "message 3 holds half a surrogate pair": (QWEN, [USER, SAID, {**MORE, "content": "a\ud800"}, SAID]),
    "or of its calls": (QWEN.replace("m.tool_calls or []", "[]"), [USER, CALL]),
    "leaves out a message of role 'tool'": (
        QWEN.replace("m.role == 'tool'", "m.role == 'function'"),
        [USER, CALL, RESULT, SAID],
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_the_model_would_not_have_sampled_is_refused(reason: str) -> None:
    source, messages = REFUSED[reason]
    with pytest.raises(PromptNotSeen, match=reason.replace("|", r"\|")):
        conversations(with_source(source)).encode(messages, 1)
