"""`spo-learner`: trains the policy, on one rank or, under the `deepspeed` launcher or `torchrun`, on several."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated

import typer
from redis.exceptions import RedisError

from common import log as logs
from common.config import Config, load_config
from common.config.warnings import warnings
from common.errors import UserError, reports_user_errors
from common.options import ConfigOption, OverrideOption
from common.streams.broker import connect
from common.streams.presence import Presence

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def learn(
    config: ConfigOption,
    override: OverrideOption = None,
    unfinished_code: Annotated[
        int,
        typer.Option(
            min=0,
            max=255,
            metavar="CODE",
            help="Exit code when a signal ends it before the run is over. A Kubernetes Job takes 0 for done.",
        ),
    ] = 0,
    local_rank: Annotated[
        int | None, typer.Option("--local_rank", "--local-rank", hidden=True, help="Set by the deepspeed launcher.")
    ] = None,
) -> None:
    """Train on the sampler's batches, publish each new version of the weights, and write checkpoints.

    Started again after a crash or SIGTERM, it goes on from the newest checkpoint without losing a batch.

        spo-learner -c configs/arithmetic.yaml -o learner.lr=1e-6
        deepspeed --num_gpus 8 --module learner.cli -c configs/arithmetic.yaml
    """
    if local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(local_rank))
    _train(load_config(config, override or ()), unfinished_code)


def _train(config: Config, unfinished_code: int) -> None:
    rank = int(os.environ.get("RANK", "0"))
    log = logs.setup("learner" if rank == 0 else f"learner-{rank}")
    if rank == 0:
        for line in warnings(config):
            log.warning(line)
    # Until the loop begins there is nothing to save: a signal simply ends the process.
    _on_signal(lambda: sys.exit(unfinished_code))
    try:
        broker = connect(config.broker, config.run.name, log=log)
        broker.agree(config)
        presence = Presence(broker, "learner", "learner", config.broker.heartbeat) if rank == 0 else None
        with presence or nullcontext():
            # torch and DeepSpeed take seconds to import: only now, when the configuration is known to be good.
            from learner import world as ranks
            from learner.loop import Learner

            log.info("loading model", model=config.model.path)
            world = ranks.start()
            learner = Learner(config, broker, world, presence, log)
            _on_signal(learner.stop.set)
            over = learner.run()
            ranks.stop()
    except RedisError as error:
        raise UserError(f"Redis failed ({error}); start this learner again, it goes on from its checkpoint") from None
    log.info("stopped", version=learner.version, checkpoint=learner.saved)
    if not over:
        raise SystemExit(unfinished_code)


def _on_signal(act: Callable[[], object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: act())


main = reports_user_errors(app)

if __name__ == "__main__":
    main()
