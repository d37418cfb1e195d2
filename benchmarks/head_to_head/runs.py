"""One run of an arm: train, then evaluate its checkpoints."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks import tables
from benchmarks.head_to_head import bare
from benchmarks.options import ROOT
from benchmarks.watched import Point, watch_spo, watch_trl
from common.config import Config, Source, load_config
from common.config.load import override, parse_config, read_tree
from common.errors import UserError
from sampler.prompts.rows import open_rows

CONFIG = ROOT / "configs" / "smollm2-gym.yaml"
PRODUCTS, CORRECTION = "products", "correction"
SUM_TERMS = "min_terms: 2, max_terms: 4, min_digits: 1, max_digits: 2"
# Over the configuration; in the rows, a task has its experiment's name.
TASKS: dict[str, list[str]] = {
    PRODUCTS: [],
    # Four answers of the initial model have a right one on 18% of the prompts.
    "sums": [
        "run.experiment=smollm2-sums",
        f"data.train=[{{path: 'reasoning_gym:chain_sum', options: {{size: 1000, {SUM_TERMS}}}}}]",
        f"data.heldout=[{{path: 'reasoning_gym:chain_sum', options: {{size: 200, {SUM_TERMS}}}}}]",
    ],
    # A wrong answer is corrected once.
    CORRECTION: [
        "run.experiment=smollm2-correction",
        "episode.user=corrector",
        "episode.user_options={turns: 1}",
        "episode.max_assistant_turns=2",
        "episode.max_response_tokens=128",
    ],
}
GROUP = 8
BY_TOKEN = "spo by token"
# Over the task's configuration.
ARMS: dict[str, list[str]] = {
    "spo": [],
    "no baseline": ["algorithm.method=none"],
    "grpo": ["algorithm.method=grpo", f"algorithm.group_size={GROUP}"],
    "rloo": ["algorithm.method=rloo", f"algorithm.group_size={GROUP}"],
    # Asked for by name: advantages normalised over tokens, of which failed episodes with two turns have more.
    BY_TOKEN: ["sampler.advantage.token_weighted=true"],
}
TRL = "trl"
TRL_VERSION = "1.16.0"
START = "start"  # the arm that trains no step
BARE = "bare"  # not an arm: the passes by themselves
LOOK = 0.5  # seconds between two looks at the CPU time


def settings(config: Config, steps: int, every: int, samples: int) -> dict[str, Any]:
    """What the rows of a study have in common; a file of rows with others is refused."""
    return {
        "task": config.run.experiment,
        "steps": steps,
        "every": every,
        "samples": samples,
        "batch": config.sampler.batch_size,
        "lr": config.learner.lr,
        "temperature": config.generator.temperature,
        "max_response_tokens": config.episode.max_response_tokens,
        "trl": TRL_VERSION,
    }


def read_rows(path: Path, common: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The rows of a study; [] if there is none yet. Raises `UserError` if one was made with other settings."""
    rows = tables.read_rows(path)
    for row in rows:
        for name, value in (common or {}).items():
            if row["settings"].get(name) != value:
                raise UserError(
                    f"{path} has rows with {name} = {row['settings'].get(name)!r}, and {value!r} is asked for; "
                    "give another --results"
                )
    return rows


def task_file(task: str, folder: Path) -> Path:
    """Write a task's training prompts, each once and none held out, and its configuration; returns that one's path."""
    tree = read_tree(CONFIG)
    override(tree, TASKS[task])
    data = parse_config(tree).data
    prompts, (heldout,) = folder / "train.jsonl", data.sources("heldout")
    seen = {row["prompt"] for row in rows_of(heldout)}
    with prompts.open("w", encoding="utf-8") as file:
        for row in rows_of(data.sources("train")[0]):
            if row["prompt"] not in seen:
                file.write(json.dumps(row) + "\n")
            seen.add(row["prompt"])
    tree["data"]["train"] = str(prompts.absolute())
    path = folder / "task.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def rows_of(source: Source) -> Iterator[dict[str, Any]]:
    """The rows of a source of prompts, in order."""
    rows = open_rows(source.path, source.split, source.options)
    return (rows[i] for i in range(len(rows)))


def check_trl(python: Path) -> None:
    """Raise `UserError` for a Python without TRL, or with another version of it."""
    code = "import importlib.metadata as m; print(m.version('trl'))"
    outcome = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    installed = outcome.stdout.strip()
    if installed != TRL_VERSION:
        has = f"has TRL {installed}" if installed else "has no TRL"
        raise UserError(f"--trl {python} {has}; {python} -m pip install trl=={TRL_VERSION}")


def measure(arm: str, seed: int, common: dict[str, Any], task: str, folder: Path, trl: Path | None) -> Any:
    """Train an arm with a seed on a task and evaluate it, or measure the passes by themselves; its row."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config_path = task_file(task, folder)
    config = load_config(config_path)
    others = _busy()
    if arm == BARE:
        figures = bare.measure(config_path, folder)
        shutil.rmtree(folder)
        return {"arm": arm, "seed": seed, "settings": common, "busy_before": others, "bare": figures}
    points: list[Point] = []
    checkpoints = {0: Path(config.model.path)}
    if arm == TRL:
        assert trl is not None
        points = watch_trl(trl.absolute(), trl_settings(config, common, seed, folder), folder)
        checkpoints = {step: folder / f"checkpoint-{step}" for step in _saved(common)}
    elif arm != START:
        points = train_spo(arm, seed, common, config_path, folder)
        checkpoints = {step: folder / "run" / "checkpoints" / f"step_{step}" for step in _saved(common)}
    began = points[0].time if points else 0.0
    row = {
        "arm": arm,
        "seed": seed,
        "settings": common,
        "busy_before": others,
        # From the end of the first step, in which both sides warm up.
        "steps": [asdict(point) | {"time": round(point.time - began, 2)} for point in points],
        "heldout": {
            str(step): evaluate(checkpoint, config_path, seed, common["samples"], folder)
            for step, checkpoint in checkpoints.items()
        },
    }
    shutil.rmtree(folder)
    return row


def train_spo(arm: str, seed: int, common: dict[str, Any], config_path: Path, folder: Path) -> list[Point]:
    """The steps of `spo run`, with a checkpoint at each step that is evaluated."""
    tree = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    tree["run"] |= {"experiment": "run", "output_dir": str(folder), "steps": common["steps"], "seed": seed}
    tree["learner"] |= {"checkpoint_every": common["every"], "keep_checkpoints": len(_saved(common))}
    tree["episode"] |= {"rollouts_every": 0}
    del tree["data"]["heldout"]  # evaluated after the run
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return watch_spo(path, folder / "run" / "metrics.jsonl", ROOT, ARMS[arm], LOOK)


def trl_settings(config: Config, common: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    """The same task for `benchmarks/grpo_trl.py`: TRL's defaults, except what both sides share."""
    steps = common["steps"]
    return {
        "model": str(Path(config.model.path).absolute()),
        # Adam works on float32 here too; in bfloat16 steps of 1e-5 would be lost to rounding.
        "dtype": "float32",
        "rows": str(config.data.train),
        "system_prompt": config.data.system_prompt,
        "pattern": config.episode.reward_options["reasoning_gym"]["pattern"],
        "threads": psutil.cpu_count(),
        "grpo": {
            "output_dir": str(folder),
            "seed": seed,
            "per_device_train_batch_size": common["batch"],
            "num_generations": GROUP,
            "max_completion_length": common["max_response_tokens"],
            "max_steps": steps,
            "learning_rate": common["lr"],
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": config.learner.warmup_steps,
            "beta": 0.0,
            "temperature": common["temperature"],
            "bf16": True,
            "save_steps": common["every"],
            "save_only_model": True,
            "gradient_checkpointing": False,
        },
    }


def evaluate(model: Path, config_path: Path, seed: int, samples: int, folder: Path) -> dict[str, int]:
    """Number of right answers among `samples` to each held-out prompt, by its id."""
    answers = folder / f"{model.name}.jsonl"
    command = [sys.executable, "-m", "launcher.cli", "eval", str(model), "-c", str(config_path), "--plain"]
    command += ["--samples", str(samples), "--output", str(answers), "--generators", "2", "-o", f"run.seed={seed}"]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if outcome.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{outcome.stderr[-3000:]}")
    right: dict[str, int] = {}
    for line in answers.read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)
        right[answer["prompt_id"]] = right.get(answer["prompt_id"], 0) + (answer["score"] >= 1)
    return right


def _saved(common: dict[str, Any]) -> range:
    """Steps at which checkpoints are saved and evaluated."""
    return range(common["every"], common["steps"] + 1, common["every"])


def _busy() -> float:
    """The share of the machine's cores that others use, in the second before the run."""
    return float(psutil.cpu_percent(1.0))
