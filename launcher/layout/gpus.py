"""Reads which GPUs this process may use, and parses lists of GPUs that users write.

The figures come from nvidia-smi, because a process that starts others must not initialise CUDA. GPUs are numbered as
torch numbers them: from 0, in the order of CUDA_VISIBLE_DEVICES if that is set.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from common.checks.computing import visible_gpus
from common.errors import UserError, one_line

QUERY = "index,uuid,name,memory.total,memory.used,mig.mode.current"
SECONDS = 60
VISIBLE = "CUDA_VISIBLE_DEVICES"
HIDDEN = ("-1", "NoDevFiles")  # as the first name in CUDA_VISIBLE_DEVICES, they hide all GPUs
# By default CUDA puts the fastest GPU first, so its numbers would differ from those of nvidia-smi and schedulers.
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

_SLICE = re.compile(r"^\s+MIG (?P<profile>\S+)\s+Device\s+\d+: \(UUID: (?P<uuid>MIG-[^)]+)\)")
_WHOLE = re.compile(r"^GPU \d+: .*\(UUID: (?P<uuid>GPU-[^)]+)\)")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a slice of one (MIG)."""

    number: int  # in torch
    name: str  # in CUDA_VISIBLE_DEVICES
    uuid: str
    product: str
    total: int  # bytes of its memory
    used: int = 0  # bytes in use; 0 for a slice, because the driver does not report it
    is_slice: bool = False


def read_gpus(environ: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, in its order, or all; an empty list without a driver.

    Without nvidia-smi, only their number is known.

    Raises:
        UserError: the driver fails, or the variable names a GPU that does not exist.
    """
    wanted = environ.get(VISIBLE)
    names = None if wanted is None else [name for name in map(str.strip, wanted.split(",")) if name]
    if names and names[0] in HIDDEN:
        return []
    try:
        whole = _ask(["--query-gpu=" + QUERY, "--format=csv,noheader,nounits"], environ)
    except FileNotFoundError:
        count = visible_gpus(dict(environ)).count
        return [Gpu(number, names[number] if names else str(number), "", "GPU", 0) for number in range(count)]
    gpus = [_parsed(line) for line in whole.splitlines() if line.strip()]
    if any(gpu.is_slice for gpu in gpus):
        slices = _slices(_ask(["-L"], environ), {gpu.uuid: gpu for gpu in gpus})
        gpus = [one for gpu in gpus for one in (slices[gpu.uuid] if gpu.is_slice else [gpu])]
    if names is not None:
        gpus = [_named(name, gpus) for name in names]
    return [replace(gpu, number=number) for number, gpu in enumerate(gpus)]


def environment(gpus: Sequence[Gpu]) -> dict[str, str]:
    """The environment variables with which a process uses these GPUs only."""
    return ORDER | {VISIBLE: ",".join(gpu.name for gpu in gpus)}


def select(text: str, gpus: Sequence[Gpu], name: str) -> list[Gpu]:
    """Parse a list of GPUs such as `0-3,6`, the value of setting `name`.

    Raises:
        UserError: the text is not a list of GPUs, or it names a GPU twice or one that does not exist.
    """
    numbers: list[int] = []
    there = f"GPUs here are 0 to {len(gpus) - 1}" if gpus else "there is no GPU here"
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise UserError(f"{name} = {text!r}: must be numbers of GPUs, such as 0-3 or 0,2")
        if int(last or first) >= len(gpus):
            raise UserError(f"{name} = {text!r} names GPU {max(int(first), len(gpus))}, but {there}")
        numbers += range(int(first), int(last or first) + 1)
    for position, number in enumerate(numbers):
        if number in numbers[:position]:
            raise UserError(f"{name} = {text!r} names GPU {number} twice")
    return [gpus[number] for number in numbers]


def numbers(gpus: Iterable[Gpu]) -> str:
    """The numbers of GPUs as text, with ranges: `0-3, 6`."""
    ranges: list[list[int]] = []
    for number in sorted(gpu.number for gpu in gpus):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


def _ask(arguments: list[str], environ: Mapping[str, str]) -> str:
    try:
        process = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SECONDS, env=dict(environ), check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"nvidia-smi did not answer within {SECONDS} s; a GPU may hang: see dmesg") from None
    if process.returncode:
        said = one_line(process.stdout or process.stderr)[:200]
        raise UserError(f"nvidia-smi ended with code {process.returncode}: {said}")
    return process.stdout


def _parsed(line: str) -> Gpu:
    values = [value.strip() for value in line.split(",")]
    if len(values) != len(QUERY.split(",")) or not values[0].isdecimal():
        raise UserError(f"nvidia-smi answered {one_line(line)[:200]!r} instead of a GPU's {QUERY}")
    index, uuid, product, total, used, slices = values
    return Gpu(int(index), index, uuid, product, _mebibytes(total), _mebibytes(used), slices == "Enabled")


def _mebibytes(text: str) -> int:
    return int(text) << 20 if text.isdecimal() else 0


def _slices(text: str, whole: Mapping[str, Gpu]) -> dict[str, list[Gpu]]:
    """The slices of each divided GPU, by the GPU's UUID; a slice's profile tells its memory."""
    found: dict[str, list[Gpu]] = {uuid: [] for uuid in whole}
    uuid = ""
    for line in text.splitlines():
        if match := _WHOLE.match(line):
            uuid = match["uuid"]
        elif match := _SLICE.match(line):
            memory = re.search(r"(\d+)gb", match["profile"])
            product = f"{whole[uuid].product} MIG {match['profile']}"
            total = int(memory[1]) << 30 if memory else 0
            found[uuid].append(Gpu(0, match["uuid"], match["uuid"], product, total, is_slice=True))
    return found


def _named(name: str, gpus: Sequence[Gpu]) -> Gpu:
    """The GPU that a part of CUDA_VISIBLE_DEVICES names: by number, or by the beginning of its UUID."""
    matching = [
        gpu for gpu in gpus if (gpu.name == name if name.isdecimal() else gpu.uuid.startswith(name) and len(name) > 4)
    ]
    if len(matching) != 1:
        there = ", ".join(gpu.name for gpu in gpus) or "none"
        raise UserError(f"{VISIBLE} names {name!r}, but the GPUs here are {there}")
    return replace(matching[0], name=name)
