"""A queue that fails over: real master, replica and sentinel; the run goes on at the promoted replica."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from common.config import BrokerConfig
from common.errors import UserError
from common.process import Role
from common.streams.broker import Broker, connect
from common.streams.ledger import Commit, SamplerLedger
from common.streams.tasks import TaskInbox
from launcher.run.embedded_redis import find_redis_server
from tests.conftest import RedisServer
from tests.support.checks import all_findings
from tests.support.ports import free_port
from tests.support.streams import dispatch, finished, tasks
from tests.support.tls import TlsFront, make_certificate

SERVICE = "spo-queue"


def start_sentinel(folder: Path, master: int, down_after: int) -> tuple[subprocess.Popen[bytes], redis.Redis]:
    """A sentinel of the master at this port, which it judges after so many milliseconds."""
    port, file = free_port(), folder / "sentinel.conf"
    file.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor {SERVICE} 127.0.0.1 {master} 1\n"
        f"sentinel down-after-milliseconds {SERVICE} {down_after}\nsentinel failover-timeout {SERVICE} 2000\n"
    )
    process = subprocess.Popen([find_redis_server(), str(file), "--sentinel"], stdout=subprocess.DEVNULL)
    client = redis.Redis(port=port)
    until(client.ping)
    return process, client


class Watched:
    """A master, its replica, and a sentinel that watches them."""

    def __init__(self, folder: Path) -> None:
        for name in ("master", "replica"):
            (folder / name).mkdir()
        self.master, self.replica = RedisServer(folder / "master"), RedisServer(folder / "replica")
        self.processes: list[subprocess.Popen[bytes] | None] = []
        for server in (self.master, self.replica):
            server.start()
            self.processes.append(server.process)
        client(self.master).config_set("repl-diskless-sync-delay", 0)
        client(self.replica).replicaof("127.0.0.1", self.master.port)
        until(lambda: client(self.replica).info("replication").get("master_link_status") == "up")
        process, self.sentinel = start_sentinel(folder, self.master.port, 500)
        self.processes.append(process)
        until(lambda: self.sentinel.sentinel_master(SERVICE)["num-slaves"] == 1)
        port = self.sentinel.connection_pool.connection_kwargs["port"]
        self.url = f"redis+sentinel://127.0.0.1:{port}/{SERVICE}/0"

    def broker(self, **settings: Any) -> Broker:
        return connect(BrokerConfig(**{"url": self.url, "wait": 30} | settings), "run")

    def stop(self) -> None:
        for process in self.processes:
            if process is not None:
                process.kill()
                process.wait()


def client(server: RedisServer) -> redis.Redis:
    return redis.Redis(port=server.port)


def until(holds: Callable[[], object]) -> None:
    """Wait until a server says so."""
    deadline = time.monotonic() + 600
    while True:
        with contextlib.suppress(redis.ConnectionError):
            if holds():
                return
        assert time.monotonic() < deadline, "it never came true"


def count(ledger: SamplerLedger) -> int:
    """Count what has come in, as the sampler does; returns how much it was."""
    return ledger.commit(Commit(counted=[entry_id for entry_id, _ in ledger.read()]))


def take_one(inbox: TaskInbox) -> list:
    while True:
        deliveries = inbox.take(1, block_ms=20_000)
        if deliveries:
            return deliveries


def errors(server: redis.Redis) -> int:
    """How often the server has refused something; 6.2 counts what it refuses within scripts as ERR."""
    return sum(refusals["count"] for refusals in server.info("errorstats").values())


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    servers = Watched(tmp_path)
    yield servers
    servers.stop()


def test_a_run_goes_on_at_the_promoted_replica(watched: Watched) -> None:
    sampler = watched.broker()
    ledger, inbox, waiting = (
        SamplerLedger(sampler), TaskInbox(watched.broker(), "g1"), TaskInbox(watched.broker(), "g2"),
    )  # fmt: skip
    ledger.acquire()
    dispatch(ledger, 6)
    taken = inbox.take(6)
    assert inbox.finish([finished(delivery) for delivery in taken[:2]]) == 2
    assert count(ledger) == 2
    with ThreadPoolExecutor(1) as blocked:
        # It sits in a blocking read when the master dies, and gets its task from the other server.
        late = blocked.submit(take_one, waiting)
        until(lambda: client(watched.master).info("clients")["blocked_clients"] == 1)
        sampler.redis.set(sampler.key("everything so far"), 1)
        assert sampler.redis.wait(1, 20_000) == 1, "the replica has all that was written"
        watched.master.kill()
        assert inbox.finish([finished(delivery) for delivery in taken[2:]]) == 4
        assert count(ledger) == 4
        dispatch(ledger, 1, start=6)
        (delivery,) = late.result(timeout=600)
    assert delivery.task.task_id == "t6"
    assert waiting.finish([finished(delivery)]) == 1
    assert inbox.finish([finished(taken[0])]) == 0, "what was finished at the old master stays finished"
    assert count(ledger) == 1
    counters = sampler.counters()
    assert counters["dispatched"] == counters["finished"] == counters["counted"] == 7
    assert counters["finished_twice"] == 1
    assert client(watched.replica).hget(sampler.key("counters"), "counted") == b"7"


def test_a_master_that_is_none_for_a_while_is_waited_for(watched: Watched) -> None:
    master = client(watched.master)
    ledger, inbox = SamplerLedger(watched.broker()), TaskInbox(watched.broker(), "g1")
    ledger.acquire()
    # Else the script would be sent again, and that call be the one that is refused.
    ledger.commit(Commit(counters={"late": 1}))
    with ThreadPoolExecutor(2) as threads:
        blocked = threads.submit(take_one, inbox)
        until(lambda: master.info("clients")["blocked_clients"] == 1)
        refused = errors(master)
        master.replicaof("127.0.0.1", 1)
        committed = threads.submit(dispatch, ledger, 1)
        until(lambda: errors(master) >= refused + 2)
        master.replicaof("NO", "ONE")
        committed.result(timeout=600)
        (delivery,) = blocked.result(timeout=600)
    assert delivery.task == tasks(1)[0]


def test_a_master_without_enough_replicas_is_waited_for(watched: Watched) -> None:
    ledger = SamplerLedger(watched.broker())
    ledger.acquire()
    ledger.commit(Commit(counters={"late": 1}))
    master = client(watched.master)
    master.config_set("min-replicas-to-write", 1)
    client(watched.replica).replicaof("NO", "ONE")
    until(lambda: master.info("replication")["connected_slaves"] == 0)
    with ThreadPoolExecutor(1) as threads:
        refused = errors(master)
        committed = threads.submit(dispatch, ledger, 1)
        until(lambda: errors(master) > refused)
        client(watched.replica).replicaof("127.0.0.1", watched.master.port)
        committed.result(timeout=600)
    assert ledger.acquire().outstanding == {"t0": b"memo"}


def test_master_and_sentinel_have_passwords_of_their_own(watched: Watched, tmp_path: Path) -> None:
    findings = {finding.name: finding for finding in all_findings("redis", Role.SAMPLER, broker={"url": watched.url})}
    assert f"answers at 127.0.0.1:{watched.master.port}, master of {SERVICE}" in findings["redis"].line
    assert findings["redis: replicas"].line.startswith("1 of the master")
    with pytest.raises(UserError, match=r"no Redis at .*/other after 0 s \(No master found for 'other'\); start one"):
        watched.broker(url=watched.url.replace(f"{SERVICE}/0", "other"), wait=0)
    client(watched.master).config_set("requirepass", "secret")
    watched.sentinel.execute_command("SENTINEL", "SET", SERVICE, "auth-pass", "secret")
    watched.sentinel.execute_command("ACL", "SETUSER", "default", "resetpass", ">asked")
    url, password = watched.url.replace("://", "://:asked@"), {"password_file": str(tmp_path / "password")}
    (tmp_path / "password").write_text("secret\n")
    assert watched.broker(url=url, **password).redis.ping()
    with pytest.raises(UserError, match="requires a password"):
        watched.broker(url=url, wait=0)
    with pytest.raises(UserError, match="WRONGPASS|invalid username-password") as caught:
        watched.broker(url=url.replace("asked", "guessed"), wait=0, **password)
    assert "guessed" not in str(caught.value)


def test_sentinels_and_their_server_are_spoken_to_over_tls(tmp_path: Path, own_redis: RedisServer) -> None:
    certificate, key = make_certificate(tmp_path, "redis")
    other, _ = make_certificate(tmp_path, "other")
    # TLS in front of both, since the servers in the wheel were built without. The sentinel reports the address that
    # clients shall take; it cannot talk to that itself, and is not to judge it for an hour.
    master = TlsFront(own_redis.port, certificate, key)
    process, plain = start_sentinel(tmp_path, master.port, 3_600_000)
    sentinel = TlsFront(plain.connection_pool.connection_kwargs["port"], certificate, key)
    url = f"rediss+sentinel://127.0.0.1:{sentinel.port}/{SERVICE}/0"
    try:
        broker = connect(BrokerConfig(url=f"{url}?ssl_ca_certs={certificate}", wait=10), "run")
        ledger, inbox = SamplerLedger(broker), TaskInbox(broker, "g1")
        ledger.acquire()
        dispatch(ledger, 2)
        assert inbox.finish([finished(delivery) for delivery in inbox.take(2)]) == 2
        assert count(ledger) == 2
        broker.redis.connection_pool.disconnect()
        assert broker.redis.ping(), "also on a new connection"
        for options in ("", f"?ssl_ca_certs={other}"):
            with pytest.raises(UserError, match=r"certificate is refused \(.+\); name the certificate"):
                connect(BrokerConfig(url=url + options, wait=3600), "run")
    finally:
        sentinel.close()
        process.kill()
        process.wait()
        master.close()


def test_a_node_of_a_cluster_is_named_as_such(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    # Its second port, for the other nodes, is 10,000 above the first.
    while server.port >= 55_000:
        server = RedisServer(tmp_path)
    server.start(["--cluster-enabled", "yes"])
    try:
        with pytest.raises(UserError, match="a node of a Redis Cluster that does not hold the run"):
            connect(BrokerConfig(url=server.url, wait=0), "run")
    finally:
        server.kill()
