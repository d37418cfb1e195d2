"""Forbids the system calls that namespaces do not cover, by a seccomp filter (classic BPF, seccomp(2)).

A network namespace does not cover AF_VSOCK, through which a guest talks to its hypervisor; no namespace covers kernel
keyrings or the kernel's log; io_uring opens sockets past a filter; System V segments and memory files are memory that
neither RLIMIT_AS nor a process's resident size counts.
"""

from __future__ import annotations

import errno
import platform
import struct

ALLOW = 0x7FFF0000
ERRNO = 0x00050000
LOAD, EQUAL, ABOVE, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER, ARCHITECTURE, ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; an argument's low half, little-endian
X32 = 0x40000000

# Forbidden outright: number on x86_64, on aarch64.
REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "syslog": (103, 116),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
}
# Refused as if this kernel lacked them, so that programs take another way.
MISSING = {
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
}
SOCKETS = {"socket": (41, 198), "socketpair": (53, 199)}
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: all three end at the namespace
IOCTL = (16, 29)
TERMINAL = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: typing into a terminal

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def step(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
    """One instruction: its operand, and how many instructions to skip if its test is true or false."""
    return struct.pack("<HBBI", code, true, false, value)


def refuse(error: int) -> bytes:
    return step(RETURN, ERRNO | error)


def program(machine: str | None = None) -> bytes | None:
    """The filter for a machine (this one by default); None if its system call numbers are not known here."""
    entry = MACHINES.get(machine or platform.machine())
    if entry is None:
        return None
    column, architecture = entry
    steps = [
        step(LOAD, ARCHITECTURE),
        step(EQUAL, architecture, true=1),
        refuse(errno.ENOSYS),  # 32-bit calls on a 64-bit kernel have other numbers
        step(LOAD, NUMBER),
    ]
    if column == 0:
        steps += [step(ABOVE, X32, false=1), refuse(errno.ENOSYS)]
    for numbers, error in ((REFUSED, errno.EPERM), (MISSING, errno.ENOSYS)):
        for pair in numbers.values():
            steps += [step(EQUAL, pair[column], false=1), refuse(error)]
    for pair in SOCKETS.values():
        check = [
            step(LOAD, ARGUMENT),
            *(step(EQUAL, family, true=len(FAMILIES) - i) for i, family in enumerate(FAMILIES)),
        ]
        check += [refuse(errno.EAFNOSUPPORT), step(RETURN, ALLOW)]
        steps += [step(EQUAL, pair[column], false=len(check)), *check]
    check = [step(LOAD, ARGUMENT + 8)]
    for command in TERMINAL:
        check += [step(EQUAL, command, false=1), refuse(errno.EPERM)]
    check += [step(RETURN, ALLOW)]
    steps += [step(EQUAL, IOCTL[column], false=len(check)), *check, step(RETURN, ALLOW)]
    return b"".join(steps)
