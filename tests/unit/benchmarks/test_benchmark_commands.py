"""Every benchmark that is a command explains itself, and says in one line what is wrong with its input."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import benchmarks

FOLDER = Path(benchmarks.__file__).parent
# Runs in an environment of its own, without this project.
ELSEWHERE = "grpo_trl"
COMMANDS = sorted(
    "benchmarks." + ".".join(path.relative_to(FOLDER).with_suffix("").parts)
    for path in FOLDER.rglob("*.py")
    if '__name__ == "__main__":\n    main()\n' in path.read_text(encoding="utf-8") and path.stem != ELSEWHERE
)
MISSING = "/nowhere/at/all"
BAD = [
    ("benchmarks.agent", ["--shape", "round"], "round", "long"),
    ("benchmarks.correction", ["--threads", "0"], "--threads", "whole number of at least 1"),
    ("benchmarks.dashboard", ["--episodes", "many"], "--episodes", "whole number of at least 1"),
    ("benchmarks.deltas.__main__", ["kill", "--kills", "-1"], "--kills", "whole number of at least 1"),
    ("benchmarks.deltas.__main__", ["train", MISSING, MISSING], MISSING, "folder"),
    ("benchmarks.group_free", ["--simulation", "--plot", f"{MISSING}/picture.png"], MISSING, "folder that exists"),
    ("benchmarks.head_dtype", [MISSING], MISSING, "folder"),
    ("benchmarks.head_to_head.__main__", ["run"], "the arm trl", "--trl PYTHON"),
    ("benchmarks.head_to_head.__main__", ["run", "--task", "correction"], "--task correction", "'no baseline'"),
    ("benchmarks.head_to_head.__main__", ["run", "--steps", "50"], "--steps 50", "--every 20"),
    ("benchmarks.head_to_head.__main__", ["table", "--results", "no.jsonl"], "no.jsonl", "run --task products"),
    ("benchmarks.keep_prefix", [str(FOLDER)], str(FOLDER), "config.json"),
    ("benchmarks.lora", ["--dtype", "float8"], "float8", "bfloat16"),
    ("benchmarks.overhead", ["disk"], "disk", "generator, learner, streams, weights, pause"),
    ("benchmarks.parts", ["--beside", str(FOLDER)], str(FOLDER), "common"),
    ("benchmarks.plot_runs", [str(FOLDER)], str(FOLDER), "config.yaml"),
    ("benchmarks.protocol", ["--prompts", "10"], "--prompts 10", "--in-flight"),
    ("benchmarks.protocol", ["--generators", "60000"], "--generators 60000", "--in-flight"),
    ("benchmarks.relays", ["--gbit", "inf"], "inf", "number above 0"),
    ("benchmarks.screenshots", [str(FOLDER), "-o", str(FOLDER)], str(FOLDER), "config.yaml"),
    ("benchmarks.sandbox", ["--concurrency", "0"], "--concurrency", "whole number of at least 1"),
    ("benchmarks.selection", ["--prompts", "1000"], "1000", "at least 6144"),
    ("benchmarks.small_episodes", ["--trl", MISSING], MISSING, "file"),
    ("benchmarks.smollm2", ["folder", "--gguf", MISSING], MISSING, "file"),
    ("benchmarks.staleness.__main__", ["--only", "magic"], "magic", "decoupled_token_is"),
    ("benchmarks.streams", ["--samples", "100"], "100", "at least 2048"),
    ("benchmarks.teacher", ["--arms", "headmaster"], "headmaster", "teacher + reward"),
    ("benchmarks.values.__main__", ["table", "--tasks", "chess"], "chess", "arithmetic"),
]


def run(monkeypatch: pytest.MonkeyPatch, command: str, *arguments: str) -> object:
    """Call a command's `main` as `python -m` does; its exit code."""
    module = importlib.import_module(command)
    monkeypatch.setattr(sys, "argv", [str(module.__file__), *arguments])
    with pytest.raises(SystemExit) as ended:
        module.main()
    return ended.value.code


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_explains_itself(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, command, "--help") == 0
    assert f"usage: python -m {command.removesuffix('.__main__')} " in capsys.readouterr().out
    assert run(monkeypatch, command, "--no-such-option") == 2
    output = capsys.readouterr()
    assert (output.out, len(output.err.splitlines())) == ("", 1), output.err


@pytest.mark.parametrize(("command", "arguments", "given", "allowed"), BAD)
def test_bad_input_is_named_with_what_is_allowed(
    command: str,
    arguments: list[str],
    given: str,
    allowed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, command, *arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("error: ")
    assert given in line
    assert allowed in line
