"""A time limit holds whatever it limits: what hangs, what ignores its cancellation, what cancels itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from generator import concurrency
from generator.concurrency import TimedOut, with_timeout
from tests.support.episode import Blocking
from tests.support.event_loop import cancelled, in_event_loop

FAR, SOON = 600.0, 0.01


class Stubborn(Blocking):
    """Goes on however often it is cancelled."""

    async def wait(self) -> None:
        self.entered.set()
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                continue
        raise ValueError("too late")


async def gives(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


async def cancelled_while_it_waits(blocking: Blocking, call: Awaitable[None]) -> None:
    waiting = asyncio.create_task(with_timeout(FAR, call))
    await blocking.entered.wait()
    await cancelled(waiting)


@in_event_loop
async def test_a_call_is_cancelled_at_its_limit_or_with_its_caller() -> None:
    first, second = Blocking(), Blocking()
    call = asyncio.ensure_future(first.wait())
    with pytest.raises(TimedOut):
        await with_timeout(SOON, call)
    assert call.cancelled()
    call = asyncio.ensure_future(second.wait())
    await cancelled_while_it_waits(second, call)
    assert call.cancelled()


@in_event_loop
async def test_a_call_that_ignores_its_cancellation_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "CANCEL_SECONDS", SOON)
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


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
@in_event_loop
async def test_a_call_ends_neither_its_caller_nor_the_process(error: BaseException) -> None:
    with pytest.raises(RuntimeError):
        await with_timeout(FAR, gives(error))
    current = asyncio.current_task()
    assert current is not None
    assert not current.cancelling()
    with pytest.raises(TimeoutError, match="its own"):
        await with_timeout(FAR, gives(TimeoutError("its own")))
