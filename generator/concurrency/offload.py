"""Work on text, so that the event loop goes on meanwhile: long pieces in a thread, short ones one at a time."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

# What is longer takes more than some milliseconds to tokenise or to search.
LONG_TOKENS = 2048
LONG_TEXT = 4096  # characters

SWITCH_SECONDS = 0.001

# One: more would only fight over the interpreter's lock, with each other and with the event loop.
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="long-text")
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


async def run(long: bool, work: Callable[..., T], *arguments: Any) -> T:
    """The result of `work`, found here or, where it takes long, in the thread."""
    loop = asyncio.get_running_loop()
    if long:
        return await loop.run_in_executor(_THREAD, work, *arguments)
    # An engine's step may end a hundred turns at once. In one round of the event loop only one of them is read.
    async with _turns.setdefault(loop, asyncio.Lock()):
        await asyncio.sleep(0)
        return work(*arguments)


def tune_interpreter() -> None:
    """Settings of the whole process, for when everything that stays is loaded; blocks for tenths of a second.

    Python's own suit programs that compute. There, a thread keeps the interpreter's lock for 5 ms each time the event
    loop waits for it, which is several times a round, and a collection of garbage looks at every object of vLLM's.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
