"""Scattering: position i gets block i, by every algorithm, and half of an all-reduce is sent for it."""

from typing import Any

import jax
import numpy as np
import pytest
import replicas
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import Reduction, varying_axes
from jaxpar.mesh import make_mesh

SCATTERS = {
    "native": Reduction("native"),
    "native bfloat16": Reduction("native", wire_dtype="bfloat16"),
    "native float32": Reduction("native", wire_dtype="float32"),
    "ring": Reduction("ring", order=(4, 2, 0, 5, 3, 1)),
    "tree": Reduction("tree"),
    "halving_doubling": Reduction("halving_doubling"),
    "hierarchical": Reduction("hierarchical", per_host=2),
    "hierarchical, tree across": Reduction("hierarchical", per_host=2, across="tree"),
    "hierarchical, folded across": Reduction(
        "hierarchical", per_host=2, across="halving_doubling", wire_dtype="bfloat16"
    ),
}


def scattered(reduction: Reduction, n: int) -> dict[str, tuple[int, float]]:
    """Scatter a tree of whole numbers over n devices, see that each has its block, and say what was sent for that."""
    mesh = make_mesh(data=n)
    dims = {"rows": 0, "columns": (1, -1), "whole": None}
    shapes = {"rows": (2 * n, 3), "columns": ((5, n, 1), (2, 3, 3 * n)), "whole": (n,)}
    dtypes = {"rows": "float32", "columns": ("bfloat16", "float32"), "whole": "float32"}
    specs = {"rows": P("data"), "columns": (P(None, "data"), P(None, None, "data")), "whole": P()}
    draw = lambda shape, dtype: np.random.default_rng(0).integers(-8, 9, (n, *shape)).astype(dtype)
    held = jax.tree.map(draw, shapes, dtypes, is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int))

    def scatter(held: Any) -> Any:
        blocks = reduction.scatter(held, dims)
        varies = jax.tree.map(lambda x: "data" in varying_axes(x), blocks)
        assert varies == {"rows": True, "columns": (True, True), "whole": False}
        return blocks

    program = replicas.compiled(scatter, mesh, held, specs)
    for got, x in zip(*map(jax.tree.leaves, (program(held), held)), strict=True):
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(got, "float64"), x.astype("float64").sum(0))
    return replicas.sent(program, mesh)


@pytest.mark.parametrize("name", SCATTERS)
def test_position_i_gets_block_i(name: str):
    scattered(SCATTERS[name], 6)


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "hierarchical"])
def test_a_scatter_sends_half_of_an_all_reduce(algorithm: str, n: int):
    """(n-1)/n of what is split: a bucket of 24 n float32 and one of 5 n bfloat16; then there is one of n, for all."""
    permutes, elements = replicas.permuted(algorithm, n, n)
    found = scattered(replicas.on(n, algorithm), n)
    if (algorithm, n) == ("halving_doubling", 3):  # folded: all is summed on all, and rows are padded to two blocks
        (more, float32), (_, bfloat16) = replicas.permuted(algorithm, n, 24 * n), replicas.permuted(algorithm, n, 6 * n)
        sent_bytes = 4 * float32 + 2 * bfloat16
    else:
        more, sent_bytes = permutes / 2, (n - 1) * (4 * 24 + 2 * 5)
    assert found == {"collective-permute": (permutes + 2 * more, 4 * elements + sent_bytes)}


def test_what_a_native_scatter_sends():
    """XLA's CPU backend sends bfloat16 as float32, unless it goes as bits."""
    split = scattered(Reduction("native"), 4)["reduce-scatter"]
    assert split == (3, 3 * 4 * (24 + 5))
    split = scattered(Reduction("native", wire_dtype="bfloat16"), 4)["all-to-all"]
    assert split == (3, 3 * 2 * (24 + 5 + 1))  # two buckets of what is split, and one of what is summed whole
