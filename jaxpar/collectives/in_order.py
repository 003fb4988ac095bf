"""Collectives that wait for each other, where the runtime would mix them up: on CPU.

XLA's CPU runtime lets virtual devices meet by a key of their group, the kind of the collective and its channel. JAX
gives all collectives inside `shard_map` one channel. Two all-gathers of a program over the same devices therefore have
the same key, and only the order in which each device comes to them tells them apart. The runtime keeps that order
between single collectives, each of which blocks its thread. But between a loop (or a conditional) and what stands after
it, it only promises that the loop has *begun* before the other does (a "scheduling edge" of its execution graph): the
loop goes on in other threads, and its gathers meet those of another place. The numbers are wrong or NaN, or the process
aborts or hangs. It takes arrays above 512 bytes, more than eight operations, and bad luck: mostly it happens in the
first call of a process, and not in small models.

What really orders two operations is data: one needs what the other makes. So for each loop that communicates, all
collectives before it become its ancestors and all after it its descendants, in the order in which the program was
written. Where data does not say so by itself, one element of an operand is made to depend on the earlier
operation, by a value that is always zero but that XLA cannot know. An optimization barrier does not do: XLA's CPU
compiler takes it out. Only the order changes, no value and no byte that travels.

On GPUs and TPUs collectives run in the order of the compiled program, and none of this is needed or wanted.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import Mesh

from jaxpar.collectives.views import same_on_all, varying_axes
from jaxpar.traced import CALLS, bind, evaluate, opened, operations, programs, rerun, with_programs

LOOPS = ("scan", "while", "cond")
"""Operations that go on in other threads."""
SILENT = ("axis_index", "pvary", "pcast")
"""Operations that name a mesh axis and send nothing."""


def in_order(f: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """The same function, whose collectives cannot meet others of the same program; on other devices than CPUs, itself.

    Args:
        f: what `jax.shard_map` gets. It is not to be differentiated afterwards: gradients are taken inside it.
        mesh: where it will run.

    Example:
        >>> from jaxpar.mesh import make_mesh
        >>> mesh = make_mesh(data=4)
        >>> total = jax.shard_map(in_order(lambda x: lax.psum(x, "data"), mesh), mesh=mesh,
        ...                       in_specs=jax.P("data"), out_specs=jax.P())
        >>> float(total(jnp.arange(4.0))[0])
        6.0
    """
    if mesh.devices.flat[0].platform != "cpu":
        return f
    return rerun(f, _needs_order, _run)


class Value(NamedTuple):
    """A value of the program, and the communicating operations that it certainly descends from, one bit each."""

    value: Any
    after: int = 0


class _Ordered:
    """One evaluation of a program, operation by operation, that remembers what has communicated."""

    def __init__(self) -> None:
        self.results: list[jax.Array] = []  # of each communicating operation so far
        self.loop = 0  # the bit of the last loop
        self.since = 0  # the bits of that loop and all that came after it

    def evaluate(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        """Evaluate a program at this point of the surrounding one."""
        return evaluate(jaxpr, consts, args, self.operation, Value)

    def operation(self, eqn: JaxprEqn, args: list[Value]) -> list[Value]:
        """Evaluate one operation."""
        if _communicates(eqn):
            return self.collective(eqn, args)
        if eqn.primitive.name in CALLS:
            jaxpr, consts, values = opened(eqn, [x.value for x in args])
            return self.evaluate(jaxpr, consts, [*map(Value, values, (x.after for x in args))])
        if _communicates_inside(eqn):
            return self.communicating_loop(eqn, args)
        after = 0 if eqn.primitive.name in LOOPS else _union(args)  # a loop may pass some values on as they were
        return [Value(out, after) for out in _bind(eqn, args)]

    def collective(self, eqn: JaxprEqn, args: list[Value]) -> list[Value]:
        """Must not run beside the last loop. Several operands are as many collectives to XLA."""
        args = [Value(self.dependent(x.value, self.loop & ~x.after), x.after | self.loop) for x in args]
        outs = _bind(eqn, args)
        after = [x.after for x in args] if len(args) == len(outs) else [_union(args)] * len(outs)
        return [Value(out, bits | self.communicated(out)) for out, bits in zip(outs, after, strict=True)]

    def communicating_loop(self, eqn: JaxprEqn, args: list[Value]) -> list[Value]:
        """Must not run beside anything: its smallest operand waits for all that there is."""
        touchable = [i for i, x in enumerate(args) if _touchable(x.value)]
        i = min(touchable, key=lambda i: jnp.size(args[i].value))
        args[i] = Value(self.dependent(args[i].value, self.since & ~_union(args)))
        outs = _bind(with_programs(eqn, _needs_order, _run), args)
        some = [i for i, out in enumerate(outs) if out.size]
        descends = _descend_from_communication(eqn)
        made = [i for i in some if descends[i]] or some
        if not made:  # a loop of no rounds
            return [Value(out) for out in outs]
        after = self.since | self.communicated(min((outs[i] for i in made), key=lambda x: x.size))
        self.loop = self.since = 1 << len(self.results) - 1
        return [Value(out, after if i in made else 0) for i, out in enumerate(outs)]

    def communicated(self, result: jax.Array) -> int:
        """The bit of an operation, by whose result others wait for it."""
        if not result.size:  # nothing is sent
            return 0
        bit = 1 << len(self.results)
        self.results.append(result)
        self.since |= bit
        return bit

    def dependent(self, x: Any, bits: int) -> Any:
        """The same value, made after the operations that the bits name."""
        if not bits or not _touchable(x):
            return x
        x = jnp.asarray(x)
        zeros = [_zero(result, varying_axes(x)) for i, result in enumerate(self.results) if bits >> i & 1]
        zero = functools.reduce(operator.or_, zeros)
        first = x[(slice(0, 1),) * x.ndim]
        another = (first == 0).astype(x.dtype)  # so that XLA sees a choice also where it knows the value
        return lax.dynamic_update_slice(x, jnp.where(zero == 0, first, another), (0,) * x.ndim)


def _run(program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    return [out.value for out in _Ordered().evaluate(program.jaxpr, program.consts, [*map(Value, args)])]


def _bind(eqn: JaxprEqn, args: Sequence[Value]) -> list[Any]:
    return bind(eqn, [x.value for x in args])


def _union(values: Sequence[Value]) -> int:
    return functools.reduce(operator.or_, (x.after for x in values), 0)


def _zero(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Zero, made of one element of `x`: no square has the bit of 2. Varies over no more than these axes."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    element = x[(0,) * x.ndim]
    if jnp.issubdtype(element.dtype, jnp.floating):
        element = jnp.where(jnp.isfinite(element), element, 0)
    word = element.astype(jnp.int32)
    for axis in varying_axes(word) - axes:
        word = same_on_all(word, axis)
    return word * word & 2


def _touchable(x: Any) -> bool:
    """Whether one of its elements can be made dependent: it has some, and they are numbers, also one in the program."""
    return jnp.size(x) > 0 and not jnp.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key)


def _needs_order(jaxpr: Jaxpr) -> bool:
    """Whether a program has a loop that communicates."""
    return any(eqn.primitive.name in LOOPS and _communicates_inside(eqn) for eqn in operations(jaxpr))


def _communicates_inside(eqn: JaxprEqn) -> bool:
    return any(any(map(_communicates, operations(program))) for program, _ in programs(eqn))


def _communicates(eqn: JaxprEqn) -> bool:
    """Whether this operation itself sends something over a mesh axis."""
    axes = eqn.params.get("axis_name", eqn.params.get("axes", ()))
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    return eqn.primitive.name not in SILENT and any(isinstance(axis, str) for axis in axes)


def _descend_from_communication(loop: JaxprEqn) -> list[bool]:
    """Which results of a loop are not there before it has communicated; others may be values that it passes on.

    There are none where the results of communication are not used, as those of a forward pass for its gradients alone.
    XLA leaves such communication out.
    """
    descends = [True] * len(loop.outvars)
    for program, _ in programs(loop):
        if len(program.outvars) == len(descends) and any(map(_communicates, operations(program))):
            descends = [*map(operator.and_, descends, _descendants(program, [False] * len(program.invars)))]
    return descends


def _descendants(jaxpr: Jaxpr, args: Sequence[bool]) -> list[bool]:
    """Which results of a program descend from communication, if these arguments do."""

    def operation(eqn: JaxprEqn, args: list[bool]) -> list[bool]:
        if eqn.primitive.name in CALLS:
            ((program, _),) = programs(eqn)
            return _descendants(program, args)
        return [any(args) or _communicates(eqn) or _communicates_inside(eqn)] * len(eqn.outvars)

    return evaluate(jaxpr, [None] * len(jaxpr.constvars), args, operation, lambda _: False)
