"""Every algorithm on every number of devices against a float64 sum, and the bytes it sends against its formula."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import replicas
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import (
    Reduction,
    halving_doubling_steps,
    hierarchical_steps,
    ring_steps,
    same_on_all,
    tree_steps,
    varying_axes,
)
from jaxpar.config import InputError
from jaxpar.mesh import make_mesh

CASES = [(dtype, size) for dtype in ("bfloat16", "float32", "float64") for size in (1, 7, 1000)]
FEW = [("bfloat16", 7), ("float32", 1000), ("float64", 1)]


def check_sum(got: jax.Array, held: np.ndarray, roundoff: float) -> None:
    """All copies are the same bit for bit, and right: no summand goes through more than n roundings."""
    bits = replicas.copies(got)
    assert len(bits) == len(held) and (bits == bits[0]).all()
    exact = held.astype(np.float64)
    error = np.abs(np.asarray(got, np.float64) - exact.sum(0))
    assert (error <= len(held) * roundoff * np.abs(exact).sum(0)).all()


@pytest.mark.parametrize("cases", [FEW, pytest.param(CASES, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("algorithm", replicas.ALGORITHMS)
def test_sums_and_what_is_sent(algorithm: str, n: int, cases: list[tuple[str, int]]):
    """Each array is in a bucket of its own here; the sizes divide by few of the numbers of devices."""
    mesh = make_mesh(data=n)
    held = {f"{dtype} {size}": replicas.random((n, size), dtype, seed=size) for dtype, size in cases}
    program = replicas.compiled(replicas.on(n, algorithm, bucket_bytes=1).sum, mesh, held)
    for name, got in program(held).items():
        dtype = name.split()[0]
        assert got.dtype == dtype
        check_sum(got, held[name], replicas.UNIT_ROUNDOFF[dtype])
    found = replicas.sent(program, mesh)
    if algorithm == "native":
        assert list(found) == ["all-reduce"]
        return
    expected = [(replicas.permuted(algorithm, n, size), jnp.dtype(dtype).itemsize) for dtype, size in cases]
    permutes = sum(count for (count, _), _ in expected)
    assert found == {"collective-permute": (permutes, sum(sent * itemsize for (_, sent), itemsize in expected))}


@pytest.mark.parametrize("n", [3, 8])
@pytest.mark.parametrize("algorithm", replicas.ALGORITHMS)
def test_bfloat16_on_the_wire(algorithm: str, n: int):
    """Half the bytes of float32 leave a device, native ones too."""
    mesh = make_mesh(data=n)
    held = {dtype: replicas.random((n, 1000), dtype) for dtype in ("float32", "float64", "bfloat16")}
    program = replicas.compiled(replicas.on(n, algorithm, wire_dtype="bfloat16").sum, mesh, held)
    for dtype, got in program(held).items():
        assert got.dtype == dtype
        check_sum(got, held[dtype], 2**-8)
        assert dtype == "bfloat16" or (np.asarray(got) == np.asarray(got).astype("bfloat16")).all()
    found = replicas.sent(program, mesh)
    if algorithm == "native":
        half = (3, 3 * (n - 1) * math.ceil(1000 / n) * 2)
        assert found == {"all-to-all": half, "all-gather": half}
    else:
        permutes, elements = replicas.permuted(algorithm, n, 1000)
        assert found == {"collective-permute": (3 * permutes, 3 * 2 * elements)}


def test_float32_on_the_wire():
    """bfloat16 is summed and sent in float32; float64 is sent in float32."""
    held = {dtype: replicas.random((4, 1000), dtype) for dtype in ("bfloat16", "float64")}
    for algorithm in ("native", "ring"):
        program = replicas.compiled(replicas.on(4, algorithm, wire_dtype="float32").sum, make_mesh(data=4), held)
        sums = program(held)
        float32_sum = sum(held["bfloat16"].astype("float32"))
        np.testing.assert_allclose(np.asarray(sums["bfloat16"], "float32"), float32_sum, rtol=2**-8, atol=1e-6)
        check_sum(sums["float64"], held["float64"], 2**-24)
        assert sums["float64"].dtype == "float64"
        sent_bytes = sum(sent for _, sent in replicas.sent(program, make_mesh(data=4)).values())
        assert sent_bytes == 2 * 2 * 3 / 4 * 1000 * 4


def tree_on_two_axes() -> tuple[Any, Any, Any]:
    """Arrays, the specs of what goes in, and of their sums over `data`: some vary over `tensor` as well, some not."""
    whole = {
        "bias": P("data"),
        "scale": [P("data"), P("data")],
        "kernel": P("data", "tensor"),
        "embedding": P(("data", "tensor")),
    }
    sums = {"bias": P(), "scale": [P(), P()], "kernel": P(None, "tensor"), "embedding": P("tensor")}
    shapes = {"bias": ((4, 5), "float32"), "scale": [((4,), "float32"), ((4, 2, 3), "bfloat16")]}
    shapes |= {"kernel": ((4, 6, 3), "float32"), "embedding": ((8, 7), "float64")}
    is_shape = lambda x: isinstance(x, tuple)
    # Small whole numbers, whose sums every type holds.
    draw = lambda shape: np.random.default_rng(0).integers(-8, 9, shape[0]).astype(shape[1])
    return jax.tree.map(draw, shapes, is_leaf=is_shape), whole, sums


@pytest.mark.parametrize("settings", [
    Reduction("native"),
    Reduction("native", wire_dtype="bfloat16"),
    Reduction("ring", order=(2, 0, 3, 1)),
    Reduction("ring", bucket_bytes=50, wire_dtype="bfloat16"),
    Reduction("tree", parents=(1, 3, 3, -1)),
    Reduction("halving_doubling"),
    Reduction("hierarchical", per_host=2, across="tree"),
], ids=lambda r: f"{r.algorithm} {r.wire_dtype}")  # fmt: skip
def test_a_tree_on_a_mesh_of_two_axes(settings: Reduction):
    """Sums over `data` are invariant over it, and over `tensor` where the array was: out_specs would refuse others."""
    mesh = make_mesh(data=4, tensor=2)
    held, in_specs, out_specs = tree_on_two_axes()
    blocks = jax.shard_map(
        lambda held: (settings.sum(held), settings.mean(held)),
        mesh=mesh,
        in_specs=(in_specs,),
        out_specs=(out_specs,) * 2,
    )
    sums, means = replicas.quickly(blocks, held)(held)
    want = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]).astype("float64").sum(0), held)
    for got, mean, sum_, x in zip(*map(jax.tree.leaves, (sums, means, want, held)), strict=True):
        assert got.dtype == mean.dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(got, "float64"), sum_)
        np.testing.assert_array_equal(np.asarray(mean, "float64"), sum_ / 4)


def test_buckets_travel_together():
    """Nine arrays of 40 bytes, at most three in a bucket: as often as three arrays."""
    held = [replicas.random((4, 10), "float32")] * 9
    for bucket_bytes, buckets in [(120, 3), (1000, 1), (1, 9)]:
        program = replicas.compiled(Reduction("tree", bucket_bytes=bucket_bytes).sum, make_mesh(data=4), held)
        assert replicas.sent(program, make_mesh(data=4)) == {"collective-permute": (4 * buckets, 4 * 360)}


@pytest.mark.parametrize("algorithm", ["native", "ring"])
def test_odd_leaves(algorithm: str):
    """Scalars, arrays without elements, whole numbers (summed as they are), and trees without leaves."""
    held = {
        "scalar": replicas.random((3,), "float32"),
        "empty": np.zeros((3, 0, 2)),
        "whole": np.array([2**40 + 1, 1, 2**41]),
        "none": None,
        "nothing": {},
    }
    reduction = replicas.on(3, algorithm, wire_dtype="bfloat16")
    sums = replicas.compiled(reduction.sum, make_mesh(data=3), held)(held)
    assert sums["scalar"].shape == () and sums["scalar"] == pytest.approx(held["scalar"].sum(), abs=0.05)
    assert sums["empty"].shape == (0, 2) and sums["whole"] == 2**41 + 2**40 + 2
    assert sums["none"] is None and sums["nothing"] == {}
    rows = replicas.each_device(lambda x: reduction.scatter(x, (0, None)), (np.zeros((3, 6, 0)), held["whole"]))
    assert rows[0].shape == (3, 2, 0) and (rows[1] == 2**41 + 2**40 + 2).all()


@pytest.mark.parametrize("algorithm", ["native", "ring"])
def test_nothing_happens_in_global_view_or_on_one_device(algorithm: str):
    """Nor are types changed, unless an axis of size 1 is named in one."""
    reduction = Reduction(algorithm, wire_dtype="bfloat16")
    tree, dims = {"a": replicas.random((4, 3), "float32"), "b": replicas.random((2,), "float64")}, {"a": 0, "b": None}

    def all_three(tree: Any) -> Any:
        return reduction.sum(tree), reduction.mean(tree), reduction.scatter(tree, dims)

    one = make_mesh(tensor=2)
    views = [
        all_three,
        jax.jit(all_three),
        jax.shard_map(all_three, mesh=one, in_specs=P(), out_specs=P()),
        jax.shard_map(all_three, mesh=one, in_specs=P("data"), out_specs=(P(), P(), {"a": P("data"), "b": P()})),
    ]
    for f in views:
        jax.tree.map(np.testing.assert_array_equal, f(tree), (tree,) * 3)
    assert replicas.sent(jax.jit(views[3]).lower(tree).compile(), one) == {}


def test_same_on_all_changes_the_type_and_moves_nothing():
    mesh = make_mesh(data=4, tensor=2)
    types = []

    def block(x: jax.Array) -> Any:
        y = same_on_all((x, x[0]), "data")
        types.extend(varying_axes(leaf) for leaf in y)
        assert all(again is leaf for again, leaf in zip(same_on_all(y, "data"), y, strict=True))
        return y

    x = np.arange(16.0).reshape(8, 2)
    program = jax.jit(
        jax.shard_map(block, mesh=mesh, in_specs=P("data", "tensor"), out_specs=(P(None, "tensor"), P("tensor")))
    )
    whole, row = program(x)
    assert types == [{"tensor"}] * 2
    for shard in whole.addressable_shards:  # they were not the same on all, and it was believed
        i = shard.device.id // 2
        np.testing.assert_array_equal(shard.data, x[2 * i : 2 * i + 2, shard.index[1]])
    assert row.shape == (2,)
    assert replicas.sent(program.lower(x).compile(), mesh) == {}
    np.testing.assert_array_equal(same_on_all(x, "data"), x)


def in_blocks(f: Any, x: Any, axis: str = "data") -> Any:
    return jax.shard_map(f, mesh=make_mesh(data=4, tensor=2), in_specs=P(axis), out_specs=P("data"))(x)


@pytest.mark.parametrize("algorithm", replicas.ALGORITHMS)
def test_what_is_whole_already_is_refused(algorithm: str):
    reduction = replicas.on(4, algorithm)
    x = {"a": np.ones((8, 4))}
    for f in (reduction.sum, reduction.mean, lambda x: reduction.scatter(x, {"a": 0})):
        with pytest.raises(ValueError, match=r"over data: the array \['a'\] .* already the same .* multiply it by 4"):
            in_blocks(f, x, "tensor")


def test_what_cannot_be_summed_is_refused():
    for dtype in (bool, "complex64"):
        with pytest.raises(ValueError, match=r"the array .* is neither of floating point nor of whole numbers"):
            in_blocks(Reduction("ring").sum, np.ones(8, dtype))
    with pytest.raises(ValueError, match="int64 has no mean of its own dtype; use sum"):
        in_blocks(Reduction("ring").mean, np.ones(8, "int64"))
    with pytest.raises(ValueError, match=r"scatter over data: dim 1 of .* into 4 blocks leaves 6 mod 4 = 2"):
        in_blocks(lambda x: Reduction("native").scatter(x, -1), np.ones((8, 6)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "auto"}, "algorithm auto: must be one of native, ring, tree, halving_doubling, hierarchical"),
        ({"algorithm": "hierarchical", "across": "native"}, "across native: must be one of ring, tree, halving_doub"),
        ({"algorithm": "ring", "wire_dtype": "int8"}, "wire_dtype int8: must be one of None, float32, bfloat16"),
        ({"algorithm": "tree", "order": (1, 0)}, r"order \(1, 0\): belongs to ring, but the algorithm is tree"),
        ({"algorithm": "native", "parents": (-1, 0)}, "parents .*: belongs to tree, but the algorithm is native"),
    ],
)
def test_settings_that_make_no_reduction(settings: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        Reduction(**settings)


@pytest.mark.parametrize(
    "reduction",
    [Reduction("ring", order=(0, 1)), Reduction("tree", parents=(-1, 0)), Reduction("hierarchical", per_host=3)],
)
def test_settings_for_another_number_of_devices(reduction: Reduction):
    """They are seen before anything is compiled."""
    with pytest.raises(InputError):
        reduction.exchange(4)


def test_the_exchange_of_a_reduction():
    assert Reduction("native").exchange(4) is None
    assert Reduction("ring", order=(1, 0, 2)).exchange(3) == ring_steps(3, (1, 0, 2))
    assert Reduction("tree", parents=(1, -1)).exchange(2) == tree_steps(2, (1, -1))
    assert Reduction("halving_doubling").exchange(5) == halving_doubling_steps(5)
    across_tree = Reduction("hierarchical", per_host=2, across="tree").exchange(6)
    assert across_tree == hierarchical_steps(6, 2, tree_steps)
