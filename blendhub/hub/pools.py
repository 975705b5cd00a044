"""Runs blocking work in a pool of threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


async def run_in(pool: Executor | None, work: Callable[..., T], *arguments: Any) -> T:
    """The result of ``work``, done in a thread of the pool; None is the event loop's own pool."""
    return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *arguments))
