"""Several pieces of work at a time: none goes on when one has failed."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Iterable[Awaitable[Any]]) -> list[Any]:
    """What they give, in their order; when one fails, or this is cancelled, the others are cancelled."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel(tasks)


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel those that are not done, and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def in_thread(call: Callable[[], T]) -> T:
    """What a call gives that may block, for ever too: nobody waits for its thread when the program ends."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(set_answer: Callable[[Any], None], value: Any) -> None:
        if not answer.done():
            set_answer(value)

    def run() -> None:
        try:
            outcome = answer.set_result, call()
        except Exception as error:
            outcome = answer.set_exception, error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, daemon=True).start()
    return await answer


async def unless(work: Awaitable[T], ended: Awaitable[Any]) -> T:
    """What the work gives, unless something else ends before, with an error, which is raised."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(ended)
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            watching.result()
        return await working
    finally:
        await cancel([working, watching])
