"""The partition against trying all splits, and the costs from formulas."""

from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.config import InputError, ModelConfig
from jaxpar.flops import flops_per_token
from jaxpar.pipeline.partition import Partition, block_costs, even, partition


def best_of_all(costs: list[float], cut_bytes: list[float], parts: int) -> tuple[int, ...]:
    """Try every split: least slowest part, then least bytes, then most even, then more layers in later parts."""
    layers = len(costs)

    def rank(counts: tuple[int, ...]):
        ends = [sum(counts[: i + 1]) for i in range(parts)]
        times = [sum(map(Fraction, costs[end - n : end])) for end, n in zip(ends, counts, strict=True)]
        cut = sum(Fraction(cut_bytes[end - 1]) for end in ends[:-1])
        return max(times), cut, sum(t * t for t in times), [-n for n in reversed(counts)]

    splits = combinations(range(1, layers), parts - 1)
    return min((tuple(b - a for a, b in pairwise((0, *split, layers))) for split in splits), key=rank)


@given(st.data())
def test_nothing_is_better(data):
    layers = data.draw(st.integers(1, 9))
    stages = data.draw(st.integers(1, layers))
    chunks = data.draw(st.integers(1, layers // stages))
    few = st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0, 1.5, 7.0])  # many equal sums, not exact in binary
    costs = data.draw(st.lists(few, min_size=layers, max_size=layers))
    cut_bytes = data.draw(st.lists(few, min_size=layers - 1, max_size=layers - 1))
    assert partition(costs, cut_bytes, stages, chunks).counts == best_of_all(costs, cut_bytes, stages * chunks)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 30))
def test_the_union_of_all_parts_is_the_model(stages, chunks, more):
    layers = stages * chunks + more
    split = partition([1.0] * layers, [1.0] * (layers - 1), stages, chunks)
    found = [layer for chunk in range(chunks) for stage in range(stages) for layer in split.layers(chunk, stage)]
    assert found == list(range(layers))
    assert (split.chunks, split.height) == (chunks, -(-layers // (stages * chunks)))
    assert max(split.counts) - min(split.counts) <= 1


def test_uneven_layers():
    assert partition([1] * 30, [1] * 29, stages=4).counts == (7, 7, 8, 8)
    assert partition([1] * 30, [1] * 29, stages=4, chunks=2).counts == (3, 3, 4, 4, 4, 4, 4, 4)
    assert partition([9, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 9, stages=2).counts == (1, 9)
    assert partition([1] * 6, [1, 1, 0, 1, 1], stages=3).counts == (2, 2, 2)  # time comes first
    for cut_bytes, counts in (([9, 5, 9, 9], (2, 3)), ([9, 9, 5, 9], (3, 2))):  # equal times: then bytes
        assert partition([2, 2, 0, 2, 2], cut_bytes, stages=2).counts == counts


def test_layers_that_are_all_alike():
    for layers in range(1, 11):
        for parts in range(1, layers + 1):
            want = best_of_all([0.1] * layers, [7.0] * (layers - 1), parts)
            assert even(layers, parts).counts == partition([0.1] * layers, [7.0] * (layers - 1), parts).counts == want


def test_a_large_model_is_quick_and_exact():
    costs = [0.1] * 199 + [0.2]
    assert partition(costs, [1.0] * 199, stages=8, chunks=5).counts == (5,) * 40


def test_costs_from_formulas():
    model = ModelConfig(
        architecture="llama",
        vocab_size=503,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    costs, cut_bytes = block_costs(model, sequence_length=32, activation_bytes=4)
    head = 6 * 503 * 64  # what flops_per_token counts beside the blocks
    assert sum(costs) == 32 * (flops_per_token(model, 32) - head) and len(set(costs)) == 1
    assert cut_bytes == (32 * 64 * 4,) * 2


def test_what_it_says():
    assert str(partition([1] * 30, [1] * 29, stages=4)) == (
        "30 layers on 4 stages, in model order: 7 7 8 8 layers (padded to 8 each: 6% idle layers)"
    )
    assert Partition((1, 2, 3), stages=3).starts == (0, 1, 3)


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "said"),
    [
        (
            10,
            4,
            3,
            "stages 4 × chunks 3 = 12 parts for 10 layers: each part needs one. Use chunks = 2 or stages = 3 or 12",
        ),
        (3, 4, 1, "Use stages = 3 or 4 layers."),
        (1, 2, 2, "Use 4 layers."),
        (3, 0, 1, "stages = 0: must be at least 1"),
    ],
)
def test_too_few_layers(layers, stages, chunks, said):
    with pytest.raises(InputError) as error:
        partition([1] * layers, [1] * (layers - 1), stages, chunks)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("costs", "cut_bytes", "said"),
    [
        ([1, 1, 1], [1], r"cut_bytes has 1 sizes, must be layers - 1 = 2"),
        ([1, -1], [1], "finite and at least 0"),
        ([1, float("nan")], [1], "finite and at least 0"),
        ([1, 1], [float("inf")], "finite and at least 0"),
    ],
)
def test_costs_that_are_none(costs, cut_bytes, said):
    with pytest.raises(InputError, match=said):
        partition(costs, cut_bytes, stages=1)
