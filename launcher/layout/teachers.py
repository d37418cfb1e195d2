"""Assigns GPUs to the servers of teachers: the last of the machine's GPUs.

On a machine with one GPU, teachers share it with a rank and a generator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from common.config import Config
from common.config.teacher import TeacherConfig
from common.errors import UserError
from common.network import without_password
from launcher.layout.gpus import Gpu, numbers
from launcher.layout.needs import SHARE, engine_size, teacher_needs, utilization


@dataclass(frozen=True, slots=True)
class TeacherServer:
    """The server of a `teacher.model`."""

    name: str
    source: str  # the name of the first data source that has this teacher
    teacher: TeacherConfig
    gpus: tuple[Gpu, ...] = ()  # none if the server computes on the CPU
    # vLLM's arguments for a GPU that the engine shares with others; empty if all is as configured.
    engine: Mapping[str, float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of GPUs that the engine takes, if it does not compute on the CPU."""
        return engine_size(self.teacher.engine)

    @property
    def share(self) -> float:
        """The share of each GPU's memory."""
        return utilization({**self.teacher.engine, **self.engine})


def teacher_servers(config: Config) -> list[TeacherServer]:
    """The servers that `spo run` starts, without GPUs yet; none for a run without a learner."""
    teachers = config.served_teachers()
    return [
        TeacherServer("teacher" if len(teachers) == 1 else f"teacher-{source}", source, teacher)
        for source, teacher in teachers.items()
    ]


def give_gpus(
    servers: Sequence[TeacherServer], named: Sequence[Gpu] | None, free: Sequence[Gpu], rest: int
) -> tuple[list[TeacherServer], list[Gpu]]:
    """Give each server GPUs of its own; returns the servers, and the GPUs left for learner and generators.

    Args:
        named: the GPUs that the user names for the teachers; None means the last of the free ones.
        rest: the number of GPUs that must be left.

    Raises:
        UserError: there are too few GPUs, or the user names more or fewer than the teachers take.
    """
    total = sum(server.size for server in servers)
    taken = f"1 teacher takes {total}" if len(servers) == 1 else f"{len(servers)} teachers take {total}"
    if named is not None and len(named) != total:
        raise UserError(
            f"--teacher-gpus names {len(named)} GPU{'s'[: len(named) != 1]}, but {taken} (teacher.engine): name as many"
        )
    if named is None and total and len(free) - total < rest:
        left = ", one of them for learner and generators" if rest else ""
        raise UserError(
            f"{taken} GPU{'s'[: total != 1]}, but only {len(free)} are free{left}: lower the parallel "
            "sizes in teacher.engine, or serve the teacher on another machine and name it by teacher.url"
        )
    keep = len(free) - total if named is None else len(free)
    own = list(free[keep:] if named is None else named)
    if any(server.size > 1 for server in servers) and any(gpu.is_slice for gpu in own):
        raise UserError("a teacher takes several GPUs (teacher.engine), but slices of a GPU cannot work together")
    rest_of_own = iter(own)
    placed = [replace(server, gpus=tuple(islice(rest_of_own, server.size))) for server in servers]
    return placed, list(free[:keep])


def share_gpu(config: Config, servers: Sequence[TeacherServer], gpu: Gpu) -> list[TeacherServer]:
    """Place the servers on the machine's only GPU, each with the share of its memory that it needs.

    Raises:
        UserError: an engine takes several GPUs, or its memory is unknown and its share is not configured.
    """
    placed = []
    for server in servers:
        if server.size > 1:
            raise UserError(f"a teacher takes {server.size} GPUs (teacher.engine), but there is only one")
        on_gpu = replace(server, gpus=(gpu,))
        needs = teacher_needs(config, server.teacher) if gpu.total else None
        configured = SHARE in server.teacher.engine
        if gpu.total and needs is None and not configured:
            raise UserError(
                f"the teacher {server.teacher.model} (of {server.source}) shares GPU {gpu.number} with the policy: "
                f"set {SHARE} in its own teacher.engine"
            )
        if needs is not None:
            share = on_gpu.share if configured else math.ceil(100 * needs.of_each() / gpu.total) / 100
            on_gpu = replace(on_gpu, engine=needs.on_shared(share, gpu.total))
        placed.append(on_gpu)
    return placed


def check_memory(config: Config, servers: Sequence[TeacherServer]) -> None:
    """Raise `UserError` for an engine that does not fit into its GPUs; the message says what would fit."""
    for server in servers:
        needs = teacher_needs(config, server.teacher) if server.gpus and server.gpus[0].total else None
        if needs is None:
            continue
        engine, total = f"the teacher {server.teacher.model}", server.gpus[0].total
        if refusal := needs.refusal(engine, "teacher", server.share, total):
            raise UserError(f"{refusal}, or teacher.url")


def described(config: Config, servers: Sequence[TeacherServer]) -> Iterator[str]:
    """A line for each teacher that has a server."""
    for server in servers:
        if not server.gpus:
            yield f"{server.name}: {server.teacher.model} on the CPU"
        else:
            line = f"{server.name}: GPU {numbers(server.gpus)} ({server.gpus[0].product}), {server.teacher.model}"
            needs = teacher_needs(config, server.teacher)
            if needs is not None and server.gpus[0].total:
                line += needs.described(server.share, server.gpus[0].total)
            yield line + (f", {server.share:.0%} of the memory" if server.engine else "")
    for source, teacher in config.teachers_in_use().items():
        if teacher.url is not None and config.run.has_learner:
            yield f"the teacher of {source}: at {without_password(teacher.url)}"
