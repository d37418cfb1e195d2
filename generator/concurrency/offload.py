"""Work on text that must not block the event loop: long texts in a thread, short ones one at a time."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

# Longer texts take more than a few milliseconds to tokenise or to search.
LONG_TOKENS = 2048
LONG_TEXT = 4096  # characters

SWITCH_SECONDS = 0.001

# One: more would only compete for the interpreter's lock, with each other and with the event loop.
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="long-text")
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def run(long: bool, work: Callable[..., T], *arguments: Any) -> T:
    """The result of `work(*arguments)`, computed in the thread if it is `long`, else here."""
    loop = asyncio.get_running_loop()
    if long:
        return await loop.run_in_executor(_THREAD, work, *arguments)
    # An engine's step may end a hundred turns at once. In one round of the event loop only one of them is read.
    async with _turns.setdefault(loop, asyncio.Lock()):
        await asyncio.sleep(0)
        return work(*arguments)


def tune_interpreter() -> None:
    """Settings of the whole process; call it once everything is loaded. Blocks for tenths of a second.

    With Python's defaults a thread keeps the interpreter's lock for 5 ms each time the event loop waits for it, and
    each garbage collection visits all of vLLM's objects.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
