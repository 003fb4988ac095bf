"""Arrays of which only some rows travel."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxpar.parameter_server.rows import Rows, Sent, add, some, without_zeros

VALUES = st.sampled_from([0.0, -0.0, 1.5, -3.25, 1e-45, float("nan"), float("inf")])
TABLES = hnp.arrays(np.float32, st.tuples(st.integers(0, 12), st.integers(1, 5)), elements=VALUES, fill=st.just(0.0))


def arrived(sent: Sent) -> np.ndarray:
    """The whole array as it comes out at the other end."""
    if isinstance(sent, np.ndarray):
        return sent
    whole = np.zeros(sent.shape, sent.dtype)
    whole[sent.numbers] = sent.values
    return whole


@given(TABLES)
def test_what_arrives_is_bit_for_bit_what_was_sent(table: np.ndarray):
    sent = without_zeros(table)
    assert sent.shape == table.shape and sent.dtype == table.dtype
    assert arrived(sent).tobytes() == table.tobytes()
    assert sent.nbytes <= table.nbytes


@given(st.lists(st.tuples(TABLES.filter(len), st.sampled_from([0.0, 1.0, 3.0, 17.0])), min_size=1, max_size=4))
@settings(deadline=None)
def test_sums_of_sparse_and_dense_are_bit_for_bit_equal(shares: list[tuple[np.ndarray, float]]):
    """Also where -0.0 or nothing is added to a sum; without nan, of which there are many bit patterns."""
    rows, width = min(len(t) for t, _ in shares), min(t.shape[1] for t, _ in shares)
    sparse, dense = (np.zeros((rows, width), np.float32) for _ in range(2))
    for table, tokens in shares:
        table = np.nan_to_num(table[:rows, :width], posinf=2.0)
        add(sparse, without_zeros(table), tokens)
        add(dense, table, tokens)
    assert sparse.tobytes() == dense.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_rows_of_zeros_stay_and_rows_of_minus_zero_go(dtype: type):
    table = np.zeros((100, 8), dtype)
    table[3, 1], table[70, 7] = 1, -0.0
    sent = without_zeros(table)
    assert isinstance(sent, Rows)
    assert sent.numbers.tolist() == [3, 70] and sent.numbers.dtype == np.int32
    assert sent.nbytes == 2 * (4 + 8 * np.dtype(dtype).itemsize)
    assert np.signbit(arrived(sent)[70, 7])


def test_stacks_are_sent_layer_by_layer():
    stack = np.zeros((6, 3, 5), np.float32)
    stack[4, 2, 4] = 1
    sent = without_zeros(stack)
    assert isinstance(sent, Rows) and sent.values.shape == (1, 3, 5)


def test_whole_arrays_go_where_names_of_rows_would_cost_more():
    full, vector, empty = np.ones((9, 4), np.float32), np.zeros(9, np.float32), np.zeros((0, 3), np.float32)
    for array in (full, vector, empty):
        assert without_zeros(array) is array
    narrow = np.zeros((4, 1), np.float32)  # a row is as long as its number: 2 of 4 rows take as much as all
    narrow[:2] = 1
    assert without_zeros(narrow) is narrow
    assert isinstance(without_zeros(narrow[1:]), Rows)


def test_a_view_with_strides_is_looked_at_by_rows():
    table = np.zeros((4, 50), np.float32)
    table[2, 40] = 1
    sent = without_zeros(table.T)
    assert isinstance(sent, Rows) and sent.numbers.tolist() == [40]


def test_some_takes_the_rows_that_it_is_told():
    table = np.arange(40, dtype=np.float32).reshape(10, 4)
    sent = some(table, np.array([2, 7]))
    assert isinstance(sent, Rows) and sent.values.tolist() == table[[2, 7]].tolist()
    nothing = some(table, np.array([], np.int64))
    assert isinstance(nothing, Rows) and nothing.nbytes == 0


def test_adding_multiplies_in_the_type_of_the_sum():
    total = np.zeros((20, 2), np.float32)
    table = np.zeros((20, 2), np.float32)
    table[1] = 1 / 3
    add(total, without_zeros(table), 3.0)
    add(total, table, 3.0)
    assert total.dtype == np.float32 and (total[1] == 2 * np.float32(np.float32(1 / 3) * np.float32(3))).all()
    assert (np.delete(total, 1, axis=0) == 0).all()
