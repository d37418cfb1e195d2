"""Threads of our own for calls that block.

asyncio's default ones are open to tools, users and rewards, and who hangs there never gives his thread back: what a
process lives by must not stand in line behind them.
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
    """What a call returns that blocks, while the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, partial(call, *arguments, **named))
