"""A whole run over network namespaces: two learner ranks, a generator on a third machine, sampler and Redis apart."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from common.streams.broker import Broker
from common.streams.steps import latest
from tests.support.namespaces import HUB, PASSWORD, PORT, BridgeRedis, Machines, NoNamespaces, wait
from tests.support.whole_run import settled_counters, write_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
STEPS, BATCH, HELDOUT = 3, 8, 4
SECTIONS = {
    "run": {"steps": STEPS},
    "sampler": {"batch_size": BATCH, "max_staleness": 1},
    "learner": {"zero_stage": 2, "checkpoint_every": 3, "token_budget": 1024},
    "episode": {"max_response_tokens": 16},
    "eval": {"every": STEPS},
}
# What each machine needs of `spo keys`, and no more.
LEARNERS_KEYS, GENERATORS_KEYS = ("server.key_secret", "client.key"), ("client.key_secret", "server.key")


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


def test_a_run_over_three_machines_counts_every_task_once(
    machines: Machines, redis: BridgeRedis, keys: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "password").write_text(PASSWORD)
    broker_of_all = {"url": f"redis://{HUB}:{PORT}/0", "password_file": str(tmp_path / "password")}
    config = write_run(tmp_path, "apart", {**SECTIONS, "broker": broker_of_all}, train=100, heldout=HELDOUT)
    logs = {name: tmp_path / f"{name}.log" for name in ("sampler", "rank 0", "rank 1", "generator")}
    settings = ("-c", str(config), "-o")
    hosts = machines.hostfile(tmp_path / "hosts", "a", "b")
    serving = [*settings, f"learner.weights.bind=tcp://{machines.address('a')}:5555"]
    serving += ["-o", f"learner.weights.curve_dir={keys['learner']}"]
    # Namespaces have one kernel, which could hand over memory; machines do not.
    serving += ["-o", "learner.weights.shared_folder=off"]
    processes = [
        machines.start("hub", [sys.executable, "-m", "sampler.cli", *settings[:2]], log=logs["sampler"]),
        machines.start_rank("a", hosts, "--module", "learner.cli", *serving, log=logs["rank 0"]),
        machines.start_rank("b", hosts, "--module", "learner.cli", *serving, log=logs["rank 1"]),
        machines.start(
            "c",
            [sys.executable, "-m", "generator.cli", *settings, f"learner.weights.curve_dir={keys['generator']}"],
            log=logs["generator"],
        ),
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
    weights = sum(array.nbytes for array in saved.values())
    out_of_a, into_a = machines.traffic("a")
    out_of_b, _ = machines.traffic("b")
    _, into_c = machines.traffic("c")
    # The generator has pulled one version whole, and the others as what changed; each rank has sent half its gradient
    # in every step, at least.
    assert into_c > weights
    assert out_of_a > 2 * weights + STEPS * weights / 2
    assert min(into_a, out_of_b) > STEPS * weights / 2
