"""Access to Redis: TLS, ACL users, and sentinels, with which a run goes on at the promoted replica."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from common.config import BrokerConfig
from common.process import Role
from common.streams.agreement import agree
from common.streams.broker import Broker, connect
from common.streams.connection import risks
from common.streams.ledger import Commit, SamplerLedger
from common.streams.tasks import TaskInbox
from launcher.run.embedded_redis import find_redis_server
from tests.conftest import RedisServer
from tests.support.checks import all_findings
from tests.support.ports import free_port
from tests.support.sampler import NoopGenerator, NoopLearner, make_config
from tests.support.sampler_driving import audited, drive, start
from tests.support.streams import dispatch, finished, refusal, tasks
from tests.support.tls import TlsFront, make_certificate
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
UNTRUSTED = r"certificate is refused \(.+\); name the certificate"


@dataclass
class TlsRedis:
    port: int
    certificate: Path
    other: Path  # another server's

    def url(self, trusted: Path | None) -> str:
        return f"rediss://127.0.0.1:{self.port}/0" + (f"?ssl_ca_certs={trusted}" if trusted else "")


@pytest.fixture
def tls_redis(tmp_path: Path, own_redis: RedisServer) -> Iterator[TlsRedis]:
    """A real server with TLS in front of it, as stunnel does it: the one in the wheel was built without TLS."""
    certificate, key = make_certificate(tmp_path, "redis")
    front = TlsFront(own_redis.port, certificate, key)
    yield TlsRedis(front.port, certificate, make_certificate(tmp_path, "other")[0])
    front.close()


def run_whole(broker: Broker, folder: Path, observer: Broker | None = None) -> None:
    """A run by stubs, with everything the scripts do; `observer` may look at all keys."""
    config = make_config(folder, heldout=5)
    agree(broker, config)
    generator, learner = NoopGenerator(broker), NoopLearner(broker, folder=config.run.folder)
    sampler = start(config, broker)
    drive(sampler, generator, learner)
    sampler.run()
    audited(observer or broker, config)


def test_a_run_goes_over_tls_and_a_wrong_certificate_is_refused(tls_redis: TlsRedis, tmp_path: Path) -> None:
    for trusted in (tls_redis.other, None):
        assert re.search(UNTRUSTED, refusal(tls_redis.url(trusted), wait=3600))
    broker = connect(BrokerConfig(url=tls_redis.url(tls_redis.certificate), wait=10), "run", log=None)
    broker.dead_after = 60.0
    run_whole(broker, tmp_path)
    broker.redis.close()


def test_the_documented_acl_user_can_do_a_run_and_no_more(own_redis: RedisServer, tmp_path: Path) -> None:
    documented = re.search(r"^user trainer on >PASSWORD (.+)$", (ROOT / "docs/security.md").read_text(), re.MULTILINE)
    assert documented
    admin = redis.Redis.from_url(own_redis.url)
    admin.execute_command("ACL", "SETUSER", "trainer", "reset", "on", ">secret", *documented.group(1).split())
    admin.execute_command("ACL", "SETUSER", "default", "off")
    assert "requires a password" in refusal(own_redis.url)
    assert "requires a password" in refusal(own_redis.url.replace("//", "//trainer:wrong@"))
    admin.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~spo:*", "+@read")
    assert "ACL lets this user do less" in refusal(own_redis.url.replace("//", "//reader:secret@"))
    (tmp_path / "password").write_text("secret\n")
    config = BrokerConfig(url=own_redis.url.replace("//", "//trainer@"), password_file=str(tmp_path / "password"))
    broker = connect(config, "run")
    broker.dead_after = 60.0
    run_whole(broker, tmp_path, Broker(admin, "run"))
    for forbidden in ("CONFIG SET dir /", "FLUSHALL", "GET other", "ACL LIST", "KEYS *"):
        with pytest.raises(redis.exceptions.NoPermissionError):
            broker.redis.execute_command(*forbidden.split())
    broker.redis.close()


NO_PASSWORD, NO_TLS = "asks for no password", "without TLS"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"url": "redis://10.0.0.5:6379/0"}, [NO_PASSWORD, NO_TLS]),
        ({"url": "redis://redis:6379/0", "password_file": "password"}, [NO_TLS]),
        ({"url": "rediss://trainer:secret@10.0.0.5:6379/0"}, []),
        ({"url": "redis+sentinel://a:1,b:2/main/0", "password_file": "password"}, [NO_TLS]),
        ({"url": "redis://127.0.0.1:6379/0"}, [f"{NO_PASSWORD}: every account of this machine"]),
        ({"url": "unix:///run/redis.sock"}, []),
    ],
)
def test_the_risk_of_a_redis_that_lets_others_in_is_named(config: dict[str, str], named: list[str]) -> None:
    lines = list(risks(BrokerConfig(**config)))
    assert len(lines) == len(named)
    assert all(text in line for line, text in zip(lines, named, strict=True))
    assert not any("secret" in line for line in lines)


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
    eventually(lambda: is_up(client))
    return process, client


class Watched:
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
        eventually(lambda: client(self.replica).info("replication").get("master_link_status") == "up")
        process, self.sentinel = start_sentinel(folder, self.master.port, 500)
        self.processes.append(process)
        eventually(lambda: self.sentinel.sentinel_master(SERVICE)["num-slaves"] == 1)
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


def is_up(client: redis.Redis) -> bool:
    with contextlib.suppress(redis.ConnectionError):
        return bool(client.ping())
    return False


def count(ledger: SamplerLedger) -> int:
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
    ledger, (inbox, waiting) = SamplerLedger(sampler), (TaskInbox(watched.broker(), name) for name in ("g1", "g2"))
    ledger.acquire()
    dispatch(ledger, 6)
    taken = inbox.take(6)
    assert inbox.finish([finished(delivery) for delivery in taken[:2]]) == 2
    assert count(ledger) == 2
    with ThreadPoolExecutor(1) as blocked:
        # It sits in a blocking read when the master dies, and gets its task from the other server.
        late = blocked.submit(take_one, waiting)
        eventually(lambda: client(watched.master).info("clients")["blocked_clients"] == 1)
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
        eventually(lambda: master.info("clients")["blocked_clients"] == 1)
        refused = errors(master)
        master.replicaof("127.0.0.1", 1)
        committed = threads.submit(dispatch, ledger, 1)
        eventually(lambda: errors(master) >= refused + 2)
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
    eventually(lambda: master.info("replication")["connected_slaves"] == 0)
    with ThreadPoolExecutor(1) as threads:
        refused = errors(master)
        committed = threads.submit(dispatch, ledger, 1)
        eventually(lambda: errors(master) > refused)
        client(watched.replica).replicaof("127.0.0.1", watched.master.port)
        committed.result(timeout=600)
    assert ledger.acquire().outstanding == {"t0": b"memo"}


def test_master_and_sentinel_have_passwords_of_their_own(watched: Watched, tmp_path: Path) -> None:
    findings = {finding.name: finding for finding in all_findings("redis", Role.SAMPLER, broker={"url": watched.url})}
    assert f"answers at 127.0.0.1:{watched.master.port}, master of {SERVICE}" in findings["redis"].line
    assert findings["redis: replicas"].line.startswith("1 of the master")
    line = refusal(watched.url.replace(f"{SERVICE}/0", "other"))
    assert "/other after 0 s (No master found for 'other'); start one" in line
    client(watched.master).config_set("requirepass", "secret")
    watched.sentinel.execute_command("SENTINEL", "SET", SERVICE, "auth-pass", "secret")
    watched.sentinel.execute_command("ACL", "SETUSER", "default", "resetpass", ">asked")
    url, password = watched.url.replace("://", "://:asked@"), {"password_file": str(tmp_path / "password")}
    (tmp_path / "password").write_text("secret\n")
    assert watched.broker(url=url, **password).redis.ping()
    assert "requires a password" in refusal(url)
    line = refusal(url.replace("asked", "guessed"), **password)
    assert re.search("WRONGPASS|invalid username-password", line)
    assert "guessed" not in line


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
            assert re.search(UNTRUSTED, refusal(url + options, wait=3600))
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
        assert "a node of a Redis Cluster that does not hold the run" in refusal(server.url)
    finally:
        server.kill()
