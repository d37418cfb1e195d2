"""A time limit holds whatever it limits: what hangs, what ignores its cancellation, what cancels itself."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from generator import concurrency
from generator.concurrency import TimedOut, with_timeout
from tests.support.episode import Blocking

FAR, SOON = 600.0, 0.01


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


async def gives(value: Any) -> Any:
    await asyncio.sleep(0)
    if isinstance(value, BaseException):
        raise value
    return value


async def cancelled_while_it_waits(blocking: Blocking, call: Awaitable[None]) -> None:
    waiting = asyncio.create_task(with_timeout(FAR, call))
    await blocking.entered.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_a_result_and_an_exception_pass() -> None:
    assert play(lambda: with_timeout(FAR, gives(7))) == 7
    with pytest.raises(TimeoutError, match="its own"):
        play(lambda: with_timeout(FAR, gives(TimeoutError("its own"))))


@pytest.mark.parametrize("how", ["takes longer", "its caller is cancelled"])
def test_a_call_is_cancelled(how: str) -> None:
    async def scene() -> None:
        blocking = Blocking()
        call = asyncio.ensure_future(blocking.wait())
        if how == "takes longer":
            with pytest.raises(TimedOut):
                await with_timeout(SOON, call)
        else:
            await cancelled_while_it_waits(blocking, call)
        assert blocking.entered.is_set()
        assert call.cancelled()

    play(scene)


def test_a_call_that_ignores_its_cancellation_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "CANCEL_SECONDS", SOON)

    async def scene() -> None:
        stubborn, another = Stubborn(), Stubborn()
        with pytest.raises(TimedOut):
            await with_timeout(SOON, stubborn.wait())
        (left,) = concurrency._abandoned
        assert not left.done()
        await cancelled_while_it_waits(another, another.wait())
        stubborn.released.set()
        another.released.set()
        await asyncio.wait(set(concurrency._abandoned))
        await asyncio.sleep(0)
        assert not concurrency._abandoned

    play(scene)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt()])
def test_a_call_ends_neither_its_caller_nor_the_process(error: BaseException) -> None:
    async def scene() -> None:
        with pytest.raises(RuntimeError):
            await with_timeout(FAR, gives(error))
        current = asyncio.current_task()
        assert current is not None
        assert not current.cancelling()

    play(scene)
