"""Reads what a run has left: its journal and its state in Redis, and the files in its folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.messages import InvalidMessage, Step
from common.streams.broker import Broker
from common.streams.early_stop import EarlyStop
from common.streams.ledger import JournalEntry, read_journal
from common.unpack import Unreadable
from launcher.audit.tokens import SampledTokens, TrainedRow, flaw_of, sampled_tokens
from launcher.folder.episodes import record_of
from launcher.folder.metrics import OLD, Metrics, read_metrics
from launcher.folder.run_folder import RunFolder
from launcher.trace import read_timelines
from sampler.files.metrics_file import not_written

# Streams, hashes and prefixes of keys that are empty or gone once a run is over.
EMPTIED = ("tasks", "samples", "batches", "outstanding", "open", "payload:", "pin:", "tasks:")


@dataclass(frozen=True, slots=True)
class RedisRecords:
    """The contents of Redis after the run's last process has ended."""

    journal: list[JournalEntry]
    steps: list[Step]  # the learner's announcements, in order
    read: int  # how many of the steps the sampler had read when it stopped
    counters: dict[str, int]
    outstanding: list[str]  # tasks whose result is awaited
    waiting: list[str]  # rewarded samples that are in no batch yet
    rows: dict[str, bytes]  # of the tracker, packed, by prompt id
    population: bytes | None  # the state of the prior; None with the paper's prior, which has none
    evaluations: list[dict[str, Any]]
    leftovers: list[str]  # keys that a finished run should have emptied or deleted
    finished: bool
    early_stop: EarlyStop


def read_redis(broker: Broker) -> RedisRecords:
    """Read all that the audit needs; raises `UserError` if the journal cannot be read."""
    redis, key = broker.redis, broker.key
    try:
        journal = list(read_journal(broker))
        steps = [Step.unpack(fields.get(b"step", b"")) for _, fields in redis.xrange(key("steps"))]
    except (InvalidMessage, Unreadable, KeyError, TypeError) as error:
        raise UserError(f"the journal of run {broker.run!r} cannot be read: {error}") from None
    return RedisRecords(
        journal=journal,
        steps=steps,
        read=len(redis.xrange(key("steps"), max=redis.hget(key("state"), "last_step") or "0")),
        counters=broker.counters(),
        outstanding=[task_id.decode() for task_id in redis.hkeys(key("outstanding"))],
        waiting=[sample_id.decode() for sample_id in redis.hkeys(key("open"))],
        rows={name.decode(): row for name, row in redis.hgetall(key("tracker")).items()},
        population=redis.hget(key("state"), "population"),
        evaluations=broker.evaluations(),
        leftovers=sorted(_leftovers(broker)),
        finished=broker.finished(),
        early_stop=EarlyStop.of(broker),
    )


def _leftovers(broker: Broker) -> Iterator[str]:
    for name in EMPTIED:
        for key in broker.keys_of(name) if name.endswith(":") else [broker.key(name)]:
            if size := _size(broker, key):
                yield f"{key.removeprefix(broker.key(''))} ({size})"


def _size(broker: Broker, key: str) -> int:
    """Entries of a stream or a hash; 1 for any other key."""
    kind = broker.redis.type(key)
    if kind == b"stream":
        return int(broker.redis.xlen(key))
    return int(broker.redis.hlen(key)) if kind == b"hash" else int(kind != b"none")


class KeptEpisode(NamedTuple):
    """A line of `rollouts/` or `validation_data/`, as far as it is compared with other records."""

    task_id: str
    prompt_id: str
    version: int  # in the file's name
    reward: float | None  # None if the task was skipped
    versions: tuple[int, ...]  # of its oldest and its newest token; empty if it was skipped
    value: float | None  # of the prompt when the task was sent, rounded; None in evaluations
    answer: str
    rows: int  # the number of its rows of tokens
    flaw: str  # how its counts differ from its messages and tokens; empty if they do not
    tokens: Sequence[SampledTokens]  # of each row; empty if the record has no tokens


@dataclass(frozen=True, slots=True)
class FolderRecords:
    """The files of a run folder."""

    metrics: Metrics
    rollouts: list[KeptEpisode]  # training episodes, in no order
    answers: dict[int, list[KeptEpisode]]  # episodes of complete evaluations, by version
    unfinished: list[str]  # files of evaluations that are not complete
    trained: dict[int, list[TrainedRow]]  # lines of training data, by batch
    torn: list[str]  # lines that cannot be read: file and number
    not_written: set[int]  # versions whose metrics may be lost, because the disk was full
    served: list[int]  # versions that the learner has served, in order, read from its timeline
    changed: Mapping[str, int]  # for each setting that was changed, the last step before it took its present value
    # For each folder of episodes and for `metrics`, the version before which files may have been removed (run.keep_mb).
    since: Mapping[str, int]


def read_folder(folder: Path, keep_bytes: int) -> FolderRecords:
    metrics = read_metrics(folder)
    torn = [f"{metrics.unreadable} of metrics.jsonl"] if metrics.unreadable else []
    rollouts = [one for version, path in episode_files(folder, "rollouts") for one in _kept(version, path, torn)]
    answers = {version: list(_kept(version, path, torn)) for version, path in episode_files(folder, "validation_data")}
    trained: dict[int, list[TrainedRow]] = defaultdict(list)
    for version, path in episode_files(folder, "training_data"):
        for number, line in lines_of(path):
            try:
                trained[version].append(TrainedRow.of(line))
            except (LookupError, TypeError, ValueError, OverflowError):
                torn.append(f"{path.parent.name}/{path.name}:{number}")
    rewards = metrics.series("reward/mean", "sampler").versions.tolist()
    since = {name: _oldest(folder, name, keep_bytes) for name in ("rollouts", "validation_data", "training_data")}
    since["metrics"] = min(rewards, default=0) if (folder / OLD).exists() else 0
    events = (event for event in read_timelines(folder)[0] if (event.process, event.name) == ("learner", "serve"))
    served = (event.details.get("version") for event in events)
    log = folder / "logs" / "sampler.log"
    return FolderRecords(
        metrics=metrics,
        rollouts=rollouts,
        answers=answers,
        unfinished=sorted(path.name for path in (folder / "validation_data").glob("*.part")),
        trained=trained,
        torn=torn,
        not_written=not_written(log.read_text(errors="replace")) if log.is_file() else set(),
        served=[version for version in served if isinstance(version, int)],
        changed={change["key"]: int(change.get("step") or 0) for change in RunFolder(folder, folder.name).changes()},
        since=since,
    )


def _oldest(folder: Path, name: str, keep_bytes: int) -> int:
    """The oldest version in the folder if older ones may have been removed, because the folder was full; else 0."""
    files = episode_files(folder, name)
    versions = sorted({version for version, _ in files})
    if sum(path.stat().st_size for _, path in files) < keep_bytes // 2:
        return 0
    # The first evaluation's file is never removed (`spare_first`), so the second tells where the gap ends.
    return versions[min(1, len(versions) - 1)] if name == "validation_data" else versions[0]


def episode_files(folder: Path, name: str) -> list[tuple[int, Path]]:
    """Complete files of a folder with their version, oldest first."""
    named = ((path.name.partition(".")[0], path) for path in (folder / name).glob("*.jsonl"))
    return sorted((int(version), path) for version, path in named if version.isdecimal())


def lines_of(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Number and record of each line; an empty record if a line cannot be read or was cut short."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            yield number, (record_of(line) if line.endswith(b"\n") else None) or {}


def _kept(version: int, path: Path, torn: list[str]) -> Iterator[KeptEpisode]:
    for number, line in lines_of(path):
        try:
            flaw = flaw_of(line)
            yield KeptEpisode(
                str(line["task_id"]), str(line["prompt_id"]), version, line["reward"], tuple(line["versions"]),
                line.get("value"), str(line.get("answer", "")), int(line.get("rows", 1)), flaw,
                () if flaw else sampled_tokens(line),
            )  # fmt: skip
        except (LookupError, TypeError, ValueError, OverflowError):
            torn.append(f"{path.parent.name}/{path.name}:{number}")
