"""The command line of one program: bubblewrap, interpreter, program, and a helper that sends files back."""

from __future__ import annotations

import json
import os

from sandbox_client.worker.protocol import ProgramLimits, WorkerSettings
from sandbox_client.worker.request import FILE_NAMES, Program

WORK = "/tmp/run"
ENDPOINT = "/run/endpoint"  # the host's socket, inside the sandbox
PORT = 8000  # where programs find the endpoint
SHARED_MB = 16  # /dev/shm, for multiprocessing's semaphores and shared arrays
USER = 1000  # inside the sandbox

NAMESPACES = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
IDENTITY = ["--clearenv", "--cap-drop", "ALL", "--uid", str(USER), "--gid", str(USER), "--hostname", "sandbox"]
# They reveal the host's boot parameters, and which keys its users hold.
HIDDEN = ["/proc/cmdline", "/proc/keys"]
SHOWN_PATHS = ["/etc/alternatives", "/etc/ld.so.cache"]
ETC = {
    "/etc/passwd": f"sandbox:x:{USER}:{USER}::/tmp:/bin/bash\n".encode(),
    "/etc/group": f"sandbox:x:{USER}:\n".encode(),
    "/etc/hosts": b"127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files\n",
}

# Files to fetch are in the sandbox's own memory: a small program inside runs the program, then sends them. The program
# runs as the same user and could forge what is sent; it could as well have written that into the file.
FETCH = """
import json, os, stat, subprocess, sys
fd, limit, folder, paths = json.loads(sys.argv[1])
program = subprocess.Popen(sys.argv[2:])
os.closerange(0, 3)  # otherwise another process could read the program's output through this helper's streams
code = program.wait()
with os.fdopen(fd, "wb") as out:
    for path in paths:
        real = os.path.realpath(os.path.join(folder, path))
        if not real.startswith(folder + "/"):
            continue
        try:
            with open(os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                data = file.read(limit + 1) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
        except OSError:
            continue
        if data is not None and len(data) <= limit:
            limit -= len(data)
            out.write(json.dumps([path, len(data)]).encode() + b"\\n" + data)
sys.exit(code if code >= 0 else 128 - code)
"""


# Programs use TCP, so this forwards their connections to the host's Unix socket. It is ready before the program begins,
# has none of the program's streams open, and dies with the sandbox.
FORWARD = """
import os, signal, socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=128)
if os.fork():
    listener.close()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(sys.argv[3], sys.argv[3:])
os.closerange(0, 3)
import asyncio
async def pump(reader, writer):
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.close()
async def forward(reader, writer):
    try:
        back, out = await asyncio.open_unix_connection(sys.argv[2])
        await asyncio.gather(pump(reader, out), pump(back, writer))
        out.close()
    finally:
        writer.close()
async def serve():
    async with await asyncio.start_server(forward, sock=listener) as server:
        await server.serve_forever()
asyncio.run(serve())
"""


def environment(settings: WorkerSettings, folder: str) -> dict[str, str]:
    """The whole environment of a program."""
    home = folder if settings.bwrap is None else "/tmp"
    return {
        "PATH": f"{os.path.dirname(settings.python)}:/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "USER": "sandbox",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",  # with a thread per core, a program may exceed its limit of threads
        "OPENBLAS_NUM_THREADS": "1",
    }


def disks(limits: ProgramLimits) -> dict[str, int]:
    """Bytes that a program can write to each folder, by its path."""
    return {"/tmp": limits.disk_mb << 20, "/dev/shm": SHARED_MB << 20}


def mounts(settings: WorkerSettings) -> list[str]:
    """Bubblewrap's arguments up to the work folder; the same for every program of a worker."""
    arguments = [*NAMESPACES, *IDENTITY, "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.islink(f"/{name}"):
            arguments += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            arguments += ["--ro-bind", f"/{name}", f"/{name}"]
    for path in SHOWN_PATHS:
        if os.path.exists(path):
            arguments += ["--ro-bind", path, path]
    arguments += ["--proc", "/proc"]
    for path in HIDDEN:
        if os.path.exists(path):
            arguments += ["--ro-bind", "/dev/null", path]
    # In a writable /proc, a program could change its oom_score_adj, and the memory of the first process,
    # which reports the exit code. /dev/full reads like /dev/zero, which could be mapped as memory that nothing counts.
    arguments += ["--remount-ro", "/proc", "--dev", "/dev", "--dev-bind", "/dev/full", "/dev/zero"]
    arguments += ["--remount-ro", "/dev"]
    for path, size in disks(settings.limits).items():
        arguments += ["--size", str(size), "--tmpfs", path]
    for path, real in settings.shown.items():
        arguments += ["--ro-bind", real, path]
    if settings.endpoint is not None:
        arguments += ["--ro-bind", settings.endpoint, ENDPOINT]
    for key, value in environment(settings, WORK).items():
        arguments += ["--setenv", key, value]
    return [*arguments, "--dir", WORK, "--chdir", WORK]


def packed(arguments: list[str]) -> bytes:
    """Arguments as bubblewrap reads them with `--args`."""
    return b"".join(os.fsencode(argument) + b"\0" for argument in arguments)


def with_streams(command: list[str]) -> list[str]:
    """Wrap a command so that its file descriptors 3, 4 and 5 become its standard streams once it reads a line from 6.

    If 6 is closed instead, the command does not run: its worker died before it limited the program.

    Bubblewrap does not get them: its first process stays in the sandbox, and a program could read through its open
    files what another program writes.
    """
    return ["/bin/sh", "-c", 'read -r _ <&6 && exec "$@" <&3 >&4 2>&5 3<&- 4>&- 5>&- 6<&-', "sh", *command]


def interpreter(settings: WorkerSettings, program: Program, folder: str) -> list[str]:
    path = {"python": settings.python, "bash": settings.bash}[program.language]
    return [path, f"{folder}/{FILE_NAMES[program.language]}"]


def forwarding(command: list[str], settings: WorkerSettings) -> list[str]:
    """Wrap a command in one that lets it reach the endpoint."""
    return [settings.python, "-I", "-S", "-c", FORWARD, str(PORT), ENDPOINT, *command]


def fetching(command: list[str], settings: WorkerSettings, fd: int, folder: str, paths: list[str]) -> list[str]:
    """Wrap a command in one that afterwards writes files to `fd`, as many bytes as the limits allow."""
    options = json.dumps([fd, settings.limits.files_mb << 20, folder, paths])
    return [settings.python, "-I", "-S", "-c", FETCH, options, *command]


def fetched_files(data: bytes, names: dict[str, str]) -> dict[str, bytes]:
    """The files that arrived whole, by the caller's names."""
    files = {}
    position = 0
    try:
        while (end := data.find(b"\n", position)) >= 0:
            path, size = json.loads(data[position:end])
            content = data[end + 1 : end + 1 + size]
            if path not in names or len(content) != size:
                break
            files[names[path]] = content
            position = end + 1 + size
    except (ValueError, TypeError):
        pass  # the program has closed or forged the stream; what came before it stands
    return files
