"""Fetches files from the sandbox. They are in its own memory: a small program inside runs the program, then sends them.

The program runs as the same user and could forge what is sent; it could as well have written it into the file.
"""

from __future__ import annotations

import json

SOURCE = """
import json, os, stat, subprocess, sys
fd, limit, folder, paths = json.loads(sys.argv[1])
program = subprocess.Popen(sys.argv[2:])
os.closerange(0, 3)  # another process could read from them what this one's program writes
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


def fetch_command(python: str, fd: int, limit: int, folder: str, paths: list[str], command: list[str]) -> list[str]:
    """The command that runs `command` and then writes the files to `fd`, at most `limit` bytes of them together."""
    return [python, "-I", "-S", "-c", SOURCE, json.dumps([fd, limit, folder, paths]), *command]


def unpack(data: bytes, names: dict[str, str]) -> dict[str, bytes]:
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
