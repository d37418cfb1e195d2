"""Tries to break out of a sandbox. It runs inside as a program of its own, with parameters on stdin.

Each attempt gets the parameters: what to look for on the host, and the limits. The output is a JSON object that maps
each attempt that succeeded to its evidence; an empty one means that nothing leaked.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import platform
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import Any

CLONE = {"x86_64": 56, "aarch64": 220}
KEYCTL = {"x86_64": 250, "aarch64": 219}
NEW_USERS = 0x10000000  # CLONE_NEWUSER
libc = ctypes.CDLL(None, use_errno=True)


def read_files(parameters: dict[str, Any]) -> str | None:
    for path in parameters["secrets"]:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            return f"read {path}: {file.read(20)!r}"
    return None


def write_files(parameters: dict[str, Any]) -> str | None:
    paths = ["/x", "/etc/x", "/usr/x", "/dev/x", os.path.dirname(sys.executable) + "/x", "/proc/self/oom_score_adj"]
    for path in [*paths, *parameters["secrets"]]:
        with contextlib.suppress(OSError), open(path, "ab"):
            return f"wrote to {path}"
    return None


def reach_listeners(parameters: dict[str, Any]) -> str | None:
    listeners = [(socket.AF_INET, ("127.0.0.1", parameters["port"])), (socket.AF_UNIX, "\0" + parameters["name"])]
    for family, address in listeners:
        with contextlib.suppress(OSError), socket.socket(family) as caller:
            caller.settimeout(0.5)
            caller.connect(address)
            return f"connected to {address!r} of the host"
    return None


def open_other_sockets(parameters: dict[str, Any]) -> str | None:
    kinds = [
        (socket.AF_INET, socket.SOCK_DGRAM, 0),
        (socket.AF_INET, socket.SOCK_STREAM, 262),  # MPTCP
        (socket.AF_INET6, socket.SOCK_STREAM, 0),
        (socket.AF_INET6, socket.SOCK_DGRAM, 0),
        (17, socket.SOCK_RAW, 0),  # AF_PACKET
        (socket.AF_INET, socket.SOCK_RAW, 0),
        (40, socket.SOCK_STREAM, 0),  # AF_VSOCK
        (38, socket.SOCK_SEQPACKET, 0),  # AF_ALG
    ]
    if not parameters["tcp"]:
        kinds.append((socket.AF_INET, socket.SOCK_STREAM, 0))
    for family, kind, protocol in kinds:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol):
            return f"opened a socket of family {family}, kind {int(kind)}"
    return None


def make_namespace(_: dict[str, Any]) -> str | None:
    if libc.unshare(NEW_USERS) == 0:
        return "unshare made a user namespace"
    child = libc.syscall(CLONE[platform.machine()], NEW_USERS | signal.SIGCHLD, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    if child > 0:
        os.waitpid(child, 0)
        return "clone made a user namespace"
    return None


def mount(_: dict[str, Any]) -> str | None:
    return "mounted a tmpfs" if libc.mount(b"x", b"/tmp", b"tmpfs", 0, None) == 0 else None


def harm_processes(parameters: dict[str, Any]) -> str | None:
    for name in os.listdir("/proc"):
        if name.isdigit():
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if parameters["name"].encode() in file.read():
                    os.kill(int(name), signal.SIGKILL)
                    return f"killed process {name} of the host"
    return None


def trace(_: dict[str, Any]) -> str | None:
    child = os.fork()
    if child == 0:
        os._exit(libc.ptrace(0, 0, None, None) == 0)
    return "ptrace is allowed" if os.waitpid(child, 0)[1] else None


def hold_keys(_: dict[str, Any]) -> str | None:
    # KEYCTL_GET_KEYRING_ID of the session keyring
    return "kernel keyrings are within reach" if libc.syscall(KEYCTL[platform.machine()], 0, -3, 0) >= 0 else None


def inherit(_: dict[str, Any]) -> str | None:
    for fd in range(3, 1024):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            return f"file descriptor {fd} is open: {os.readlink(f'/proc/self/fd/{fd}')}"
    with open("/proc/1/environ", "rb") as file:
        environment = file.read()
    return f"the host's environment is in /proc/1/environ: {environment[:50]!r}" if environment.strip(b"\0") else None


def take_memory(parameters: dict[str, Any]) -> str | None:
    try:
        block = b"x" * (parameters["memory_mb"] << 20)
        return f"one process holds {len(block) >> 20} MB"
    except MemoryError:
        return None


def hide_memory(_: dict[str, Any]) -> str | None:
    """Memory that is shared without a file belongs to no process, so no limit counts it."""
    zero = os.open("/dev/zero", os.O_RDWR)
    for fd in (-1, zero):
        with contextlib.suppress(OSError):
            mmap.mmap(fd, 4096).close()
            return "memory can be shared without a file"
    os.close(zero)
    return None


def take_processes(parameters: dict[str, Any]) -> str | None:
    children: list[int] = []
    try:
        while len(children) <= parameters["processes"]:
            child = os.fork()
            if child == 0:
                signal.pause()
            children.append(child)
        return f"{len(children)} processes run at once"
    except OSError as error:
        return None if error.errno == errno.EAGAIN else str(error)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def take_disk(parameters: dict[str, Any]) -> str | None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
        file.truncate((parameters["file_mb"] << 20) + 1)
        return f"a file of more than {parameters['file_mb']} MB was made"
    block = b"\0" * (1 << 20)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(parameters["disk_mb"] + 1):
            try:
                with open(f"{folder}/{number}", "wb") as file:
                    file.write(block)
            except OSError:
                return None
    return f"{parameters['disk_mb'] + 1} MB were written to /tmp"


def keep_limits(_: dict[str, Any]) -> str | None:
    for name in ("AS", "NPROC", "NOFILE", "FSIZE", "CPU"):
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (hard + 1, hard + 1))
            return f"resource limit {kind} was raised"
    return None


ATTEMPTS: list[Callable[[dict[str, Any]], str | None]] = [
    *(read_files, write_files, reach_listeners, open_other_sockets, make_namespace, mount, harm_processes, trace),
    *(hold_keys, inherit, keep_limits, hide_memory, take_memory, take_processes, take_disk),
]


def main() -> None:
    parameters = json.loads(sys.stdin.read())
    leaks = {}
    for attempt in ATTEMPTS:
        try:
            evidence = attempt(parameters)
        except OSError as error:  # an attempt that could not be made proves nothing, so it counts as a leak
            evidence = f"it could not be tried: {error}"
        if evidence is not None:
            leaks[attempt.__name__.replace("_", " ")] = evidence
    json.dump(leaks, sys.stdout)


if __name__ == "__main__":
    main()
