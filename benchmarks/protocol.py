"""What the protocol costs at scale: a million prompts, 50,000 tasks in flight, 1,000 generators that do no work.

A real redis-server, the sampler and the generators' inboxes as they are. `python -m benchmarks.protocol`; with
`--beside FOLDER`, another checkout is measured in turns with this one.
"""

from __future__ import annotations

import gc
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import redis
import structlog

from benchmarks import options
from benchmarks.streams import redis_server
from benchmarks.turns import compared, spent
from common.config import Config, parse_config
from common.errors import reports_user_errors
from common.messages import SampleHeader, Step
from common.streams.broker import Broker
from common.streams.ledger import SamplerLedger
from common.streams.presence import Presence
from common.streams.tasks import Delivery, Finished, TaskInbox
from sampler.loop import Sampler
from sampler.prompts.prompt_set import RunData, load_data
from tests.support.ports import free_port

BATCH = 1024
COUNTED, ROUNDS = 512, 5  # samples of one round, and rounds
LEAST = 8 * BATCH  # tasks in flight, so that there are enough for all rounds
DEAD_AFTER, HEARTBEAT = 10.0, 1.0  # the defaults of a run
LOG = structlog.wrap_logger(structlog.PrintLogger(), wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


class Scale:
    """A run at full size, each part of which is measured."""

    def __init__(self, client: redis.Redis, folder: Path, prompts: int, in_flight: int, generators: int) -> None:
        self.client, self.folder = client, folder
        self.prompts, self.in_flight, self.generators = prompts, in_flight, generators
        self.broker = Broker(client, "scale", dead_after=DEAD_AFTER)
        self.config = self._configuration()
        self.data = load_data(self.config.data, LOG)
        self.deliveries: list[Delivery] = []
        self.inboxes = [TaskInbox(self.broker, f"generator-{i}") for i in range(generators)]

    def _configuration(self) -> Config:
        train = self.folder / "train.jsonl"
        with train.open("w") as file:
            file.writelines(f'{{"prompt": "prompt {i}", "answer": "{i}"}}\n' for i in range(self.prompts))
        sampler = {"batch_size": BATCH, "max_staleness": self.in_flight // BATCH, "drift": {"mode": "ledger"}}
        return parse_config(
            {
                "run": {"name": "scale", "steps": 10**6, "output_dir": str(self.folder)},
                "model": {"path": "none"},
                "data": {"train": str(train)},
                "sampler": sampler,
                "eval": {"every": 0},
            }
        )

    def sampler(self, name: str) -> Sampler:
        data = RunData(self.data.train, None)
        presence = Presence(self.broker, name, "sampler")
        return Sampler(self.config, data, SamplerLedger(self.broker, name), presence, LOG)

    def measure(self) -> dict[str, float]:
        """Every row of the table."""
        figures: dict[str, float] = {}
        sampler = self.sampler("first")
        sampler.begin()
        sampler.take_step(Step(version=0))
        self._answer_every_prompt_once(sampler)
        rounds = list(self._fill(sampler))[-8:]
        figures["choose 1,024 tasks, ms"] = 1e3 * median(choose for choose, _ in rounds)
        figures["commit 1,024 tasks, ms"] = 1e3 * median(commit for _, commit in rounds)
        each = self.in_flight // self.generators
        gc.collect()
        gc.freeze()  # as the sampler does when it has begun
        held = [inbox.lease(-1, each, each).deliveries for inbox in self.inboxes]
        ids = [[delivery.entry_id for delivery in deliveries] for deliveries in held]
        floor = self._redis_seconds(lambda i: self.client.ping())
        figures["a PING a second of each, % of a core of Redis"] = 100 * floor
        for _ in range(2):  # the first ones of a generator look at every task
            for inbox, entry_ids in zip(self.inboxes, ids, strict=True):
                inbox.beat(entry_ids)
        beats = self._redis_seconds(lambda i: self.inboxes[i].beat(ids[i]))
        figures["heartbeats, % of a core of Redis"] = 100 * beats / HEARTBEAT
        searches = self._redis_seconds(lambda i: self.inboxes[i].adopt(1))
        figures["searches for the dead, % of a core of Redis"] = 100 * searches / (DEAD_AFTER / 2)
        counted = [self._count(sampler, held) for _ in range(ROUNDS)]
        figures["count 512 samples and send 512 tasks, ms"] = 1e3 * median(counted)
        self.client.delete(self.broker.key("lease"))
        self.client.config_set("slowlog-log-slower-than", 1000)
        self.client.slowlog_reset()
        began = time.perf_counter()
        successor = self.sampler("second")
        made = time.perf_counter()
        successor.begin()
        figures["start: make the state, s"] = made - began
        figures["start: read it from Redis, s"] = time.perf_counter() - made
        slowest = max((entry["duration"] for entry in self.client.slowlog_get(1000)), default=0)
        figures["start: longest command of Redis, ms"] = slowest / 1e3
        return figures

    def _answer_every_prompt_once(self, sampler: Sampler) -> None:
        state = sampler.state
        for number, prompt_id in enumerate(self.data.train.ids):
            state.tracker.update(prompt_id, float(number % 3 == 0), rho=0.9)
            state.drift.answered[number] = 0
        for commit in state.tracker_commits():
            sampler.ledger.commit(commit)

    def _fill(self, sampler: Sampler) -> Iterator[tuple[float, float]]:
        """Dispatch until all places are taken; seconds to choose and to commit of each round."""
        while sampler.state.admission.training + BATCH <= self.in_flight:
            yield spent(sampler.dispatch).wall, spent(lambda: sampler.write(due=False)).wall

    def _redis_seconds(self, act: Callable[[int], object]) -> float:
        """CPU seconds of Redis for all generators once; the median of three turns."""
        used = []
        for _ in range(3):
            before = self._cpu()
            for i in range(self.generators):
                act(i)
            used.append(self._cpu() - before)
        return median(used)

    def _cpu(self) -> float:
        used = self.client.info("cpu")
        return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])

    def _count(self, sampler: Sampler, held: list[list[Delivery]]) -> float:
        """Seconds of a round that counts samples and sends as many tasks."""
        sent = 0
        while sent < COUNTED:
            deliveries = held.pop()
            self.inboxes[0].finish([Finished(delivery.entry_id, _header(delivery)) for delivery in deliveries])
            sent += len(deliveries)
        return spent(sampler.round).wall


def _header(delivery: Delivery) -> SampleHeader:
    task = delivery.task
    return SampleHeader(
        task_id=task.task_id, prompt_id=task.prompt_id, kind="train", reward=1.0, tokens=10, model_tokens=6,
        oldest_version=0, newest_version=0,
    )  # fmt: skip


def measured(prompts: int, in_flight: int, generators: int) -> dict[str, float]:
    """The figures of the checkout that is imported here."""
    with tempfile.TemporaryDirectory() as name, redis_server(Path(name), free_port()) as client:
        return Scale(client, Path(name), prompts, in_flight, generators).measure()


@reports_user_errors
def main() -> None:
    parser = options.Parser(__doc__)
    parser.add_argument("--prompts", type=options.positive, default=1_000_000, help="at least twice those in flight")
    parser.add_argument("--in-flight", type=options.at_least(LEAST), default=50_000, help=f"tasks, at least {LEAST:,}")
    parser.add_argument("--generators", type=options.at_least(ROUNDS), default=1000, help="that hold them")
    parser.add_argument("--beside", type=options.checkout, help="another checkout, measured in turns with this one")
    parser.add_argument("--turns", type=options.positive, default=1)
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of the table")
    args = parser.parse_args()
    if args.prompts < 2 * args.in_flight:
        parser.error(f"--prompts {args.prompts} is less than twice --in-flight {args.in_flight}")
    if args.generators > args.in_flight:
        parser.error(f"--generators {args.generators} is more than --in-flight {args.in_flight}")
    sizes: dict[str, Any] = {"prompts": args.prompts, "in_flight": args.in_flight, "generators": args.generators}
    if args.json:
        print(json.dumps(measured(**sizes)))
        return
    arguments = [text for name, value in sizes.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    print(compared("benchmarks.protocol", arguments, args.beside, args.turns))


if __name__ == "__main__":
    main()
