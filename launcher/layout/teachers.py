"""The processes of the teachers, and their GPUs: the last ones, before the others are divided.

On a machine with one GPU they share it with a rank and a generator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from common.config import Config
from common.config.teacher import TeacherConfig
from common.errors import UserError
from common.network import without_password
from common.streams import scoring
from launcher.layout.gpus import Gpu, numbers
from launcher.layout.needs import GB, engine_size, teacher_needs, utilization

SHARE = "gpu_memory_utilization"


@dataclass(frozen=True, slots=True)
class TeacherProcess:
    """A process of a teacher.

    Attributes:
        source: name of the first source of data that has this teacher.
        gpus: none: it computes on the CPU, or asks a server.
        utilization: its engine's share of the memory of a GPU that it shares with others; None: as configured.
    """

    name: str
    source: str
    teacher: TeacherConfig
    gpus: tuple[Gpu, ...] = ()
    utilization: float | None = None

    @property
    def group(self) -> str:
        """What the names of all processes of this teacher begin with."""
        return self.name.rpartition("-")[0]

    @property
    def size(self) -> int:
        """GPUs that it takes on a machine that has some."""
        return 0 if self.teacher.model is None else engine_size(self.teacher.engine)

    @property
    def share(self) -> float:
        """Its engine's share of the memory of each of its GPUs."""
        return utilization(self.teacher.engine) if self.utilization is None else self.utilization


def teacher_processes(config: Config) -> list[TeacherProcess]:
    """The processes that `spo run` starts, without GPUs; none in a run without learning."""
    teachers = scoring.teachers(config)
    return [
        TeacherProcess(f"teacher-{number}" if len(teachers) == 1 else f"teacher-{source}-{number}", source, teacher)
        for source, teacher in teachers.items()
        for number in range(teacher.processes if config.run.has_learner else 0)
    ]


def teachers_elsewhere(config: Config) -> list[str]:
    """Sources whose teachers' processes join from elsewhere."""
    teachers = scoring.teachers(config).items() if config.run.has_learner else ()
    return [source for source, teacher in teachers if not teacher.processes]


def give_gpus(
    processes: Sequence[TeacherProcess], named: Sequence[Gpu] | None, free: Sequence[Gpu], rest: int
) -> tuple[list[TeacherProcess], list[Gpu]]:
    """The processes with GPUs of their own, and what is left for learner and generators.

    Args:
        named: the GPUs that the user names for them; None: the last of the free ones.
        rest: how many must be left.

    Raises:
        UserError: there are too few, or other than they take.
    """
    total = sum(process.size for process in processes)
    taken = f"1 process of teachers takes {total}"
    if len(processes) != 1:
        taken = f"{len(processes)} processes of teachers take {total}"
    if named is not None and len(named) != total:
        raise UserError(
            f"--teacher-gpus names {len(named)} GPU{'s'[: len(named) != 1]}, and {taken}: name as many, or set "
            "teacher.processes"
        )
    if named is None and total and len(free) - total < rest:
        left = ", one of them for learner and generators" if rest else ""
        raise UserError(
            f"{taken} GPU{'s'[: total != 1]}, and {len(free)} are free{left}: set teacher.processes to fewer, or "
            "to 0 and start spo-teacher on another machine"
        )
    own = list(free[len(free) - total :] if named is None else named)
    if any(process.size > 1 for process in processes) and any(gpu.is_slice for gpu in own):
        raise UserError("a teacher takes several GPUs (teacher.engine), and slices of a GPU cannot work together")
    placed, start = [], 0
    for process in processes:
        placed.append(replace(process, gpus=tuple(own[start : start + process.size])))
        start += process.size
    return placed, list(free if named is not None else free[: len(free) - total])


def share_gpu(config: Config, processes: Sequence[TeacherProcess], gpu: Gpu) -> list[TeacherProcess]:
    """The processes on the machine's only GPU, each with what it needs of its memory.

    Raises:
        UserError: an engine takes several GPUs, or must say what it takes.
    """
    placed = []
    for process in processes:
        if process.size > 1:
            raise UserError(f"a teacher takes {process.size} GPUs (teacher.engine), and there is one")
        on_gpu = replace(process, gpus=(gpu,) * process.size)
        if not process.size or not gpu.total or SHARE in process.teacher.engine:
            placed.append(on_gpu)
            continue
        needs = teacher_needs(config, process.teacher)
        if needs is None or process.teacher.engine != config.teacher.engine:
            raise UserError(
                f"the teacher {process.teacher.model} (of {process.source}) shares GPU {gpu.number} with the policy: "
                f"set {SHARE} in its own teacher.engine"
            )
        placed.append(replace(on_gpu, utilization=math.ceil(100 * needs.of_each(1) / gpu.total) / 100))
    return placed


def check_memory(config: Config, processes: Sequence[TeacherProcess]) -> None:
    """Refuse an engine that does not fit into its GPUs; the message says what would."""
    for process in processes:
        needs = teacher_needs(config, process.teacher) if process.gpus and process.gpus[0].total else None
        if needs is None:
            continue
        room = process.share * process.gpus[0].total
        needed = needs.of_each(process.size)
        if needed > room:
            enough = next((n for n in (2, 4, 8) if needs.of_each(process.size * n) <= room), None)
            fix = f"set teacher.engine.tensor_parallel_size={enough}" if enough else "use a smaller teacher"
            raise UserError(
                f"the teacher {process.teacher.model} needs {needed / GB:.1f} GB of each of its GPUs, and vLLM takes "
                f"{process.share:.0%} of {process.gpus[0].total / GB:.1f} GB: {fix}, or teacher.url"
            )


def described(config: Config, processes: Sequence[TeacherProcess]) -> Iterator[str]:
    """A line for each process, and for each teacher whose processes join from elsewhere."""
    for process in processes:
        if process.teacher.url is not None:
            yield f"{process.name}: asks {without_password(process.teacher.url)}"
        elif not process.gpus:
            yield f"{process.name}: {process.teacher.model} on the CPU"
        else:
            line = f"{process.name}: GPU {numbers(process.gpus)} ({process.gpus[0].product}), {process.teacher.model}"
            needs = teacher_needs(config, process.teacher)
            if needs is not None and process.gpus[0].total:
                tokens = needs.cached(process.share * process.gpus[0].total * process.size, process.size)
                line += f", {needs.weights / GB:.1f} GB of weights, keys and values of {tokens:,.0f} tokens"
            yield line + ("" if process.utilization is None else f", {process.utilization:.0%} of the memory")
    for source in teachers_elsewhere(config):
        yield f"the teacher of {source}: its processes join from elsewhere (teacher.processes = 0)"
