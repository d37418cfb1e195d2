"""Hands each task to a program that runs already, in an environment of its own: its imports are made once.

/path/to/python mini_swe_agent.py agent.sock &
AGENT_SOCKET=$PWD/agent.sock spo run my.yaml -o run.modules=examples/agents -o episode.agent=served:solve
"""

import asyncio
import json
import os
from dataclasses import asdict


async def solve(task):
    reader, writer = await asyncio.open_unix_connection(os.environ["AGENT_SOCKET"])
    try:
        writer.write(json.dumps(asdict(task) | {"folder": str(task.folder)}).encode() + b"\n")
        return json.loads(await reader.read())  # nothing if the agent failed, which raises
    finally:
        writer.close()
