"""Starting one program: its files, pipes and command line."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from dataclasses import dataclass, field

from sandbox_client.settings import Resolved
from sandbox_client.worker import command, fetch_files, seccomp
from sandbox_client.worker.output import Output
from sandbox_client.worker.request import Request

FIRST = 200  # the child's file descriptors beside the standard streams start here, above any that this process has
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
HOLD = 6  # a bare program's gate; 3, 4 and 5 are its standard streams (`command.with_streams`)
STATUS = 1 << 16
USUAL = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ)  # this process ignores some; a child would too


class StdinFeed:
    """Writes a program's stdin; into a pipe, since a file could be opened again and read from its start."""

    def __init__(self, fd: int, data: bytes) -> None:
        self.fd = fd
        self.rest = memoryview(data)
        os.set_blocking(fd, False)

    def push(self) -> bool:
        """Write as much as the pipe takes; True when all is written, or the program has closed its stdin."""
        try:
            while self.rest:
                self.rest = self.rest[os.write(self.fd, self.rest) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:
            pass
        return True


@dataclass
class Child:
    """A started program, our ends of its pipes, and their output.

    Attributes:
        bwrap_err: stderr of bubblewrap.
        status: bubblewrap's messages about the program, a JSON document a line.
        gate: written to when the program may begin.
    """

    out: Output
    err: Output
    bwrap_err: Output
    status: Output
    fetched: Output
    pid: int = 0
    pipes: dict[int, Output] = field(default_factory=dict)
    feed: StdinFeed | None = None
    gate: int | None = None

    def begin(self) -> None:
        """Let the program begin."""
        if self.gate is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self.gate, b"\n")
            os.close(self.gate)
        self.gate = None

    def close(self) -> None:
        """Close our ends."""
        for fd in self.pipes:
            os.close(fd)
        self.close_feed()
        if self.gate is not None:
            os.close(self.gate)

    def close_feed(self) -> None:
        """End the program's stdin."""
        if self.feed is not None:
            os.close(self.feed.fd)
        self.feed = None


class Descriptors:
    """File descriptors for a child; closed in this process once the child has been started."""

    def __init__(self) -> None:
        self.inherited: list[int] = []
        self.opened: list[int] = []

    def inherit(self, fd: int) -> int:
        """Have the child inherit a descriptor; returns its number in the child."""
        self.inherited.append(fd)
        return FIRST + len(self.inherited) - 1

    def pipe(self, child: Child, output: Output) -> int:
        """A pipe into `output`; the end to write to."""
        read, write = os.pipe()
        self.opened.append(write)
        child.pipes[read] = output
        return write

    def incoming(self) -> tuple[int, int]:
        """A pipe to the child: the end to read from, and the one that stays here."""
        read, write = os.pipe()
        self.opened.append(read)
        return read, write

    def memory(self, content: bytes) -> int:
        """A sealed file in memory."""
        self.opened.append(memory_file(content))
        return self.opened[-1]

    def close(self) -> None:
        for fd in self.opened:
            os.close(fd)


class Starter:
    """Starts programs, isolated by bubblewrap or, if there is none in the settings, bare."""

    def __init__(self, settings: Resolved) -> None:
        self.settings = settings
        # Taken for good, so that nothing that is given to a child has a number it has there.
        while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= HOLD:
            pass
        self.nothing = fd
        self.disks = command.disks(settings.limits) if settings.bwrap else {}  # bytes by path
        self.mounts = command.packed(command.mounts(settings)) if settings.bwrap else b""
        self.filter = memory_file(seccomp.program() or b"")

    def start(self, request: Request, folder: str) -> Child:
        """Start a program; its standard streams are pipes of which only we hold the other end. It waits at the gate.

        Raises:
            OSError: it could not be started.
        """
        limits = self.settings.limits
        half = limits.output_kb << 9
        outputs = (Output(half, half), Output(half, half), Output(STATUS), Output(STATUS))
        child = Child(*outputs, Output((limits.files_mb << 20) + STATUS))
        fds = Descriptors()
        bare = self.settings.bwrap is None
        try:
            stdin = self.nothing
            if request.stdin:
                stdin, write_end = fds.incoming()
                child.feed = StdinFeed(write_end, request.stdin)
            hold, child.gate = fds.incoming()
            streams = {3: stdin, 4: fds.pipe(child, child.out), 5: fds.pipe(child, child.err)}
            own = {0: self.nothing, 1: self.nothing, 2: fds.pipe(child, child.bwrap_err)}
            argv = self.program(request, folder, child, fds)
            if self.settings.bwrap is None:
                argv = command.with_streams(argv, HOLD)
                streams[HOLD] = hold
                place(request.files, folder)
                os.chdir(folder)
            else:
                argv = self.isolated(self.settings.bwrap, request, command.with_streams(argv), child, fds, hold)
            descriptors = {**{FIRST + i: fd for i, fd in enumerate(fds.inherited)}, **streams, **own}
            # Isolated, the first process has no environment at all: it can be read inside, as /proc/1/environ.
            environment = command.environment(self.settings, folder) if bare else {}
            actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in descriptors.items()]
            child.pid = os.posix_spawn(argv[0], argv, environment, file_actions=actions, setsid=bare, setsigdef=USUAL)
        except BaseException:
            child.close()
            raise
        finally:
            fds.close()
            if bare:
                os.chdir("/")
        return child

    def program(self, request: Request, folder: str, child: Child, fds: Descriptors) -> list[str]:
        """The command of the program; if files are to be fetched, within the command that sends them."""
        argv = command.program(self.settings, request, folder)
        if request.fetch:
            back = fds.inherit(fds.pipe(child, child.fetched))
            most = self.settings.limits.files_mb << 20
            argv = fetch_files.fetch_command(self.settings.python, back, most, folder, list(request.fetch), argv)
        return argv

    def isolated(
        self, bwrap: str, request: Request, argv: list[str], child: Child, fds: Descriptors, hold: int
    ) -> list[str]:
        """The command inside a sandbox; bubblewrap's own arguments must not be visible in /proc/1/cmdline."""
        os.lseek(self.filter, 0, os.SEEK_SET)
        arguments: list[str] = []
        for option, fd in (
            ("--json-status-fd", fds.pipe(child, child.status)),
            ("--seccomp", self.filter),
            ("--block-fd", hold),
        ):
            arguments += [option, str(fds.inherit(fd))]
        files = {f"{command.WORK}/{path}": content for path, content in request.files.items()}
        for path, content in {**files, **command.ETC}.items():
            arguments += ["--file", str(fds.inherit(fds.memory(content))), path]
        arguments += ["--remount-ro", "/"]
        packed = fds.memory(self.mounts + command.packed(arguments))
        return [bwrap, "--args", str(fds.inherit(packed)), "--", *argv]


def memory_file(content: bytes) -> int:
    """A sealed file in memory with this content, to be read from its start."""
    fd = os.memfd_create("data", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def place(files: dict[str, bytes], folder: str) -> None:
    """Write files below a folder of the host."""
    for path, content in files.items():
        full = os.path.join(folder, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "wb") as file:
            file.write(content)
