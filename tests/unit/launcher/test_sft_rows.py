"""Rows of demonstrations: what is read from them, and why a row cannot be used."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.config import Config
from common.errors import UserError
from launcher.demonstrations.rows import RowReader, load_demonstrations
from launcher.quickstart.tiny_model import build_model, build_tokenizer, save
from launcher.sft.settings import supervised, with_steps
from learner.batch.demonstrations import Demonstration
from sampler.prompts.row import BadRow
from tests.support import checks
from tests.support.documented import EXAMPLES
from tests.support.sampler import write_rows

TOKENIZER = build_tokenizer()
USER, SAID = {"role": "user", "content": "What is 1?"}, {"role": "assistant", "content": "1"}
MESSAGES = [USER, SAID, USER, SAID]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def config_of(**sft: Any) -> Config:
    model, data = {"path": "none", "max_model_len": 64}, {"train": "none.jsonl", "max_prompt_tokens": 32}
    return checks.config_of(model=model, data=data, sft={"data": "rows.jsonl"} | sft)


def read(row: dict[str, Any], **sft: Any) -> list[Demonstration]:
    return RowReader(config_of(**sft), TOKENIZER).read(row)


def trained(row: dict[str, Any], **sft: Any) -> list[tuple[str, float]]:
    """The texts that are trained on, and their weights."""
    texts: list[tuple[str, float]] = []
    for one in read(row, **sft):
        payload, weights = one.payload(0)
        texts += [
            (TOKENIZER.decode(one.token_ids[start:end]), weight)
            for (start, end), weight in zip(payload.model_spans.tolist(), weights, strict=True)
        ]
    return texts


END = "1<|im_end|>"
READ: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[str, float]]]] = {
    "all turns": ({"messages": MESSAGES}, {}, [(END, 1.0)] * 2),
    "the last turn": ({"messages": MESSAGES}, {"train": "last"}, [(END, 1.0)]),
    "weights": ({"messages": [USER, {**SAID, "weight": 0}, USER, {**SAID, "weight": 0.5}]}, {}, [(END, 0.5)]),
    "messages behind the last turn": ({"messages": [USER, SAID, USER]}, {}, [(END, 1.0)]),
    "text parts": ({"messages": [USER, {**SAID, "content": [{"type": "text", "text": "1"}]}]}, {}, [(END, 1.0)]),
    "prompt and completion": ({"prompt": "What is 1?", "completion": "1", "weight": 2}, {}, [(END, 2.0)]),
    "prompt and completion as messages": ({"prompt": [USER], "completion": [SAID, USER, SAID]}, {}, [(END, 1.0)] * 2),
    "columns of other names": ({"prompt": "1?", "said": "1"}, {"completion_column": "said"}, [(END, 1.0)]),
    "tools": ({"messages": MESSAGES, "tools": json.dumps([TOOL])}, {"train": "last"}, [(END, 1.0)]),
}


@pytest.mark.parametrize("case", READ)
def test_what_is_trained_on(case: str) -> None:
    row, sft, expected = READ[case]
    assert trained(row, **sft) == expected


def test_a_recorded_episode_is_trained_on_as_it_was_sampled() -> None:
    row = {"token_ids": [5, 6, 7, 8, 9], "model_spans": [[1, 2], [4, 5]], "row_lengths": [3, 2], "messages": []}
    assert [(one.token_ids.tolist(), one.weights.tolist()) for one in read(row)] == [
        ([5, 6, 7], [0, 1, 0]),
        ([8, 9], [0, 1]),
    ]


BAD: dict[str, dict[str, Any]] = {
    "no message is the assistant's": {"messages": [USER]},
    "message 1: role 'human' is unknown; allowed: system, developer, user, assistant, tool": {
        "messages": [{**USER, "role": "human"}, SAID]
    },
    "message 2: weight = 'high' is not a number": {"messages": [USER, {**SAID, "weight": "high"}]},
    "message 2: weight = 'nan'": {"messages": [USER, {**SAID, "weight": float("nan")}]},
    "message 2: weight = '-1'": {"messages": [USER, {**SAID, "weight": -1}]},
    "message 2: weight = 'True'": {"messages": [USER, {**SAID, "weight": True}]},
    "message 2: weight = '1e+39' is not a number from 0 to 3e+38": {"messages": [USER, {**SAID, "weight": 1e39}]},
    "message 2: weight = '1000000": {"messages": [USER, {**SAID, "weight": 10**400}]},
    "is of type str, and not a list of messages": {"messages": "hello"},
    "message 1 has no role": {"messages": [{"content": "x"}, SAID]},
    "needs the columns 'messages', or 'prompt' and 'completion'; it has prompt": {"prompt": "x"},
    "'completion' is of type int, and neither text nor messages": {"prompt": "x", "completion": 1},
    "'tools' is not JSON": {"messages": MESSAGES, "tools": "{"},
    "'tools' is not JSON (maximum recursion depth": {"messages": MESSAGES, "tools": "[" * 100_000},
    "contains '<|im_end|>', which ends a turn": {"messages": [USER, {**SAID, "content": "a<|im_end|>b"}]},
    "not those of an episode of this model": {"token_ids": [1, 2], "model_spans": [[1, 3]]},
}


NOT_RECORDED: list[dict[str, Any]] = [
    {"token_ids": [1.5, 2.0, 3.0]},
    {"token_ids": ["1", "2", "3"]},
    {"token_ids": [[1, 2], [3, 4]]},
    {"model_spans": [[1.9, 2.9]]},
    {"row_lengths": [-2, 5]},
    {"row_lengths": [0, 3]},
    {"row_lengths": [[3]]},
]


@pytest.mark.parametrize("wrong", NOT_RECORDED, ids=str)
def test_what_is_not_an_episodes_tokens_is_not_made_to_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRow, match="not those of an episode of this model"):
        read({"token_ids": [1, 2, 3], "model_spans": [[1, 2]], **wrong})


@pytest.mark.parametrize("reason", BAD)
def test_a_row_that_cannot_be_used_says_why(reason: str) -> None:
    with pytest.raises(BadRow) as refused:
        read(BAD[reason])
    assert reason in str(refused.value)


def load(path: Path, log: Any, **sft: Any) -> list[int]:
    """The lengths of the demonstrations of a file."""
    config = config_of(**sft)
    rows = load_demonstrations(config, str(path), RowReader(config, TOKENIZER), "sft.data", "train", log)
    return [len(rows[number].token_ids) for number in range(len(rows))]


def test_rows_that_are_too_long_are_skipped_or_cut_and_bad_ones_named_by_line(tmp_path: Path) -> None:
    path, log = tmp_path / "rows.jsonl", mock.Mock()
    long = [USER, {**SAID, "content": "1" * 70}]
    lines = [{"messages": [USER, SAID]}, {"messages": long}, {"messages": [USER]}]
    write_rows(path, *lines)
    (short,) = load(path, log)
    named = [call.kwargs["row"] for call in log.warning.call_args_list if "row" in call.kwargs]
    assert named == [f"{path} line 2", f"{path} line 3"]
    assert log.warning.call_args.kwargs["count"] == 2
    assert load(path, log, too_long="cut", max_tokens=40) == [short, 40]
    # A prompt that fills the limit leaves nothing to train on.
    with pytest.raises(UserError, match=r"none of the 3 rows can be used \(.*rows.jsonl line 1: "):
        load(path, log, too_long="cut", max_tokens=4)


@pytest.mark.parametrize(
    ("sft", "steps"), [({}, 2), ({"epochs": 2.5}, 4), ({"steps": 7, "epochs": 2.5}, 7), ({"epochs": 0.01}, 1)]
)
def test_steps_follow_from_epochs_unless_they_are_given(sft: dict[str, Any], steps: int) -> None:
    config = supervised(config_of(batch_size=64, **sft))
    assert with_steps(config, 100).run.steps == steps
    assert config.run.folder == Path("runs/sft")


def test_the_learner_has_settings_of_its_own_and_wrong_ones_are_refused() -> None:
    assert supervised(config_of(learner={"lr": 1e-2})).learner.lr == 1e-2
    with pytest.raises(UserError, match=r"sft\.learner\.rate"):
        supervised(config_of(learner={"rate": 1}))


def example(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: object) -> dict[str, Any]:
    """Run a program of examples/harbor; returns its globals."""
    folder = EXAMPLES / "harbor"
    for module in ("tasks", "demonstrations"):  # which the others import
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**runpy.run_path(str(folder / f"{module}.py"))))
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    return runpy.run_path(str(folder / name), run_name="__main__")


EDIT = "sed -i s/@/{}/ calc.py"
CALLS = {"": "{}<|im_end|>", "use": '{{"operator": "{}"}}', "Bash": EDIT, "exec_command": EDIT}


@pytest.mark.parametrize("tool", CALLS)
def test_half_of_the_demonstrations_of_the_repairs_are_right(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repairs = example(monkeypatch, "demonstrations.py", tmp_path / "rows.jsonl", *tool.split())["REPAIRS"]
    right = 0
    for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines()):
        (name,) = (name for name in repairs if f"does {name} need?" in json.dumps(row))
        right += CALLS[tool].format(repairs[name]) in trained(row)[0][0]
    assert (right, len(repairs)) == (20, 10)


@pytest.mark.parametrize("tool", filter(None, CALLS))
def test_a_call_of_the_repairs_is_three_tokens_with_the_operator_between(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(build_model(TOKENIZER, seed=0), TOKENIZER, tmp_path / "model")
    calls = example(monkeypatch, "tokens.py", tmp_path / "model", tmp_path / "new", tool)["CALLS"]
    call = {"name": tool, "arguments": json.loads(calls[tool][-2].format(operator="*"))}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    tokens = tokenizer.tokenize(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
    assert [token == "*" for token in tokens] == [False, True, False]
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert len(model.get_input_embeddings().weight) == len(tokenizer)
