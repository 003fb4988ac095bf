import numpy as np
import pytest

from jaxpar.config import InputError
from jaxpar.data.examples import EvaluationExamples, TrainExamples, read_rows, shuffled_order
from jaxpar.data.windows import Span, Windows

LENGTH = 4


def make_windows(*counts):
    """Sources with these numbers of windows; window w of the whole begins with the token 4 * w."""
    spans, start = [], 0
    for count in counts:
        spans.append(Span(np.arange(start, start + count * LENGTH + 1, dtype=np.uint32), 0, count * LENGTH + 1))
        start += count * LENGTH
    return Windows(spans, LENGTH, 1 << 16)


def train_examples(*counts, weights=None, global_batch=6, seed=0):
    return TrainExamples(make_windows(*counts), counts, weights or [1.0] * len(counts), global_batch, seed)


def window_numbers(examples, step, rows=None):
    read = examples.rows(step, range(examples.global_batch) if rows is None else rows)
    return (read["tokens"][:, 0] // LENGTH).tolist()


def test_each_window_exactly_once_an_epoch_in_an_order_of_its_own():
    examples = train_examples(210, global_batch=7)
    epochs = [
        [number for step in range(30 * e, 30 * (e + 1)) for number in window_numbers(examples, step)] for e in range(3)
    ]
    for epoch in epochs:
        assert sorted(epoch) == list(range(210)) and epoch != sorted(epoch)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_epochs_end_within_a_batch():
    """210 windows in batches of 8: the 27th batch takes the last two of one epoch and the first six of the next."""
    examples = train_examples(210, global_batch=8)
    numbers = [number for step in range(53) for number in window_numbers(examples, step)]
    assert sorted(numbers[:210]) == sorted(numbers[210:420]) == list(range(210))


def test_batch_is_a_function_of_seed_and_step():
    one, other = train_examples(200, 150), train_examples(200, 150)
    for step in (0, 1, 5, 1000, 10**9):
        first, second = one.rows(step, range(6)), other.rows(step, range(6))
        assert all((first[name] == second[name]).all() for name in first)
    steps = [window_numbers(one, step) for step in range(20)]
    assert len({tuple(numbers) for numbers in steps}) == 20
    # Neighbouring seeds share no epoch. (Grain's own epochs are seeded by seed + epoch.)
    longer = [
        window_numbers(train_examples(100, global_batch=100, seed=seed), epoch)
        for seed in range(3)
        for epoch in range(3)
    ]
    assert len({tuple(numbers) for numbers in longer}) == 9


@pytest.mark.parametrize("hosts", [1, 2, 3, 6])
def test_hosts_together_read_what_one_host_reads(hosts):
    examples = train_examples(200, 150, weights=[1.0, 2.0])
    for step in (0, 7):
        whole = examples.rows(step, range(6))
        parts = [examples.rows(step, range(host * 6 // hosts, (host + 1) * 6 // hosts)) for host in range(hosts)]
        for name, array in whole.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)
    np.testing.assert_array_equal(examples.rows(3, [5, 2])["tokens"], examples.rows(3, range(6))["tokens"][[5, 2]])


@pytest.mark.parametrize("weights", [[1.0, 3.0], [0.1, 0.3], [3.0, 1.0], [1.0, 1.0]])
def test_mixture_has_the_proportions_of_the_weights(weights):
    """Not those of the sizes, evenly in every stretch, and each source still goes through its own windows in turn."""
    order = shuffled_order([300, 100], weights, seed=1)
    share = weights[0] / sum(weights)
    drawn = [order[position] for position in range(1200)]
    for start in range(0, 1200, 100):
        assert abs(sum(number < 300 for number in drawn[start : start + 100]) - 100 * share) <= 1
    for low, high in ((0, 300), (300, 400)):
        own = [number for number in drawn if low <= number < high]
        for epoch in range(len(own) // (high - low)):
            assert sorted(own[epoch * (high - low) : (epoch + 1) * (high - low)]) == list(range(low, high))


def test_three_sources_and_an_uneven_weight():
    order = shuffled_order([500, 500, 500], [1.0, 2.345, 7.0], seed=0)
    drawn = np.array([order[position] for position in range(10_000)]) // 500
    share = np.bincount(drawn) / drawn.size
    np.testing.assert_allclose(share, np.array([1.0, 2.345, 7.0]) / 10.345, rtol=0.01)  # the docstring's 1 %


def test_evaluation_reads_every_window_once_and_pads_with_masked_rows():
    examples = EvaluationExamples(make_windows(10), global_batch=4, batches=8)
    assert len(examples) == 3 and examples.windows == 10
    batches = [examples.rows(step, range(4)) for step in range(3)]
    assert [batch["tokens"].shape for batch in batches] == [(4, LENGTH)] * 3
    kept = [
        int(tokens[0]) // LENGTH
        for batch in batches
        for tokens, mask in zip(batch["tokens"], batch["mask"], strict=True)
        if mask.all()
    ]
    assert kept == list(range(10))
    assert [batch["mask"].sum() for batch in batches] == [16, 16, 8]


@pytest.mark.parametrize("hosts", [2, 4])
def test_evaluation_is_the_same_for_any_number_of_hosts_even_where_one_has_only_padding(hosts):
    examples = EvaluationExamples(make_windows(5), global_batch=4, batches=8)
    for step in range(len(examples)):
        whole = examples.rows(step, range(4))
        parts = [examples.rows(step, range(host * 4 // hosts, (host + 1) * 4 // hosts)) for host in range(hosts)]
        for name, array in whole.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)


def test_evaluation_of_a_part_takes_distinct_windows_from_all_over():
    examples = EvaluationExamples(make_windows(60, 41), global_batch=4, batches=5)
    numbers = [number for step in range(len(examples)) for number in window_numbers(examples, step)]
    assert len(examples) == 5 and len(set(numbers)) == 20
    assert numbers[0] == 0 and numbers[-1] > 90 and max(np.diff(numbers)) <= 6
    assert numbers == [number for step in range(5) for number in window_numbers(examples, step)]


class Own:
    """Examples of a user's own."""

    global_batch, sequence_length, vocab_size = 8, 4, 300

    def __init__(self):
        self.arrays = {name: np.full((8, 4), 299, np.int32) for name in ("tokens", "targets")}
        self.arrays["mask"] = np.arange(32).reshape(8, 4) % 4 < 3
        self.arrays["lengths"] = np.full((8, 4), 1000)  # no ids

    def rows(self, step, rows):
        return {name: array[rows] for name, array in self.arrays.items()}


@pytest.mark.parametrize("bad", [-1, -100, 300, 65535, 2**31 - 1])
def test_ids_outside_the_vocabulary_reach_no_device(bad):
    own = Own()
    own.arrays["targets"][:, 3] = bad  # which the mask leaves out
    assert read_rows(own, 6, [1, 5])["targets"].tolist() == [[299, 299, 299, bad]] * 2
    for name, column in (("tokens", 3), ("targets", 2)):
        own.arrays[name][5, column] = bad
        read_rows(own, 6, [1, 4])
        message = rf"after step 6 has the id {bad} in its {name}, in row 5 at position {column} .* from 0 to 299\."
        with pytest.raises(InputError, match=message):
            read_rows(own, 6, [1, 5])
        own.arrays[name][5, column] = 0


def test_examples_of_files_have_the_vocabulary_of_the_model():
    windows = make_windows(10)
    assert TrainExamples(windows, [10], [1.0], 2, seed=0).vocab_size == 1 << 16
    assert EvaluationExamples(windows, 2, 3).vocab_size == 1 << 16
