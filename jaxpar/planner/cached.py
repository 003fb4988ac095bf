"""Remembering what a function gave for arguments that it was asked before."""

from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


def cached(function: Callable[P, T]) -> Callable[P, T]:
    """`functools.lru_cache`, for arguments that type checkers do not know to be hashable, as frozen pydantic models."""
    return cast(Callable[P, T], lru_cache(maxsize=1 << 17)(function))
