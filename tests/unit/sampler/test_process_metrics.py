"""What is measured by time: queues and counters, and what processes publish of themselves."""

from __future__ import annotations

import msgpack

from common.streams.broker import Broker
from common.streams.ledger import SamplerLedger
from common.streams.presence import Presence
from common.streams.tasks import TaskInbox
from sampler.process_metrics import MAX_VALUES, ProcessMetrics
from tests.support.streams import dispatch


def test_each_process_has_an_entry_at_the_version_that_it_has_loaded(fake_broker: Broker) -> None:
    generator = Presence(fake_broker, "generator-1", "generator")
    generator.status(version=3, metrics={"generator/episodes": 7})
    generator.beat()
    Presence(fake_broker, "sampler", "sampler").beat()
    sampler, other = ProcessMetrics(fake_broker).entries(5, "", {"samples/per_second": 2.0})
    assert (sampler.process, sampler.version, other.process, other.version) == ("sampler", 5, "generator-1", 3)
    assert other.values["generator/episodes"] == 7
    assert other.values["process/memory_mb"] > 1
    assert sampler.values["processes/generator"] == sampler.values["processes/sampler"] == 1
    assert {"samples/per_second", "process/cpu_seconds"} <= sampler.values.keys()


def test_tasks_that_wait_and_tasks_that_are_played_are_counted_apart(fake_broker: Broker) -> None:
    ledger = SamplerLedger(fake_broker)
    ledger.acquire()
    dispatch(ledger, 5)
    TaskInbox(fake_broker, "g").take(2)
    (sampler,) = ProcessMetrics(fake_broker).entries(0, "", {})
    queues = {name: sampler.values[f"queue/{name}"] for name in ("tasks", "leased", "outstanding", "samples", "dead")}
    assert queues == {"tasks": 3, "leased": 2, "outstanding": 5, "samples": 0, "dead": 0}
    assert sampler.values["samples/dispatched"] == 5


def test_figures_that_are_none_and_too_many_of_them_are_left_out(fake_broker: Broker) -> None:
    figures = {f"f{i}": 1.0 for i in range(2 * MAX_VALUES)} | {"x" * 1000: 1.0, "text": "1"}
    status = {"role": "generator", "pid": 1, "host": "h", "state": "running", "metrics": figures}
    for name, packed in (("many", msgpack.packb(status)), ("odd", msgpack.packb(status | {"metrics": [1]}))):
        Presence(fake_broker, name, "generator").beat()
        fake_broker.redis.hset(fake_broker.key("processes"), name, packed)
    _, many = ProcessMetrics(fake_broker).entries(0, "", {})
    assert (many.process, len(many.values)) == ("many", MAX_VALUES)
