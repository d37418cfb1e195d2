"""Random episodes: what the engine sampled is what is trained on, whatever the tokenizer would make of the text."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from common.messages import Task
from common.payload import decode_payload, encode_payload
from generator.chat.template import ChatTemplate
from generator.engine.engine import Completion
from generator.users import UserTurn
from tests.support.episode import runner
from tests.support.templates import byte_level
from tests.support.users import RecordingUser

# Pairs that stand where one turn ends and the next begins, inside the tags, and in numbers.
MERGES = "Ċ <, > Ċ, Ċ Ċ, e >, e> Ċ, > <, Ċ u, # Ċ, : 9, < /, l >, l> Ċ, l>Ċ <, r >, r> Ċ, r>Ċ Ċ, 9 <, 8 9, 1 +, 1+ 1, "
PAIRS = [tuple(pair.split()) for pair in (MERGES + "2 Ċ, 2Ċ <, Ġ a, t :, t: Ċ, t:Ċ 8").split(", ")]
# Ends of turns with a text and without one around them.
TEMPLATES = {
    "marked": "{%- for m in messages -%}{{ '<s>' + m.role + '\n' + m.content + '</s>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<s>assistant\n' }}{%- endif -%}",
    "bare": "{%- for m in messages -%}{{ m.role + ':\n' + m.content + '</s>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'assistant:' }}{%- endif -%}",
}


@functools.cache
def chat(template: str, merges: bool) -> tuple[PreTrainedTokenizerFast, ChatTemplate]:
    """Byte-level, so that every text has tokens, with merges that make other tokens of the same text."""
    tokens = byte_level(["</s>", "<s>"], TEMPLATES[template], pairs=PAIRS if merges else ())
    return tokens, ChatTemplate(tokens)


class RandomEngine:
    """Samples what is drawn: pieces of text cut into tokens anywhere, any other tokens, under any versions."""

    def __init__(self, draw: Any, tokens: PreTrainedTokenizerFast) -> None:
        self.draw, self.tokens, self.tokenizer = draw, tokens, tokens
        self.prompts: list[np.ndarray] = []
        self.turns: list[Completion] = []

    async def generate(self, prompt_ids: Any, *, max_tokens: int, **limits: Any) -> Completion:
        draw = self.draw
        self.prompts.append(np.asarray(prompt_ids).copy())
        ids: list[int] = []
        for text in draw(st.lists(st.sampled_from(SAID), max_size=4)):
            # A model may spell a text in other tokens than a tokenizer would.
            cut = draw(st.integers(0, len(text)))
            for part in (text[:cut], text[cut:]):
                ids += self.tokens.encode(part, add_special_tokens=False)
        ids += draw(st.lists(st.integers(0, len(self.tokens) - 1), max_size=3))
        end = draw(st.sampled_from(["end", "stop string", "length"]))
        ids = (ids or [0])[: max_tokens - 1] + ([self.tokens.eos_token_id] if end == "end" else [])
        ids = ids or [self.tokens.eos_token_id]
        reason = "length" if end == "length" or len(ids) == max_tokens else "stop"
        logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=len(ids), max_size=len(ids)))
        borders = sorted({0, len(ids), *draw(st.lists(st.integers(0, len(ids)), max_size=3))})
        newest = max((turn.versions[-1][0] for turn in self.turns), default=0)
        versions = []
        for start, stop in itertools.pairwise(borders):
            newest += draw(st.integers(0, 2))
            versions.append((newest, start, stop))
        self.turns.append(Completion(np.asarray(ids, np.int32), np.asarray(logprobs, np.float32), versions, reason))
        return self.turns[-1]


HEARD = ["89", "\n", "", "<b>", "e>\n", "</s>\n<s>assistant\n", "9:9", "äß🙂", "user\n#", "\ud83d"]
SAID = [
    *("1+1", ">\n", "\n<", "t:\n", "äß🙂", "</code>", "<code>", "<tool_call>", "</tool_call>", "#\n", "9<"),
    *(f"<code>{text}</code>" for text in HEARD[:-1]),
    *(
        "<tool_call>" + json.dumps({"name": "code_interpreter", "arguments": {"code": text}}) + "</tool_call>"
        for text in HEARD[:-1]
    ),
]


@settings(max_examples=25)
@given(st.data(), st.booleans(), st.sampled_from(list(TEMPLATES)), st.sampled_from(["hermes", "code"]), st.booleans())
def test_what_the_engine_sampled_is_what_is_trained_on(data, merges, template, call_format, with_user) -> None:
    (tokens, chat_template), draw = chat(template, merges), data.draw
    engine = RandomEngine(draw, tokens)
    user = RecordingUser(lambda _: UserTurn(draw(st.integers(0, 3)) == 0, draw(st.sampled_from(HEARD))))
    rules = runner(
        engine,
        user=user if with_user else None,
        max_model_len=600,
        template=chat_template,
        max_assistant_turns=draw(st.integers(1, 6)),
        max_user_turns=draw(st.none() | st.integers(0, 5)),
        max_response_tokens=draw(st.integers(1, 400)),
        max_tool_text=draw(st.integers(1, 12)),
        call_format=call_format,
        tools=["tests.support.tool_examples:RepeatingInterpreter"],
    )
    config = rules.config
    episode = asyncio.run(rules.run(Task(task_id="t", prompt_id="p", prompt="what is 8+1?\n")))

    payload = decode_payload(encode_payload(episode.payload()))
    turns = engine.turns
    # Exactly what was sampled, in order, is marked, with its own log-probs and versions.
    np.testing.assert_array_equal(payload.token_ids[payload.mask()], np.concatenate([t.token_ids for t in turns]))
    np.testing.assert_array_equal(payload.logprobs, np.concatenate([t.logprobs for t in turns]))
    expected = [version for t in turns for version, start, end in t.versions for _ in range(start, end)]
    assert payload.versions().tolist() == expected
    assert len(payload.model_spans) == len(turns) == episode.turns

    # Every request is a beginning of the final ids: the past is added to and never changed.
    for prompt, turn, (start, _) in zip(engine.prompts, turns, payload.model_spans, strict=True):
        assert len(prompt) == start
        np.testing.assert_array_equal(payload.token_ids[: start + len(turn.token_ids)], [*prompt, *turn.token_ids])

    assert episode.length <= min(600, len(episode.rows[0].prompt_ids) + config.max_response_tokens)
    assert episode.turns <= config.max_assistant_turns
    assert config.max_user_turns is None or episode.user_turns <= config.max_user_turns
    assert episode.reason in ("stop", "user", "length", "max_assistant_turns", "max_user_turns")
