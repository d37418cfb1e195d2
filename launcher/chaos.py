"""The command `spo chaos`; its code stands beside the tests (`tests/chaos/`), and is imported only when it is given."""

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
    """The command's options; its help says what they mean."""

    minutes: float
    seed: int
    steps: int | None
    threshold: float | None
    without: tuple[str, ...]
    output: Path
    plain: bool
    overrides: tuple[str, ...]


def chaos(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long faults are done, from the first step on.")] = 2.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the faults, and of the run.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Learner steps; by default as many as fit.")] = None,
    threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="Held-out accuracy that the run must reach.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="FAULT", help="Leave out this kind, several times if you like.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder to make the run folder in.")] = Path("runs"),
    plain: Plain = False,
    override: OverrideOption = None,
) -> None:
    """Run the quickstart under faults drawn from a seed, and check that nothing was lost and nothing counted twice.

    All processes are real; they are killed and frozen, their connections to Redis cut, held and slowed down, replies
    lost, Redis killed, its log cut, memory and disk full, and generators come and go. What the run did is compared with
    the journal of the sampler's commits. Exit code 1: the counts do not agree. Needs a source checkout.

    - `spo chaos`
    - `spo chaos --minutes 15 --seed 3 --threshold 0.9`
    """
    if not (CHECKOUT / "tests" / "chaos" / "command.py").is_file():
        raise UserError(
            "spo chaos needs a source checkout of SPO, whose tests/chaos it runs; this is an installed package"
        )
    sys.path.insert(0, str(CHECKOUT))
    from tests.chaos.command import run_chaos

    run_chaos(ChaosOptions(minutes, seed, steps, threshold, tuple(without or ()), output, plain, tuple(override or ())))
