"""A whole run over network namespaces: two learner ranks, a generator on a third machine, sampler and Redis apart."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from common.streams.broker import Broker
from common.streams.steps import latest
from tests.support.namespaces import HUB, PASSWORD, PORT, BridgeRedis, Machines, NoNamespaces, wait
from tests.support.whole_run import options, settled_counters, spo, write_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
STEPS, BATCH, HELDOUT = 3, 8, 4
SECTIONS = {
    "run": {"steps": STEPS},
    "sampler": {"batch_size": BATCH, "max_staleness": 1},
    "learner": {"zero_stage": 2, "checkpoint_every": 3, "token_budget": 1024},
    "episode": {"max_response_tokens": 16},
    "eval": {"every": STEPS},
}
# What each side needs of `spo keys`, and no more.
KEYS = {
    "learner": ("server.key_secret", "client.key"),
    "generator": ("client.key_secret", "server.key"),
}


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Three machines on a network of their own; skips where namespaces cannot be made."""
    try:
        made = Machines("a", "b", "c")
    except NoNamespaces as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture
def redis(machines: Machines, tmp_path: Path) -> Iterator[BridgeRedis]:
    made = BridgeRedis(machines, tmp_path)
    yield made
    made.close()


def key_settings(folder: Path, role: str) -> list[str]:
    """The settings with a role's keys, in a folder of its own."""
    own = folder / f"keys of the {role}"
    own.mkdir(mode=0o700)
    for file in KEYS[role]:
        shutil.copy2(folder / "keys" / file, own)
    return ["-o", f"learner.weights.curve_dir={own}"]


def test_a_run_over_three_machines_counts_every_task_once(
    machines: Machines, redis: BridgeRedis, tmp_path: Path
) -> None:
    assert spo("keys", tmp_path / "keys").returncode == 0
    (tmp_path / "password").write_text(PASSWORD)
    broker_of_all = {"url": f"redis://{HUB}:{PORT}/0", "password_file": str(tmp_path / "password")}
    config = write_run(tmp_path, "apart", {**SECTIONS, "broker": broker_of_all}, train=100, heldout=HELDOUT)
    logs = {name: tmp_path / f"{name}.log" for name in ("sampler", "rank 0", "rank 1", "generator")}
    command = ["-c", str(config)]
    hosts = machines.hostfile(tmp_path / "hosts", "a", "b")
    # Namespaces have one kernel, which could hand over memory; machines do not.
    weights = {"bind": f"tcp://{machines.address('a')}:5555", "shared_folder": "off"}
    serving = [*command, *options({f"learner.weights.{name}": value for name, value in weights.items()})]
    serving += key_settings(tmp_path, "learner")
    pulling = [*command, *key_settings(tmp_path, "generator")]
    processes = [
        machines.start("hub", [sys.executable, "-m", "sampler.cli", *command], log=logs["sampler"]),
        machines.start_rank("a", hosts, "--module", "learner.cli", *serving, log=logs["rank 0"]),
        machines.start_rank("b", hosts, "--module", "learner.cli", *serving, log=logs["rank 1"]),
        machines.start("c", [sys.executable, "-m", "generator.cli", *pulling], log=logs["generator"]),
    ]
    ended = [wait(process, logs) for process in processes]
    assert ended == [0, 0, 0, 0], {name: log.read_text()[-3000:] for name, log in logs.items()}

    broker = Broker(redis.client, "apart")
    assert settled_counters(broker)["batched"] == STEPS * BATCH
    step = latest(broker)
    assert step is not None
    assert step.version == STEPS
    # A version is evaluated by a generator that has loaded its weights.
    results = [(result["version"], result["samples"]) for result in broker.evaluations()]
    assert results == [(0, HELDOUT), (STEPS, HELDOUT)]

    saved = load_file(tmp_path / "runs" / "apart" / "checkpoints" / f"step_{STEPS}" / "hf" / "model.safetensors")
    size = sum(array.nbytes for array in saved.values())
    out_of_a, into_a = machines.traffic("a")
    out_of_b, _ = machines.traffic("b")
    _, into_c = machines.traffic("c")
    # The generator has pulled one version whole, and the others as what changed; each rank has sent half its gradient
    # in every step, at least.
    assert into_c > size
    assert out_of_a > 2 * size + STEPS * size / 2
    assert min(into_a, out_of_b) > STEPS * size / 2
