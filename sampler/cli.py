"""`spo-sampler`: the process that owns a run's prompts, value tracker and batches."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from redis.exceptions import RedisError

from common import log as logs
from common.checks.list import check_start
from common.config import Config, dump_config, load_config
from common.errors import UserError
from common.files import rewrite
from common.process import Role, keep_files_private
from common.scripts import HELP, ConfigOption, OverrideOption, VersionOption, entry_point
from common.streams.agreement import agree, changes_of
from common.streams.broker import connect
from common.streams.early_stop import to_continue
from common.streams.lease import LeaseLost, RedisBehind
from common.streams.ledger import SamplerLedger
from common.streams.presence import Presence
from common.versions import record_versions
from sampler.answers import load_questions
from sampler.files.answer_file import Request
from sampler.loop import Sampler
from sampler.prompts.prompt_set import RunData, load_data, too_few

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings=HELP)
def sample(
    config: ConfigOption,
    override: OverrideOption = None,
    version: VersionOption = False,
    answers: Annotated[Path | None, typer.Option(hidden=True)] = None,
    kind: Annotated[str, typer.Option(hidden=True)] = "values",
    responses: Annotated[int, typer.Option(min=1, hidden=True)] = 1,
    data: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Choose prompts, track their values, and assemble batches for the learner.

    A run has one sampler. It waits for Redis and for the learner's first weights, so processes may start in any
    order. After a stop or a kill, start it again and it continues from Redis.

        spo-sampler -c my.yaml -o sampler.batch_size=256
    """
    settings = load_config(config, override or ())
    keep_files_private()
    log = logs.setup("sampler")
    request = None
    if answers is not None:  # `spo values estimate` and `spo eval` have checked the rest
        request = Request("eval" if kind == "eval" else "values", responses, answers, data)
    else:
        for line in check_start(Role.SAMPLER, settings):
            log.warning(line)
    try:
        serve(settings, log, request)
    except RedisError as error:
        raise UserError(
            f"Redis failed ({error}); start this sampler again; it continues from the state in Redis"
        ) from None


def serve(config: Config, log: Any, request: Request | None = None) -> None:
    """Run a sampler until the run is over, or the request is answered, or a signal stops it.

    Raises:
        UserError: the configuration or the data cannot be used, or the run has a sampler already.
    """
    data = load_data(config.data, log) if request is None else RunData(load_questions(config, request, log), None)
    broker = connect(config.broker, config.run.name, log=log)
    agree(broker, config, log)
    if broker.finished():
        log.info(f"run is finished already; {to_continue(broker, config.run)}, or choose another run.name")
        return
    if request is None and (few := too_few(config, data.train)):
        log.warning(few)
    write_config(config, changes_of(broker))
    record_versions(config.run.folder, "sampler", broker)
    ledger = SamplerLedger(broker, journal=config.run.journal)
    with Presence(broker, "sampler", "sampler", config.broker.heartbeat) as presence:
        try:
            while not run_once(Sampler(config, data, ledger, presence, log, request)):
                pass
        except LeaseLost as error:
            raise UserError(f"{error}; stop that one or wait until it ends, or choose another run.name") from None
        except UserError:
            ledger.release()
            raise
        ledger.release()
    log.info("stopped")


def run_once(sampler: Sampler) -> bool:
    """Run a sampler until it ends or a signal stops it; False if it must be replaced by a new one: Redis was behind."""

    def stop(*_: object) -> None:
        sampler.stop.set()
        sampler.ledger.broker.patience.end()

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        sampler.run()
    except RedisBehind as error:
        sampler.log.warning(
            "Redis has lost a part of the run; the run continues from its newest checkpoint", because=str(error)
        )
        sampler.ledger.reset()
        return sampler.stop.is_set()
    except UserError:
        # A file that cannot be written may be the first sign that the run folder was moved away.
        sampler.folder.check()
        raise
    finally:
        sampler.timeline.flush()
        sampler.metrics.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return True


def write_config(config: Config, changes: Sequence[dict[str, Any]] = ()) -> None:
    """Write the resolved configuration, and the settings that changed since the run began, into the run folder.

    Raises:
        UserError: a file cannot be written.
    """
    folder = config.run.folder
    files = {"config.yaml": dump_config(config, absolute=True)}
    if changes:
        files["changes.jsonl"] = "".join(json.dumps(change) + "\n" for change in changes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            rewrite(folder / name, [text.encode()])
    except OSError as error:
        raise UserError(f"run folder {folder} cannot be written: {error.strerror}") from None


main = entry_point(app)

if __name__ == "__main__":
    main()
