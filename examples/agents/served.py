"""Runs an agent in another environment, as a server: packages that conflict with vLLM's are imported once.

/path/to/python served.py agent.sock mini_swe_agent:solve &
AGENT_SOCKET=$PWD/agent.sock spo run my.yaml -o run.modules=examples/agents -o episode.agent=served:solve
"""

import asyncio
import importlib
import json
import os
import sys
from dataclasses import asdict
from socketserver import StreamRequestHandler, ThreadingUnixStreamServer
from types import SimpleNamespace


async def solve(task):
    """The agent of the run: the answer of the server."""
    reader, writer = await asyncio.open_unix_connection(os.environ["AGENT_SOCKET"])
    try:
        writer.write(json.dumps(asdict(task) | {"folder": str(task.folder)}).encode() + b"\n")
        return json.loads(await reader.read())  # nothing if the agent failed, which raises
    finally:
        writer.close()


class Server(ThreadingUnixStreamServer):
    request_queue_size = 256  # connections that may wait to be accepted


class Handler(StreamRequestHandler):
    def handle(self):
        task = SimpleNamespace(**json.loads(self.rfile.readline()))
        self.wfile.write(json.dumps(agent(task)).encode())


if __name__ == "__main__":
    module, _, name = sys.argv[2].partition(":")
    agent = getattr(importlib.import_module(module), name)
    Server(sys.argv[1], Handler).serve_forever()
