"""The filter decides as meant: an interpreter of classic BPF runs it over system calls."""

from __future__ import annotations

import errno
import struct

import pytest

from sandbox_client.worker import seccomp

X86, ARM = 0xC000003E, 0xC00000B7


def refusal(machine: str, architecture: int, number: int, *arguments: int, tcp: bool = False) -> int | None:
    """The error that the filter returns for a call (struct seccomp_data of seccomp(2)); None if it is allowed."""
    filled = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("<iIQ6Q", number, architecture, 0, *filled)
    program = seccomp.program(machine, tcp)
    assert program is not None
    at = accumulator = 0
    while True:
        code, true, false, value = struct.unpack_from("<HBBI", program, 8 * at)
        at += 1
        if code == seccomp.RETURN:
            return None if value == seccomp.ALLOW else value & 0xFFFF
        if code == seccomp.LOAD:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == seccomp.AND:
            accumulator &= value
        else:
            holds = {seccomp.EQUAL: accumulator == value, seccomp.ABOVE: accumulator >= value}[code]
            at += true if holds else false


@pytest.mark.parametrize(("machine", "architecture", "column"), [("x86_64", X86, 0), ("aarch64", ARM, 1)])
def test_the_listed_calls_are_refused_and_all_others_allowed(machine: str, architecture: int, column: int) -> None:
    def error(number: int, *arguments: int) -> int | None:
        return refusal(machine, architecture, number, *arguments)

    refused = {numbers[column]: errno.EPERM for numbers in seccomp.REFUSED.values()}
    refused |= {numbers[column]: errno.ENOSYS for numbers in seccomp.MISSING.values()}
    sockets = {numbers[column]: errno.EAFNOSUPPORT for numbers in seccomp.SOCKETS.values()}
    assert {number: error(number) for number in range(500) if error(number)} == refused | sockets
    for number in sockets:
        assert [family for family in range(64) if error(number, family) is None] == [1]
    for pair, argument, values in seccomp.VALUES.values():
        before = (0,) * argument
        for value in values:  # the kernel takes 32 bits
            assert error(pair[column], *before, value) == error(pair[column], *before, (7 << 32) | value) == errno.EPERM
            assert error(pair[column], *before, value + 1 if value + 1 not in values else 0) is None
    for flags, refused_ in ((0x21, True), (0x4023, True), (0x22, False), (0x01, False), (0x02, False)):
        assert (error(seccomp.MMAP[column], 0, 0, 3, flags) == errno.EPERM) == refused_


@pytest.mark.parametrize(("machine", "architecture", "column"), [("x86_64", X86, 0), ("aarch64", ARM, 1)])
def test_tcp_over_ipv4_is_allowed_where_there_is_an_endpoint(machine: str, architecture: int, column: int) -> None:
    socket, pair = (seccomp.SOCKETS[name][column] for name in ("socket", "socketpair"))
    families, protocols = (0, 1, 2, 10, 16, 17, 40), (0, 1, 6, 17, 132, 262)
    kinds = [(family, kind, protocol) for family in families for kind in range(8) for protocol in protocols]
    allowed = {one for one in kinds if refusal(machine, architecture, socket, *one, tcp=True) is None}
    assert allowed == {one for one in kinds if one[0] == 1} | {(2, 1, 0), (2, 1, 6)}
    flags = 0o4000 | 0o2000000  # SOCK_NONBLOCK, SOCK_CLOEXEC
    assert refusal(machine, architecture, socket, 2, 1 | flags, 0, tcp=True) is None
    assert refusal(machine, architecture, socket, 2, 2 | flags, 0, tcp=True) == errno.EAFNOSUPPORT
    assert refusal(machine, architecture, pair, 2, 1, 0, tcp=True) == errno.EAFNOSUPPORT
    assert refusal(machine, architecture, seccomp.REFUSED["ptrace"][column], tcp=True) == errno.EPERM


def test_other_call_tables_do_not_lead_around_it() -> None:
    assert refusal("x86_64", 0x40000003, 1) == errno.ENOSYS  # 32-bit calls
    assert refusal("x86_64", X86, 0x40000000 | 250) == errno.ENOSYS  # x32
    assert refusal("aarch64", 0x40000028, 1) == errno.ENOSYS
    assert seccomp.program("riscv64") is None
