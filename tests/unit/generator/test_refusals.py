"""Settings of a generator that cannot be meant: each is refused in a line that names it, before anything is awaited."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.config import parse_config
from common.errors import UserError
from generator import cli
from generator.engine.arguments import OWN_NAMES, check_engine_names, engine_names, shortened
from generator.episode import parts
from generator.episode.parts import EpisodeParts
from generator.formats import Hermes
from generator.users import Checker
from tests.support.episode import configured
from tests.support.process_sandbox import ProcessSandbox
from tests.support.tool_examples import Echo

HERE, TOOLS, REWARDS = __name__, "tests.support.tool_examples", "tests.support.some_rewards"
JUDGE = {"base_url": "http://127.0.0.1:1/v1", "model": "m"}
INTERPRETER = "code_interpreter"


class Asking(Echo):
    def __init__(self, sandboxes: str) -> None: ...


Nameless = type("Nameless", (Echo,), {"name": "no name"})
NoSchema = type("NoSchema", (Echo,), {"schema": {"type": "nothing"}})
Slow = type("Slow", (Echo,), {"timeout": 30.0})
Worded = type("Worded", (Echo,), {"timeout": "5"})
Unfinished = type("Unfinished", (), {"stop": ()})


class Synchronous(Echo):
    def call(self, text: str) -> str:  # type: ignore[override]
        return text


class Unmade(Hermes):
    def __init__(self) -> None:
        raise FileNotFoundError("no tags.json")


Lettered = type("Lettered", (Hermes,), {"stop": "</call>"})
Unwrapped = type("Unwrapped", (Hermes,), {"wrap": "<result>"})


class NoFinish:
    async def start(self, episode_id: str, **_: Any) -> None: ...

    respond = start


class Greeting(NoFinish):
    def __init__(self, greeting: str, checker: Checker, loud: bool = False) -> None: ...

    finish = NoFinish.start


class Demanding(Hermes):
    def __init__(self, needed: int) -> None: ...


def tool(name: str, **options: Any) -> dict[str, Any]:
    return {"tools": [name], "tool_options": {name: options}}


def user(name: str, reward: Any = "exact", **options: Any) -> dict[str, Any]:
    return {"user": name, "user_options": options, "reward": reward}


def reward(name: str, **options: Any) -> dict[str, Any]:
    return {"reward": name, "reward_options": {name: options}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (tool("abacus"), "episode.tools = 'abacus' is unknown; allowed: calculator, code_interpreter"),
        (tool(f"{HERE}:HERE"), "is not a class"),
        (tool("builtins:dict"), "`name` must be .* got None"),
        (tool(f"{HERE}:Nameless"), "`name` must be.*got 'no name'"),
        (tool(f"{HERE}:NoSchema"), "its schema is not a JSON schema"),
        (tool(f"{HERE}:Synchronous"), "needs `async def call"),
        (tool(f"{HERE}:Slow"), "limit of 30 s is never reached within episode.tool_timeout = 30 s"),
        (tool(f"{HERE}:Worded"), "its own limit must be a positive number of seconds or None, got '5'"),
        (tool(f"{HERE}:Asking"), "tool_options of .*sandboxes"),
        (tool(f"{TOOLS}:Echo", after="x"), "tool_options of .*Echo': .*after.*; allowed: before"),
        ({"tools": [f"{TOOLS}:Echo"] * 2}, "two tools named 'echo'"),
        (tool(INTERPRETER, persistent=True, language="bash"), "persistent programs are Python, not 'bash'"),
        (tool(INTERPRETER, memory_mb=0), "memory_mb = 0 must be above 0"),
        (tool(INTERPRETER, run_timeout=30), "limit of 30 s is never reached within episode.tool_timeout"),
        (tool(INTERPRETER, persist=True), "'persist'; allowed: language, run_timeout"),
        ({"call_format": "xml"}, "episode.call_format = .*allowed: hermes, code"),
        ({"call_format": f"{HERE}:HERE"}, "is not a class"),
        ({"call_format": f"{HERE}:Unfinished"}, "lacks find, wrap"),
        ({"call_format": f"{HERE}:Demanding"}, "needed"),
        ({"call_format": f"{HERE}:Unmade"}, "cannot be made: FileNotFoundError: no tags.json"),
        ({"call_format": f"{HERE}:Lettered"}, "stop = '</call>' must be a list of strings that are not empty"),
        ({"call_format": f"{HERE}:Unwrapped"}, "wrap = '<result>' must be None or two strings"),
        (user("nobody"), "episode.user = 'nobody' is unknown; allowed: corrector, scripted, llm, or module:object"),
        (user(f"{HERE}:NoFinish"), "is not a class with start, respond, finish"),
        (user("corrector", turns="three"), "user_options of 'corrector': turns = 'three': input should be a valid int"),
        (user("corrector", turns=0), "turns = 0"),
        (user("corrector", discount=1.5), "discount"),
        (user("corrector", penalty=-1.0), "penalty"),
        (user("corrector", message="{answer}"), "message"),
        (user("corrector", checker="nothing"), "'nothing' is unknown"),
        (user("corrector", checker=5), "checker = 5 must be the name of a reward"),
        (user("corrector", {"boxed": 1.0, "exact": 0.5}), "checker must name one reward, because"),
        (user("llm", model="m"), "missing a required argument: 'base_url'; allowed: base_url, model, "),
        (user("llm", base_url="http://a", model="m", max_turns=0), "max_turns"),
        (user(f"{HERE}:Greeting"), "'greeting'; allowed: checker, checker_options, greeting, loud"),
        (reward("levenshtein"), "'levenshtein' is unknown; allowed: exact, boxed, .*math, reasoning_gym, code"),
        (reward("no.such.module:f"), "cannot import no.such.module"),
        (reward(f"{REWARDS}:missing"), "has no missing"),
        (reward(f"{REWARDS}:NOT_CALLABLE"), r"neither a function of \(text, answer, row\), or .* nor a class"),
        (reward(f"{REWARDS}:NoScore"), "no method score"),
        (reward(f"{REWARDS}:shorter", size=1), "reward_options of .*unexpected keyword argument 'size'"),
        (reward(f"{REWARDS}:CountingReward", begin=1), "reward_options of .*'begin'"),
        (reward("exact", strict=True), "reward_options of 'exact'"),
        (reward("format"), "give either"),
        (reward("format", pattern="("), "regular expression"),
        (reward("format", tags="<think>"), "tags"),
        (reward("format", tags=["a"], of="answer"), "of = 'answer'"),
        (reward("format", tags=["a", "b", "a"]), "tags = .* has one of them twice"),
        (reward("length", free=10, limit=10), "limit = 10"),
        (reward("overlong", buffer=11, limit=10), "buffer = 11"),
        (reward("math", seconds=0), "seconds = 0"),
        (reward("math", seconds=float("inf")), "seconds = inf must be above 0 and finite"),
        (reward("reasoning_gym", seconds=float("nan")), "seconds = nan must be above 0 and finite"),
        (reward("reasoning_gym", pattern="a+"), "has no group"),
        (reward("code", timeout=0), "timeout = 0"),
        (reward("code", timeout=float("nan")), "timeout = nan"),
        (reward("code", tolerance=-0.1), "tolerance = -0.1 must be a finite number of at least 0"),
        (reward("code", tolerance=float("inf")), "tolerance = inf must be a finite number of at least 0"),
        (reward("judge"), "base_url"),
        (reward("judge", **JUDGE, scale=(1, 1)), "scale"),
        (reward("judge", **JUDGE, scale=(0, float("inf"))), "scale = .* must be .least, greatest."),
        (reward("judge", **JUDGE, tries=0), "tries"),
        (reward("judge", **JUDGE, template="{question}"), r"\{question\} is unknown; allowed: prompt, text"),
        (reward("judge", **JUDGE, template="{text"), "braces"),
        ({"reward": {}}, "names no reward"),
        ({"reward": {"exact": float("inf")}}, "finite"),
        ({"reward": "exact", "reward_options": {"boxed": {}}}, r"'boxed', which is not part of episode.reward \(exact"),
    ],
)
def test_what_cannot_be_meant_is_named(settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "make_sandbox", lambda _: ProcessSandbox())
    with pytest.raises(UserError, match=words):
        EpisodeParts(configured({"sampler": {"tracker": {"reward_range": [-2.0, 2.0]}}}, **settings))


# No server listens there: a generator that comes so far fails with another error.
BROKER = {"url": "redis://127.0.0.1:1/0", "wait": 0.0}
TREE: dict[str, Any] = {"model": {"path": "no model"}, "data": {"train": "t"}, "broker": BROKER}


def corrector(turns: int) -> dict[str, Any]:
    return {"episode": {"user": "corrector", "max_assistant_turns": 4, "user_options": {"turns": turns}}}


@pytest.mark.parametrize(
    ("sections", "words", "warning"),
    [
        (corrector(0), "user_options of 'corrector': turns = 0", ""),
        ({"generator": {"engine": {"tensor_paralel_size": 2}}}, "did you mean tensor_parallel_size", ""),
        # What is right comes as far as the queue.
        (corrector(5), r"127\.0\.0\.1:1", "episode.user_options.turns = 5 is cut short to 3"),
    ],
    ids=["user", "engine", "queue"],
)
def test_it_is_one_error_before_anything_is_waited_for(sections: Any, words: str, warning: str, capsys) -> None:
    with pytest.raises(UserError, match=words):
        asyncio.run(cli._serve(parse_config(TREE | sections), "g"))
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "1 validation error for ModelConfig\n  Value error, User-specified max_model_len (128) is greater than the "
            "derived max_model_len (max_position_embeddings=64.0 or model_max_length=None in model's config.json). To "
            "allow overriding this maximum, ... [type=value_error, input_value=ArgsKwargs((), {'model': ...})]",
            "model.max_model_len = 128, but the model was made for 64 tokens; lower it",
        ),
        (
            "1 validation error for ModelConfig\n  Value error, Model architectures ['A'] are not supported for now. "
            "Supported architectures: dict_keys(['B', 'C']) [type=value_error, input_value=ArgsKwargs((), {})]",
            "Model architectures ['A'] are not supported for now.",
        ),
        ("word " * 200, "word " * 80 + "..."),
    ],
)
def test_what_vllm_refuses_is_a_line_without_its_frame(text: str, line: str) -> None:
    assert shortened(text) == line


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("warp_drive", "'warp_drive'; see vLLM's engine arguments"),
        ("weight_transfer_config", "set learner.weights instead of weight_transfer_config"),
        ("logprobs_mode", "'processed_logprobs', which training needs"),
    ],
)
def test_an_engine_name_is_refused_with_what_may_be_meant(name: str, words: str) -> None:
    with pytest.raises(UserError, match=f"generator.engine: .*{words}"):
        check_engine_names(parse_config(TREE | {"generator": {"engine": {name: 1}}}))


def test_what_vllm_knows_is_taken() -> None:
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "quantization", "max_num_seqs")
    check_engine_names(parse_config(TREE | {"generator": {"engine": dict.fromkeys(names, 2)}}))
    assert OWN_NAMES.keys() <= engine_names()
