import numpy as np
import pytest

from jaxpar.data.windows import Span, Windows, hold_out


def span(count, start=0):
    return Span(np.arange(start, start + count, dtype=np.uint16), 0, count)


def test_each_token_but_the_first_is_a_target_once():
    windows = Windows([span(4 * 7 + 1)], 4)
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
    assert len(Windows([span(tokens)], 4)) == span(tokens).windows(4) == count


def test_no_window_runs_from_one_span_into_the_next():
    windows = Windows([span(11), span(3, 100), span(9, 200)], 4)
    assert windows.read([0, 1, 2, 3])["tokens"][:, 0].tolist() == [0, 4, 200, 204]
    assert windows.read([3, 0])["targets"].tolist() == [[205, 206, 207, 208], [1, 2, 3, 4]]


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("counts", [[100], [97], [98], [40, 3, 57], [4, 5, 90], [12, 13]])
def test_held_out_tail_shares_no_token(counts, fraction):
    starts = np.cumsum([0, *counts[:-1]])
    spans = [span(count, start) for count, start in zip(counts, starts, strict=True)]
    train, held = (Windows(part, 4) for part in hold_out(spans, 4, fraction))

    def seen(windows):
        read = windows.read(range(len(windows)))
        return set(read["tokens"].ravel()) | set(read["targets"].ravel())

    total = len(Windows(spans, 4))
    assert not seen(train) & seen(held)
    assert max(seen(train)) < min(seen(held))
    wanted = max(1, round(total * fraction))
    assert len(train) in (total - wanted, total - wanted - 1)
    assert len(held) in (wanted, wanted - 1) and len(held) >= 1


def test_too_little_to_hold_out_leaves_nothing_to_train_on():
    train, held = hold_out([span(9)], 4, 0.5)  # two windows that share a token
    assert len(Windows(train, 4)) == 0 and len(Windows(held, 4)) == 2
