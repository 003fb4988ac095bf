"""Sums in float32, whoever wrote them: for the parameters of a user's own model.

Our layers sum over tokens in float32 by themselves (`jaxpar.layers.token_sums`). In another model the gradient of what
is added to every token or looked up by it is a sum in the dtype of the computation, put there by JAX when it
differentiates; in bfloat16 it loses what is smaller than 1/256 of it. The model cannot do anything about that, but the
traced program can be changed: what sums 16-bit floats in one operation does so in float32 and rounds once. Programs of
our own models have none of these, and are left as they are.

Not changed is what a loop adds up round by round in a 16-bit carry, as JAX does for a parameter that a user's own scan
over tokens closes over. `jaxpar verify` sees that: such a gradient differs from float32's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxpar.traced import CALLS, bind, evaluate, opened, operations, programs, rerun, with_programs

SUMS = ("reduce_sum", "reduce_window_sum", "cumsum", "scatter-add")
"""Operations that add up any number of elements. Matrix products accumulate in float32 by themselves."""


def wide_sums(f: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, its sums of 16-bit floats made in float32 and rounded once.

    Args:
        f: of trees of arrays. It is not to be differentiated afterwards: gradients are taken inside it.

    Example:
        >>> ones = jnp.ones(1000, jnp.bfloat16)
        >>> total = lambda x: x.at[jnp.zeros(1000, int)].add(ones)[0]
        >>> float(total(ones)), float(wide_sums(total)(ones))
        (256.0, 1000.0)
    """
    return rerun(f, _needs_width, _run)


def _run(program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    return evaluate(program.jaxpr, program.consts, args, _operation)


def _operation(eqn: JaxprEqn, args: list[Any]) -> Sequence[Any]:
    if _narrow_sum(eqn):
        wide = [x.astype(jnp.float32) if _narrow(x.dtype) else x for x in args]
        out = _scatter_add(eqn, wide) if eqn.primitive.name == "scatter-add" else bind(eqn, wide)[0]
        return [out.astype(_dtype(eqn))]
    if not any(_needs_width(program) for program, _ in programs(eqn)):
        return bind(eqn, args)
    if eqn.primitive.name in CALLS:
        jaxpr, consts, inputs = opened(eqn, args)
        return evaluate(jaxpr, consts, inputs, _operation)
    return bind(with_programs(eqn, _needs_width, _run), args)


def _scatter_add(eqn: JaxprEqn, args: list[Any]) -> Any:
    """The operation again: what it has in itself to add two elements is of their dtype."""
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return lax.scatter_add(*args, **{name: eqn.params[name] for name in names})


def _needs_width(jaxpr: Jaxpr) -> bool:
    return any(map(_narrow_sum, operations(jaxpr)))


def _narrow_sum(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in SUMS and _narrow(_dtype(eqn))


def _dtype(eqn: JaxprEqn) -> Any:
    aval: Any = eqn.outvars[0].aval
    return aval.dtype


def _narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2
