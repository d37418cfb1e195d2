"""Episodes: ids, spans, log-probs and versions stay aligned over any number of turns."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest

from common.config import EpisodeConfig
from common.errors import UserError
from common.messages import Task
from common.payload import decode_payload, encode_payload
from generator.episode import Episode, EpisodeRunner, PromptTooLong
from generator.template import ChatTemplate
from generator.tool_calls import find_calls
from generator.tools import Toolbox, calculate
from launcher.tiny_model import build_tokenizer

TOKENIZER = build_tokenizer()
TEMPLATE = ChatTemplate(TOKENIZER)
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*7+5"}}\n</tool_call><|im_end|>'


@dataclasses.dataclass
class Turn:
    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: list[tuple[int, int, int]]
    finish_reason: str


class ScriptedEngine:
    """Says what it was told to, a turn at a time; each turn by a newer version."""

    def __init__(self, *turns: str) -> None:
        self.turns = list(turns)
        self.prompts: list[str] = []
        self.version = 0

    async def generate(self, prompt_ids: Any, *, max_tokens: int, **sampling: Any) -> Turn:
        self.prompts.append(TOKENIZER.decode(prompt_ids))
        ids = np.asarray(TOKENIZER.encode(self.turns.pop(0), add_special_tokens=False), np.int32)
        stopped = len(ids) <= max_tokens
        ids = ids[:max_tokens]
        self.version += 1
        versions = [(self.version, 0, len(ids))]
        return Turn(ids, np.full(len(ids), -self.version, np.float32), versions, "stop" if stopped else "length")


def play(engine: ScriptedEngine, prompt: Any = "What is 12*7+5?", **changes: Any) -> Episode:
    config = EpisodeConfig(
        **({"max_assistant_turns": 3, "max_response_tokens": 200, "tools": ["calculator"]} | changes)
    )
    runner = EpisodeRunner(engine, TEMPLATE, Toolbox(config.tools, config.max_tool_text), config, 1000, 100)
    return asyncio.run(runner.play(Task(task_id="t", prompt_id="p", prompt=prompt)))


def test_a_call_is_answered_and_the_next_turn_goes_on_from_it() -> None:
    engine = ScriptedEngine(CALL, "89<|im_end|>")
    episode = play(engine)
    whole = TOKENIZER.apply_chat_template(
        [
            {"role": "user", "content": "What is 12*7+5?"},
            {"role": "assistant", "content": CALL.removesuffix("<|im_end|>")},
            {"role": "tool", "content": "89"},
            {"role": "assistant", "content": "89"},
        ],
        tokenize=False,
    )
    assert TOKENIZER.decode(episode.tokens()) == whole.removesuffix("\n")
    assert engine.prompts[1] in whole
    assert (episode.answer, episode.reason, episode.turns, episode.tool_calls) == ("89", "stop", 2, 1)


def test_only_sampled_tokens_are_in_the_loss_and_carry_their_version() -> None:
    payload = decode_payload(encode_payload(play(ScriptedEngine(CALL, "89<|im_end|>")).payload()))
    sampled = TOKENIZER.decode(payload.token_ids[payload.mask()])
    assert sampled == CALL + "89<|im_end|>"
    versions = payload.versions()
    assert sorted(set(versions.tolist())) == [1, 2]
    np.testing.assert_array_equal(payload.logprobs, -versions.astype(np.float32))


def test_several_calls_in_a_turn_are_answered_in_order() -> None:
    calls = "".join(
        f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{text}"}}}}</tool_call>'
        for text in ("1+1", "2*3", "oops")
    )
    engine = ScriptedEngine(calls + "<|im_end|>", "done<|im_end|>")
    assert play(engine, max_response_tokens=900).tool_calls == 3
    results = engine.prompts[1].split("<tool_response>\n")[1:]
    assert [text.split("\n")[0] for text in results] == ["2", "6", "error: not an arithmetic expression"]


def test_an_episode_that_only_calls_ends_without_an_answer() -> None:
    episode = play(ScriptedEngine(CALL, CALL, CALL))
    assert (episode.reason, episode.answer, episode.turns, episode.tool_calls) == ("max_assistant_turns", "", 3, 2)


def test_a_turn_cut_off_by_the_limit_is_no_answer() -> None:
    episode = play(ScriptedEngine("1234567890" * 9), max_response_tokens=20)
    assert (episode.reason, episode.answer, episode.sampled) == ("length", "", 20)


def test_a_tool_result_that_does_not_fit_ends_the_episode() -> None:
    episode = play(ScriptedEngine(CALL), max_response_tokens=len(TOKENIZER.encode(CALL)) + 3)
    assert (episode.reason, episode.turns) == ("length", 1)
    assert episode.tokens().shape == (episode.length,)


def test_tool_text_is_cut_to_its_limit() -> None:
    engine = ScriptedEngine(CALL.replace("12*7+5", "99*99"), "x<|im_end|>")
    play(engine, max_tool_text=2)
    assert "<tool_response>\n98\n</tool_response>" in engine.prompts[1]


def test_a_prompt_over_the_limit_is_refused_before_the_engine_sees_it() -> None:
    engine = ScriptedEngine()
    with pytest.raises(PromptTooLong, match="data.max_prompt_tokens allows 100"):
        play(engine, prompt="1" * 200)
    assert engine.prompts == []


def test_chat_messages_are_taken_as_they_are() -> None:
    engine = ScriptedEngine("ok<|im_end|>")
    play(engine, prompt=[{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}])
    assert engine.prompts[0].startswith("<|im_start|>system\nbe short<|im_end|>")


def test_a_tokenizer_without_chat_template_is_named() -> None:
    bare = build_tokenizer()
    bare.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        ChatTemplate(bare)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>nonsense</tool_call>", "not valid JSON"),
        ("<tool_call>[1]</tool_call>", '"name"'),
        ('<tool_call>{"name": "x", "arguments": 3}</tool_call>', "must be an object"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
    ],
)
def test_a_malformed_call_is_a_call_with_an_error(text: str, error: str) -> None:
    (call,) = find_calls(text)
    assert error in call.error


def test_an_unterminated_call_is_no_call() -> None:
    assert find_calls('<tool_call>{"name": "calculator"') == []


def test_unknown_tools_and_wrong_arguments_get_an_error_text() -> None:
    toolbox = Toolbox(["calculator"], 256)
    calls = find_calls(
        '<tool_call>{"name": "shell", "arguments": {}}</tool_call>'
        '<tool_call>{"name": "calculator", "arguments": {"number": 1}}</tool_call>'
        '<tool_call>{"name": "calculator", "arguments": {"expression": 5}}</tool_call>'
    )
    unknown, wrong, mistyped = asyncio.run(toolbox.run(calls))
    assert unknown == "error: no tool named 'shell'; there is calculator"
    assert "number" in wrong
    assert "must be a string" in mistyped


def test_an_unknown_tool_name_in_the_configuration_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"episode.tools = 'abacus' is unknown; allowed: calculator"):
        Toolbox(["abacus"], 10)


@pytest.mark.parametrize(
    ("expression", "value"), [("1+2*3", 7), ("-(4-6)*2", 4), ("7//2", 3), ("7%4", 3), ("1/4", 0.25), ("2.5*2", 5)]
)
def test_the_calculator_calculates(expression: str, value: float) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "x", "__import__('os')", "(1).real", "9**9**9", "1/0", "1e999*1e999", "[1]", "True+1", "1" * 201, "((((" * 40],
)
def test_the_calculator_refuses_everything_else(expression: str) -> None:
    with pytest.raises(ValueError, match="error"):
        calculate(expression)
