"""Starts one program with its files, pipes and command line, and keeps what comes out of its pipes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal

from sandbox_client.worker import command, seccomp
from sandbox_client.worker.protocol import WorkerSettings
from sandbox_client.worker.request import Program

FIRST = 200  # the child's file descriptors beside the standard streams start here, above any that this process has
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
GATE = 6  # 3, 4 and 5 are the program's standard streams (`command.with_streams`)
STATUS = 1 << 16  # bytes kept of bubblewrap's messages and errors, and room for the headers of fetched files
# Reset in the child, which would inherit that this process ignores some.
USUAL = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ)


class Output:
    """Takes any number of bytes and keeps the first `head` and the last `tail` of them."""

    def __init__(self, head: int, tail: int = 0) -> None:
        self.room = head
        self.keep = tail
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        if self.room:
            self.head += data[: self.room]
            data, self.room = data[self.room :], max(0, self.room - len(data))
        if self.keep:
            self.tail += data
            if len(self.tail) > 2 * self.keep:  # trimmed now and then, not on every read
                del self.tail[: -self.keep]

    def text(self) -> bytes:
        """The output as UTF-8; invalid bytes become U+FFFD, and a note marks what was left out."""
        del self.tail[: max(0, len(self.tail) - self.keep)]
        left_out = self.total - len(self.head) - len(self.tail)
        if not left_out:
            return _utf8(self.head + self.tail)
        return _utf8(self.head) + f"\n[... {left_out} bytes of output left out ...]\n".encode() + _utf8(self.tail)


def _utf8(data: bytearray) -> bytes:
    return data.decode(errors="replace").encode()


class StartedProgram:
    """A program, this process's ends of its pipes, and what came through them.

    Attributes:
        bwrap_err: stderr of bubblewrap.
        status: bubblewrap's messages about the program, a JSON document a line.
        pipes: what is read from each file descriptor.
        stdin: written to until all input is sent; a pipe, since a file could be opened again and read from its start.
        gate: written to when the program may begin.
    """

    def __init__(self, settings: WorkerSettings, program: Program) -> None:
        half = settings.limits.output_kb << 9
        self.out, self.err = Output(half, half), Output(half, half)
        self.bwrap_err, self.status = Output(STATUS), Output(STATUS)
        self.fetched = Output((settings.limits.files_mb << 20) + STATUS)
        self.pid = 0
        self.pipes: dict[int, Output] = {}
        self.stdin: int | None = None
        self.gate: int | None = None
        self._input = memoryview(program.stdin)
        self._childs: list[int] = []  # the child's ends, closed here once it has started
        self._inherited: list[int] = []

    def pipe(self, output: Output) -> int:
        """Make a pipe into `output`; returns its write end."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        self._childs.append(write)
        self.pipes[read] = output
        return write

    def pipe_to_child(self) -> tuple[int, int]:
        """Make a pipe; returns the end that the child reads from, and the one that stays here."""
        read, write = os.pipe()
        self._childs.append(read)
        return read, write

    def memory(self, content: bytes) -> int:
        self._childs.append(memory_file(content))
        return self._childs[-1]

    def inherit(self, fd: int) -> int:
        """Have the child inherit a descriptor; returns its number in the child."""
        self._inherited.append(fd)
        return FIRST + len(self._inherited) - 1

    def spawn(self, argv: list[str], environment: dict[str, str], streams: dict[int, int], setsid: bool) -> None:
        """Start the process; `streams` are descriptors by their number in the child, besides the inherited ones."""
        descriptors = {**{FIRST + i: fd for i, fd in enumerate(self._inherited)}, **streams}
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in descriptors.items()]
        self.pid = os.posix_spawn(argv[0], argv, environment, file_actions=actions, setsid=setsid, setsigdef=USUAL)

    def close_childs_ends(self) -> None:
        for fd in self._childs:
            os.close(fd)

    def send_input(self) -> bool:
        """Write as much input as the pipe takes; True when all is written, or the program has closed its stdin."""
        assert self.stdin is not None
        try:
            while self._input:
                self._input = self._input[os.write(self.stdin, self._input) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:
            pass
        return True

    def begin(self) -> None:
        if self.gate is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self.gate, b"\n\n")  # for bubblewrap's --block-fd, and for `command.with_streams`
            os.close(self.gate)
        self.gate = None

    def close_stdin(self) -> None:
        if self.stdin is not None:
            os.close(self.stdin)
        self.stdin = None

    def close(self) -> None:
        """Close this process's ends."""
        for fd in self.pipes:
            os.close(fd)
        self.close_stdin()
        if self.gate is not None:
            os.close(self.gate)


class Starter:
    """Starts programs, isolated by bubblewrap or, if the settings have none, as plain processes."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        # Low numbers stay taken, so that no descriptor for a child already has the number it gets in the child.
        while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= GATE:
            pass
        self._nothing = fd
        self.disks = command.disks(settings.limits) if settings.bwrap else {}  # bytes by path
        self._mounts = command.packed(command.mounts(settings)) if settings.bwrap else b""
        self._filter = memory_file(seccomp.program(tcp=settings.endpoint is not None) or b"")

    def start(self, program: Program, folder: str) -> StartedProgram:
        """Start a program, which waits at the gate; only this process holds the other ends of its standard streams.

        Raises:
            OSError: it could not be started.
        """
        started = StartedProgram(self.settings, program)
        try:
            stdin = self._nothing
            if program.stdin:
                stdin, started.stdin = started.pipe_to_child()
                os.set_blocking(started.stdin, False)
            gate, started.gate = started.pipe_to_child()
            streams = {3: stdin, 4: started.pipe(started.out), 5: started.pipe(started.err), GATE: gate}
            streams |= {0: self._nothing, 1: self._nothing, 2: started.pipe(started.bwrap_err)}
            argv = command.interpreter(self.settings, program, folder)
            if self.settings.endpoint is not None:
                argv = command.forwarding(argv, self.settings)
            if program.fetch:
                back = started.inherit(started.pipe(started.fetched))
                argv = command.fetching(argv, self.settings, back, folder, list(program.fetch))
            if self.settings.bwrap is None:
                _place(program.files, folder)
                os.chdir(folder)
                environment = command.environment(self.settings, folder)
                started.spawn(command.with_streams(argv), environment, streams, setsid=True)
            else:
                # The first process has no environment and, in /proc/1/cmdline, no arguments: a program can read both.
                options = started.memory(self._mounts + self._options(program, started, gate))
                argv = ["--args", str(started.inherit(options)), "--", *command.with_streams(argv)]
                started.spawn([self.settings.bwrap, *argv], {}, streams, setsid=False)
        except BaseException:
            started.close()
            raise
        finally:
            started.close_childs_ends()
            os.chdir("/")
        return started

    def _options(self, program: Program, started: StartedProgram, gate: int) -> bytes:
        """Bubblewrap's arguments that differ from program to program."""
        os.lseek(self._filter, 0, os.SEEK_SET)
        arguments: list[str] = []
        for option, fd in (
            ("--json-status-fd", started.pipe(started.status)),
            ("--seccomp", self._filter),
            ("--block-fd", gate),
        ):
            arguments += [option, str(started.inherit(fd))]
        files = {f"{command.WORK}/{path}": content for path, content in program.files.items()}
        for path, content in {**files, **command.ETC}.items():
            arguments += ["--file", str(started.inherit(started.memory(content))), path]
        return command.packed([*arguments, "--remount-ro", "/"])


def memory_file(content: bytes) -> int:
    """A sealed file in memory with this content, to be read from its start."""
    fd = os.memfd_create("data", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def _place(files: dict[str, bytes], folder: str) -> None:
    """Write files below a folder of the host."""
    for path, content in files.items():
        full = os.path.join(folder, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "wb") as file:
            file.write(content)
