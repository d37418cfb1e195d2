"""The connection to Redis and the names of a run's keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Required

import redis
from pydantic import ConfigDict, TypeAdapter, ValidationError
from redis.commands.core import Script
from redis.exceptions import BusyLoadingError, ConnectionError, ResponseError, TimeoutError
from redis.retry import Retry
from typing_extensions import TypedDict

from common.config import BrokerConfig
from common.errors import UserError
from common.network import without_password
from common.payload import Payload, decode_if_valid
from common.streams.connection import Patience, client, risks, wait_for_server
from common.unpack import Unreadable, unpack

OLDEST_SERVER = (6, 2)
# Longer than any blocking read, so that only a dead connection times out.
SOCKET_TIMEOUT = 30.0
MEMORY_SHARE = 0.8  # of `maxmemory`, above which no task is sent and the learner saves early
SHORTEST_OUTAGE = 1.0  # seconds; a shorter silence is never an outage
NOEVICTION = "noeviction"
UNREADABLE: dict[str, Any] = {"role": "unknown", "state": "unreadable"}  # stands for what a process has published


class Memory(NamedTuple):
    """Bytes that Redis uses and may use, and its eviction policy; `limit` is 0 if it is unlimited or unknown."""

    used: int
    limit: int
    policy: str = NOEVICTION

    @property
    def refusal(self) -> str | None:
        """Why no run may use this Redis; None if it drops nothing, or does not say.

        The eviction policy is checked even without a limit: `CONFIG SET maxmemory` can set one at any time.
        """
        if self.policy == NOEVICTION:
            return None
        return (
            f"Redis has maxmemory-policy {self.policy}: once its memory is full it drops samples of the run; run "
            f"`CONFIG SET maxmemory-policy {NOEVICTION}` there (of a managed Redis, set it in its parameters)"
        )

    @property
    def share(self) -> float:
        """Used share of the limit; 0 without one."""
        return self.used / self.limit if self.limit else 0.0


class Broker:
    """One run's keys on one Redis server, and what all processes share there."""

    def __init__(self, client: redis.Redis, run: str, dead_after: float = 10.0) -> None:
        # redis-py types every reply for both raw and decoded, sync and async clients; ours are raw and sync.
        self.redis: Any = client
        self.run = run
        self.dead_after = dead_after
        self.patience = Patience()  # the client's, if `connect` made it
        self._scripts: dict[str, Script] = {}

    def key(self, name: str) -> str:
        """Key of the run.

        The braces are Redis' hash tag, which puts all keys of a run into one slot (Cluster is not supported).
        """
        return f"spo:{{{self.run}}}:{name}"

    def keys_of(self, prefix: str) -> list[str]:
        """All keys of the run with this prefix, found by a scan of the whole server."""
        pattern = re.sub(r"([\\*?\[\]^])", r"\\\1", self.key(prefix)) + "*"
        return [key.decode() for key in self.redis.scan_iter(pattern, count=1000)]

    def call(self, script: str, names: Iterable[str], arguments: Sequence[Any]) -> Any:
        """Run a script on keys of the run."""
        if script not in self._scripts:
            source = (Path(__file__).parent / f"{script}.lua").read_text(encoding="utf-8")
            self._scripts[script] = self.redis.register_script(source)
        return self._scripts[script]([self.key(name) for name in names], arguments)

    def was_cut_off(self, seconds: float) -> bool:
        """Whether a process that has not reached Redis for `seconds` cannot tell which others are silent.

        The limit is three quarters of `dead_after`, and at least `SHORTEST_OUTAGE`: longer than the longest heartbeat
        interval, which is half of `dead_after`.
        """
        return seconds > max(0.75 * self.dead_after, SHORTEST_OUTAGE)

    def ensure_group(self, stream: str, group: str) -> None:
        """Create a consumer group that sees the stream from its beginning, unless it exists."""
        try:
            # Looked up first: a full Redis would refuse to create what is there.
            if any(info["name"] == group.encode() for info in self.redis.xinfo_groups(self.key(stream))):
                return
        except ResponseError:
            pass  # there is no such stream
        try:
            self.redis.xgroup_create(self.key(stream), group, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    def read_group(
        self, stream: str, group: str, consumer: str, *, after: str = ">", count: int, block_ms: int = 0
    ) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """New entries of a stream, waiting up to `block_ms`; or the consumer's unacknowledged ones `after` an id."""
        block = block_ms or None if after == ">" else None
        reply = self.redis.xreadgroup(group, consumer, {self.key(stream): after}, count=count, block=block)
        # A deleted entry that was not acknowledged has no fields.
        return [(entry_id, fields or {}) for entry_id, fields in reply[0][1]] if reply else []

    def payloads(self, kind: str, ids: Sequence[str]) -> list[Payload | None]:
        """Tokens kept under the keys `kind:ID`; None if they are missing or invalid."""
        data = self.redis.mget([self.key(f"{kind}:{name}") for name in ids]) if ids else []
        return [decode_if_valid(payload) for payload in data]

    def endpoint(self, name: str) -> dict[str, str] | None:
        """Where something is served, or None before it is published."""
        data = self.redis.hget(self.key("endpoints"), name)
        return unpack(data) if data else None

    def set(self, name: str, value: str | int, seconds: int = 0) -> None:
        """Set a small key, also in a full Redis; it expires after `seconds`, if these are given."""
        self.call("set", [name], [value, seconds])

    def memory(self) -> Memory:
        try:
            info = self.redis.info("memory")
        except ResponseError:
            return Memory(0, 0)  # the server or its ACL forbids the command
        policy = str(info.get("maxmemory_policy", NOEVICTION))
        return Memory(int(info.get("used_memory", 0)), int(info.get("maxmemory", 0)), policy)

    def memory_is_short(self) -> bool:
        """Whether memory must be freed before anything more is stored; raises what `check_eviction` does."""
        return self.check_eviction().share > MEMORY_SHARE

    def check_eviction(self) -> Memory:
        """The server's memory; raises `UserError` if it may drop keys to save memory."""
        memory = self.memory()
        if memory.refusal is not None:
            raise UserError(memory.refusal)
        return memory

    def evicted(self) -> int:
        """Keys that Redis has dropped to save memory since it was started; 0 if it does not say."""
        try:
            return int(self.redis.info("stats").get("evicted_keys", 0))
        except ResponseError:
            return 0

    def finish(self) -> None:
        """Mark the run as finished; every process exits when it sees this."""
        self.set("finished", 1)

    def finished(self) -> bool:
        return bool(self.redis.exists(self.key("finished")))

    def counters(self) -> dict[str, int]:
        """What the scripts have counted: dispatched, finished, finished_twice, counted, ..."""
        return {name.decode(): int(value) for name, value in self.redis.hgetall(self.key("counters")).items()}

    def evaluations(self) -> list[dict[str, Any]]:
        """Held-out results by version, oldest first."""
        return self.all_evaluations().results

    def all_evaluations(self) -> PublishedEvaluations:
        values = [read_published(_EVALUATION, data) for data in self.redis.hvals(self.key("evaluations"))]
        results = [value for value in values if value is not None]
        return PublishedEvaluations(sorted(results, key=lambda result: result["version"]), len(values) - len(results))

    def processes(self) -> dict[str, dict[str, Any]]:
        """Living processes by id, with the values each publishes and `age`, seconds since its last heartbeat.

        One whose values cannot be read has the state `unreadable`.
        """
        pipe = self.redis.pipeline(transaction=False)
        pipe.time()
        pipe.hgetall(self.key("processes"))
        pipe.zrange(self.key("alive"), 0, -1, withscores=True)
        (seconds, micros), entries, heartbeats = pipe.execute()
        now = seconds + micros / 1e6
        ages = {process_id: now - milliseconds / 1000 for process_id, milliseconds in heartbeats}
        return {
            process_id.decode(errors="replace"): (read_published(_PROCESS, data) or UNREADABLE)
            | {"age": ages[process_id]}
            for process_id, data in sorted(entries.items())
            # A heartbeat from the future comes from a process that died before Redis' clock was set back.
            if abs(ages.get(process_id, self.dead_after)) < self.dead_after
        }


def connect(config: BrokerConfig, run: str, *, log: Any = None) -> Broker:
    """Connect to the run's Redis, waiting up to `config.wait` seconds for it.

    Later calls are retried for about as long, so they survive a restart of the server and, if `config.url` names
    sentinels, a fail-over.

    Raises:
        UserError: the server is unreachable, requires a password, is too old or is not Redis.
    """
    url, patience = without_password(config.url), Patience()
    try:
        connected = client(
            config,
            socket_timeout=SOCKET_TIMEOUT,
            retry=Retry(patience, retries=max(1, int(config.wait) + 5)),
            retry_on_error=[ConnectionError, TimeoutError, BusyLoadingError],
        )
    except ValueError as error:
        raise UserError(f"broker.url {url}: {error}") from None
    server_version = wait_for_server(config, run, url, log)
    if tuple(int(part) for part in server_version.split(".")[:2]) < OLDEST_SERVER:
        raise UserError(f"Redis at {url} is {server_version}; SPO needs {'.'.join(map(str, OLDEST_SERVER))} or newer")
    if log is not None:
        for risk in risks(config, on_this_machine=False):
            log.warning(risk)
    broker = Broker(connected, run, config.dead_after)
    broker.patience = patience
    return broker


class ProcessStatus(TypedDict, total=False):
    """What a process publishes about itself; each role adds its own fields."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    role: Required[str]
    pid: Required[int]
    host: Required[str]
    state: Required[str]
    version: int
    tokens_per_second: float
    episodes: int
    source: str
    sent_bytes: int
    variance_ratio: float | None
    evaluating: str | None


class EvaluationResult(TypedDict, total=False):
    """A complete evaluation: `set_aside` and `samples` count answers, `figures` has all that was measured, by name."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    version: Required[int]
    accuracy: Required[float]
    samples: Required[int]
    reward: float
    set_aside: int
    figures: dict[str, float]


class PublishedEvaluations(NamedTuple):
    """Results by version, oldest first, and how many could not be read."""

    results: list[dict[str, Any]]
    unreadable: int


_PROCESS = TypeAdapter(ProcessStatus)
_EVALUATION = TypeAdapter(EvaluationResult)


def read_published(kind: TypeAdapter[Any], data: bytes) -> dict[str, Any] | None:
    """What a process published, as one of these mappings; None if it cannot be read."""
    try:
        value: dict[str, Any] = kind.validate_python(unpack(data), strict=True)
    except (Unreadable, ValidationError):
        return None
    return value
