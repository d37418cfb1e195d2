"""The clock of Redis's machine is set by an hour, forth or back: nothing is taken from living processes, and what dead
ones have left is found as soon as ever."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from common.streams import relays
from common.streams.broker import Broker
from common.streams.ledger import Commit, SamplerLedger
from common.streams.presence import Presence
from common.streams.tasks import TaskInbox
from tests.conftest import RedisServer
from tests.support.streams import dispatch
from tests.support.waiting import eventually

HOUR = 3600
# Adds an offset to the time of the process that loads it.
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static long offset(void) {
    static volatile long *seconds;
    if (!seconds) {
        int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
        seconds = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    }
    return *seconds;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int result = real(at, zone);
    at->tv_sec += offset();
    return result;
}
time_t time(time_t *at) {
    struct timeval now;
    gettimeofday(&now, 0);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, at);
    if (clock == CLOCK_REALTIME) at->tv_sec += offset();
    return result;
}
"""


class RedisClock:
    """What a redis-server needs in its environment, and its clock."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("the clock of a redis-server is set by a library that is compiled here; there is no C compiler")
        self._offset = folder / "offset"
        self._offset.write_bytes(bytes(8))
        source, library = folder / "clock.c", folder / "clock.so"
        source.write_text(CLOCK)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(self._offset)}

    def set(self, seconds: int) -> None:
        """Set the clock this much ahead of the true time."""
        with self._offset.open("r+b") as file:
            file.write(seconds.to_bytes(8, "little", signed=True))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisServer, RedisClock]]:
    folder = tmp_path_factory.mktemp("stepped")
    server, clock = RedisServer(folder), RedisClock(folder)
    server.environment = clock.environment
    server.start()
    yield server, clock
    server.kill()


@pytest.fixture
def clock(server: tuple[RedisServer, RedisClock]) -> RedisClock:
    server[1].set(0)
    return server[1]


@pytest.fixture
def broker(server: tuple[RedisServer, RedisClock], clock: RedisClock) -> Iterator[Broker]:
    client = redis.Redis.from_url(server[0].url)
    client.flushall()
    yield Broker(client, "test", dead_after=2.0)
    client.close()


@pytest.fixture
def ledger(broker: Broker) -> SamplerLedger:
    ledger = SamplerLedger(broker, "first")
    ledger.acquire()
    return ledger


def test_a_clock_ahead_takes_no_task_from_a_living_generator(
    broker: Broker, ledger: SamplerLedger, clock: RedisClock
) -> None:
    broker.dead_after = 60.0
    dispatch(ledger, 3)
    living, other = TaskInbox(broker, "living"), TaskInbox(broker, "other")
    leased = living.take(3, 0)
    clock.set(HOUR)
    assert [other.adopt(3), other.adopt(3)] == [[], []]
    assert living.beat([delivery.entry_id for delivery in leased]).lost == set()


def test_a_clock_set_back_delays_no_takeover(broker: Broker, ledger: SamplerLedger, clock: RedisClock) -> None:
    dispatch(ledger, 3)
    dead, other = TaskInbox(broker, "dead"), TaskInbox(broker, "other")
    dead.take(3, 0)
    clock.set(-HOUR)
    taken: list[object] = []
    eventually(lambda: taken.extend(other.adopt(3)) or len(taken) == 3)


def test_a_dead_sampler_is_replaced_although_the_clock_went_back(
    broker: Broker, ledger: SamplerLedger, clock: RedisClock
) -> None:
    clock.set(-HOUR)
    SamplerLedger(broker, "second").acquire(wait=60)
    assert broker.redis.get(broker.key("lease")) == b"second"


def test_processes_and_relays_are_listed_whatever_the_clock(broker: Broker, clock: RedisClock) -> None:
    broker.dead_after = 60.0
    living, dead = Presence(broker, "living", "generator"), Presence(broker, "dead", "generator")
    for step in (-HOUR, HOUR):
        clock.set(0)
        for name, presence in {"living": living, "dead": dead}.items():
            presence.beat()
            relays.announce(broker, "here", name, {"address": "tcp://127.0.0.1:1"})
        clock.set(step)
        living.beat()
        relays.announce(broker, "here", "living", {"address": "tcp://127.0.0.1:1"})
        assert list(broker.processes()) == ["living"]
        assert [relay["name"] for relay in relays.nearby(broker, "here")] == ["living"]


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_no_clock_gives_an_evaluation_up(broker: Broker, ledger: SamplerLedger, clock: RedisClock, step: int) -> None:
    ledger.commit(Commit(scalars={"evaluating": "e0", "evaluating_from": 0}))
    inbox = TaskInbox(broker, "a")
    assert inbox.lease(0, 0, 0).evaluation == "e0"

    def unseen() -> float:
        pin = ledger.pin("e0")
        assert pin is not None
        assert pin.version == 0
        return pin.unseen

    unseen()
    clock.set(step)
    assert unseen() < HOUR / 2
    eventually(lambda: unseen() > broker.dead_after)
    after_silence = unseen()
    inbox.lease(0, 0, 0)
    assert unseen() < after_silence
