"""A learner whose ranks are on two machines, and a third that pulls its weights: network namespaces stand for them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from common.curve import make_keys
from common.streams.batches import StepReader
from common.streams.broker import Broker
from tests.support.batch import send_batch
from tests.support.learner import RANK_PROGRAM, learner_config, run_ranks, save_tiny_model, write_jobs
from tests.support.learner_reference import assert_close_gradients
from tests.support.namespaces import BridgeRedis, Machines, wait

pytestmark = pytest.mark.integration
PULL_PROGRAM = Path(__file__).with_name("pull_program.py")
STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def size_of(model: str) -> int:
    """Bytes of the model's weights, each float32."""
    return sum(array.nbytes for array in load_file(Path(model) / "model.safetensors").values())


def test_ranks_on_two_machines_have_the_gradients_of_one(machines: Machines, model: str, tmp_path: Path) -> None:
    def job(**learner: Any) -> dict[str, Any]:
        return {"model": model, "learner": learner, "gradients_only": True}

    apart, whole = tmp_path / "apart", tmp_path / "whole"
    apart.mkdir()
    whole.mkdir()
    jobs = write_jobs({f"stage {stage}": job(token_budget=160, zero_stage=stage) for stage in STAGES}, apart)
    hosts = machines.hostfile(tmp_path / "hosts", "a", "b")
    logs = {name: tmp_path / f"{name}.log" for name in "ab"}
    program = ("--no_local_rank", str(RANK_PROGRAM), str(jobs))
    launchers = [machines.start_rank(name, hosts, *program, log=log) for name, log in logs.items()]
    alone = run_ranks(1, {"alone": job(token_budget=4096)}, whole)["alone"]["gradients"]
    told = {name: log.read_text() for name, log in logs.items()}
    assert [wait(launcher, logs) for launcher in launchers] == [0, 0], told

    import torch

    for stage in STAGES:
        found = torch.load(apart / f"stage {stage}.pt")
        assert_close_gradients(found["gradients"], alone)
    # Each rank's gradient went to the other at least once for every stage, and there was no other way than the veth.
    for name in "ab":
        out, into = machines.traffic(name)
        assert min(out, into) > len(STAGES) * size_of(model) / 2


class TwoRanks:
    """A run whose learner has a rank on machine a and one on b; the test is its sampler and its generators."""

    def __init__(self, machines: Machines, redis: BridgeRedis, folder: Path, model: str) -> None:
        self.machines, self.folder, self.model = machines, folder, model
        self.keys = folder / "keys"
        make_keys(self.keys)
        self.broker = Broker(redis.client, "apart")
        self.hosts = machines.hostfile(folder / "hosts", "a", "b")
        self.logs = {name: folder / f"{name}.log" for name in "ab"}
        self.checkpoints = folder / "apart" / "checkpoints"
        self.config = learner_config(
            model,
            folder,
            run={"name": "apart", "experiment": "apart", "steps": 4},
            broker={"url": redis.url},
            token_budget=160,
            zero_stage=2,
            checkpoint_every=100,
            # Namespaces of one machine could share memory.
            weights={
                "bind": f"tcp://{machines.address('a')}:*",
                "curve_dir": str(self.keys),
                "chunk_mib": 1,
                "shared_folder": "off",
            },
        )

    def configured(self, name: str, curve_dir: Path | None) -> Path:
        """The run's configuration as a machine with these keys has it."""
        tree = self.config.model_dump(mode="json")
        tree["learner"]["weights"]["curve_dir"] = str(curve_dir) if curve_dir else None
        if curve_dir is None:
            # A learner could not be started like that; a generator binds nothing.
            tree["learner"]["weights"]["bind"] = "tcp://127.0.0.1:*"
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return path

    def start(self) -> list[Any]:
        path = self.configured("learner", self.keys)
        command = ("--module", "learner.cli", "-c", str(path), "--unfinished-code", "75")
        return [self.machines.start_rank(name, self.hosts, *command, log=log) for name, log in self.logs.items()]

    def send(self, number: int) -> None:
        """Put one batch and its payloads where the sampler and the generators would."""
        send_batch(self.broker, number)

    def wait_for(self, version: int, launchers: list[Any]) -> None:
        reader = StepReader(self.broker)
        while not any(step.version >= version for step in reader.read(block_ms=500)):
            assert all(launcher.poll() is None for launcher in launchers), self.told()

    def told(self) -> str:
        return "\n".join(f"--- {name}\n{log.read_text()[-3000:]}" for name, log in self.logs.items())

    def pull(self, *configs: Path) -> tuple[list[tuple[int, str]], int]:
        """What clients on machine c get: of each its exit code and what it says; and the bytes that came for all."""
        before = self.machines.traffic("c")[1]
        started = [self.machines.start("c", [sys.executable, str(PULL_PROGRAM), str(path)]) for path in configs]
        said = [process.communicate(timeout=200)[0].decode() for process in started]
        came = self.machines.traffic("c")[1] - before
        return [(process.returncode, text) for process, text in zip(started, said, strict=True)], came


@pytest.fixture
def run(machines: Machines, tmp_path: Path, model: str) -> Iterator[Callable[[], TwoRanks]]:
    redis = BridgeRedis(machines, tmp_path)
    yield TwoRanks(machines, redis, tmp_path, model)
    redis.close()


def test_a_third_machine_gets_the_weights_of_two_ranks_with_the_right_keys_only(run: TwoRanks, tmp_path: Path) -> None:
    launchers = run.start()
    run.send(0)
    run.send(1)
    run.wait_for(2, launchers)
    [(code, said)], came = run.pull(run.configured("third", run.keys))
    assert code == 0, said
    pulled = json.loads(said.splitlines()[-1])
    assert came > size_of(run.model)

    foreign, half = tmp_path / "foreign", tmp_path / "half"
    make_keys(foreign)
    make_keys(half)
    (half / "server.key").write_bytes((run.keys / "server.key").read_bytes())
    refused = {
        None: "set learner.weights.curve_dir",
        foreign: f"has another key than {foreign}/server.key",
        half: f"refuses {half}/client.key_secret",
    }
    configs = [run.configured(f"refused-{number}", keys) for number, keys in enumerate(refused)]
    answers, came = run.pull(*configs)
    for (code, said), reason in zip(answers, refused.values(), strict=True):
        lines = [line for line in said.splitlines() if line.startswith("error:")]
        assert (code, len(lines)) == (2, 1), said
        assert reason in lines[0]
        assert '"sha256"' not in said
    # All three together got less than a fifth of what the weights take.
    assert came < size_of(run.model) / 5

    # SIGTERM to the machine without rank 0 ends both, behind a checkpoint of what the third machine has.
    os.kill(run.machines.process("b", "learner.cli", "--local_rank=0", "-m"), signal.SIGTERM)
    assert [wait(launcher, run.logs) for launcher in launchers] == [75, 75], run.told()
    saved = load_file(run.checkpoints / "step_2" / "hf" / "model.safetensors")
    assert pulled["version"] == 2
    assert pulled["sha256"] == {name: checksum(array) for name, array in saved.items()}


def checksum(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()
