import numpy as np
import pytest

from jaxpar.config import InputError
from jaxpar.data.windows import Span, Windows, hold_out, unknown


def span(count, start=0):
    return Span(np.arange(start, start + count, dtype=np.uint16), 0, count)


def test_each_token_but_the_first_is_a_target_once():
    windows = Windows([span(4 * 7 + 1)], 4, 1 << 16)
    read = windows.read(range(len(windows)))
    assert read["tokens"].ravel().tolist() == list(range(28))
    assert read["targets"].ravel().tolist() == list(range(1, 29))
    assert {name: (array.dtype, array.shape) for name, array in read.items()} == {
        "tokens": (np.int32, (7, 4)),
        "targets": (np.int32, (7, 4)),
        "mask": (np.bool_, (7, 4)),
    }
    assert read["mask"].all()


@pytest.mark.parametrize(("tokens", "count"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)])
def test_no_short_windows(tokens, count):
    assert len(Windows([span(tokens)], 4, 1 << 16)) == span(tokens).windows(4) == count


def test_no_window_runs_from_one_span_into_the_next():
    windows = Windows([span(11), span(3, 100), span(9, 200)], 4, 1 << 16)
    assert windows.read([0, 1, 2, 3])["tokens"][:, 0].tolist() == [0, 4, 200, 204]
    assert windows.read([3, 0])["targets"].tolist() == [[205, 206, 207, 208], [1, 2, 3, 4]]


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("counts", [[100], [97], [98], [40, 3, 57], [4, 5, 90], [12, 13]])
def test_held_out_tail_shares_no_token(counts, fraction):
    starts = np.cumsum([0, *counts[:-1]])
    spans = [span(count, start) for count, start in zip(counts, starts, strict=True)]
    train, held = (Windows(part, 4, 1 << 16) for part in hold_out(spans, 4, fraction))

    def seen(windows):
        read = windows.read(range(len(windows)))
        return set(read["tokens"].ravel()) | set(read["targets"].ravel())

    total = len(Windows(spans, 4, 1 << 16))
    assert not seen(train) & seen(held)
    assert max(seen(train)) < min(seen(held))
    wanted = max(1, round(total * fraction))
    assert len(train) in (total - wanted, total - wanted - 1)
    assert len(held) in (wanted, wanted - 1) and len(held) >= 1


def test_too_little_to_hold_out_leaves_nothing_to_train_on():
    train, held = hold_out([span(9)], 4, 0.5)  # two windows that share a token
    assert len(Windows(train, 4, 1 << 16)) == 0 and len(Windows(held, 4, 1 << 16)) == 2


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint16", "uint32"])
@pytest.mark.parametrize("bad", [-1, 300, 65535, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_found(dtype, bad):
    ids = np.array([[0, 299], [299, 0]], dtype)
    assert unknown(ids, 300) is None
    assert unknown(ids[:, 1:], 300) is None and unknown(ids[:0], 300) is None
    if np.iinfo(dtype).min <= bad <= np.iinfo(dtype).max:
        ids[1, 0] = bad
        assert unknown(ids, 300).tolist() == [[False, False], [True, False]]
        assert unknown(ids[:, :1], 300).tolist() == [[False], [True]]  # a view with gaps


@pytest.mark.parametrize(("dtype", "bad"), [("<u2", 65535), ("<u2", 300), ("<u4", 2**31 - 1), ("<u4", 2**32 - 1)])
@pytest.mark.parametrize("at", [50, 52, 54])  # the first token of a window, one between, the last target
def test_an_id_outside_the_vocabulary_is_named_with_its_file_and_place(dtype, bad, at):
    """2^32 - 1 is -1 in the batch; the message says what the file holds."""
    tokens = np.zeros(100, dtype)
    tokens[at] = bad
    windows = Windows([span(9), Span(tokens, 50, 90, "some.tokens")], 4, 300)
    good = [0, 1, 4, 5]
    assert windows.read(good)["tokens"].shape == (4, 4)
    with pytest.raises(InputError, match=rf"^some.tokens holds the id {bad} at token {at} \(the first is 0\), but "):
        windows.read([*good, 2])
