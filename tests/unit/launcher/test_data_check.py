"""`spo data check`: what it finds in the rows of a run's data, and when it says that they cannot be used."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from common.config import Config, load_config
from common.errors import UserError
from common.messages import Task
from generator.episode_runner import EpisodeRunner
from generator.parts import RunParts
from launcher.checks.rows import load_tokenizer
from launcher.cli import app
from launcher.quickstart.tiny_model import build_tokenizer
from tests.support.episode import ScriptedEngine


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def check(*arguments: object) -> str:
    """The report as text; raises what would become exit code 2."""
    result = CliRunner().invoke(app, ["data", "check", *map(str, arguments)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def check_json(*arguments: object) -> dict[str, Any]:
    return dict(json.loads(check(*arguments, "--json")))


def write_config(folder: Path, **data: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": str(folder / "model")}, "data": data}))
    return path


def test_unusable_rows_are_counted_by_reason(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "a.jsonl",
        {"prompt": "1+1=", "answer": 2, "level": 1},
        {"prompt": "1+1=", "answer": 2},
        {"prompt": "1+2=", "answer": "3"},
        '{"prompt": "1+3=", "ans',
        '{"prompt": "1+3=", "answer": 4',
        {"prompt": "1+4=", "answer": None},
        {"answer": 3},
        {"prompt": "1" * 11, "answer": True},
    )
    (source,) = check_json(path)["sources"]
    assert (source["rows"], source["usable"]) == (8, 3)
    assert source["problems"] == {"duplicate": 1, "unreadable": 2, "answer": 1, "prompt": 1}
    assert source["reasons"]["the same prompt as an earlier row"] == {"count": 1, "first": f"{path} line 2"}
    assert source["reasons"]["not JSON"]["count"] == 2
    assert source["reasons"]["not JSON"]["first"].startswith(f"{path} line 4: ")
    assert source["columns"] == {"prompt": 5, "answer": 6, "level": 1}
    assert {kind: rows["count"] for kind, rows in source["answers"].items()} == {"number": 1, "text": 1, "boolean": 1}
    assert source["answers"]["boolean"]["first"] == f"{path} line 8"
    assert source["mixed_answers"]
    assert source["characters"] == {"min": 4, "median": 4.0, "p95": pytest.approx(10.3), "max": 11}
    assert source["tokens"] is source["too_long"] is None
    text = check(path)
    assert "8, of which 3 can be used" in text
    assert "of different types" in text
    alike = jsonl(tmp_path / "b.jsonl", {"prompt": "a", "answer": 79}, {"prompt": "b", "answer": "79"})
    assert not check_json(alike)["sources"][0]["mixed_answers"]
    assert "different types" not in check(alike)


def test_prompts_are_counted_as_a_generator_renders_them(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": "What is 1+1?", "answer": 2}, {"prompt": "1" * 40, "answer": 1}]
    config_path = write_config(
        tmp_path,
        train=[
            {"path": str(jsonl(tmp_path / "plain.jsonl", *rows))},
            {
                "path": str(jsonl(tmp_path / "tools.jsonl", *rows)),
                "system_prompt": "Use the calculator.",
                "episode": {"tools": ["calculator"], "max_assistant_turns": 2},
            },
        ],
        max_prompt_tokens=50,
    )
    config, checked = load_config(config_path, (), {}), check_json(config_path)
    assert checked["tokens_not_counted"] == ""
    plain, tools = checked["sources"]
    for source, report in zip(config.data.sources("train"), (plain, tools), strict=True):
        lengths = [_tokens_of_an_episode(config, source.name, str(row["prompt"])) for row in rows]
        assert (report["tokens"]["min"], report["tokens"]["max"]) == (min(lengths), max(lengths))
        assert report["too_long"] == sum(length > 50 for length in lengths)
    assert tools["tokens"]["min"] > plain["tokens"]["min"]
    other = check_json(tmp_path / "plain.jsonl", "--tokenizer", tmp_path / "model")
    assert other["sources"][0]["tokens"] == plain["tokens"]


def _tokens_of_an_episode(config: Config, source: str, prompt: str) -> int:
    of_source, parts = RunParts(config).by_source["train", source]
    roomy = of_source.model_copy(update={"data": of_source.data.model_copy(update={"max_prompt_tokens": 10_000})})
    engine: Any = ScriptedEngine()
    runner = EpisodeRunner(roomy, engine, parts)
    return asyncio.run(runner.prepare(Task(task_id="t", prompt_id="p", prompt=prompt))).length


def test_tokens_that_cannot_be_counted_are_a_note_and_no_error(tmp_path: Path) -> None:
    path = write_config(tmp_path, train=str(jsonl(tmp_path / "a.jsonl", {"prompt": "a", "answer": 1})))
    (tmp_path / "model").mkdir()
    for reason in ("tokenizer", "has no chat template"):
        report = check_json(path)
        assert reason in report["tokens_not_counted"]
        assert report["sources"][0]["usable"] == 1
        tokenizer = build_tokenizer()
        tokenizer.chat_template = None
        tokenizer.save_pretrained(tmp_path / "model")


def test_held_out_prompts_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    one = jsonl(tmp_path / "one.jsonl", {"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 1})
    two = jsonl(tmp_path / "two.jsonl", {"prompt": "b", "answer": 1}, {"prompt": "c", "answer": 1})
    path = write_config(tmp_path, train=[{"path": str(one)}], heldout=str(two))
    assert check_json(path)["heldout_also_trained_on"] == 1
    assert "1 held-out prompts are also trained on" in check(path)
    assert check_json(one)["heldout_also_trained_on"] is None


def test_a_source_without_a_usable_row_names_its_columns(tmp_path: Path) -> None:
    good = jsonl(tmp_path / "good.jsonl", {"prompt": "a", "answer": 1})
    wrong = jsonl(tmp_path / "wrong.jsonl", {"question": "a", "answer": 1})
    empty = jsonl(tmp_path / "empty.jsonl")
    path = write_config(
        tmp_path, train=[{"path": str(good)}, {"path": str(wrong)}, {"path": str(empty)}, {"path": "gone.jsonl"}]
    )
    with pytest.raises(UserError) as refusal:
        check(path)
    line = str(refusal.value)
    assert f"{wrong} line 1: no prompt in column 'prompt'; there is no column 'prompt'; there are question, answer" in (
        line
    )
    assert "data.train[empty]" in line
    assert "it is empty" in line
    assert "data file gone.jsonl does not exist" in line
    assert "good" not in line
    assert check_json(wrong, "-o", "data.prompt_column=question")["sources"][0]["usable"] == 1


def test_without_a_network_only_the_cache_has_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def load(path: str, *, trust_remote_code: bool, local_files_only: bool) -> None:
        asked.append(local_files_only)
        raise OSError("no files")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(UserError, match="tokenizer of owner/name cannot be loaded: .* hub cannot be reached"):
        load_tokenizer("owner/name")
    assert asked == [True]
