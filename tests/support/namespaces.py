"""Small machines: network namespaces that reach each other through one bridge, and nothing else.

Each machine has a loopback of its own and `eth0`, a veth whose other end is a port of the bridge. The bridge is in a
namespace too (`hub`), so the host's network and firewall take no part. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import redis

from launcher.run.embedded_redis import find_redis_server

ROOT = Path(__file__).parents[2]
HUB = "10.203.0.1"
PASSWORD = "over-the-bridge"
PORT = 6379
MEETING_PORT = 29500  # where ranks meet; every machine has all ports to itself
# Variables of the environment that tell ranks how to meet.
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


class NoNamespaces(Exception): ...


class Machines:
    """Named machines on one bridge; `close` ends what runs on them and removes them."""

    def __init__(self, *names: str) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise NoNamespaces("network namespaces need root and iproute2")
        self._prefix = f"spo-{os.getpid()}-{secrets.token_hex(2)}"
        self._made: list[str] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._addresses = {name: f"10.203.0.{number}" for number, name in enumerate(names, start=2)}
        try:
            self._make("hub")
            self._in("hub", "link", "add", "name", "bridge", "type", "bridge")
            self._in("hub", "address", "add", f"{HUB}/24", "dev", "bridge")
            self._in("hub", "link", "set", "bridge", "up")
            for name in names:
                self._make(name)
                port = f"port-{name}"
                end = ["peer", "name", "eth0", "netns", self._space(name)]
                self._in("hub", "link", "add", "name", port, "type", "veth", *end)
                self._in("hub", "link", "set", port, "master", "bridge", "up")
                self._in(name, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
                self._in(name, "link", "set", "eth0", "up")
        except RuntimeError as error:
            self.close()
            raise NoNamespaces(str(error)) from None

    def address(self, name: str) -> str:
        return self._addresses[name]

    def start(self, name: str, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        environment = {key: value for key, value in os.environ.items() if key not in OURS}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        command = ["ip", "netns", "exec", self._space(name), *command]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        self._processes.append(process)
        return process

    def start_rank(self, name: str, hosts: Path, *command: str, log: Path) -> subprocess.Popen[bytes]:
        """Start a machine's ranks of a hostfile with the DeepSpeed launcher, without ssh."""
        listed = [line.split()[0] for line in hosts.read_text().splitlines()]
        launcher = [str(Path(sys.executable).parent / "deepspeed"), "--hostfile", str(hosts), "--no_ssh"]
        launcher += ["--node_rank", str(listed.index(self.address(name)))]
        launcher += ["--master_addr", listed[0], "--master_port", str(MEETING_PORT)]
        return self.start(name, [*launcher, *command], log=log)

    def hostfile(self, path: Path, *names: str) -> Path:
        path.write_text("".join(f"{self.address(name)} slots=1\n" for name in names))
        return path

    def traffic(self, name: str) -> tuple[int, int]:
        counters: dict[str, Any] = json.loads(self._in(name, "-json", "-stats", "link", "show", "eth0"))[0]["stats64"]
        return counters["tx"]["bytes"], counters["rx"]["bytes"]

    def close(self) -> None:
        """Kill all that still runs there, and remove the namespaces with all that is in them."""
        for space in self._made:
            while pids := _ip("netns", "pids", space).split():
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                for process in self._processes:
                    process.poll()
        for process in self._processes:
            process.wait()
        while self._made:
            _ip("netns", "delete", self._made.pop())

    def _space(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _make(self, name: str) -> None:
        _ip("netns", "add", self._space(name))
        self._made.append(self._space(name))
        self._in(name, "link", "set", "lo", "up")

    def _in(self, name: str, *arguments: str) -> str:
        return _ip("-n", self._space(name), *arguments)


def _ip(*arguments: str) -> str:
    ran = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise RuntimeError(f"`ip {' '.join(arguments)}` failed: {ran.stderr.strip()}")
    return ran.stdout


class BridgeRedis:
    """A redis-server on the bridge's address, behind a password; the test itself connects by its Unix socket."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self.url = f"redis://:{PASSWORD}@{HUB}:{PORT}/0"
        # The path of a Unix socket must be short; pytest's folders are too long.
        self._folder = Path(tempfile.mkdtemp(prefix="spo-"))
        file_socket = str(self._folder / "redis.sock")
        log = folder / "redis.log"
        arguments = ["--bind", HUB, "--port", str(PORT), "--requirepass", PASSWORD, "--unixsocket", file_socket]
        arguments += ["--dir", str(folder), "--save", "", "--logfile", str(log)]
        process = machines.start("hub", [find_redis_server(), *arguments], log)
        self.client = redis.Redis(unix_socket_path=file_socket, password=PASSWORD)
        deadline = time.monotonic() + 600
        while not os.path.exists(file_socket):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.02)

    def close(self) -> None:
        self.client.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def wait(process: subprocess.Popen[bytes], logs: Mapping[str, Path], seconds: float = 800.0) -> int:
    """The exit code of a process that should end by itself; its group stays ours until the machines are closed."""
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        output = "\n".join(f"--- {name}\n{log.read_text()[-3000:]}" for name, log in logs.items())
        raise AssertionError(f"still running after {seconds:g} s:\n{output}") from None
