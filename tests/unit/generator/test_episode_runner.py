"""Episodes: which turn follows which, and how they end."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.messages import Task
from common.payload import decode_payload, encode_payload
from generator.chat.prompts import PromptTooLong
from generator.chat.template import ChatTemplate
from generator.engine.engine import Completion, EngineFailed
from generator.episode.parts import EpisodeParts
from generator.users import UserTurn
from launcher.quickstart.tiny_model import build_tokenizer
from tests.support.episode import END, TOKENIZER, ScriptedEngine, call, completion, configured, play, runner, tool_texts
from tests.support.event_loop import in_event_loop
from tests.support.golden import GOLDEN
from tests.support.templates import shaped
from tests.support.users import RecordingUser

CALL = call("calculator", '{"expression": "12*7+5"}') + END
ANSWER = f"89{END}"
TASK = Task(task_id="t", prompt_id="p", prompt="What is 1+1?")


def test_a_call_is_answered_and_the_next_turn_goes_on() -> None:
    engine = ScriptedEngine(CALL, ANSWER)
    episode = play(engine)
    spoken = [("user", "What is 12*7+5?"), ("assistant", CALL.removesuffix(END)), ("tool", "89"), ("assistant", "89")]
    messages = [{"role": role, "content": text} for role, text in spoken]
    whole = TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert TOKENIZER.decode(episode.rows[0].tokens()) == whole.removesuffix("\n")
    assert engine.prompts[1] in whole
    assert (episode.answer, episode.reason) == ("89", "stop")
    assert (episode.turns, episode.user_turns, episode.tool_calls) == (2, 1, 1)
    assert [(entry.role, entry.text) for entry in episode.transcript.entries] == spoken[1:]
    # Only sampled tokens are in the loss; each carries its version.
    payload = decode_payload(encode_payload(episode.payload()))
    assert TOKENIZER.decode(payload.token_ids[payload.mask()]) == CALL + ANSWER
    assert sorted(set(payload.versions().tolist())) == [1, 2]
    np.testing.assert_array_equal(payload.logprobs, -payload.versions().astype(np.float32))


@pytest.mark.parametrize(("keep", "epochs"), [("none", [None, None, None]), ("episodes", [None, 1, 1])])
def test_turns_read_the_first_ones_cache_only_if_asked_and_have_seeds_of_their_own(keep: str, epochs: Any) -> None:
    engine = ScriptedEngine(CALL, CALL, ANSWER)  # each turn with newer weights
    asyncio.run(runner(engine, keep_prefix=keep).run(TASK, seed=7))
    assert [limits.get("prefix_epoch") for limits in engine.limits] == epochs
    assert [limits["seed"] for limits in engine.limits] == [7, 8, 9]


class Mixture(ScriptedEngine):
    """Tells experts that are the tokens' own ids."""

    async def generate(self, prompt_ids: Any, **limits: Any) -> Completion:
        turn = await super().generate(prompt_ids, **limits)
        ids = np.concatenate([prompt_ids, turn.token_ids])
        told = ids[limits.get("experts_from", 0) : -1].astype(np.uint16)
        return replace(turn, experts=np.broadcast_to(told[:, None, None], (len(told), 3, 2)))


def test_each_token_keeps_the_experts_that_were_told_first() -> None:
    payload = decode_payload(encode_payload(play(Mixture(CALL, CALL, ANSWER)).payload()))
    assert payload.expert_lengths.tolist() == [len(payload.token_ids) - 1]
    np.testing.assert_array_equal(payload.experts[:, 2, 1], payload.token_ids[:-1])
    assert len(play(ScriptedEngine(CALL, ANSWER)).payload().experts) == 0


@pytest.mark.parametrize(("assistant", "user", "reason"), [(8, 8, "max_assistant_turns"), (1000, 2, "max_user_turns")])
def test_golden_m06_turns_when_every_turn_calls(assistant: int, user: int, reason: str) -> None:
    expected = GOLDEN["M06"]["expected"]
    expected = expected["limit_none_2"] if user == 2 else expected
    limits = {"max_assistant_turns": assistant, "max_user_turns": user}
    episode = play(ScriptedEngine(*[CALL] * 9), max_response_tokens=1900, **limits)
    assert (episode.turns, episode.user_turns) == (expected["assistant_turns"], expected["user_turns"])
    assert (episode.tool_calls, episode.answer) == (expected["tool_executions"], "")
    assert "num_turns" in expected or episode.reason == reason


SIZE, LONGER = len(TOKENIZER.encode(CALL)), CALL.removesuffix(END) + "more"


@pytest.mark.parametrize(
    ("turns", "changes", "expected"),
    [
        ([CALL, ANSWER], {"max_assistant_turns": 2, "max_user_turns": 1}, ("stop", "89", 2, 1)),
        (["1234567890" * 9], {"max_response_tokens": 20}, ("length", "", 1, 0)),
        ([LONGER], {"max_response_tokens": SIZE - 1}, ("length", "", 1, 0)),  # a call that was cut off is not run
        ([CALL], {"max_response_tokens": SIZE + 3}, ("length", "", 1, 1)),  # its result does not fit
        (["1" * 100], {"max_response_tokens": 10_000, "max_model_len": 80}, ("length", "", 1, 0)),
        ([CALL], {"tools": []}, ("stop", CALL.removesuffix(END), 1, 0)),
    ],
    ids=["last turn", "cut answer", "cut call", "result too long", "model length", "no tools"],
)
def test_limits_end_an_episode(turns: list[str], changes: dict[str, Any], expected: tuple[Any, ...]) -> None:
    episode = play(ScriptedEngine(*turns), **changes)
    assert (episode.reason, episode.answer, episode.turns, episode.tool_calls) == expected
    assert episode.rows[0].tokens().shape == (episode.length,)
    assert episode.length <= changes.get("max_model_len", 2000)
    assert episode.length - len(episode.rows[0].prompt_ids) <= changes.get("max_response_tokens", 900)


HALF = completion(TOKENIZER.encode("half an ans"), "time")
WHOLE_CALL = completion(TOKENIZER.encode(CALL))


@pytest.mark.parametrize(
    ("answers", "seconds", "expected"),
    [
        ([HALF], 60.0, ("max_seconds", "", 1, 0)),
        ([WHOLE_CALL, completion([], "time")], 60.0, ("max_seconds", "", 1, 1)),
        # The first turn may begin, however late it is: without a token there is no episode.
        ([WHOLE_CALL], 1e-9, ("max_seconds", "", 1, 0)),
    ],
    ids=["cut turn", "no token in a later turn", "no turn when the time is over"],
)
def test_time_ends_an_episode(answers: list[Completion], seconds: float, expected: tuple[Any, ...]) -> None:
    engine = ScriptedEngine(*answers)
    episode = play(engine, max_seconds=seconds)
    assert (episode.reason, episode.answer, episode.turns, episode.user_turns) == expected
    assert episode.sampled == len(answers[0].token_ids)
    assert engine.limits[0]["seconds"] <= seconds
    with pytest.raises(EngineFailed, match="episode.max_seconds"):  # no token in all that time: failed machinery
        play(ScriptedEngine(completion([], "time")), max_seconds=60.0)


def repeating(right: str) -> RecordingUser:
    """A user who says the same until the assistant is right."""

    def turn(messages: list[dict[str, Any]]) -> UserTurn:
        is_right = messages[-1]["content"] == right
        return UserTurn(is_right, "again", 1.0 if is_right else -0.5)

    return RecordingUser(turn)


def test_a_user_is_asked_after_every_turn_without_a_call() -> None:
    user, engine = repeating("89"), ScriptedEngine(CALL, f"88{END}", ANSWER)
    episode = play(engine, user=user, max_assistant_turns=5)
    assert (episode.reason, episode.answer) == ("user", "89")
    assert (episode.turns, episode.user_turns, episode.tool_calls) == (3, 2, 1)
    assert engine.prompts[2].endswith("88<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n")
    roles = [message["role"] for message in user.seen[-1]]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert episode.transcript.turn_rewards() == [-0.5, 1.0]
    assert episode.transcript.rewards_by_assistant_turn() == [0.0, -0.5, 1.0]  # none for the turn that called
    assert user.started["messages"] == [{"role": "user", "content": "What is 12*7+5?"}]
    assert len(user.finished) == 1


RIGHT = [f"1{END}", ANSWER]
WRONG = [f"1{END}", f"2{END}", f"3{END}"]


@pytest.mark.parametrize(
    ("turns", "limits", "expected", "rewards"),
    [
        # The last answer that a limit allows reaches the user, for its reward.
        (WRONG, {"max_assistant_turns": 2}, ("max_assistant_turns", "2", 1), [-0.5, -0.5]),
        (RIGHT, {"max_assistant_turns": 2}, ("user", "89", 1), [-0.5, 1.0]),
        (RIGHT, {"max_user_turns": 1}, ("user", "89", 1), [-0.5, 1.0]),
        # A last turn without an answer does not.
        ([CALL], {"max_assistant_turns": 1}, ("max_assistant_turns", "", 0), []),
        (["half an"], {"max_response_tokens": 5}, ("length", "", 0), []),
    ],
)
def test_the_user_gets_the_last_answer_for_its_reward(turns, limits, expected, rewards) -> None:
    user = repeating("89")
    episode = play(ScriptedEngine(*turns), user=user, **limits)
    assert (episode.reason, episode.answer, episode.user_turns) == expected
    assert episode.transcript.turn_rewards() == rewards
    assert (len(user.seen), len(user.finished)) == (len(rewards), 1)
    if rewards:
        assert [entry.text for entry in episode.transcript.entries][3] == "", "the last reply is dropped"
        user.rewards = False  # type: ignore[attr-defined]
        assert play(ScriptedEngine(*WRONG), user=user, **limits).transcript.turn_rewards() == [-0.5], "it gives none"


@in_event_loop
async def test_two_episodes_of_one_task_have_different_names() -> None:
    user = repeating("1")
    rules = runner(ScriptedEngine(f"1{END}", f"1{END}"), user=user)
    for _ in range(2):
        await rules.run(TASK)
    assert len(set(user.finished)) == 2


def test_code_is_answered_within_the_assistants_turn() -> None:
    engine = ScriptedEngine("so <code>6*7</code>", f"it is \\boxed{{42}}{END}")
    episode = play(engine, call_format="code", tools=["tests.support.tool_examples:RepeatingInterpreter"])
    assert engine.prompts[1].endswith("so <code>6*7</code><interpreter>\n6*7\n</interpreter>\n\n")
    assert [limits["stop"] for limits in engine.limits] == [("</code>",)] * 2
    assert episode.answer == "it is \\boxed{42}"
    assert episode.response == "so <code>6*7</code><interpreter>\n6*7\n</interpreter>\n\nit is \\boxed{42}"
    assert (episode.turns, episode.user_turns) == (2, 1)
    payload = episode.payload()
    assert len(payload.model_spans) == 2
    assert TOKENIZER.decode(payload.token_ids[payload.mask()]) == f"so <code>6*7</code>it is \\boxed{{42}}{END}"


BARE_CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12*7+5"}}</tool_call>'
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("shape", "call_turn", "result", "answer_turn"),
    [
        ("qwen", f"{BARE_CALL}<|endoftext|>", "\n<|im_start|>user\n<tool_response>\n89\n</tool_response>"
         "<|im_end|>\n<|im_start|>assistant\n", "89<|endoftext|>"),
        ("glm", f"{BARE_CALL}<|observation|>", "\n<tool_response>\n89\n</tool_response><|assistant|>",
         "89<|endoftext|>"),
        ("harmony", f"{THOUGHT}<|channel|>commentary<|message|>{BARE_CALL}<|call|>",
         '<|start|>functions.calculator to=assistant<|channel|>commentary<|message|>"89"<|end|><|start|>assistant',
         f"{THOUGHT}<|channel|>final<|message|>89<|return|>"),
        ("llama", f"{BARE_CALL}<|eot_id|>", "<|head|>ipython<|/head|>\n\n89<|eot_id|><|head|>assistant<|/head|>\n\n",
         "89<|eot_id|>"),
        ("gemma", f"{BARE_CALL}<|result>", 'calculator:<|"|>89<|"|><result|>', "89<turn|>"),
        ("mistral", f"{BARE_CALL}</s>", '[TOOL_RESULTS] {"content": 89, "call_id": "call00000"}[/TOOL_RESULTS]',
         "89</s>"),
    ],
)  # fmt: skip
def test_turns_and_results_join_as_the_template_ends_them(shape, call_turn, result, answer_turn) -> None:
    tokenizer, chat = shaped(shape)
    # What a model writes behind the end of a turn is never sampled.
    engine = ScriptedEngine(f"{call_turn}!", f"{answer_turn}!", tokenizer=tokenizer)
    episode = play(engine, template=chat)
    assert (episode.answer, episode.reason, episode.tool_calls) == ("89", "stop", 1)
    (row,) = episode.rows
    assert tokenizer.decode(row.response_ids()) == call_turn + result + answer_turn
    payload = decode_payload(encode_payload(episode.payload()))
    assert tokenizer.decode(payload.token_ids[payload.mask()]) == call_turn + answer_turn
    lengths = [len(tokenizer.encode(turn)) for turn in (call_turn, answer_turn)]
    assert payload.logprobs.tolist() == [-1] * lengths[0] + [-2] * lengths[1]
    with pytest.raises(PromptTooLong, match="data.max_prompt_tokens allows 100"):
        play(ScriptedEngine(), prompt="1" * 200)


def test_a_models_own_ends_of_text_stop_generation(tmp_path: Path) -> None:
    tokenizer, _ = shaped("qwen")
    ids = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    config = configured({"model": {"path": str(tmp_path)}})
    chat = EpisodeParts(config).chat_template(tokenizer, config)
    engine = ScriptedEngine("hi<|im_start|>user", tokenizer=tokenizer)
    episode = play(engine, template=chat)
    assert engine.limits[0]["stop_token_ids"] == tuple(sorted(tokenizer.convert_tokens_to_ids(["<|im_start|>", END])))
    assert (episode.answer, episode.reason) == ("hi", "stop")


THINKS = f"<think>I could {BARE_CALL}</think>"
UNTOLD = '<tool_call>{"name": "calculator", "arguments": {"expression": "<think>"}}</tool_call>'


@pytest.mark.parametrize(
    ("turn", "opened", "called"),
    [
        (f"{THINKS}no{END}", False, 0),
        (f"{THINKS}{BARE_CALL}{END}", False, 1),
        (f"<think>{BARE_CALL}{END}", False, 0),  # it never closes
        (f"I could {BARE_CALL}</think>no{END}", True, 0),
        (f"</think>{BARE_CALL}{THINKS}{BARE_CALL}{END}", True, 2),
        # Without a <think> there is no thinking, and what stands in a call's JSON belongs to the call.
        (f"I could {BARE_CALL}</think>{END}", False, 1),
        (f"{UNTOLD}{BARE_CALL}{END}", False, 2),
        (f"<tool_call>{THINKS}no{END}", False, 0),
    ],
)
def test_calls_within_thinking_are_not_run_unless_an_option_says_so(turn: str, opened: bool, called: int) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template += "{%- if add_generation_prompt -%}{{ '<think>\n' }}{%- endif -%}" if opened else ""
    chat = ChatTemplate(tokenizer)

    def calls(prompt: str, **changes: Any) -> int:
        return play(ScriptedEngine(turn, *[ANSWER] * 3), prompt=prompt, template=chat, **changes).tool_calls

    assert calls("What is 12*7+5?") == calls("Use <think>") == called
    assert calls("What is 12*7+5?", calls_in_thinking=False) == called
    assert calls("What is 12*7+5?", calls_in_thinking=True) == turn.count("<tool_call>{")


def test_several_calls_in_a_turn_are_answered_in_order() -> None:
    calls = "".join(call("calculator", f'{{"expression": "{text}"}}') for text in ("1+1", "2*3", "oops"))
    engine = ScriptedEngine(calls + END, f"done{END}")
    episode = play(engine)
    assert (episode.tool_calls, episode.tool_errors, episode.user_turns) == (3, 1, 1)
    assert tool_texts(episode) == ["2", "6", "error: not an arithmetic expression"]


def test_the_user_gets_the_last_answer_when_time_is_over() -> None:
    episode = play(ScriptedEngine(completion(TOKENIZER.encode(f"88{END}"))), user=repeating("89"), max_seconds=1e-9)
    assert (episode.reason, episode.answer) == ("max_seconds", "88")
    assert episode.transcript.turn_rewards() == [-0.5]
