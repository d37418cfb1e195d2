"""Threads for the process's own blocking calls.

asyncio's default threads run the code of tools, simulated users and rewards, which may hang and never return its
thread. The calls that a process depends on must not wait behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

_THREADS = ThreadPoolExecutor(16, thread_name_prefix="own")


async def in_thread(call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Run a blocking call in a thread, and return its result."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, partial(call, *arguments, **named))
