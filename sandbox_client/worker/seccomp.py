"""Forbids the system calls that namespaces do not cover, by a seccomp filter (classic BPF, seccomp(2)).

A network namespace does not cover AF_VSOCK, through which a guest talks to its hypervisor; no namespace covers kernel
keyrings, the kernel's log, or notifications about files that host and program share (inotify, dnotify, leases);
io_uring opens sockets past a filter; pidfd_getfd takes the descriptor by which bubblewrap's first process reports the
exit code.

A program that may reach an endpoint also gets TCP over IPv4, and no other sockets: its network namespace has the
loopback interface alone. It then needs a control group that counts TCP's buffers (`cgroup.MemoryGroup.join`).

Memory that neither RLIMIT_AS nor a process's resident size counts cannot be obtained: System V segments, memory files,
shared mappings without a file (`command.mounts` closes /dev/zero), pages given to a pipe, larger buffers of sockets and
pipes, and the buffers of TCP, which control groups of version 1 do not count either.
"""

from __future__ import annotations

import errno
import platform
import struct

ALLOW = 0x7FFF0000
ERRNO = 0x00050000
LOAD, AND, EQUAL, ABOVE, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; arguments have 8 bytes, the low 4 first
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
    "pidfd_getfd": (438, 438),
}
# Refused as if this kernel lacked them, so that programs fall back on others.
MISSING = {
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "vmsplice": (278, 75),
    "inotify_init": (253, 26),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
}
SOCKETS = {"socket": (41, 198), "socketpair": (53, 199)}
UNIX, INET = 1, 2  # families of sockets; only the first is allowed in every sandbox
STREAM, KIND, TCP = 1, 0xF, 6  # a socket's type, without its flags; 6 is also what the protocol 0 means then
MMAP = (9, 222)
SHARED_WITHOUT_FILE = 0x21  # MAP_SHARED, MAP_ANONYMOUS: both in the flags, the fourth argument
# Refused if an argument, counted from 0, has one of these values.
VALUES = {
    "ioctl": ((16, 29), 1, (0x5412, 0x541C)),  # TIOCSTI, TIOCLINUX: typing into a terminal
    "fcntl": ((72, 25), 1, (1024, 1026, 1031, 1040)),  # F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ, F_SETDELEG
    "setsockopt": ((54, 208), 2, (7, 32)),  # SO_SNDBUF, SO_SNDBUFFORCE
}

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def step(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
    """One instruction: its operand, and how many instructions to skip if its test is true or false."""
    return struct.pack("<HBBI", code, true, false, value)


def refuse(error: int) -> bytes:
    return step(RETURN, ERRNO | error)


def program(machine: str | None = None, tcp: bool = False) -> bytes | None:
    """The filter for a machine (this one by default); None if its system call numbers are not known here.

    Args:
        tcp: allow TCP over IPv4.
    """
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
    checks = {}
    for pair in SOCKETS.values():
        checks[pair[column]] = [step(LOAD, ARGUMENTS), step(EQUAL, UNIX, true=1), refuse(errno.EAFNOSUPPORT)]
    if tcp:
        checks[SOCKETS["socket"][column]] = [
            step(LOAD, ARGUMENTS),
            step(EQUAL, UNIX, true=8),
            step(EQUAL, INET, false=6),
            step(LOAD, ARGUMENTS + 8),
            step(AND, KIND),
            step(EQUAL, STREAM, false=3),
            step(LOAD, ARGUMENTS + 2 * 8),
            step(EQUAL, 0, true=2),
            step(EQUAL, TCP, true=1),
            refuse(errno.EAFNOSUPPORT),
        ]
    flags = [step(LOAD, ARGUMENTS + 3 * 8), step(AND, SHARED_WITHOUT_FILE)]
    checks[MMAP[column]] = [*flags, step(EQUAL, SHARED_WITHOUT_FILE, false=1), refuse(errno.EPERM)]
    for pair, argument, values in VALUES.values():
        tests = [part for value in values for part in (step(EQUAL, value, false=1), refuse(errno.EPERM))]
        checks[pair[column]] = [step(LOAD, ARGUMENTS + argument * 8), *tests]
    for number, check in checks.items():
        steps += [step(EQUAL, number, false=len(check) + 1), *check, step(RETURN, ALLOW)]
    return b"".join([*steps, step(RETURN, ALLOW)])
