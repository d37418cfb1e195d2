"""`spo-learner`: trains the policy on one or more ranks, started by itself, by `deepspeed` or by `torchrun`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any

import typer
from redis.exceptions import RedisError

from common import log as logs
from common.checks.computing import visible_gpus
from common.checks.list import check_start
from common.config import Config, load_config
from common.config.combinations import check_ranks
from common.config.warnings import warnings
from common.errors import UserError
from common.files import checkpoint_versions, checkpoints
from common.process import Role, keep_files_private
from common.scripts import HELP, ConfigOption, OverrideOption, ResumeOption, VersionOption, entry_point
from common.streams.agreement import agree, agree_on_download
from common.streams.batches import BatchInbox
from common.streams.broker import Broker, connect
from common.streams.lease import RedisBehind
from common.streams.presence import LEARNER, Presence
from common.versions import record_versions
from learner.ranks.launch import die_with_launcher, launch
from learner.ranks.rank import Rendezvous, exits_at_once, read_rendezvous

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings=HELP)
def learn(
    config: ConfigOption,
    override: OverrideOption = None,
    unfinished_code: Annotated[
        int,
        typer.Option(
            min=0,
            max=255,
            metavar="CODE",
            help="Exit code if a signal ends it before the run is finished. A Kubernetes Job takes 0 for done.",
        ),
    ] = 0,
    resume: ResumeOption = False,
    ranks: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Ranks on this machine, each on a GPU of its own; 0 means one per GPU."),
    ] = 1,
    local_rank: Annotated[
        int | None, typer.Option("--local_rank", "--local-rank", hidden=True, help="Set by the deepspeed launcher.")
    ] = None,
    version: VersionOption = False,
) -> None:
    """Train on the sampler's batches, publish each new version of the weights, and write checkpoints.

    Started again after a crash or SIGTERM, it continues from the newest checkpoint without losing a batch.

        spo-learner -c my.yaml -o learner.lr=1e-6
        spo-learner -c my.yaml --ranks 8

    On several machines, run one command on each, by deepspeed --no_ssh or torchrun, each with its own --node_rank.
    """
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
    keep_files_private()
    die_with_launcher()
    settings = load_config(config, override or ())
    ranks = ranks or max(1, visible_gpus(dict(os.environ)).count)
    if ranks > 1:
        if "RANK" in os.environ:
            raise UserError(
                f"--ranks = {ranks} in a process that is a rank already (RANK is set): leave --ranks out, or unset RANK"
            )
        check_ranks(settings, ranks)
        words = ["--config", str(config), *(f"--override={one}" for one in override or ())]
        words += [f"--unfinished-code={unfinished_code}", *(["--resume"] if resume else [])]
        raise SystemExit(launch(ranks, words, unfinished_code))
    _train(settings, unfinished_code, resume)


def _train(config: Config, unfinished_code: int, resume: bool) -> None:
    rendezvous = read_rendezvous(os.environ)
    check_ranks(config, rendezvous.world_size)
    is_main = rendezvous.rank == 0
    log = logs.setup("learner" if is_main else f"learner-{rendezvous.rank}")
    if is_main:
        for line in warnings(config):
            log.warning(line)
    for line in check_start(Role.LEARNER, config):
        log.warning(line)
    # Until the loop begins there is nothing to save: a signal simply ends the process.
    _on_signal(lambda: sys.exit(unfinished_code))
    try:
        broker = connect(config.broker, config.run.name, log=log)
        inbox = BatchInbox(broker)
        # Only rank 0 asks Redis: `check_ranks_agree` compares the other ranks with it.
        disagreement = _disagreement(broker, config, inbox, log, resume) if is_main else None
        if disagreement and rendezvous.world_size == 1:
            raise disagreement
        shows_itself = is_main and not disagreement
        if shows_itself:
            record_versions(config.run.folder, "learner", broker)
        presence = Presence(broker, LEARNER, "learner", config.broker.heartbeat) if shows_itself else None
        with presence or nullcontext():
            # torch and DeepSpeed take seconds to import, so they wait until the configuration has been checked.
            from learner.loop import Learner
            from learner.policy.kernels import deterministic
            from learner.ranks import world as ranks
            from learner.ranks.world import check_ranks_agree

            if rendezvous.world_size > 1:
                log.info(
                    "waiting for the other ranks",
                    ranks=rendezvous.world_size,
                    at=f"{rendezvous.master_addr}:{rendezvous.master_port}",
                )
            world = ranks.start(config.learner.rank_timeout)
            # The other ranks end with rank 0's error, instead of waiting for rank 0.
            world.raise_on_all_ranks(lambda: _raise(disagreement))
            check_ranks_agree(world, config, broker)
            world = world.in_groups(config.learner.sequence_parallel)
            with deterministic(config.run.seed) if config.run.deterministic else nullcontext():
                log.info("loading model", model=config.model.path)
                learner = Learner(config, broker, inbox, world, presence, log)
                world.raise_on_all_ranks(lambda: agree_on_download(broker, config) if is_main else None)

                def stop() -> None:
                    learner.stop.set()
                    broker.patience.end()

                _on_signal(stop)
                is_over = learner.run()
            ranks.stop()
    except RedisError as error:
        raise UserError(f"Redis failed ({error}); start this learner again; it continues from its checkpoint") from None
    except RedisBehind as error:
        raise SystemExit(f"error: {error}") from None  # not with code 2: a supervisor should start it again
    except RuntimeError as error:
        _exit_if_ranks_are_lost(error, rendezvous)
        raise
    log.info("stopped", version=learner.version, checkpoint=learner.saved)
    if not is_over:
        raise SystemExit(unfinished_code)


def _disagreement(broker: Broker, config: Config, inbox: BatchInbox, log: Any, resume: bool) -> UserError | None:
    """Why rank 0 cannot join the run: its configuration, checkpoints of an unknown run, or a learner that is alive."""
    try:
        agree(broker, config, log, role=Role.LEARNER)
        if inbox.is_new() and not resume:
            _refuse_checkpoints(config)
        inbox.acquire()
    except UserError as error:
        return error
    return None


def _refuse_checkpoints(config: Config) -> None:
    """Raise `UserError` if the run folder of a run that Redis does not know has checkpoints."""
    folder, versions = checkpoints(config.run.folder), checkpoint_versions(config.run.folder)
    if versions:
        raise UserError(
            f"{folder} holds a checkpoint of version {versions[-1]}, but run {config.run.name!r} is new in Redis: "
            "start it with --resume to continue from there, or choose another run.experiment (and "
            f"model.path={folder / f'step_{versions[-1]}' / 'hf'} to start from its weights)"
        )


def _raise(error: UserError | None) -> None:
    if error is not None:
        raise error


def _exit_if_ranks_are_lost(error: RuntimeError, rendezvous: Rendezvous) -> None:
    """Exit if other ranks died or never joined; not with code 2, because a supervisor should start all ranks again."""
    from learner.ranks.world import lost_rank_message

    message = lost_rank_message(error) if rendezvous.world_size > 1 else None
    if message:
        raise SystemExit(f"error: {message}") from None


def _on_signal(act: Callable[[], object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: act())


main = exits_at_once(entry_point(app))

if __name__ == "__main__":
    main()
