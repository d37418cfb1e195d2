"""`spo data check`: what it finds in the rows of a run's data, and when it says that they cannot be used."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from common.config import Config, load_config
from common.errors import UserError
from common.messages import Task
from generator.chat.token_text import load_tokenizer
from generator.episode.parts import RunParts
from generator.episode.runner import EpisodeRunner
from launcher.checks.prompts import check_first_prompts, runs_other_code
from launcher.cli import app
from launcher.quickstart.tiny_model import build_tokenizer
from tests.support.episode import ScriptedEngine
from tests.support.sampler import write_rows
from tests.support.templates import ASK, CARELESS, QWEN, STRICT, with_template


def check(*arguments: object) -> str:
    """The report as text; raises what would become exit code 2."""
    result = CliRunner().invoke(app, ["data", "check", *map(str, arguments)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def check_json(*arguments: object) -> dict[str, Any]:
    return dict(json.loads(check(*arguments, "--json")))


def write_config(folder: Path, episode: dict[str, Any] | None = None, **data: Any) -> Path:
    """A run on the data `a.jsonl`, unless other data is named."""
    path = folder / "run.yaml"
    data = {"train": str(folder / "a.jsonl")} | data
    path.write_text(yaml.safe_dump({"model": {"path": str(folder / "model")}, "data": data, "episode": episode or {}}))
    return path


def start(path: Path) -> None:
    """What a run checks before it starts."""
    check_first_prompts(load_config(path, (), {}))


def assert_refused(path: Path, words: str) -> None:
    """By the command, and before a run starts."""
    for look in (check, start):
        with pytest.raises(UserError, match=words):
            look(path)


def test_unusable_rows_are_counted_by_reason(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1=", "answer": 2, "level": 1}, {"prompt": "1+1=", "answer": 2}, {"prompt": "1+2=", "answer": "3"},
        '{"prompt": "1+3=", "ans', '{"prompt": "1+3=", "answer": 4', {"prompt": "1+4=", "answer": None}, {"answer": 3},
        {"prompt": "1" * 11, "answer": True},
    ]  # fmt: skip
    path = write_rows(tmp_path / "a.jsonl", *rows)
    (source,) = check_json(path)["sources"]
    assert (source["rows"], source["usable"]) == (8, 3)
    assert source["problems"] == {"duplicate": 1, "unreadable": 2, "answer": 1, "prompt": 1}
    assert source["reasons"]["the same prompt as an earlier row"] == {"count": 1, "first": f"{path} line 2"}
    assert source["reasons"]["not JSON"]["count"] == 2
    assert source["reasons"]["not JSON"]["first"].startswith(f"{path} line 4 (")
    assert source["columns"] == {"prompt": 5, "answer": 6, "level": 1}
    assert {kind: rows["count"] for kind, rows in source["answers"].items()} == {"number": 1, "text": 1, "boolean": 1}
    assert source["answers"]["boolean"]["first"] == f"{path} line 8"
    assert source["mixed_answers"]
    assert source["characters"] == {"min": 4, "median": 4.0, "p95": pytest.approx(10.3), "max": 11}
    assert source["tokens"] is source["too_long"] is None
    text = check(path)
    assert "8, of which 3 can be used" in text
    assert "of different types" in text
    alike = write_rows(tmp_path / "b.jsonl", {"prompt": "a", "answer": 79}, {"prompt": "b", "answer": "79"})
    assert not check_json(alike)["sources"][0]["mixed_answers"]
    assert "different types" not in check(alike)


def test_prompts_are_counted_as_a_generator_renders_them(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": "What is 1+1?", "answer": 2}, {"prompt": "1" * 40, "answer": 1}]
    plain_data, tools_data = (str(write_rows(tmp_path / f"{name}.jsonl", *rows)) for name in ("plain", "tools"))
    episode = {"tools": ["calculator"], "max_assistant_turns": 2}
    with_tools = {"path": tools_data, "system_prompt": "Use the calculator.", "episode": episode}
    config_path = write_config(tmp_path, train=[{"path": plain_data}, with_tools], max_prompt_tokens=50)
    config, checked = load_config(config_path, (), {}), check_json(config_path)
    assert checked["tokens_not_counted"] == ""
    plain, tools = checked["sources"]
    for source, report in zip(config.data.sources("train"), (plain, tools), strict=True):
        lengths = [_tokens_of_an_episode(config, source.name, str(row["prompt"])) for row in rows]
        assert (report["tokens"]["min"], report["tokens"]["max"]) == (min(lengths), max(lengths))
        assert report["too_long"] == sum(length > 50 for length in lengths)
    assert tools["tokens"]["min"] > plain["tokens"]["min"]
    other = check_json(tmp_path / "plain.jsonl", "--tokenizer", tmp_path / "model")
    named = check_json(tmp_path / "plain.jsonl", "-o", f"model.path={tmp_path / 'model'}")
    assert other["sources"][0]["tokens"] == named["sources"][0]["tokens"] == plain["tokens"]


def test_a_row_is_shown_as_the_model_sees_it(tmp_path: Path) -> None:
    write_model(tmp_path)
    long = {"prompt": "7" * 5000, "answer": None}
    path = write_rows(
        tmp_path / "a.jsonl", long, asks(("system", "Be \x1bbrief."), ("user", "1+1?"), answer=2), asks(("user", "3?"))
    )
    plain, rendered = check(path), check(path, "--tokenizer", tmp_path / "model")
    assert "| system: Be \\x1bbrief." in plain
    assert all(text in rendered for text in (f"{path} line 2 as the model sees it", "| 1+1?", "answer: 2"))
    assert "3?" not in rendered
    shown = check_json(path, "--tokenizer", tmp_path / "model", "--examples", 2)["sources"][0]["examples"]
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    asked = [{"role": "system", "content": "Be \x1bbrief."}, {"role": "user", "content": "1+1?"}]
    assert shown[0]["prompt"] == tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert len(shown) == 2
    wide = write_rows(tmp_path / "b.jsonl", {"prompt": "7" * 5000, "answer": 1})
    assert "7" * 1000 + " […] " + "7" * 1000 in check(wide)
    assert "example" not in check(wide, "--examples", 0)


def _tokens_of_an_episode(config: Config, source: str, prompt: str) -> int:
    of_source, parts = RunParts(config).by_source["train", source]
    roomy = of_source.model_copy(update={"data": of_source.data.model_copy(update={"max_prompt_tokens": 10_000})})
    engine: Any = ScriptedEngine()
    runner = EpisodeRunner(roomy, engine, parts)
    return asyncio.run(runner.prepare(Task(task_id="t", prompt_id="p", prompt=prompt))).length


def test_tokens_that_cannot_be_counted_are_a_note_and_no_error(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", {"prompt": "a", "answer": 1})
    (tmp_path / "model").mkdir()
    report = check_json(write_config(tmp_path))
    assert "tokenizer" in report["tokens_not_counted"]
    assert report["sources"][0]["usable"] == 1


def asks(*messages: tuple[str, Any], **columns: Any) -> dict[str, Any]:
    """A row whose prompt is chat messages, each a role and a content."""
    return {"prompt": [{"role": role, "content": content} for role, content in messages], "answer": 1} | columns


def write_model(folder: Path, template: str | None = QWEN) -> Path:
    with_template(template).save_pretrained(folder / "model")
    return folder / "model"


TOOL, OPTION = {"tools": ["calculater"], "max_assistant_turns": 2}, {"enable_thinkng": True}
UNUSABLE: dict[str, tuple[str | None, dict[str, Any]]] = {
    "has no chat template; add one to its tokenizer_config.json": (None, {}),
    "did you mean calculator": (QWEN, {"episode": TOOL}),
    "did you mean enable_thinking": (QWEN, {"template_options": OPTION}),
    "all 1 prompts are longer than data.max_prompt_tokens = 8: the": (QWEN, {"max_prompt_tokens": 8}),
}


@pytest.mark.parametrize("refusal", UNUSABLE)
def test_what_no_generator_could_use_is_refused(tmp_path: Path, refusal: str) -> None:
    template, settings = UNUSABLE[refusal]
    write_model(tmp_path, template)
    write_rows(tmp_path / "a.jsonl", asks(("user", "What is 0+0?")))
    assert_refused(write_config(tmp_path, **settings), refusal)


HUMANS = [asks(("human", f"What is {i}+{i}?")) for i in range(8)]
ONE_BAD_ORDER = [*(asks(("user", f"{i}?")) for i in range(7)), asks(("user", "Be brief."), ("user", "9?"))]


def test_a_row_that_the_template_refuses_is_skipped_and_most_of_them_refuse_the_run(tmp_path: Path) -> None:
    model = write_model(tmp_path, STRICT)
    (source,) = check_json(write_rows(tmp_path / "a.jsonl", *ONE_BAD_ORDER), "--tokenizer", model)["sources"]
    ((reason, rows),) = source["reasons"].items()
    assert (source["usable"], source["problems"], rows["count"]) == (7, {"template": 1}, 1)
    assert "TemplateError: roles must alternate" in reason
    assert rows["first"].endswith("a.jsonl line 8")
    path = write_config(tmp_path)
    start(path)
    write_model(tmp_path)
    write_rows(tmp_path / "a.jsonl", *HUMANS, *ONE_BAD_ORDER[:7])
    refusal = r"the model would not see 8 of 15 prompts as they are \(.*a.jsonl line 1: the text of message 1 .*'human'"
    assert_refused(path, refusal)


def test_prompts_are_read_until_one_fits_before_the_start(tmp_path: Path) -> None:
    write_model(tmp_path)
    long = [asks(("user", f"{i} " + "x" * 100)) for i in range(100)]
    path = write_config(tmp_path, max_prompt_tokens=60)
    write_rows(tmp_path / "a.jsonl", *long, asks(("user", "0?")))
    start(path)
    write_rows(tmp_path / "a.jsonl", *long)
    assert_refused(path, "all 100 prompts are longer than data.max_prompt_tokens = 60")


@pytest.mark.integration
def test_prompts_are_checked_without_torch_unless_code_of_others_runs(tmp_path: Path) -> None:
    write_model(tmp_path)
    write_rows(tmp_path / "a.jsonl", asks(("user", "0?")))
    path = write_config(tmp_path, max_prompt_tokens=3)
    command = [sys.executable, "-X", "importtime", "-m", "launcher.checks.prompts", path]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (ran.returncode, "all 1 prompts are longer" in ran.stderr) == (2, True)
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert {"transformers", "torch"} & imported == {"transformers"}
    path = write_config(tmp_path, max_prompt_tokens=99)
    path.write_text(path.read_text() + "algorithm: {loss: no_such_module:loss}\n")
    ran = subprocess.run([*command[:-1], path], capture_output=True, text=True, timeout=600, check=False)
    assert (ran.returncode, "loss = 'no_such_module:loss': cannot import" in ran.stderr) == (2, True)
    path = write_config(tmp_path)
    for key in ("episode.tools=[calculator]", "episode.tools=[mine:Tool]", "model.trust_remote_code=true"):
        config = load_config(path, [key, "episode.max_assistant_turns=2"], {})
        assert runs_other_code(config) == ("calculator" not in key)


GAMES = [asks(("user", "Play."), seed=seed, level=seed // 2) for seed in range(4)]
JSON_TEXT = json.dumps([{"role": "user", "content": "0?"}])
PARTS_TEXT = json.dumps([{"content": [{"type": "text", "text": "0?"}], "role": "user"}])
CALLED = asks(("user", "a")) | {
    "prompt": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "weather"}}]},
    ]
}


THINKING = asks(("user", "0?"), ("assistant", "Let me add.\n<think>"))
TENTHS = [asks(("user", f"{i}?"), answer=float(np.float32(i / 10))) for i in range(3)]
HINTS: dict[str, tuple[Any, ...]] = {  # each with the rows that it is about
    "data.template_options.continue_final_message=true": (THINKING,),
    "'<|im_start|>'.*data.prompt_column": ({"prompt": "<|im_start|>user\n0?<|im_end|>", "answer": 1},),
    r"'\[INST\]'": ({"prompt": "[INST] 0? [/INST]", "answer": 1},),
    "reads as chat messages.*data.prompt_column": ({"prompt": JSON_TEXT, "answer": 1},),
    "reads as chat messages": ({"prompt": PARTS_TEXT, "answer": 1},),
    "column 'tools' is not shown .*episode.tools": (asks(("user", "0?"), tools=[{"type": "function"}]),),
    "<image> stands for": (asks(("user", "<image>What is it?")),),
    "column 'images' stands for": (asks(("user", "What is it?"), images=["a.png"]),),
    "3 rows .*line 2.*'seed'.* differs; to keep such rows, set data.id_column=seed": (*GAMES,),
    "0.10000000149011612 in": (*TENTHS,),
    "data.system_prompt is added only to text prompts": (asks(("user", "0?")),),
}


@pytest.mark.parametrize("hint", HINTS)
def test_what_was_probably_not_meant_is_said_with_the_key_that_helps(tmp_path: Path, hint: str) -> None:
    overrides = ("-o", "data.system_prompt=Be brief.") if "system_prompt" in hint else ()
    path = write_rows(tmp_path / "a.jsonl", *HINTS[hint])
    (said,) = check_json(path, *overrides)["sources"][0]["hints"]
    assert re.search(hint, said)
    assert f"  warning     {said}" in check(path, *overrides)


def test_plain_data_gets_no_hint(tmp_path: Path) -> None:
    rows = [
        asks(("system", ""), ("user", "What is 1 < 2 | 3?")),
        {"prompt": '{"a": 1} is JSON; what role has it?', "answer": 0.5, "images": None, "tools": []},
        {"prompt": '{"role": "admin"} is JSON, is it not?', "answer": 0.5},
        {"prompt": "[1, 2]", "answer": 0.1, "image": []},
        {"prompt": "same", "answer": 1.25},
        {"prompt": "same", "answer": 1.25},
    ]
    assert check_json(write_rows(tmp_path / "a.jsonl", *rows))["sources"][0]["hints"] == []
    meant = write_rows(
        tmp_path / "b.jsonl", asks(("user", "0?"), ("assistant", "So")), {"prompt": "<|x|>", "answer": 1}
    )
    options = "data.template_options.continue_final_message=true", "data.prompt_markup=true"
    assert check_json(meant, "-o", options[0], "-o", options[1])["sources"][0]["hints"] == []


def test_what_a_template_leaves_out_beside_texts_is_a_hint(tmp_path: Path) -> None:
    write_model(tmp_path, CARELESS)
    write_rows(tmp_path / "a.jsonl", CALLED)
    path = write_config(tmp_path, {"tools": ["calculator"], "max_assistant_turns": 2})
    _, call, tool = check_json(path)["sources"][0]["hints"]
    assert "leaves out the call of 'weather' in message 2" in call
    assert "does not describe tools: unless prompts or data.system_prompt do, the model knows nothing of calc" in tool
    write_model(tmp_path, CARELESS.replace(ASK, ""))
    hints = check_json(path)["sources"][0]["hints"]
    assert any("ignores add_generation_prompt: prompts end without '<|im_start|>assistant'" in hint for hint in hints)


def test_data_without_answers_gets_a_way_out(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "Write a line."}, {"prompt": "Write two."})
    with pytest.raises(UserError, match="set data.answer_column, or to null if the reward needs no answer"):
        check(path)


def test_held_out_prompts_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "one.jsonl", {"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 1})
    two = write_rows(tmp_path / "two.jsonl", {"prompt": "b", "answer": 1}, {"prompt": "c", "answer": 1})
    path = write_config(tmp_path, train=[{"path": str(one)}], heldout=str(two))
    assert check_json(path)["heldout_also_trained_on"] == 1
    assert "1 held-out prompts are also trained on" in check(path)
    assert check_json(one)["heldout_also_trained_on"] is None
    numbered = [write_rows(tmp_path / f"{name}.jsonl", {"prompt": name, "answer": 1, "n": 0}) for name in "xy"]
    train, heldout = ({"path": str(file), "id_column": "n"} for file in numbered)
    path = write_config(tmp_path, train=[train], heldout=[heldout])
    assert check_json(path)["heldout_also_trained_on"] == 0, "each file numbers its rows from 0"


def test_a_source_without_a_usable_row_names_its_columns(tmp_path: Path) -> None:
    good = write_rows(tmp_path / "good.jsonl", {"prompt": "a", "answer": 1})
    wrong = write_rows(tmp_path / "wrong.jsonl", {"question": "a", "answer": 1})
    empty = write_rows(tmp_path / "empty.jsonl")
    sources = [{"path": path} for path in (str(good), str(wrong), str(empty), "gone.jsonl")]
    path = write_config(tmp_path, train=sources)
    with pytest.raises(UserError) as refusal:
        check(path)
    line = str(refusal.value)
    columns = "no prompt in column 'prompt'; there is no column 'prompt'; there are question, answer"
    for words in (f"{wrong} line 1: {columns}", "data.train[empty]", "it is empty", "file gone.jsonl does not exist"):
        assert words in line
    assert "good" not in line
    assert check_json(wrong, "-o", "data.prompt_column=question")["sources"][0]["usable"] == 1


# The reward, tried on the reference answers.


def rewards_of(path: Path, reward: Any, **options: Any) -> list[dict[str, str]]:
    config = write_config(path.parent, {"reward": reward, "reward_options": options, "reward_workers": 1})
    result = CliRunner().invoke(app, ["data", "check", str(config), "--json"], standalone_mode=False)
    assert result.exception is None or isinstance(result.exception, UserError)
    found: list[dict[str, str]] = json.loads(result.stdout)["reward"]
    assert (result.exception is not None) == any(finding["level"] == "problem" for finding in found)
    return found


def answers(folder: Path, *references: Any) -> Path:
    rows = [{"prompt": f"question {i}", "answer": reference} for i, reference in enumerate(references)]
    return write_rows(folder / "a.jsonl", *rows)


LONG = "x" * 120  # beyond the end that `boxed` looks at
STREAM = {"inputs": ["1"], "outputs": ["1"]}
OPTIONS: dict[str, Any] = {
    "judge": {"base_url": "http://127.0.0.1:1/v1", "model": "m"},
    "format": {"tags": ["<why>", "</why>", "<so>", "</so>"]},
}
TRIED: dict[str, Any] = {
    "some": ("boxed", (LONG, 4, 5), ("warning", "no answer made of the", "for 1 of 3 rows tried: ", "line 1 ('xxx")),
    "most": ("boxed", (4, LONG, LONG + "y"), ("problem", "for 2 of 3 rows tried: ", "line 2", "line 3")),
    "in a sum, with thinking": ({"boxed_think": 0.5, "length": 0.5}, (4, "B"), None),
    "no reference is read": ("length", (4, "B"), None),
    "no tests": ("code", (4, STREAM), ("ok", "'code'"), ("warning", "fails on 1 of 2 rows", "line 1: tests = '4'")),
    "a server is asked": ("judge", (4,), ("ok", "'judge' is a part of it: it would ask a server")),
    "part of a sum": ({"exact": 0.5, "format": 0.25}, (4, 5), ("warning", "at most 0.5 for 2 of 2 rows", "right_from")),
    "tags around it": ({"math": 0.5, "format": 0.5}, (4, 5), None),
}  # fmt: skip


@pytest.mark.integration  # starts a sandbox
@pytest.mark.parametrize("case", TRIED)
def test_references_are_tried_with_the_reward(case: str, tmp_path: Path) -> None:
    reward, references, *expected = TRIED[case]
    options = {name: OPTIONS[name] for name in ([reward] if isinstance(reward, str) else reward) if name in OPTIONS}
    found = rewards_of(answers(tmp_path, *references), reward, **options)
    for finding, (level, *words) in zip(found, filter(None, expected), strict=True):
        assert finding["level"] == level
        assert all(word in finding["line"] for word in ("data.train: ", *words))


@pytest.mark.integration  # starts scoring processes
def test_references_are_tried_with_maths_and_a_reward_of_ones_own(tmp_path: Path) -> None:
    deep = "(" * 3000 + "1" + ")" * 3000
    (unread,) = rewards_of(answers(tmp_path, r"\$2", "15 dollars", "34.", deep), "math", math={"seconds": 0.3})
    assert unread["level"] == "warning"
    assert "the reward fails on 1 of 4 rows tried; " in unread["line"]
    assert "line 4: reward 'math': ValueError: the reference answer '(((" in unread["line"]
    (broken,) = rewards_of(answers(tmp_path, *range(9)), f"{HERE}:broken")
    assert broken["level"] == "problem"
    assert "the reward fails on 9 of 9 rows tried; " in broken["line"]
    assert "some_rewards.py:" in broken["line"]
    assert broken["line"].endswith("line 6 and 3 more")
    assert broken["line"].count("KeyError") == 1


HERE = "tests.support.some_rewards"
SOLUTION = "3 + 1 = <<3+1=4>>4.\n#### 4"
IGNORES = "this is right only if the reward ignores the reference (then set data.answer_column: null)"
OWN: dict[str, Any] = {
    "matches what a solution ends with": ("solved", (SOLUTION, ["B"], r"Thus \boxed{5}."), {}, []),
    "another form": ("marked", (4, "B"), {"mark": "<so> {} </so>", "end": ""}, []),
    "a form that nothing names": ("marked", (4, "B"), {"mark": 7}, ["warning", "scores more than", "2 of 2", IGNORES]),
    "never": ("never", (4, "B"), {}, ["warning", "scores more than an empty one", "2 of 2", "line 1 ('4')", IGNORES]),
    "silence is worth most": ("shorter", (4, "B"), {}, ["problem", "empty answer counts as right (reward 1)"]),
    "any answer": ("boxes", (4, "B"), {}, ["warning", "another row's reference scores as much", "2 of 2", IGNORES]),
    "fails on some texts": ("numbers", (4, 5), {}, ["warning", "fails on some answers, 2 of 2", r"'\\boxed{4}')"]),
    "a part": ("half", (4, "B"), {}, ["warning", "at most 0.5 for 2 of 2 rows", "eval.right_from, now 1"]),
}  # fmt: skip


@pytest.mark.integration  # starts scoring processes
@pytest.mark.parametrize("case", OWN)
def test_a_right_answer_scores_the_most_and_an_empty_one_the_least(case: str, tmp_path: Path) -> None:
    name, references, options, expected = OWN[case]
    found = rewards_of(answers(tmp_path, *references), f"{HERE}:{name}", **{f"{HERE}:{name}": options})
    assert [finding["level"] for finding in found] == expected[:1]
    assert all(words in finding["line"] for finding in found for words in expected[1:])


@pytest.mark.integration  # starts scoring processes
def test_without_references_nothing_is_compared(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "Write a line."}, {"prompt": "Write two."})
    check(path, "-o", "data.answer_column=null", "-o", f"episode.reward={HERE}:shorter")


def test_without_a_reward_no_reference_is_tried(tmp_path: Path) -> None:
    path = answers(tmp_path, LONG)
    assert check_json(path)["reward"] == []
    with pytest.raises(UserError, match="no answer made of the reference"):
        check(path, "-o", "episode.reward=boxed")
