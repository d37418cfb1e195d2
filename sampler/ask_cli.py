"""The process that asks in a run without a learner; `spo values estimate` and `spo eval` start it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from redis.exceptions import RedisError

from common import log as logs
from common.config import Config, load_config
from common.config.data import Side, Source
from common.errors import UserError
from common.messages import Kind
from common.process import keep_files_private
from common.scripts import ConfigOption, OverrideOption, entry_point
from common.streams.agreement import agree
from common.streams.broker import connect
from common.streams.lease import LeaseLost
from common.streams.ledger import OutOfStep, SamplerLedger
from common.streams.presence import Presence
from sampler.answer_file import AnswerFile
from sampler.ask import Asker
from sampler.prompts import PromptSet, load_prompts

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def ask(
    config: ConfigOption,
    kind: Annotated[str, typer.Option(help="values or eval: how responses are sampled.")],
    responses: Annotated[int, typer.Option(min=1, help="Responses a prompt.")],
    output: Annotated[Path, typer.Option(help="File for the answers.")],
    data: Annotated[str | None, typer.Option(help="[NAME=]PATH of a part of the data.")] = None,
    override: OverrideOption = None,
) -> None:
    """Have every prompt answered by the generators of a run without a learner, and write the answers to a file."""
    keep_files_private()
    settings = load_config(config, override or ())
    log = logs.setup("asker")
    of_kind: Kind = "eval" if kind == "eval" else "values"
    prompts = load_questions(settings, of_kind, data, log)
    file = AnswerFile(output, log)
    try:
        serve(settings, prompts, of_kind, responses, file, log)
    except RedisError as error:
        raise UserError(f"Redis failed ({error}); start again, it goes on with what is missing") from None


def load_questions(config: Config, kind: Kind, data: str | None, log: Any) -> PromptSet:
    """The prompts that are to be answered: those of `data.train`, or `eval.limit` of each source of `data.heldout`.

    Args:
        data: `[NAME=]PATH`, to be read in place of the source of that name, or of the only one: a part of it.

    Raises:
        UserError: there is no such source, or its prompts cannot be used.
    """
    side: Side = "heldout" if kind == "eval" else "train"
    sources = config.data.sources(side)
    if data is not None:
        sources = [_in_place_of(sources, side, data)]
    prompts = load_prompts(sources, log)
    limit = config.eval.limit if kind == "eval" else None
    return prompts if limit is None else prompts.first(limit)


def _in_place_of(sources: Sequence[Source], side: Side, data: str) -> Source:
    name, equals, path = data.partition("=")
    chosen = [source for source in sources if not equals or source.name == name]
    if len(chosen) != 1:
        names = ", ".join(source.name for source in sources)
        raise UserError(f"--data {data}: data.{side} has {names}; say which of them it is a part of, NAME=FILE")
    # Its rows are those of the whole; where they came from does not matter any more.
    return replace(chosen[0], key="--data", path=path if equals else data, options={}, config=None)


def serve(config: Config, prompts: PromptSet, kind: Kind, responses: int, file: AnswerFile, log: Any) -> None:
    """Ask until all is answered or a signal comes.

    Raises:
        UserError: what the user gave cannot be used, or another process asks in this run.
    """
    broker = connect(config.broker, config.run.name, log=log)
    agree(broker, config, log)
    ledger = SamplerLedger(broker)
    with Presence(broker, "asker", "sampler", config.broker.heartbeat) as presence:
        presence.status(state="running")
        try:
            while not _asked(Asker(config, prompts, kind, responses, file, ledger, log)):
                log.warning("redis has lost what this process had written; starting again from what it has")
        except LeaseLost as error:
            raise UserError(f"{error}; wait until that one is done, or choose another run.name") from None
        finally:
            ledger.release()


def _asked(asker: Asker) -> bool:
    """Run to the end; False if Redis went back in time and another asker must start from what it has."""

    def stop(*_: object) -> None:
        asker.stop.set()
        asker.ledger.broker.patience.end()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        asker.run()
    except OutOfStep:
        return asker.stop.is_set()
    return True


main = entry_point(app)

if __name__ == "__main__":
    main()
