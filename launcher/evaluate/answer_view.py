"""Shows how many prompts are answered: a bar on a terminal, or now and then a line."""

from __future__ import annotations

import time
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Generators = list[dict[str, Any]]


class View(Protocol):
    """Shows progress; updated several times a second."""

    def update(self, answered: int, set_aside: int, generators: Generators) -> None: ...

    def close(self) -> None: ...


class LineView:
    """A log line whenever there are new answers, at most every `every` seconds."""

    def __init__(self, log: Any, wanted: int, every: float = 5.0) -> None:
        self.log, self.wanted, self.every = log, wanted, every
        self._next = 0.0
        self._shown: tuple[Any, ...] = ()

    def update(self, answered: int, set_aside: int, generators: Generators) -> None:
        state = (answered, set_aside, len(generators))
        if time.monotonic() < self._next or state == self._shown:
            return
        self._next, self._shown = time.monotonic() + self.every, state
        self.log.info("progress", answered=f"{answered}/{self.wanted}", set_aside=set_aside, now=doing(generators))

    def close(self) -> None:
        """A log has nothing to tidy up."""


class BarView:
    """A progress bar with the time that is left, drawn in place."""

    def __init__(self, console: Console, title: str, wanted: int) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[doing]}", style="dim"),
            console=console,
            transient=True,
        )
        self.task = self.progress.add_task(title, total=wanted, doing="")
        self.progress.start()

    def update(self, answered: int, set_aside: int, generators: Generators) -> None:
        aside = f", {set_aside} set aside" if set_aside else ""
        self.progress.update(self.task, completed=answered, doing=doing(generators) + aside)

    def close(self) -> None:
        self.progress.stop()


def doing(generators: Generators) -> str:
    """The state of the generators in a few words."""
    running = [generator for generator in generators if generator.get("state") == "running"]
    if running:
        tokens = sum(float(generator.get("tokens_per_second", 0.0)) for generator in running)
        return f"{len(running)} generator{'s' * (len(running) > 1)}, {tokens:,.0f} tokens/s"
    return str(generators[0].get("state")) if generators else "waiting for generators"
