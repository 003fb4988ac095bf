"""Which tables a function looks its ids up in, read from the traced function."""

from collections.abc import Iterator, Sequence

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

MOVES = {"broadcast_in_dim", "reshape", "squeeze", "transpose", "slice", "convert_element_type", "copy"}
"""Operations after which an id is still that id."""


def tables(jaxpr: Jaxpr, ids: Sequence[Var]) -> list[int]:
    """Rows of the arrays that are indexed by ids themselves, and not by what is computed from them, as a hash.

    Args:
        jaxpr: the traced function.
        ids: those of its inputs that are ids.

    Returns:
        The number of rows, for each lookup that is found; ids turned into one-hot vectors are not.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> table, small = jnp.ones((30, 4)), jnp.ones((5, 4))
        >>> traced = jax.make_jaxpr(lambda ids: table[ids] + small[ids % 5])(jnp.arange(3)).jaxpr
        >>> tables(traced, traced.invars)
        [30]
    """
    return _follow(jaxpr, ids)[0]


def _follow(jaxpr: Jaxpr, ids: Sequence[Var]) -> tuple[list[int], list[bool]]:
    """`tables`, and which of the outputs are ids."""
    known, found = set(ids), []
    is_id = lambda value: isinstance(value, Var) and value in known
    for eqn in jaxpr.eqns:
        name, reads = eqn.primitive.name, [is_id(value) for value in eqn.invars]
        inner = next(_inner(eqn), None)
        if not any(reads):
            continue
        if name == "gather" and reads[1]:
            shape = getattr(eqn.invars[0].aval, "shape")  # noqa: B009  # not all kinds of values have one
            found += [shape[dim] for dim in eqn.params["dimension_numbers"].start_index_map]
        elif inner and len(inner.invars) == len(eqn.invars):
            rows, out = _follow(inner, [v for v, read in zip(inner.invars, reads, strict=True) if read])
            found += rows
            known |= {v for v, of_ids in zip(eqn.outvars, out, strict=True) if of_ids}
        elif name in MOVES or _counts_from_the_end(eqn, reads):
            known |= set(eqn.outvars)
    return found, [is_id(value) for value in jaxpr.outvars]


def _counts_from_the_end(eqn: JaxprEqn, reads: list[bool]) -> bool:
    """The two steps of NumPy's rule for negative indices: `select(id < 0, id + rows, id)`."""
    if eqn.primitive.name == "select_n":
        return all(reads[1:])
    return eqn.primitive.name == "add" and isinstance(eqn.invars[1], Literal)


def _inner(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The function that an operation as `jit` calls."""
    for value in eqn.params.values():
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
