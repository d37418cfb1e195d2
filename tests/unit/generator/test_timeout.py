"""A time limit holds whatever it limits: what hangs, what will not be cancelled, what cancels itself."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from generator import concurrency as module
from generator.concurrency import TimedOut, with_timeout
from tests.support.episode import Blocking

FAR = 600.0
SOON = 0.01


def play(scene: Callable[[], Awaitable[Any]]) -> Any:
    """Run a scene, which must leave no error that nobody sees."""
    unseen: list[dict[str, Any]] = []

    async def watched() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
        try:
            return await scene()
        finally:
            gc.collect(1)  # the youngest are enough: errors of tasks that nobody awaited

    try:
        return asyncio.run(watched())
    finally:
        assert unseen == []


class Stubborn(Blocking):
    """Goes on however often it is cancelled."""

    async def wait(self) -> None:
        self.entered.set()
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                continue
        raise ValueError("too late for anybody")


async def value(number: int) -> int:
    await asyncio.sleep(0)
    return number


async def raises(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


def test_a_result_and_an_exception_pass() -> None:
    assert play(lambda: with_timeout(FAR, value(7))) == 7
    with pytest.raises(TimeoutError, match="its own"):
        play(lambda: with_timeout(FAR, raises(TimeoutError("its own"))))


def test_what_takes_longer_is_cancelled() -> None:
    async def scene() -> None:
        blocking = Blocking()
        call = asyncio.ensure_future(blocking.wait())
        with pytest.raises(TimedOut):
            await with_timeout(SOON, call)
        assert blocking.entered.is_set()
        assert call.cancelled()

    play(scene)


def test_what_will_not_be_cancelled_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CANCEL_SECONDS", SOON)

    async def scene() -> None:
        stubborn = Stubborn()
        with pytest.raises(TimedOut):
            await with_timeout(SOON, stubborn.wait())
        (left,) = module._abandoned
        assert not left.done()
        # Also for one who is cancelled himself while he waits for it.
        another = Stubborn()
        waiting = asyncio.create_task(with_timeout(FAR, another.wait()))
        await another.entered.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        stubborn.released.set()
        another.released.set()
        await asyncio.wait(set(module._abandoned))
        await asyncio.sleep(0)
        assert not module._abandoned

    play(scene)


def test_who_is_cancelled_takes_the_call_along() -> None:
    async def scene() -> None:
        blocking = Blocking()
        call = asyncio.ensure_future(blocking.wait())
        waiting = asyncio.create_task(with_timeout(FAR, call))
        await blocking.entered.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert call.cancelled()

    play(scene)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt()])
def test_a_call_ends_neither_its_caller_nor_the_process(error: BaseException) -> None:
    async def scene() -> None:
        with pytest.raises(RuntimeError):
            await with_timeout(FAR, raises(error))
        current = asyncio.current_task()
        assert current is not None
        assert not current.cancelling()

    play(scene)
