"""The command `spo chaos`; its code lives with the tests in `tests/chaos/` and is imported only when it is called."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from common.errors import UserError
from common.scripts import OverrideOption
from launcher.options import Plain

CHECKOUT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    task: str
    teacher: bool
    minutes: float
    seed: int
    steps: int | None
    threshold: float | None
    without: tuple[str, ...]
    output: Path
    plain: bool
    overrides: tuple[str, ...]


def chaos(
    task: Annotated[str, typer.Option(help="Which quickstart: `arithmetic`, or `agent`.")] = "arithmetic",
    teacher: Annotated[
        bool, typer.Option("--teacher", help="Let a teacher score every answer; faults hit it too.")
    ] = False,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long to inject faults, from the first step on.")] = 2.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the faults and of the run.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Learner steps; by default as many as fit the time.")] = None,
    threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="Held-out accuracy that the run must reach.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="FAULT", help="Kind of fault to leave out; may be given several times.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder to make the run folder in.")] = Path("runs"),
    plain: Plain = False,
    override: OverrideOption = None,
) -> None:
    """Run the quickstart under faults drawn from a seed, and check that nothing was lost and nothing counted twice.

    All processes are real. They are killed and frozen; their connections to Redis are cut, held and slowed down;
    replies are lost; Redis is killed, its log cut, its memory and disk filled; generators come and go; foreign
    clients connect; the power fails. Then the run is checked against the journal of the sampler's commits. Exit code
    1 if the counts do not agree. Needs a source checkout.

    - `spo chaos`
    - `spo chaos --minutes 15 --seed 3 --threshold 0.9`
    - `spo chaos --task agent`
    - `spo chaos --teacher`
    """
    if not (CHECKOUT / "tests" / "chaos" / "command.py").is_file():
        raise UserError(
            "spo chaos needs a source checkout of SPO, whose tests/chaos it runs; this is an installed package"
        )
    sys.path.insert(0, str(CHECKOUT))
    from tests.chaos.command import run_chaos

    faulty = tuple(without or ())
    run_chaos(
        ChaosOptions(task, teacher, minutes, seed, steps, threshold, faulty, output, plain, tuple(override or ()))
    )
