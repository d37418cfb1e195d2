"""Learner, relay and generators as processes that are killed while weights travel between them as deltas.

Whatever arrives must be, bit for bit, what a learner published under that snapshot's name.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import xxhash

from common.config import WeightsConfig
from common.weights.memory import Transfer
from common.weights.wire import Manifest
from generator.weights.weight_client import WeightClient
from relay.relay import Relay

CONFIG = WeightsConfig(deltas="on")
SILENCE = 2.0  # seconds after which a server is given up
EVERY = 0.4  # seconds between versions
PATIENCE = 120.0
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class KillReport:
    """Processes killed by kind, snapshots that arrived whole, and how many of those as deltas."""

    killed: dict[str, int]
    in_transfer: int
    arrived: int
    as_deltas: int
    wrong: int


def run(folder: Path, kills: int, mib: int, seed: int) -> KillReport:
    """Kill so many processes, one after the other, each when a transfer has begun; then compare all that arrived."""
    kinds: dict[str, Callable[[Path, str, int], None]] = {
        "learner": _learner,
        "relay": _relay,
        "generator-1": _generator,
        "generator-2": _generator,
    }
    rng = random.Random(seed)
    processes = {name: _start(kinds[name], folder, name, mib) for name in kinds}
    killed: Counter[str] = Counter()
    in_transfer = 0
    for number in range(kills):
        victim = list(kinds)[number % len(kinds)]
        # A transfer of the victim; of the learner, one of any receiver.
        watched = victim if victim != "learner" else rng.choice(["relay", "generator-1", "generator-2"])
        _wait_for_transfer(folder / f"{watched}.log", processes.values())
        time.sleep(rng.random() * 0.05)
        processes[victim].kill()
        processes[victim].join()
        in_transfer += _lines(folder / f"{watched}.log")[-1]["what"] == "begins"
        killed[victim.partition("-")[0]] += 1
        processes[victim] = _start(kinds[victim], folder, victim, mib)
    # Afterwards every process gets the newest again.
    for name in ("relay", "generator-1", "generator-2"):
        _wait_for_transfer(folder / f"{name}.log", processes.values(), ends=True)
    for process in processes.values():
        process.kill()
        process.join()
    names: dict[str, str] = {}
    digests: set[str] = set()
    for line in _lines(folder / "learner.log"):
        digests.add(line["digest"])
        names |= {line["snapshot"]: line["digest"]} if "snapshot" in line else {}
    arrived = [
        line for name in ("generator-1", "generator-2") for line in _lines(folder / f"{name}.log") if "digest" in line
    ]
    wrong = sum(
        line["digest"] not in digests or names.get(line["snapshot"], line["digest"]) != line["digest"]
        for line in arrived
    )
    return KillReport(dict(killed), in_transfer, len(arrived), sum(line["deltas"] > 0 for line in arrived), wrong)


def _start(target: Callable[[Path, str, int], None], folder: Path, name: str, mib: int) -> BaseProcess:
    process = SPAWN.Process(target=target, args=(folder, name, mib), daemon=True)
    process.start()
    return process


def _lines(path: Path) -> list[dict[str, Any]]:
    """The notes of a process, without lines that were cut off."""
    lines = []
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def _note(path: Path, **what: Any) -> None:
    # On a line of its own even where the last one was cut off.
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps(what) + "\n")


def _wait_for_transfer(path: Path, processes: Any, *, ends: bool = False) -> None:
    deadline, seen = time.monotonic() + PATIENCE, len(_lines(path))
    while not any(line["what"] == ("ends" if ends else "begins") for line in _lines(path)[seen:]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.stem}: no transfer in {PATIENCE:g} s; {[p.exitcode for p in processes]}")
        time.sleep(0.002)


def _endpoint(path: Path) -> dict[str, str] | None:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _announce(path: Path, endpoint: dict[str, str]) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(endpoint), encoding="utf-8")
    temporary.rename(path)


def _quiet() -> Any:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    return structlog.get_logger()


def _learner(folder: Path, name: str, mib: int) -> None:
    """Publish one version after another; a restarted learner begins with other weights and the same numbers."""
    # Of all the processes only this one needs torch, which takes seconds.
    import torch

    from learner.publish.weight_server import WeightServer

    log = _quiet()
    server = WeightServer(CONFIG, log=log)
    rng = np.random.default_rng()
    weights = rng.integers(0, 1 << 15, (mib << 20) // 2, np.uint16)
    version = 0
    while True:
        digest = _digest(weights.data)
        _note(folder / f"{name}.log", what="publishes", digest=digest)
        server.serve(
            server.copy(version, [("weights", torch.from_numpy(weights).view(torch.bfloat16))], torch.bfloat16)
        )
        endpoint = server.endpoint()
        _note(folder / f"{name}.log", what="published", snapshot=endpoint["snapshot"], digest=digest)
        _announce(folder / "learner.json", endpoint)
        time.sleep(EVERY)
        weights[rng.integers(0, len(weights), len(weights) // 200)] ^= 1
        version += 1


def _relay(folder: Path, name: str, mib: int) -> None:
    log = _quiet()

    class Noting(Relay):
        def begin(self, manifest: Manifest) -> Transfer:
            _note(folder / f"{name}.log", what="begins")
            return super().begin(manifest)

        def end(self, transfer: Transfer) -> None:
            super().end(transfer)
            _note(folder / f"{name}.log", what="ends")

    relay = Noting(lambda: _endpoint(folder / "learner.json"), CONFIG, timeout=SILENCE, log=log)
    _announce(folder / "relay.json", relay.server.endpoint() | {"name": name})
    relay.run()


def _generator(folder: Path, name: str, mib: int) -> None:
    asyncio.run(_generate(folder, name, _quiet()))


async def _generate(folder: Path, name: str, log: Any) -> None:
    class Noting(WeightClient):
        def begin(self, manifest: Manifest) -> Transfer:
            _note(folder / f"{name}.log", what="begins")
            return super().begin(manifest)

    def relays() -> list[dict[str, str]]:
        relay = _endpoint(folder / "relay.json")
        return [relay] if relay else []

    client = Noting(
        lambda: _endpoint(folder / "learner.json"),
        CONFIG,
        relays=relays if name == "generator-1" else list,
        timeout=SILENCE,
        log=log,
    )
    deltas = 0
    while True:
        with await client.next() as weights:
            made = client.stats.delta_chunks - deltas
            deltas += made
            digest = _digest(np.fromfile(weights.path, np.uint8).data)
            _note(folder / f"{name}.log", what="ends", snapshot=weights.manifest.snapshot, digest=digest, deltas=made)


def _digest(data: memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)
