"""Tests that are coroutines."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

DEADLINE = 600.0


def in_event_loop(test: Callable[..., Awaitable[None]]) -> Any:
    """Make a test of a coroutine function; an error in a task that nothing awaited fails it."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        unseen: list[dict[str, Any]] = []

        async def watched() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
            try:
                async with asyncio.timeout(DEADLINE):
                    await test(**fixtures)
            finally:
                gc.collect(1)  # the young generations are enough

        try:
            asyncio.run(watched())
        finally:
            assert unseen == []

    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    return run


def within(context: Callable[[], AbstractAsyncContextManager[Any]], gives: int = 1) -> Callable[[Any], Any]:
    """Make a test of a coroutine function whose first parameters, as many as it `gives`, come from a context."""

    def decorate(test: Any) -> Any:
        @functools.wraps(test)
        async def scene(**fixtures: Any) -> None:
            async with context() as given:
                await test(*(given if gives > 1 else (given,)), **fixtures)

        signature = inspect.signature(test)
        fixtures = list(signature.parameters.values())[gives:]
        scene.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return in_event_loop(scene)

    return decorate


async def cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its end, which is its cancellation."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def used(make: Callable[[], Any], act: Callable[[Any], Awaitable[Any]]) -> Any:
    """Make an object in an event loop of its own, act on it, and close it; returns the result of the act."""

    async def scene() -> Any:
        made = make()
        try:
            return await act(made)
        finally:
            await made.close()

    return asyncio.run(scene())
