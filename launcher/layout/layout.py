"""Assigns the GPUs of this machine to the learner's ranks, the generators, and the teachers' servers.

By default each side gets half of them, or as near to half as the learner's memory allows. A rank and a generator share
a single GPU if both fit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.checks.computing import cpu_build
from common.config import Config
from common.config.combinations import check_ranks
from common.errors import UserError
from common.process import Role
from launcher.folder.time_budget import Split
from launcher.layout.advice import advice, free_of_rank, rank_bytes, rank_too_large
from launcher.layout.gpus import Gpu, environment, numbers, read_gpus, select
from launcher.layout.needs import GB, SHARE, Needs, engine_size, needs_of, utilization
from launcher.layout.shape import read_shape
from launcher.layout.teachers import TeacherServer, check_memory, described, give_gpus, share_gpu, teacher_servers

BUSY = 2 << 30  # bytes: a GPU counts as in use if other processes hold this much of it; a desktop takes less
LARGE = 5e7  # from this number of parameters on, the learner has a thread for each core


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user asks for; None leaves the choice to `lay_out`. `select` parses the lists of GPUs."""

    generators: int | None = None  # number of processes; 0: they join from other machines
    learner_gpus: str | None = None
    generator_gpus: str | None = None
    teacher_gpus: str | None = None


NOTHING_ASKED = Choice()
NAMED = ("learner_gpus", "generator_gpus", "teacher_gpus")  # fields of `Choice`, and keys of the section `run`


@dataclass(frozen=True, slots=True)
class Placement:
    """The GPUs of each process."""

    learner: tuple[Gpu, ...]  # a GPU for each rank; empty if a single rank computes on the CPU
    generators: tuple[tuple[Gpu, ...], ...]  # the GPUs of each generator; none for one that computes on the CPU
    reasons: tuple[str, ...] = ()  # lines for the user that explain the choice
    # vLLM's arguments for GPUs that generators and ranks share; empty if all is as configured.
    engine: Mapping[str, float] = field(default_factory=dict)
    teachers: tuple[TeacherServer, ...] = ()
    # On the CPU, the learner has a thread for each core; else as many threads as any other process.
    all_cores: bool = False

    @property
    def processes(self) -> int:
        """The number of processes that compute a model: ranks of the learner, generators, and teachers' servers."""
        return max(1, len(self.learner)) + len(self.generators) + len(self.teachers)

    @property
    def teacher_gpus(self) -> list[Gpu]:
        return list(dict.fromkeys(gpu for one in self.teachers for gpu in one.gpus))

    def split(self, group: int) -> Split | None:
        """How many GPUs each side has; None if they share one, or one side has none. `group` ranks share a sequence."""
        used = {gpu.number for one in self.generators for gpu in one}
        if not self.learner or not used or used & {gpu.number for gpu in self.learner}:
            return None
        return Split(len(self.learner), len(used), math.lcm(group, len(self.generators[0])))

    @property
    def generator_names(self) -> list[str]:
        return [f"generator-{number}" for number in range(1, len(self.generators) + 1)]

    @property
    def environments(self) -> dict[str, dict[str, str]]:
        """The environment variables of each process that has GPUs, by the process's name."""
        gpus = {"learner": self.learner} | dict(zip(self.generator_names, self.generators, strict=True))
        gpus |= {one.name: one.gpus for one in self.teachers}
        return {name: environment(own) for name, own in gpus.items() if own}


def lay_out(config: Config, choice: Choice, environ: Mapping[str, str] = os.environ) -> Placement:
    """Assign the GPUs that this process may use, or the CPU if there are none.

    Raises:
        UserError: the choice names GPUs that do not exist, or a process does not fit; the message says what would fit.
    """
    if choice.generators is not None and choice.generators < 0:
        raise UserError(f"--generators {choice.generators} must be at least 0")
    named = {name: getattr(choice, name) or getattr(config.run, name) for name in NAMED}
    choice = replace(choice, **named)
    gpus = [] if _cpu_only(config) else read_gpus(environ)
    if not gpus:
        for name, asked in named.items():
            if asked is not None:
                why = _cpu_only(config) or "there is no GPU here"
                raise UserError(f"{_option(name)} = {asked!r}, but {why}")
        if config.run.has_learner:
            check_ranks(config, 1)
        generators = _cpu_generators(config) if choice.generators is None else choice.generators
        teachers = teacher_servers(config)
        all_cores = config.run.has_learner and _gains_from_all_cores(config)
        reasons = [f"no GPU: all processes compute on the CPU{', the learner on all cores' * all_cores}"]
        reasons += described(config, teachers)
        return Placement((), ((),) * generators, tuple(reasons), teachers=tuple(teachers), all_cores=all_cores)
    return _Plan(config, choice, gpus).layout()


def _cpu_only(config: Config) -> str:
    """Why the run cannot use GPUs (the installed builds are for the CPU); empty if it can."""
    roles = (Role.LEARNER, Role.GENERATOR) if config.run.has_learner else (Role.GENERATOR,)
    builds = [build for role in roles if (build := cpu_build(role))]
    return f"{' and '.join(builds)} compute on the CPU only" if builds else ""


def _gains_from_all_cores(config: Config) -> bool:
    """Whether the model is so large that the learner gains from a thread for each core, though it shares the cores.

    On two cores shared with a generator, a step with two threads instead of one takes 0.7 of the time with
    SmolLM2-135M, but 1.1 with the quickstart's model of a million parameters.
    """
    try:
        return read_shape(Path(config.model.path)).parameters >= LARGE
    except (OSError, LookupError, TypeError, ValueError):  # not on this disk, or of an unusual kind
        return False


def _cpu_generators(config: Config) -> int:
    """One generator for every four cores: engines with fewer would compete for them."""
    return 1 if config.run.deterministic else max(1, len(os.sched_getaffinity(0)) // 4)


class _Plan:
    """The state of `lay_out` while it assigns GPUs."""

    def __init__(self, config: Config, choice: Choice, gpus: Sequence[Gpu]) -> None:
        self.config, self.choice, self.gpus = config, choice, gpus
        self.size = engine_size(config.generator.engine)
        self.teachers = teacher_servers(config)
        self.beside = 0.0  # bytes that teachers take of a rank's GPU
        needs = needs_of(config)
        self.needs = needs if isinstance(needs, Needs) else None
        self.reasons = [] if isinstance(needs, Needs) else [f"memory is not checked: {needs}"]

    def layout(self) -> Placement:
        asked: list[list[Gpu] | None] = []
        for name in NAMED:
            text = getattr(self.choice, name)
            asked.append(None if text is None else select(text, self.gpus, _option(name)))
        for gpu in (gpu for gpus in asked for gpu in gpus or ()):
            if gpu.used >= BUSY:
                raise UserError(f"{_busy(gpu)}: end them, or name another GPU")
        learning, generating, teaching = asked
        if not self.config.run.has_learner:
            learning, teaching = [], None
        if self.choice.generators == 0:
            generating = []
        taken = {gpu.number for gpu in (*(learning or ()), *(generating or ()))}
        free = self._free([gpu for gpu in self.gpus if gpu.number not in taken])
        free = self._give_teachers(teaching, taken, free, int(learning is None or generating is None))
        if learning is None and generating is None:
            learning, generating = self._divide(free)
        learning = free if learning is None else learning
        generating = free if generating is None else generating
        if self.config.run.has_learner and not learning:
            raise UserError("no GPU is left for the learner: name fewer in --generator-gpus, or some in --learner-gpus")
        check_ranks(self.config, len(learning))
        generators = self._generators(learning, generating, named=asked[1] is not None)
        of_generators = {gpu.number for group in generators for gpu in group}
        shared = [gpu for gpu in learning if gpu.number in of_generators]
        share = self._share(len(learning), shared) if shared else None
        self._check_rank(learning)
        self._check_generators(generators, share)
        check_memory(self.config, self.teachers)
        self._say(learning, generators, share)
        engine: Mapping[str, float] = {}
        if self.needs is not None and share is not None:
            engine = self.needs.generator.on_shared(share, shared[0].total)
        return Placement(tuple(learning), generators, tuple(self.reasons), engine, tuple(self.teachers))

    def _give_teachers(self, named: Sequence[Gpu] | None, taken: set[int], free: list[Gpu], rest: int) -> list[Gpu]:
        """Assign GPUs to the teachers, and return the free GPUs that are left, at least `rest`."""
        if len(self.gpus) == 1:
            self.teachers = share_gpu(self.config, self.teachers, self.gpus[0])
            self.beside = sum(one.share * self.gpus[0].total for one in self.teachers if one.gpus)
            return free
        if shared := [gpu for gpu in named or () if gpu.number in taken]:
            raise UserError(
                f"--teacher-gpus names GPU {numbers(shared)}, which learner or generators have: name others"
            )
        used = {gpu.number for gpu in named or ()}
        others = [gpu for gpu in free if gpu.number not in used]
        self.teachers, left = give_gpus(self.teachers, named, others, rest)
        return left

    def _free(self, gpus: list[Gpu]) -> list[Gpu]:
        """The GPUs that no other program uses; slices count as free, because the driver does not report their use."""
        free = [gpu for gpu in gpus if gpu.used < BUSY]
        self.reasons += [f"{_busy(gpu)}: it is left out" for gpu in gpus if gpu.used >= BUSY]
        if gpus and not free:
            raise UserError(f"{_busy(gpus[0])}, and so of every other GPU here: end them, or wait")
        return free

    def _divide(self, gpus: list[Gpu]) -> tuple[list[Gpu], list[Gpu]]:
        """Divide GPUs between ranks and generators as evenly as the learner's memory allows."""
        wanted = None if self.choice.generators is None else self.choice.generators * self.size
        if self.config.run.deterministic:
            wanted = self.size
        if len(gpus) == 1:
            left = "one GPU is left" if any(one.gpus for one in self.teachers) and not self.beside else "one GPU"
            self.reasons.append(f"{left}: the learner and a generator share it")
            return gpus, gpus
        # Slices of a GPU cannot exchange data: one rank, and generators of one slice.
        most = 1 if any(gpu.is_slice for gpu in gpus) else len(gpus) - self.size
        if most < 1:
            raise UserError(
                f"a generator takes {self.size} GPUs (generator.engine), but one of {len(gpus)} must be left"
            )
        group = self.config.learner.sequence_parallel
        ways = [count for count in range(group, most + 1, group) if wanted is None or len(gpus) - count == wanted]
        if not ways:
            wanted_generators = f"{self.choice.generators or 1} generators of {self.size} GPUs"
            raise UserError(
                f"{wanted_generators} leave none of {len(gpus)} for the learner"
                + f", or no multiple of learner.sequence_parallel = {group}" * (group > 1)
                + ": ask for fewer (--generators)"
            )
        needs = self.needs
        fitting = [count for count in ways if needs is None or free_of_rank(needs, count, gpus[0]) >= 0]
        if needs is not None and not fitting:
            raise UserError(rank_too_large(needs, ways[-1], gpus[0]))
        chosen = min(fitting, key=lambda count: abs(2 * count - len(gpus)))
        return gpus[:chosen], gpus[chosen:]

    def _generators(
        self, learning: Sequence[Gpu], generating: Sequence[Gpu], *, named: bool
    ) -> tuple[tuple[Gpu, ...], ...]:
        size = self.size
        if self.choice.generators == 0:
            return ()
        groups = [tuple(generating[i : i + size]) for i in range(0, len(generating) - size + 1, size)]
        left = generating[len(groups) * size :]
        if not groups or (left and named):
            raise UserError(
                f"a generator takes {size} GPU{'s'[: size != 1]} (generator.engine), but {len(generating)} are left: "
                "name a multiple of that"
            )
        if left:
            self.reasons.append(f"GPU {numbers(left)} is not used: a generator takes {size}")
        if size > 1 and any(gpu.is_slice for gpu in generating):
            raise UserError(
                f"a generator takes {size} GPUs (generator.engine), but slices of a GPU cannot work together"
            )
        if len(learning) > 1 and any(gpu.is_slice for gpu in learning):
            raise UserError("slices of a GPU cannot work together: name one for the learner")
        wanted = self.choice.generators
        if wanted is not None and wanted > len(groups):
            raise UserError(
                f"--generators = {wanted}, but there are GPUs for {len(groups)}, of {size} each: ask for fewer"
            )
        return tuple(groups[:1] if self.config.run.deterministic else groups[:wanted])

    def _share(self, ranks: int, gpus: Sequence[Gpu]) -> float | None:
        """vLLM's share of the memory of GPUs that ranks use too: the configured one, or what a rank leaves."""
        if self.needs is None or not gpus[0].total:
            return None
        left = free_of_rank(self.needs, ranks, gpus[0]) - self.beside
        share = math.floor(100 * left / gpus[0].total) / 100
        if SHARE in self.config.generator.engine:
            share = min(share, utilization(self.config.generator.engine))
        needed = self.needs.generator.of_each()
        if left <= 0 or share * gpus[0].total < needed:
            rank = rank_bytes(self.needs, ranks) / GB
            parts = f"a rank of the learner needs {rank:.1f} and a generator {needed / GB:.1f}"
            if self.beside:
                parts = f"the teachers take {self.beside / GB:.1f}, {parts}"
            raise UserError(
                f"GPU {numbers(gpus)} has {gpus[0].total / GB:.1f} GB, of which {parts}: "
                f"{advice(self.needs, ranks, gpus[0], needed + self.beside)}"
            )
        return share

    def _check_rank(self, gpus: Sequence[Gpu]) -> None:
        if self.needs and gpus and gpus[0].total and free_of_rank(self.needs, len(gpus), gpus[0]) < self.beside:
            raise UserError(rank_too_large(self.needs, len(gpus), gpus[0], self.beside))

    def _check_generators(self, groups: Sequence[Sequence[Gpu]], share: float | None) -> None:
        if self.needs is None or not groups or not groups[0][0].total:
            return
        engine = self.needs.generator
        share = utilization(engine.arguments) if share is None else share
        if refusal := engine.refusal("a generator", "generator", share, groups[0][0].total):
            raise UserError(refusal)

    def _say(self, learning: Sequence[Gpu], groups: Sequence[Sequence[Gpu]], share: float | None) -> None:
        """Put a line for each process before the other reasons."""
        lines = []
        if learning:
            memory = ""
            if self.needs and learning[0].total:
                needed = rank_bytes(self.needs, len(learning)) / GB
                memory = f", {needed:.1f} of {learning[0].total / GB:.1f} GB each"
            stage = self.config.learner.deepspeed_stage
            lines.append(
                f"learner: GPU {numbers(learning)} ({learning[0].product}), {len(learning)} "
                f"rank{'s'[: len(learning) != 1]}, ZeRO {stage}{memory}"
            )
        for number, group in enumerate(groups, 1):
            line = f"generator-{number}: GPU {numbers(group)} ({group[0].product})"
            if self.needs and group[0].total:
                engine = self.needs.generator
                line += engine.described(utilization(engine.arguments) if share is None else share, group[0].total)
            lines.append(line + (f", {share:.0%} of the memory" if share is not None else ""))
        self.reasons[:0] = [*lines, *described(self.config, self.teachers)]


def _busy(gpu: Gpu) -> str:
    return f"other processes hold {gpu.used / GB:.1f} of {gpu.total / GB:.1f} GB of GPU {gpu.number}"


def _option(name: str) -> str:
    """The option of the command line for a field of `Choice`."""
    return f"--{name.replace('_', '-')}"
