"""XLA's own collectives with bfloat16 on the wire: summands are rounded once, and added in float32."""

import numpy as np
import pytest
import replicas

from jaxpar.collectives.native import narrow_all_reduce, narrow_reduce_scatter


@pytest.mark.parametrize("n", [3, 8])
def test_sums_of_what_was_rounded(n: int):
    held = replicas.random((n, n, 5), "float32")
    sent = held.astype("bfloat16").astype("float64")
    rows = replicas.each_device(lambda x: narrow_reduce_scatter(x, "data", "bfloat16"), held)
    assert rows.dtype == "float32"
    np.testing.assert_array_less(np.abs(rows - sent.sum(0)), n * 2**-24 * np.abs(sent).sum(0))


@pytest.mark.parametrize("size", [1, 8, 23])
def test_every_device_gets_the_rounded_sums(size: int):
    """The same on all, also on the device that made the sum, which it has in float32."""
    held = replicas.random((4, size), "float32")
    got = replicas.each_device(lambda x: narrow_all_reduce(x, "data", "bfloat16"), held)
    sums = held.astype("bfloat16").astype("float64").sum(0)
    assert got.shape == (4, size) and (got == got[0]).all()
    assert (got == got.astype("bfloat16").astype("float32")).all()
    assert (np.abs(got[0] - sums) <= (2**-8 + 4 * 2**-24) * np.abs(held).sum(0) * 1.01).all()
