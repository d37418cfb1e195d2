"""The filter decides as meant: an interpreter of classic BPF runs it over system calls."""

from __future__ import annotations

import errno
import struct

import pytest

from sandbox_client.worker import seccomp

X86, ARM = 0xC000003E, 0xC00000B7


def decide(machine: str, architecture: int, number: int, *arguments: int) -> int:
    """What the filter returns for a call (struct seccomp_data of seccomp(2))."""
    filled = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("<iIQ6Q", number, architecture, 0, *(argument & (1 << 64) - 1 for argument in filled))
    program = seccomp.program(machine)
    assert program is not None
    at = accumulator = 0
    while True:
        code, true, false, value = struct.unpack_from("<HBBI", program, 8 * at)
        at += 1
        if code == seccomp.RETURN:
            return value
        if code == seccomp.LOAD:
            (accumulator,) = struct.unpack_from("<I", data, value)
        else:
            holds = {seccomp.EQUAL: accumulator == value, seccomp.ABOVE: accumulator >= value}[code]
            at += true if holds else false


def refusal(machine: str, architecture: int, number: int, *arguments: int) -> int | None:
    """The error of a call; None if it is allowed."""
    value = decide(machine, architecture, number, *arguments)
    return None if value == seccomp.ALLOW else value & 0xFFFF


@pytest.mark.parametrize(("machine", "architecture", "column"), [("x86_64", X86, 0), ("aarch64", ARM, 1)])
def test_what_is_refused(machine: str, architecture: int, column: int) -> None:
    for numbers in seccomp.REFUSED.values():
        assert refusal(machine, architecture, numbers[column]) == errno.EPERM
    for numbers in seccomp.MISSING.values():
        assert refusal(machine, architecture, numbers[column]) == errno.ENOSYS
    for numbers in seccomp.SOCKETS.values():
        allowed = [family for family in range(64) if refusal(machine, architecture, numbers[column], family) is None]
        assert allowed == [1, 2, 10]
        assert refusal(machine, architecture, numbers[column], 40) == errno.EAFNOSUPPORT
    ioctl = seccomp.IOCTL[column]
    assert refusal(machine, architecture, ioctl, 0, 0x5412) == errno.EPERM
    assert refusal(machine, architecture, ioctl, 0, (7 << 32) | 0x541C) == errno.EPERM  # the kernel takes 32 bits
    assert refusal(machine, architecture, ioctl, 0, 0x5413) is None


@pytest.mark.parametrize(("machine", "architecture", "column"), [("x86_64", X86, 0), ("aarch64", ARM, 1)])
def test_everything_else_is_allowed(machine: str, architecture: int, column: int) -> None:
    special = {**seccomp.REFUSED, **seccomp.MISSING, **seccomp.SOCKETS}
    named = {numbers[column] for numbers in special.values()} | {seccomp.IOCTL[column]}
    assert all(refusal(machine, architecture, number) is None for number in range(500) if number not in named)


def test_other_call_tables_do_not_lead_around_it() -> None:
    assert refusal("x86_64", 0x40000003, 1) == errno.ENOSYS  # 32-bit calls
    assert refusal("x86_64", X86, 0x40000000 | 250) == errno.ENOSYS  # x32
    assert refusal("aarch64", 0x40000028, 1) == errno.ENOSYS


def test_unknown_machines_have_no_filter() -> None:
    assert seccomp.program("riscv64") is None
