"""Traced programs (jaxprs) as values: what is inside them, and how one is run again with changes.

Some rules are about a whole program, whoever wrote its parts: the user's model, a layer, a library, or JAX when it took
gradients. They are kept by tracing the program and running it again, operation by operation, as JAX describes for
interpreters of one's own (https://docs.jax.dev/en/latest/notebooks/Writing_custom_interpreters_in_Jax.html).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint")
"""Operations that are nothing but the program inside them, once gradients have been taken."""

Run = Callable[[ClosedJaxpr, Sequence[Any]], list[Any]]
"""Runs a program with flat arguments, and changes it on the way."""


def rerun(f: Callable[..., Any], needs: Callable[[Jaxpr], bool], run: Run) -> Callable[..., Any]:
    """The same function, by `run` where its program needs that.

    Args:
        f: of trees of arrays. It is not to be differentiated afterwards: gradients are taken inside it.
        needs: whether a program needs to be run otherwise.
        run: how.
    """

    def again(*args: Any) -> Any:
        program, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        if not needs(program.jaxpr):
            return f(*args)
        return jax.tree.unflatten(jax.tree.structure(shape), run(program, jax.tree.leaves(args)))

    return again


def evaluate(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    operation: Callable[[JaxprEqn, list[Any]], Sequence[Any]],
    constant: Callable[[Any], Any] = lambda x: x,
) -> list[Any]:
    """The results of a program whose operations are done by `operation(eqn, arguments)`; those of no use are left out.

    Args:
        jaxpr: the program.
        consts: its constants.
        args: of whatever kind `operation` takes and gives.
        operation: gives a value for each result.
        constant: a number or array of the program as a value of that kind.
    """
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(constant, consts), *args], strict=True))
    read = lambda atom: constant(atom.val) if isinstance(atom, Literal) else known[atom]
    for eqn in live(jaxpr):
        known |= zip(eqn.outvars, operation(eqn, [read(atom) for atom in eqn.invars]), strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def live(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The operations whose results are used, or that do something else than give results (print, for instance)."""
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    used: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        # That a mesh axis is named counts as an effect in JAX, too; communication has no other.
        effects = {type(effect).__name__ for effect in eqn.effects} - {"NamedAxisEffect"}
        if effects or not needed.isdisjoint(eqn.outvars):
            used.append(eqn)
            needed |= {atom for atom in eqn.invars if not isinstance(atom, Literal)}
    return used[::-1]


def bind(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Do an operation as it is."""
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def opened(eqn: JaxprEqn, args: Sequence[Any]) -> tuple[Jaxpr, Sequence[Any], Sequence[Any]]:
    """The program, constants and arguments of one of `CALLS`, to be evaluated in its place."""
    if eqn.params.get("differentiated") and eqn.params["prevent_cse"]:  # what is recomputed, as JAX itself does it
        args = lax.optimization_barrier(list(args))
    ((jaxpr, consts),) = programs(eqn)
    return jaxpr, consts, args


def with_programs(eqn: JaxprEqn, needs: Callable[[Jaxpr], bool], run: Run) -> JaxprEqn:
    """A loop or a conditional whose programs, where they need it, are run by `run`."""

    def changed(param: Any) -> Any:
        if isinstance(param, tuple | list) and any(isinstance(p, ClosedJaxpr) for p in param):
            return type(param)(map(changed, param))
        if not isinstance(param, ClosedJaxpr) or not needs(param.jaxpr):
            return param
        here = jax.NamedSharding(jax.sharding.get_abstract_mesh(), jax.P())
        kinds = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here, weak_type=a.weak_type, manual_axis_type=a.mat)
            for a in (v.aval for v in param.jaxpr.invars)
        ]
        return jax.make_jaxpr(lambda *args: run(param, args))(*kinds)

    return eqn.replace(params={name: changed(param) for name, param in eqn.params.items()})


def programs(eqn: JaxprEqn) -> Iterator[tuple[Jaxpr, Sequence[Any]]]:
    """The programs inside an operation, with their constants."""
    for param in eqn.params.values():
        for program in param if isinstance(param, tuple | list) else (param,):
            if isinstance(program, ClosedJaxpr):
                yield program.jaxpr, program.consts
            elif isinstance(program, Jaxpr):
                yield program, ()


def operations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All operations of a program, those of programs inside it as well."""
    for eqn in jaxpr.eqns:
        yield eqn
        for program, _ in programs(eqn):
            yield from operations(program)
