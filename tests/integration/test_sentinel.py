"""A queue that fails over: real master, replica and sentinel; the run goes on at the promoted replica."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from common.config import BrokerConfig
from common.errors import UserError
from common.process import Role
from common.streams.broker import connect
from common.streams.ledger import Commit, SamplerLedger
from common.streams.tasks import TaskInbox
from launcher.run.embedded_redis import find_redis_server
from tests.conftest import RedisServer
from tests.support.checks import all_findings
from tests.support.ports import free_port
from tests.support.streams import dispatch, finished, tasks
from tests.support.tls import TlsFront, make_certificate

pytestmark = pytest.mark.integration
SERVICE = "spo-queue"


class Watched:
    """A master, its replica, and a sentinel that watches them."""

    def __init__(self, folder: Path) -> None:
        self.servers: list[RedisServer] = []
        for name in ("master", "replica"):
            (folder / name).mkdir()
            self.servers.append(RedisServer(folder / name))
        self.master, self.replica = self.servers
        self.file = folder / "sentinel.conf"
        self.port = free_port()
        self.url = f"redis+sentinel://127.0.0.1:{self.port}/{SERVICE}/0"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        for server in self.servers:
            server.start()
        redis.Redis(port=self.master.port).config_set("repl-diskless-sync-delay", 0)
        redis.Redis(port=self.replica.port).replicaof("127.0.0.1", self.master.port)
        until(lambda: self.tell(self.replica, "replication").get("master_link_status") == "up")
        self.file.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self.file.parent}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.master.port} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} 500\nsentinel failover-timeout {SERVICE} 2000\n"
        )
        command = [find_redis_server(), str(self.file), "--sentinel"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.sentinel = redis.Redis(port=self.port)
        until(self.sentinel.ping)
        until(lambda: self.sentinel.sentinel_master(SERVICE)["num-slaves"] == 1)

    def tell(self, server: RedisServer, section: str) -> dict[str, object]:
        return dict(redis.Redis(port=server.port).info(section))

    def stop(self) -> None:
        for process in (self.process, *(server.process for server in self.servers)):
            if process is not None:
                process.kill()
                process.wait()


def until(holds: Callable[[], object]) -> None:
    """Ask a server until it says so."""
    deadline = time.monotonic() + 120
    while True:
        try:
            if holds():
                return
        except redis.ConnectionError:
            pass
        assert time.monotonic() < deadline, "it never came true"


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    servers = Watched(tmp_path)
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()


def test_a_run_goes_on_at_the_promoted_replica(watched: Watched) -> None:
    config = BrokerConfig(url=watched.url, wait=30)
    sampler, generator = connect(config, "run"), connect(config, "run")
    ledger, inbox, waiting = SamplerLedger(sampler), TaskInbox(generator, "g1"), TaskInbox(connect(config, "run"), "g2")
    ledger.acquire()
    dispatch(ledger, 6)
    taken = inbox.take(6)
    assert inbox.finish([finished(delivery) for delivery in taken[:2]]) == 2
    assert count(ledger) == 2
    heard = watched.sentinel.pubsub(ignore_subscribe_messages=True)
    heard.subscribe("+switch-master")
    with ThreadPoolExecutor(1) as blocked:
        # It sits in a blocking read when the master dies, and gets its task from the other server.
        late = blocked.submit(take_one, waiting)
        until(lambda: watched.tell(watched.master, "clients")["blocked_clients"] == 1)
        sampler.redis.set(sampler.key("everything so far"), 1)
        assert sampler.redis.wait(1, 20_000) == 1, "the replica has all that was written"
        watched.master.kill()
        assert inbox.finish([finished(delivery) for delivery in taken[2:]]) == 4
        assert count(ledger) == 4
        dispatch(ledger, 1, start=6)
        (delivery,) = late.result(timeout=30)
    assert delivery.task.task_id == "t6"
    assert waiting.finish([finished(delivery)]) == 1
    assert inbox.finish([finished(taken[0])]) == 0, "what was finished at the old master stays finished"
    assert count(ledger) == 1
    counters = sampler.counters()
    assert {name: counters[name] for name in ("dispatched", "finished", "counted", "finished_twice")} == {
        "dispatched": 7,
        "finished": 7,
        "counted": 7,
        "finished_twice": 1,
    }
    switch = next(message for message in heard.listen() if message["channel"] == b"+switch-master")
    assert switch["data"].split() == [
        text.encode()
        for text in (SERVICE, "127.0.0.1", str(watched.master.port), "127.0.0.1", str(watched.replica.port))
    ]
    assert redis.Redis(port=watched.replica.port).hget(sampler.key("counters"), "counted") == b"7"


def test_a_master_that_is_none_for_a_while_is_waited_for(watched: Watched) -> None:
    config, master = BrokerConfig(url=watched.url, wait=30), redis.Redis(port=watched.master.port)
    ledger, inbox = SamplerLedger(connect(config, "run")), TaskInbox(connect(config, "run"), "g1")
    ledger.acquire()
    # Else the script would be sent anew, and that call be the one that is refused.
    ledger.commit(Commit(counters={"late": 1}))
    with ThreadPoolExecutor(2) as threads:
        blocked = threads.submit(take_one, inbox)
        until(lambda: watched.tell(watched.master, "clients")["blocked_clients"] == 1)
        refused = errors(master)
        master.replicaof("127.0.0.1", 1)
        committed = threads.submit(dispatch, ledger, 1)
        until(lambda: errors(master) >= refused + 2)
        master.replicaof("NO", "ONE")
        committed.result(timeout=30)
        (delivery,) = blocked.result(timeout=30)
    assert delivery.task == tasks(1)[0]


def test_a_master_without_enough_replicas_is_waited_for(watched: Watched) -> None:
    ledger = SamplerLedger(connect(BrokerConfig(url=watched.url, wait=30), "run"))
    ledger.acquire()
    ledger.commit(Commit(counters={"late": 1}))
    master = redis.Redis(port=watched.master.port)
    master.config_set("min-replicas-to-write", 1)
    redis.Redis(port=watched.replica.port).replicaof("NO", "ONE")
    until(lambda: watched.tell(watched.master, "replication")["connected_slaves"] == 0)
    with ThreadPoolExecutor(1) as threads:
        refused = errors(master)
        committed = threads.submit(dispatch, ledger, 1)
        until(lambda: errors(master) > refused)
        redis.Redis(port=watched.replica.port).replicaof("127.0.0.1", watched.master.port)
        committed.result(timeout=30)
    assert ledger.acquire().outstanding == {"t0": b"memo"}


def test_the_doctor_names_the_master_and_its_replicas(watched: Watched) -> None:
    findings = {finding.name: finding for finding in all_findings("redis", Role.SAMPLER, broker={"url": watched.url})}
    assert f"answers at 127.0.0.1:{watched.master.port}, master of {SERVICE}" in findings["redis"].line
    assert findings["redis: replicas"].line.startswith("1 of the master")


def test_a_service_that_the_sentinels_do_not_know_is_one_line(watched: Watched) -> None:
    with pytest.raises(UserError, match=r"no Redis at .*/other after 0 s \(No master found for 'other'\); start one"):
        connect(BrokerConfig(url=watched.url.replace(f"{SERVICE}/0", "other"), wait=0), "run")


def test_master_and_sentinel_have_passwords_of_their_own(watched: Watched, tmp_path: Path) -> None:
    redis.Redis(port=watched.master.port).config_set("requirepass", "secret")
    watched.sentinel.execute_command("SENTINEL", "SET", SERVICE, "auth-pass", "secret")
    watched.sentinel.execute_command("ACL", "SETUSER", "default", "resetpass", ">asked")
    file, url = tmp_path / "password", watched.url.replace("://", "://:asked@")
    file.write_text("secret\n")
    assert connect(BrokerConfig(url=url, password_file=str(file), wait=5), "run").redis.ping()
    with pytest.raises(UserError, match="wants a password"):
        connect(BrokerConfig(url=url, wait=0), "run")
    with pytest.raises(UserError) as caught:
        connect(BrokerConfig(url=url.replace("asked", "guessed"), password_file=str(file), wait=0), "run")
    assert "WRONGPASS" in str(caught.value) or "invalid username-password" in str(caught.value)
    assert "guessed" not in str(caught.value)


@dataclass
class BehindTls:
    """A sentinel and its master, both with TLS in front of them: the servers in the wheel were built without."""

    url: str
    certificate: Path
    other: Path


@pytest.fixture
def behind_tls(tmp_path: Path, own_redis: RedisServer) -> Iterator[BehindTls]:
    certificate, key = make_certificate(tmp_path, "redis")
    other, _ = make_certificate(tmp_path, "other")
    master = TlsFront(own_redis.port, certificate, key)
    port = free_port()
    # It reports the address that clients shall take. It cannot talk to that itself, and is not to judge it for an hour.
    (tmp_path / "sentinel.conf").write_text(
        f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel monitor {SERVICE} 127.0.0.1 {master.port} 1\n"
        f"sentinel down-after-milliseconds {SERVICE} 3600000\n"
    )
    process = subprocess.Popen(
        [find_redis_server(), str(tmp_path / "sentinel.conf"), "--sentinel"], stdout=subprocess.DEVNULL
    )
    try:
        until(redis.Redis(port=port).ping)
        sentinel = TlsFront(port, certificate, key)
        yield BehindTls(f"rediss+sentinel://127.0.0.1:{sentinel.port}/{SERVICE}/0", certificate, other)
        sentinel.close()
    finally:
        process.kill()
        process.wait()
        master.close()


def test_sentinels_and_the_server_they_name_are_spoken_to_over_tls(behind_tls: BehindTls) -> None:
    broker = connect(BrokerConfig(url=f"{behind_tls.url}?ssl_ca_certs={behind_tls.certificate}", wait=10), "run")
    ledger, inbox = SamplerLedger(broker), TaskInbox(broker, "g1")
    ledger.acquire()
    dispatch(ledger, 2)
    assert inbox.finish([finished(delivery) for delivery in inbox.take(2)]) == 2
    assert count(ledger) == 2
    broker.redis.connection_pool.disconnect()
    assert broker.redis.ping(), "also on a new connection"


@pytest.mark.parametrize("trusted", ["none", "other"])
def test_a_sentinel_with_an_unknown_certificate_is_refused(behind_tls: BehindTls, trusted: str) -> None:
    options = f"?ssl_ca_certs={behind_tls.other}" if trusted == "other" else ""
    with pytest.raises(UserError, match=r"certificate is refused \(.+\); name the certificate") as refused:
        connect(BrokerConfig(url=behind_tls.url + options, wait=3600), "run")
    assert "\n" not in str(refused.value)


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
