"""Each collective against its plain numpy meaning, value and gradient, in block view; and nothing in global view.

The numpy side sees one big array `[data, pipe, tensor, ...]`: the first three dims say whose block it is, without
the dims of axes over which a value is the same on all devices. Every collective is linear, so its gradient is the
transpose of the numpy function, which is found by feeding it the unit vectors.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar import collectives
from jaxpar.mesh import AXES, make_mesh

MESHES = [(2, 1, 4), (1, 2, 4)]
GROUPS = ["data", "tensor", ("pipe", "tensor")]
LOCAL = (8, 3)
# Sums of at most 8 float64 numbers of size 1: what is left is their order.
CLOSE: dict[str, Any] = dict(rtol=0, atol=1e-14)
COLLECTIVE = re.compile(r" = .* (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(")


def tuple_of(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes


def without(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(a for a in AXES if a not in tuple_of(axes))


def numbers(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def in_blocks(f: Callable[[jax.Array], jax.Array], mesh: Mesh, split: tuple[str, ...], out: tuple[str, ...]) -> Any:
    """`f` of one block as a function of the big array, with its gradient for a cotangent of the result's shape."""

    def typed(x: jax.Array) -> jax.Array:
        """With axes of size 1, which the collectives leave out of types, as `out` says."""
        y = f(x)
        alone = tuple(a for a in out if mesh.shape[a] == 1 and a not in jax.typeof(y).mat.varying)
        return jax.lax.pcast(y, alone, to="varying") if alone else y

    def block(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, backward = jax.vjp(typed, x.reshape(x.shape[len(split) :]))
        (dx,) = backward(w.reshape(y.shape))
        return jnp.expand_dims(y, tuple(range(len(out)))), dx.reshape(x.shape)

    specs = P(*split), P(*out)
    return jax.jit(jax.shard_map(block, mesh=mesh, in_specs=specs, out_specs=(specs[1], specs[0])))


def check(
    f: Callable[[jax.Array], jax.Array],
    plain: Callable[[np.ndarray], np.ndarray],
    mesh: Mesh,
    *,
    split: tuple[str, ...] = AXES,
    out: tuple[str, ...] = AXES,
    local: tuple[int, ...] = LOCAL,
) -> None:
    """Compare value and gradient with `plain`, a function of the big array."""
    x = numbers((*(mesh.shape[a] for a in split), *local))
    want = plain(x)
    w = numbers(want.shape, seed=1)
    got, gradient = in_blocks(f, mesh, split, out)(x, w)
    np.testing.assert_allclose(got, want, **CLOSE)
    units = np.eye(x.size).reshape(-1, *x.shape)
    np.testing.assert_allclose(gradient, np.array([(plain(u) * w).sum() for u in units]).reshape(x.shape), **CLOSE)


def dims_of(axes: str | tuple[str, ...], split: tuple[str, ...] = AXES) -> tuple[int, ...]:
    return tuple(split.index(a) for a in tuple_of(axes))


def spread(blocks: np.ndarray, mesh: Mesh, axes: str | tuple[str, ...]) -> np.ndarray:
    """Copy a big array without the dims of `axes` to all their devices."""
    full = np.expand_dims(blocks, dims_of(axes))
    return np.broadcast_to(full, (*(mesh.shape[a] for a in AXES), *full.shape[3:]))


@pytest.fixture(params=MESHES, ids=lambda sizes: "x".join(map(str, sizes)))
def mesh(request: pytest.FixtureRequest) -> Mesh:
    return make_mesh(*request.param)


@pytest.mark.parametrize("axes", [*GROUPS, "pipe"], ids=str)
def test_psum_adds_the_blocks(mesh: Mesh, axes: Any):
    check(lambda x: collectives.psum(x, axes), lambda x: x.sum(dims_of(axes)), mesh, out=without(axes))


def test_psum_of_a_tree_travels_together(mesh: Mesh):
    tree = lambda x: collectives.psum({"a": x, "b": (2 * x[:1],)}, "tensor")
    check(
        lambda x: tree(x)["a"] + tree(x)["b"][0],
        lambda x: x.sum(2) + 2 * x.sum(2)[..., :1, :],
        mesh,
        out=without("tensor"),
    )
    f = jax.shard_map(tree, mesh=mesh, in_specs=P("tensor"), out_specs=P())
    assert kinds(f, numbers((8, 3))) == ["all-reduce"]


@pytest.mark.parametrize("axes", [*GROUPS, "pipe"], ids=str)
def test_pmax_is_the_largest(mesh: Mesh, axes: Any):
    x = numbers((*mesh.devices.shape, *LOCAL))
    f = lambda x: collectives.pmax(jax.lax.stop_gradient(x), axes)
    got, gradient = in_blocks(f, mesh, AXES, without(axes))(x, np.ones(x.max(dims_of(axes)).shape))
    np.testing.assert_array_equal(got, x.max(dims_of(axes)))
    np.testing.assert_array_equal(gradient, np.zeros_like(x))


@pytest.mark.parametrize("axis", ["data", "tensor"])
@pytest.mark.parametrize("dim", [0, 1])
def test_all_gather_joins_the_blocks(mesh: Mesh, axis: str, dim: int):
    number = dims_of(axis)[0]

    def plain(x: np.ndarray) -> np.ndarray:
        joined = np.concatenate(np.split(x, mesh.shape[axis], axis=number), axis=3 + dim)
        return spread(joined.squeeze(number), mesh, axis)

    check(lambda x: collectives.all_gather(x, axis, dim), plain, mesh)


@pytest.mark.parametrize("axis", ["data", "tensor"])
@pytest.mark.parametrize("dim", [0, 1])
def test_reduce_scatter_adds_and_keeps_a_block(mesh: Mesh, axis: str, dim: int):
    number = dims_of(axis)[0]

    def plain(x: np.ndarray) -> np.ndarray:
        blocks = np.split(x.sum(number), mesh.shape[axis], axis=2 + dim)
        return np.stack(blocks, axis=number)

    check(lambda x: collectives.reduce_scatter(x, axis, dim), plain, mesh, local=(8, 4))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("by", [1, -1, 3])
def test_shift_turns_the_ring(mesh: Mesh, axis: str, by: int):
    check(lambda x: collectives.shift(x, axis, by), lambda x: np.roll(x, by, dims_of(axis)), mesh)


def test_shift_back_is_the_inverse(mesh: Mesh):
    there = lambda x: collectives.shift({"a": x}, "tensor")
    check(lambda x: collectives.shift(there(x), "tensor", -1)["a"], lambda x: x, mesh)


@pytest.mark.parametrize(
    ("axis", "blocks"), [("data", None), ("data", 1), ("tensor", None), ("tensor", 2), ("tensor", 1)]
)
@pytest.mark.parametrize("dim", [0, 1])
def test_block_of_keeps_a_block(mesh: Mesh, axis: str, dim: int, blocks: int | None):
    """With fewer blocks than devices neighbours share one: with 2 blocks 4 devices hold blocks 0, 0, 1, 1."""
    n = mesh.shape[axis]
    split = without(axis)

    def plain(x: np.ndarray) -> np.ndarray:
        parts = np.split(x, blocks or n, axis=2 + dim)
        held = [parts[0]] if n == 1 else [part for part in parts for _ in range(n // len(parts))]
        return np.stack(held, axis=dims_of(axis)[0])

    check(lambda x: collectives.block_of(x, axis, dim, blocks), plain, mesh, split=split, local=(8, 4))


def test_block_of_refuses_what_it_cannot_split():
    mesh = make_mesh(tensor=4)
    f = lambda blocks: jax.shard_map(
        lambda x: collectives.block_of(x, "tensor", 0, blocks), mesh=mesh, in_specs=P(), out_specs=P("tensor")
    )
    with pytest.raises(ValueError, match=r"dim 0 of size 10 into 4 blocks leaves 10 mod 4 = 2"):
        f(None)(np.ones((10, 3)))
    with pytest.raises(ValueError, match=r"3 blocks over 4 devices of tensor leaves 4 mod 3 = 1"):
        f(3)(np.ones((12, 3)))


@pytest.mark.parametrize("axes", GROUPS, ids=str)
def test_varying_sums_the_gradient(mesh: Mesh, axes: Any):
    split = without(axes)
    check(lambda x: collectives.varying([x], axes)[0], lambda x: spread(x, mesh, axes), mesh, split=split)


def test_types_and_places(mesh: Mesh):
    """`axis_index` counts with the last axis fastest, as a `PartitionSpec` of several axes does."""

    def block(x: jax.Array) -> jax.Array:
        assert collectives.manual(("pipe", "nobody", "tensor")) == ("pipe", "tensor")
        assert collectives.varying_axes(x) == {"tensor"}
        assert collectives.varying_axes(jnp.ones(3)) == frozenset()
        assert [collectives.axis_size(a) for a in AXES] == list(mesh.devices.shape)
        assert collectives.axis_size(("pipe", "tensor")) == mesh.shape["pipe"] * mesh.shape["tensor"]
        index = jnp.asarray(collectives.axis_index(("pipe", "tensor")))
        return collectives.varying(index, ("pipe", "tensor"))[None]

    n = mesh.shape["pipe"] * mesh.shape["tensor"]
    got = jax.shard_map(block, mesh=mesh, in_specs=P("tensor"), out_specs=P(("pipe", "tensor")))(np.ones(8))
    np.testing.assert_array_equal(got, np.arange(n))


SUMMING = {
    "psum": (lambda x: collectives.psum(x, "tensor"), "multiply it by 4"),
    "psum over two axes": (lambda x: collectives.psum(x, ("pipe", "tensor")), "multiply it by 4"),
    "reduce_scatter": (lambda x: collectives.reduce_scatter(x, "tensor", 0), "multiply it by 4"),
    "all_gather": (lambda x: collectives.all_gather(x, "tensor", 0), "repeat it 4 times"),
}


@pytest.mark.parametrize("name", SUMMING)
def test_what_is_whole_already_is_refused(name: str):
    """JAX itself would go on, and the numbers would be wrong by the axis size."""
    f, message = SUMMING[name]
    block = jax.shard_map(f, mesh=make_mesh(2, 1, 4), in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(ValueError, match=rf"over \['tensor'\].*already the same on all devices.*{message}"):
        block(np.ones((8, 3)))


ALL = {
    "psum": lambda x: collectives.psum(x, AXES),
    "pmax": lambda x: collectives.pmax(jax.lax.stop_gradient(x), AXES) + x,
    "all_gather": lambda x: collectives.all_gather(x, "tensor", 0),
    "reduce_scatter": lambda x: collectives.reduce_scatter(x, "tensor", 0),
    "shift": lambda x: collectives.shift(x, "tensor"),
    "block_of": lambda x: collectives.block_of(x, "tensor", 0),
    "varying": lambda x: collectives.varying(x, AXES),
    "axis_index": lambda x: x + collectives.axis_index(AXES),
    "axis_size": lambda x: x * collectives.axis_size(AXES),
}


def kinds(f: Callable[..., Any], *args: Any) -> list[str]:
    """The collectives in the compiled program."""
    return COLLECTIVE.findall(jax.jit(f).lower(*args).compile().as_text())


def square_and_gradient(f: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    return lambda x: (f(x), jax.grad(lambda x: (f(x) ** 2).sum())(x))


def unchanged(name: str, got: tuple[jax.Array, jax.Array], x: np.ndarray) -> None:
    factor = 2 if name == "pmax" else 1  # pmax is added to x, so that there is a gradient at all
    np.testing.assert_array_equal(got[0], factor * x)
    np.testing.assert_array_equal(got[1], 2 * factor * x)


@pytest.mark.parametrize("name", ALL)
def test_nothing_happens_in_global_view(name: str):
    """Without a mesh, and in plain `jit` over arrays that are split over one."""
    x = numbers((8, 3))
    f = square_and_gradient(ALL[name])
    unchanged(name, f(x), x)
    mesh = make_mesh(2, 1, 4)
    placed = jax.device_put(x, jax.NamedSharding(mesh, P("tensor")))
    with jax.set_mesh(mesh):
        unchanged(name, jax.jit(f)(placed), x)


@pytest.mark.parametrize("name", ALL)
def test_an_axis_of_size_1_costs_nothing(name: str):
    x = numbers((8, 3))
    f = square_and_gradient(ALL[name])
    block = jax.shard_map(f, mesh=make_mesh(1, 1, 1), in_specs=P(), out_specs=P())
    unchanged(name, block(x), x)
    assert kinds(block, x) == []


@pytest.mark.parametrize("name", ALL)
def test_a_mesh_without_the_axis_costs_nothing(name: str):
    x = numbers((8, 3))
    f = square_and_gradient(ALL[name])
    mesh = Mesh(np.array(jax.devices()[:4]), ("rows",), axis_types=(AxisType.Auto,))
    block = jax.shard_map(f, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    unchanged(name, block(x), x)
    assert kinds(block, x) == []


def test_a_size_1_axis_in_one_type_of_a_tree():
    """Somebody's `in_specs` name an axis of size 1 for one leaf only: both are summed, the type is made the same."""
    block = jax.shard_map(
        lambda a, b: collectives.psum((a, b), ("pipe", "tensor")),
        mesh=make_mesh(2, 1, 4),
        in_specs=(P(("pipe", "tensor")), P("tensor")),
        out_specs=P(),
    )
    x = numbers((8, 3))
    for got in block(x, x):
        np.testing.assert_allclose(got, x.reshape(4, 2, 3).sum(0), **CLOSE)
