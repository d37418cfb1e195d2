"""The command line of one run: bubblewrap, resource limits, interpreter, program."""

from __future__ import annotations

import os

from sandbox_client.settings import Limits, Resolved
from sandbox_client.worker.request import PROGRAMS, Request

WORK = "/tmp/run"
SHARED_MB = 16  # /dev/shm, for multiprocessing's semaphores and shared arrays
UNNAMED = 1000  # the user inside

NAMESPACES = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
NOBODY = ["--clearenv", "--cap-drop", "ALL", "--uid", str(UNNAMED), "--gid", str(UNNAMED), "--hostname", "sandbox"]
# They tell about the host: its boot parameters, and which keys its users hold.
HIDDEN = ["/proc/cmdline", "/proc/keys"]
SHOWN = ["/etc/alternatives", "/etc/ld.so.cache"]
ETC = {
    "/etc/passwd": f"sandbox:x:{UNNAMED}:{UNNAMED}::/tmp:/bin/bash\n".encode(),
    "/etc/group": f"sandbox:x:{UNNAMED}:\n".encode(),
    "/etc/hosts": b"127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files\n",
}


def environment(settings: Resolved, folder: str) -> dict[str, str]:
    """All a program sees of an environment."""
    home = folder if settings.bwrap is None else "/tmp"
    return {
        "PATH": f"{os.path.dirname(settings.python)}:/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "USER": "sandbox",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",  # a thread per core is soon more threads than a run may have
        "OPENBLAS_NUM_THREADS": "1",
    }


def disks(limits: Limits) -> dict[str, int]:
    """Where a program can write, and how many bytes."""
    return {"/tmp": limits.disk_mb << 20, "/dev/shm": SHARED_MB << 20}


def mounts(settings: Resolved) -> list[str]:
    """Bubblewrap's arguments up to the work folder; the same for every run of a worker."""
    arguments = [*NAMESPACES, *NOBODY, "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.islink(f"/{name}"):
            arguments += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            arguments += ["--ro-bind", f"/{name}", f"/{name}"]
    for path in SHOWN:
        if os.path.exists(path):
            arguments += ["--ro-bind", path, path]
    arguments += ["--proc", "/proc"]
    for path in HIDDEN:
        if os.path.exists(path):
            arguments += ["--ro-bind", "/dev/null", path]
    arguments += ["--dev", "/dev", "--remount-ro", "/dev"]
    for path, size in disks(settings.limits).items():
        arguments += ["--size", str(size), "--tmpfs", path]
    for path, real in settings.shown.items():
        arguments += ["--ro-bind", real, path]
    for key, value in environment(settings, WORK).items():
        arguments += ["--setenv", key, value]
    return [*arguments, "--dir", WORK, "--chdir", WORK]


def packed(arguments: list[str]) -> bytes:
    """Arguments as bubblewrap reads them with `--args`."""
    return b"".join(os.fsencode(argument) + b"\0" for argument in arguments)


def with_streams(command: list[str], hold: int | None = None) -> list[str]:
    """The command with its standard streams. Bubblewrap does not get them: its first process stays in the sandbox, and
    a program could open what that process has open, to read what another program writes.

    Args:
        hold: wait for a line from this file descriptor first.
    """
    wait = "" if hold is None else f"read -r _ <&{hold}; exec {hold}<&-; "
    return ["/bin/sh", "-c", f'{wait}exec "$@" <&3 >&4 2>&5 3<&- 4>&- 5>&-', "sh", *command]


def program(settings: Resolved, request: Request, folder: str) -> list[str]:
    """The interpreter and the program."""
    runs = {"python": settings.python, "bash": settings.bash}[request.language]
    return [runs, f"{folder}/{PROGRAMS[request.language]}"]
