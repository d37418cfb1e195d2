"""The configuration and the model that all processes of a run share: the first one stores them, the others must match.

A run whose processes are all gone may be started again with other values: of any key, as long as it has not trained;
later, of the keys that `common.config.shared` lists. Each such change is recorded with the step from which it applies.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.config import Config, Difference, differences, shared_values
from common.config.shared import CHANGEABLE
from common.errors import UserError
from common.files import checkpoint_versions
from common.model import cached_folder, model_digests
from common.process import Role
from common.release import release
from common.streams.broker import Broker
from common.streams.early_stop import EarlyStop
from common.streams.steps import latest

POLL = 0.1  # seconds
SETTLING = 2  # heartbeats after a run's start or a change during which no other process changes the configuration
ROLES = ("sampler", "learner", "generator")  # whose configuration matters to the others; a relay's does not


def agree(
    broker: Broker, config: Config, log: Any = None, *, may_differ: bool = True, role: Role | None = None
) -> None:
    """Join the run: store its configuration and release if this process is the first, else compare with them.

    Values that may change replace the run's once none of its processes is alive. A process that was killed is
    waited for until its heartbeat expires.

    Args:
        may_differ: whether this process may change anything.
        role: compare the files of the model too, as a generator or the learner reads them.

    Raises:
        UserError: the run was started with another release of SPO, with another configuration that cannot change now,
            or with other files under `model.path`; the message lists the keys or the files. Or Redis may drop keys.
    """
    broker.check_eviction()
    _set_first(broker, "release", release())
    _same_release(broker)
    if not broker.redis.exists(broker.key("config")):
        # Set first, so that no process takes the run for dead before its first heartbeat.
        broker.redis.set(broker.key("reconfigured"), 1, px=_settling(config))
        _set_first(broker, "config", json.dumps(shared_values(config)))
    while changes := differences(config, json.loads(before := _stored(broker))):
        _check_changes_of_run(broker, config, changes, may_differ)
        _wait_until_alone(broker, changes)
        if _replace(broker, before, config, changes, log):
            break
    if role is not None:
        _agree_on_model(broker, config, role, log)


def compare(broker: Broker, config: Config) -> list[Difference] | None:
    """The changes that this configuration would make to the run; None if the run has not begun. Changes nothing.

    Raises `UserError` like `agree`, but does not check whether processes of the run are alive.
    """
    if not broker.redis.exists(broker.key("release")):
        return None
    _same_release(broker)
    if not broker.redis.exists(broker.key("config")):
        return []
    changes = differences(config, json.loads(_stored(broker)))
    _check_changes_of_run(broker, config, changes)
    return changes


def changes_of(broker: Broker) -> list[dict[str, Any]]:
    """What has changed since the run began, oldest first: `step`, `key`, `from`, `to` and `time` of each change."""
    return [json.loads(line) for line in broker.redis.lrange(broker.key("changes"), 0, -1)]


def _check_changes_of_run(
    broker: Broker, config: Config, changes: Sequence[Difference], may_differ: bool = True
) -> None:
    step = _step(broker, config) if may_differ and config.run.has_learner else None
    # With no step in Redis, its tasks are lost too, so none is ahead of the checkpoint.
    ahead = 0 if latest(broker) is None else config.sampler.max_staleness + 1
    check_changes(changes, f"run {broker.run!r}", step, ahead)


def check_changes(changes: Sequence[Difference], run: str, step: int | None, ahead: int = 0) -> None:
    """Raise `UserError` if a configuration differs from a run's in keys that cannot change.

    Args:
        run: its name in messages.
        step: the last step that the run has trained; if None, nothing may differ.
        ahead: steps after that for which tasks can have been dispatched; an end before them would lose samples.
    """
    if step == 0:
        return
    refused = [change for change in changes if step is None or change.key not in CHANGEABLE]
    if refused and step is None:
        raise UserError(
            f"{run} was started with another configuration: {_listed(refused)}; use that, or choose another run.name"
        )
    if refused:
        options = " ".join(f"-o {change.key}=..." for change in refused)
        raise UserError(
            f"{run} was started with another configuration: {_listed(refused)}, which cannot change after step {step}; "
            f"use that, or start a new run from its checkpoint: spo fork RUN NEW {options}"
        )
    for change in changes:
        if change.key != "run.steps" or step is None:
            continue
        lowest = min(change.there, step + ahead)
        reached = f"step {step} already" if lowest == step else f"step {step}, with tasks for steps up to {lowest}"
        if change.here < lowest:
            raise UserError(f"{run} is at {reached}: run.steps = {change.here} is too low; use {lowest} or more")


def _agree_on_model(broker: Broker, config: Config, role: Role, log: Any) -> None:
    """Store the digests of the model's files if this process is the first, else compare with them."""
    folder = Path(config.model.path)
    # A generator needs them all; the learner's folder may lack the tokenizer.
    missing = "missing" if role is Role.GENERATOR else ""
    while folder.is_dir() and (changes := _other_files(broker, config, folder, missing)):
        if not config.run.has_learner or _step(broker, config) > 0:
            raise _other_model(broker, changes, folder)
        _wait_until_alone(broker, changes)
        _replace(broker, _stored(broker), config, changes, log)


def agree_on_download(broker: Broker, config: Config) -> None:
    """Compare the model's files with the run's if `model.path` is a Hugging Face name; raises `UserError` like `agree`.

    To be called once the model is loaded, because loading may download another revision than the cache had. Files that
    this cache lacks are not compared: caches of one revision may lack different files.
    """
    name = config.model.path
    folder = None if Path(name).is_dir() else cached_folder(name)
    if folder is not None and (changes := _other_files(broker, config, folder)):
        raise _other_model(broker, changes, folder.parents[1])


def _other_files(broker: Broker, config: Config, folder: Path, missing: str = "") -> list[Difference]:
    """Files that differ from the run's; those that the run has no digest of yet are stored as the run's."""
    redis, key, path = broker.redis, broker.key("model"), config.model.path
    # Weights on the disk matter only if the learner's do not replace them: with LoRA, or without a learner.
    here = model_digests(folder, missing, weights=config.learner.lora is not None or not config.run.has_learner)
    for name in here.keys() - {name.decode() for name in redis.hkeys(key)}:
        redis.hsetnx(key, name, here[name])
    there = {name.decode(): digest.decode() for name, digest in redis.hgetall(key).items()}
    return [Difference(f"{path}: {name}", here[name], there[name]) for name in here if here[name] != there[name]]


def _other_model(broker: Broker, changes: Sequence[Difference], folder: Path) -> UserError:
    return UserError(
        f"run {broker.run!r} was started with another model: {_listed(changes)}; copy the folder {folder} from a "
        "machine of the run, or choose another run.name"
    )


def _same_release(broker: Broker) -> None:
    own, first = release(), (broker.redis.get(broker.key("release")) or b"").decode()
    if own != first:
        raise UserError(
            f"run {broker.run!r} was started with SPO {first}, but this is {own}; use the same release "
            "(image) for all processes of a run, or choose another run.name"
        )


def _set_first(broker: Broker, name: str, value: str) -> None:
    # Looked up first: a full Redis refuses any SET, even one that would change nothing.
    if not broker.redis.exists(broker.key(name)):
        broker.redis.set(broker.key(name), value, nx=True)


def _stored(broker: Broker) -> str:
    return (broker.redis.get(broker.key("config")) or b"{}").decode()


def _step(broker: Broker, config: Config) -> int:
    """The last step that the run has trained, according to Redis or, if Redis has lost the run, the checkpoints."""
    newest = latest(broker)
    return max(0 if newest is None else newest.version, *checkpoint_versions(config.run.folder), 0)


def _wait_until_alone(broker: Broker, changes: Sequence[Difference]) -> None:
    """Return when no process of the run is alive; raises `UserError` as soon as one sends a heartbeat."""
    silence: dict[str, float] = {}
    while True:
        # Read first: a process that has just changed the configuration sends a heartbeat before this key expires.
        is_new = broker.redis.exists(broker.key("reconfigured"))
        ages = {name: one["age"] for name, one in broker.processes().items() if one.get("role") in ROLES}
        alive = [name for name, age in ages.items() if age < silence.get(name, age)]
        if alive:
            raise UserError(
                f"run {broker.run!r} has another configuration: {_listed(changes)}; to change it, stop all of the "
                f"run's processes first ({', '.join(sorted(alive))}), or use that"
            )
        if not ages and not is_new:
            return
        silence |= ages
        time.sleep(POLL)


def _replace(broker: Broker, before: str, config: Config, changes: Sequence[Difference], log: Any) -> bool:
    """Store this configuration as the run's; False if another process has done so first."""
    step, after, settling = _step(broker, config), json.dumps(shared_values(config)), _settling(config)
    shown = [f"{change.key}: {change.there!r} -> {change.here!r}" for change in changes]
    if step == 0:
        # What was generated so far belongs to the other configuration.
        arguments: list[str | int] = [before, after, settling, broker.key(""), release()]
        done = broker.call("begin_anew", ("config", "reconfigured"), arguments)
        line = "another configuration: the run, which has not trained yet, starts from the beginning"
    else:
        rows = [
            json.dumps({"step": step, "key": c.key, "from": c.there, "to": c.here, "time": round(time.time())})
            for c in changes
        ]
        keys = ("config", "reconfigured", "changes", "finished")
        last = EarlyStop.of(broker).last_version(config.run.steps, config.run.stop_when)
        done = broker.call("reconfigure", keys, [before, after, settling, int(step < last), *rows])
        line = "the run's configuration changes"
    if done and log is not None:
        log.warning(line, step=step, changes=shown)
    return bool(done)


def _settling(config: Config) -> int:
    return int(1000 * SETTLING * config.broker.heartbeat)


def _listed(changes: Sequence[Difference]) -> str:
    return ", ".join(map(str, changes))
