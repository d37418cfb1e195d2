"""The recipe's four steps, one after the other, on real vLLM and DeepSpeed; then what was trained is evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.whole_run import json_lines, spo, write_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PROMPTS, RESPONSES, HELDOUT = 24, 3, 4
SECTIONS = {
    "run": {"steps": 1},
    "sampler": {"batch_size": 16, "max_staleness": 1},
    "episode": {"max_response_tokens": 16},
}


def done(folder: Path, *words: object) -> str:
    """The output of a command that must succeed."""
    ended = spo(*words, folder=folder)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def test_split_estimate_merge_train_and_evaluate(tmp_path: Path) -> None:
    config = write_run(tmp_path, "recipe", SECTIONS, train=PROMPTS, heldout=HELDOUT)
    done(tmp_path, "values", "split", "train.jsonl", "--parts", 2, "--output", "values")
    subset = tmp_path / "values" / "subset_0"
    arguments = ("--data", f"{subset}.parquet", "--output", f"{subset}.jsonl", "--responses", RESPONSES)
    done(tmp_path, "values", "estimate", config, *arguments, "--generators", 1, "-o", "run.name=values")
    rows = json_lines(Path(f"{subset}.jsonl"))
    asked = [f"train {i}" for i in range(PROMPTS // 2)]
    assert sorted(row["input"] for row in rows) == sorted(asked * RESPONSES)
    assert {"prompt_id", "input", "output", "gts", "score", "step"} <= set(rows[0])

    done(tmp_path, "values", "merge", "values/*.jsonl", "--output", "values.json")
    values = json.loads((tmp_path / "values.json").read_text())
    assert {prompt: len(scores) for prompt, scores in values.items()} == dict.fromkeys(asked, RESPONSES)

    done(tmp_path, "run", config, "--plain", "--generators", 1, "-o", "sampler.initial_values=values.json")
    folder = tmp_path / "runs" / "recipe"
    log = (folder / "logs" / "sampler.log").read_text()
    (line,) = [line for line in log.splitlines() if "initial values read" in line]
    assert f"prompts={PROMPTS // 2} " in line

    figures = done(
        tmp_path, "eval", folder / "checkpoints" / "step_1", "-c", config, "--data", "heldout.jsonl", "--samples", 2,
        "--generators", 1, "--json",
    )  # fmt: skip
    assert json.loads(figures)["samples"] == HELDOUT * 2
