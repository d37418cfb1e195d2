"""A whole run over network namespaces: two learner ranks, a generator on a third machine, sampler and Redis apart."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file

from common.streams.broker import Broker
from common.streams.steps import latest
from launcher.quickstart.tiny_model import build_model, build_tokenizer, save
from tests.support.namespaces import HUB, PASSWORD, PORT, BridgeRedis, Machines, wait

pytestmark = pytest.mark.e2e
STEPS, BATCH, HELDOUT = 3, 8, 4
# What each machine needs of `spo keys`, and no more.
LEARNERS_KEYS, GENERATORS_KEYS = ("server.key_secret", "client.key"), ("client.key_secret", "server.key")


@pytest.fixture
def redis(machines: Machines, tmp_path: Path) -> Iterator[BridgeRedis]:
    made = BridgeRedis(machines, tmp_path)
    yield made
    made.close()


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    """A folder for the learner's machines and one for the generator's."""
    subprocess.run([sys.executable, "-m", "launcher.cli", "keys", str(tmp_path / "keys")], check=True)
    folders = {}
    for role, files in {"learner": LEARNERS_KEYS, "generator": GENERATORS_KEYS}.items():
        folders[role] = tmp_path / f"keys of the {role}"
        folders[role].mkdir(mode=0o700)
        for file in files:
            shutil.copy2(tmp_path / "keys" / file, folders[role])
    return folders


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """What all machines have in common: a random tiny model, prompts, and where Redis is."""
    tokenizer = build_tokenizer()
    save(build_model(tokenizer, seed=0), tokenizer, tmp_path / "model")
    for name, count in (("train", 100), ("heldout", HELDOUT)):
        rows = [json.dumps({"prompt": f"{name} {i}", "answer": str(i % 10)}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    (tmp_path / "password").write_text(PASSWORD)
    settings = {
        "run": {"name": "apart", "experiment": "apart", "output_dir": str(tmp_path / "runs"), "steps": STEPS},
        "model": {"path": str(tmp_path / "model"), "dtype": "float32", "max_model_len": 128},
        "data": {"train": str(tmp_path / "train.jsonl"), "heldout": str(tmp_path / "heldout.jsonl")}
        | {"max_prompt_tokens": 64},
        "sampler": {"batch_size": BATCH, "max_staleness": 1},
        "generator": {"max_concurrency": 16},
        "learner": {"dtype": "float32", "lr": 1e-4, "zero_stage": 2, "checkpoint_every": 3, "token_budget": 1024},
        "episode": {"max_response_tokens": 16},
        "eval": {"every": STEPS},
        "broker": {"url": f"redis://{HUB}:{PORT}/0", "password_file": str(tmp_path / "password")},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_a_run_over_three_machines_counts_every_task_once_and_its_weights_cross_the_wire(
    machines: Machines, redis: BridgeRedis, keys: dict[str, Path], config: Path, tmp_path: Path
) -> None:
    logs = {name: tmp_path / f"{name}.log" for name in ("sampler", "rank 0", "rank 1", "generator")}
    given = ("-c", str(config), "-o")
    hosts = machines.hostfile(tmp_path / "hosts", "a", "b")
    serving = [*given, f"learner.weights.bind=tcp://{machines.address('a')}:5555"]
    serving += ["-o", f"learner.weights.curve_dir={keys['learner']}"]
    # Namespaces have one kernel, which could hand over memory; machines do not.
    serving += ["-o", "learner.weights.shared_folder=off"]
    processes = [
        machines.start("hub", [sys.executable, "-m", "sampler.cli", *given[:2]], log=logs["sampler"]),
        machines.start_rank("a", hosts, "--module", "learner.cli", *serving, log=logs["rank 0"]),
        machines.start_rank("b", hosts, "--module", "learner.cli", *serving, log=logs["rank 1"]),
        machines.start(
            "c",
            [sys.executable, "-m", "generator.cli", *given, f"learner.weights.curve_dir={keys['generator']}"],
            log=logs["generator"],
        ),
    ]
    ended = [wait(process, logs) for process in processes]
    assert ended == [0, 0, 0, 0], {name: log.read_text()[-3000:] for name, log in logs.items()}

    broker = Broker(redis.client, "apart")
    counters = broker.counters()
    assert counters["dispatched"] == counters["counted"] == counters["finished"]
    assert counters["batched"] == STEPS * BATCH
    step = latest(broker)
    assert step is not None
    assert step.version == STEPS
    # Only who has loaded the last version's weights evaluates it.
    assert [(found["version"], found["samples"]) for found in broker.evaluations()] == [(0, HELDOUT), (STEPS, HELDOUT)]
    left = {name: redis.client.xlen(broker.key(name)) for name in ("tasks", "samples", "batches", "dead")}
    assert left == {"tasks": 0, "samples": 0, "batches": 0, "dead": 0}

    saved = load_file(tmp_path / "runs" / "apart" / "checkpoints" / f"step_{STEPS}" / "hf" / "model.safetensors")
    weights = sum(array.nbytes for array in saved.values())
    out_of_a, into_a = machines.traffic("a")
    out_of_b, _ = machines.traffic("b")
    _, into_c = machines.traffic("c")
    # The generator has pulled one version whole, and the others as what changed; each rank has sent half its gradient
    # in every step, at least.
    assert into_c > weights
    assert out_of_a > 2 * weights + STEPS * weights / 2
    assert min(into_a, out_of_b) > STEPS * weights / 2
