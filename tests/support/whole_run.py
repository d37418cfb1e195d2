"""Whole runs by `spo`, as small as they can be, and what a test does to them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.streams.broker import Broker
from common.streams.steps import StepReader

STREAMS = ("tasks", "samples", "batches", "dead")
SPO = (sys.executable, "-m", "launcher.cli")
# Short enough that a process that was killed is replaced at once.
QUICK_HEARTBEAT = {"dead_after": 3.0}


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings as one; what `more` says wins."""
    both = {
        key: merged(base[key], value) if isinstance(value, Mapping) and isinstance(base.get(key), Mapping) else value
        for key, value in more.items()
    }
    return {**base, **both}


def save_model(
    folder: Path,
    extra_tokens: Sequence[str] = (),
    seed: int = 0,
    frequent: Sequence[str] = (),
    pull: tuple[float, float] = (0.8, 1.4),
) -> Path:
    """Save a tiny model that has learned nothing; other seeds give other weights.

    Args:
        frequent: texts of one token each, such as whole tool calls; the model samples them, and the turn's end, often.
        pull: how far their embeddings, and that of the turn's end, point along the direction that all states share.
    """
    import torch

    from launcher.quickstart.tiny_model import build_model, build_tokenizer, save

    tokenizer = build_tokenizer((*extra_tokens, *frequent))
    model = build_model(tokenizer, seed=seed)
    if frequent:
        # Every state gets a common direction, along which the embeddings of these tokens point.
        with torch.no_grad():
            embedding = model.get_input_embeddings().weight
            embedding[:, 0] = 0.3
            embedding[tokenizer.eos_token_id, 0] = pull[1]
            for text in frequent:
                embedding[tokenizer.convert_tokens_to_ids(text), 0] = pull[0]
    save(model, tokenizer, folder)
    return folder


def write_run(folder: Path, name: str, sections: Mapping[str, Any], *, train: int = 200, heldout: int = 0) -> Path:
    """Write a random tiny model, prompts, and the configuration `NAME.yaml`; `sections` adds to the smallest one."""
    save_model(folder / "model")
    data: dict[str, Any] = {"max_prompt_tokens": 64}
    for side, count in (("train", train), ("heldout", heldout)):
        rows = [json.dumps({"prompt": f"{side} {i}", "answer": str(i % 10)}) for i in range(count)]
        if rows:
            (folder / f"{side}.jsonl").write_text("\n".join(rows))
            data[side] = str(folder / f"{side}.jsonl")
    smallest = {
        "run": {"name": name, "experiment": name, "output_dir": str(folder / "runs")},
        "model": {"path": str(folder / "model"), "dtype": "float32", "max_model_len": 128},
        "data": data,
        "generator": {"max_concurrency": 16},
        "learner": {"dtype": "float32", "lr": 1e-4, "token_budget": 2048},
        "broker": QUICK_HEARTBEAT,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(merged(smallest, sections)))
    return path


def cache_of_quickstart(folder: Path) -> dict[str, str]:
    """The environment in which `spo quickstart` finds an initial model that has learned nothing."""
    from launcher.quickstart.cache import key
    from launcher.tasks import DEFAULT

    save_model(folder / "cache" / "spo" / f"warm-start-{key(DEFAULT)}", DEFAULT.extra_tokens)
    return {"XDG_CACHE_HOME": str(folder / "cache")}


def importing(folder: Path, modules: Mapping[str, str]) -> dict[str, str]:
    """The environment in which processes import these modules, which are written to the folder."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def options(settings: Mapping[str, Any]) -> list[str]:
    """Settings by their dotted names as a command line has them."""
    return [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]


def spo(
    *words: object, folder: Path | None = None, timeout: float = 600, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder; if it does not end, the test fails with its output so far."""
    command = [*SPO, *map(str, words)]
    try:
        return subprocess.run(
            command,
            cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        printed = ((expired.stdout or b"") + (expired.stderr or b"")).decode(errors="replace")
        pytest.fail(f"{' '.join(command)} had not ended after {timeout:g} s; the end of its output:\n{printed[-3000:]}")


@contextmanager
def started(
    log: Path | None, *words: object, folder: Path | None = None, environment: Mapping[str, str] = {}
) -> Iterator[subprocess.Popen[str]]:
    """A command that runs during the block; interrupted at the end if it still runs.

    Args:
        log: the file that gets its output; None for the process's `stdout`, a pipe.
    """
    with ExitStack() as stack:
        output = stack.enter_context(log.open("a")) if log else subprocess.PIPE
        process = subprocess.Popen(
            [*SPO, *map(str, words)], cwd=folder, env=os.environ | environment,
            stdout=output, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=600)


def wait_for_version(broker: Broker, version: int, process: subprocess.Popen[str]) -> None:
    """Until the learner has announced a version; fails if the command has ended before."""
    reader = StepReader(broker)
    while not any(step.version >= version for step in reader.read(block_ms=500)):
        assert process.poll() is None, "the run ended early"


def pid_of(log: Path, name: str) -> int:
    """The process id of a process that `spo run` has started, by the run's plain output."""
    return int(re.findall(rf"started .*process={name}\b.*", log.read_text())[-1].partition("pid=")[2].split()[0])


def kill(broker: Broker, role: str) -> None:
    """SIGKILL the only process of a role, as its heartbeat names it."""
    (pid,) = [process["pid"] for process in broker.processes().values() if process["role"] == role]
    os.kill(pid, signal.SIGKILL)


def settled_counters(broker: Broker) -> dict[str, int]:
    """The counters of a run that is over: every task was counted once, and nothing is left in Redis."""
    counters = broker.counters()
    assert counters["dispatched"] == counters["counted"]
    # A generator that is killed in the middle of an evaluation takes its version with it.
    ended = counters["finished"] + counters.get("superseded", 0) + counters.get("lost", 0)
    assert counters["counted"] == ended
    assert {name: broker.redis.xlen(broker.key(name)) for name in STREAMS} == dict.fromkeys(STREAMS, 0)
    assert broker.keys_of("payload:") == []
    return counters


def json_lines(*paths: Path) -> list[dict[str, Any]]:
    """The rows of files, one after the other."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def kept_episodes(run: Path) -> list[dict[str, Any]]:
    """Episodes of a run folder, of training and of evaluations."""
    return json_lines(*sorted(run.glob("rollouts/*.jsonl")), *sorted(run.glob("validation_data/*.jsonl")))
