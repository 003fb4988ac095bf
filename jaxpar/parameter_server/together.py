"""Several pieces of work at a time: none goes on when one has failed."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any


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
