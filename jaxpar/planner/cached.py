"""Remembering what a function gave for arguments that it was asked before."""

from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def cached(function: Callable[P, T]) -> Callable[P, T]:
    """`functools.lru_cache`, for arguments that type checkers do not know to be hashable, as frozen pydantic models."""
    return lru_cache(maxsize=1 << 17)(function)  # pyright: ignore[reportReturnType]
