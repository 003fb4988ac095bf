"""Which layers each pipeline stage gets: the split with the least slowest part, found exactly. No JAX.

Letters: L layers, S stages, v chunks per stage; part c · S + s of the model is chunk c of stage s.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from jaxpar.config import InputError
from jaxpar.flops import block_flops_per_token
from jaxpar.pipeline.schedules import check_sizes

if TYPE_CHECKING:
    from jaxpar.config import ModelConfig


@dataclass(frozen=True)
class Partition:
    """How many consecutive layers each part of the model has.

    Attributes:
        counts: layers of each part in model order, v · S of them, none 0.
        stages: S.
    """

    counts: tuple[int, ...]
    stages: int

    @property
    def chunks(self) -> int:
        """Parts on each stage, v."""
        return len(self.counts) // self.stages

    @property
    def starts(self) -> tuple[int, ...]:
        """First layer of each part."""
        return tuple(accumulate(self.counts[:-1], initial=0))

    @property
    def height(self) -> int:
        """Layers of the largest part; the others are padded to it in a run."""
        return max(self.counts)

    def layers(self, chunk: int, stage: int) -> range:
        """The layers of a stage's chunk.

        Example:
            >>> Partition((2, 2, 1, 1), stages=2).layers(chunk=1, stage=0)
            range(4, 5)
        """
        part = chunk * self.stages + stage
        return range(self.starts[part], self.starts[part] + self.counts[part])

    def __str__(self) -> str:
        """One sentence for people.

        Example:
            >>> print(Partition((2, 2, 1, 1), stages=2))
            6 layers on 2 stages with 2 chunks each, in model order: 2 2 1 1 layers (padded to 2 each: 25% idle layers)
            >>> print(Partition((2, 2), stages=2))
            4 layers on 2 stages, in model order: 2 2 layers
        """
        layers, rows = sum(self.counts), self.height * len(self.counts)
        chunks = f" with {self.chunks} chunks each" if self.chunks > 1 else ""
        padded = f" (padded to {self.height} each: {1 - layers / rows:.0%} idle layers)" if rows > layers else ""
        counts = " ".join(map(str, self.counts))
        return f"{layers} layers on {self.stages} stages{chunks}, in model order: {counts} layers{padded}"


def partition(costs: Sequence[float], cut_bytes: Sequence[float], stages: int, chunks: int = 1) -> Partition:
    """Split layers into v · S parts of consecutive layers, exactly, by dynamic programming.

    The slowest part is as fast as it can be, since in lockstep all stages keep its pace. Of such splits the one that
    cuts the fewest bytes is taken; of those the most even one (least sum of squared part costs); of those the one
    with more layers in later parts. Sums are exact, so
    that equal splits are not told apart by rounding.

    Args:
        costs: time of each layer, in model order, in any one unit, at least 0: forward and backward of a microbatch.
        cut_bytes: L − 1 sizes of what crosses a cut after each layer but the last, at least 0.
        stages: S.
        chunks: v.

    Returns:
        The counts of layers.

    Raises:
        InputError: when there are fewer layers than parts, with the nearest legal values, or a cost is no number.

    Example:
        >>> partition([1] * 30, [1] * 29, stages=4).counts
        (7, 7, 8, 8)
        >>> partition([3, 1, 1, 1, 1, 1], [1] * 5, stages=2).counts
        (2, 4)
    """
    check_sizes(stages=stages, chunks=chunks)
    layers, parts = len(costs), stages * chunks
    if parts > layers:
        raise InputError(_too_few_layers(layers, stages, chunks))
    if len(cut_bytes) != layers - 1:
        raise InputError(f"cut_bytes has {len(cut_bytes)} sizes, must be layers - 1 = {layers - 1}.")
    if not all(math.isfinite(x) and x >= 0 for x in (*costs, *cut_bytes)):
        raise InputError("costs and cut_bytes must be finite and at least 0.")

    if len(set(costs)) == len(set(cut_bytes) or {0}) == 1 and costs[0] > 0:
        return even(layers, stages, chunks)
    sums = list(accumulate(_whole(costs), initial=0))
    cuts = [0, *_whole(cut_bytes)]  # what is cut at the start of a part
    # Some split has no part above the mean part and one layer, so the best one has not either.
    bound = -(-sums[-1] // parts) + max(b - a for a, b in pairwise(sums))
    slowest, _ = _best_split(sums, parts, bound, cost=lambda _, time: time, combine=max)
    _, counts = _best_split(
        sums,
        parts,
        slowest,
        cost=lambda start, time: (cuts[start], time**2),
        combine=lambda a, b: (a[0] + b[0], a[1] + b[1]),
    )
    return Partition(counts, stages)


def even(layers: int, stages: int, chunks: int = 1) -> Partition:
    """The partition of layers that all cost the same: as even as can be, with more layers in later parts.

    Example:
        >>> even(30, stages=4).counts
        (7, 7, 8, 8)
    """
    fewest, more = divmod(layers, stages * chunks)
    return Partition((fewest,) * (stages * chunks - more) + (fewest + 1,) * more, stages)


def _whole(numbers: Sequence[float]) -> list[int]:
    """The numbers times the least factor that makes all of them whole: exact, whatever fractions they are."""
    exact = [Fraction(number) for number in numbers]
    factor = math.lcm(*(number.denominator for number in exact))
    return [int(number * factor) for number in exact]


def _best_split(
    sums: Sequence[int], parts: int, bound: int, cost: Callable[[int, int], Any], combine: Callable[[Any, Any], Any]
) -> tuple[Any, tuple[int, ...]]:
    """Find the split into `parts` non-empty parts with the least combined cost, no part taking more than `bound`.

    `sums[i]` is the time of the first i layers, `cost(start, time)` what a part from layer `start` on costs. Of equal
    splits the one with the longest last part is found.
    """
    layers = len(sums) - 1
    # best[i]: the cost of the first i layers in as many parts as have been looked at, and the parts' counts.
    best = {stop: (cost(0, sums[stop]), (stop,)) for stop in range(1, layers + 1) if sums[stop] <= bound}
    for part in range(1, parts):
        longer: dict[int, tuple[Any, tuple[int, ...]]] = {}
        for stop in range(part + 1, layers - (parts - part - 1) + 1):
            for start in range(stop - 1, part - 1, -1):
                time = sums[stop] - sums[start]
                if time > bound:
                    break
                if start in best:
                    total = combine(best[start][0], cost(start, time))
                    if stop not in longer or total <= longer[stop][0]:
                        longer[stop] = (total, (*best[start][1], stop - start))
        best = longer
    return best[layers]


def _too_few_layers(layers: int, stages: int, chunks: int) -> str:
    ways = [f"chunks = {layers // stages}"] if layers >= stages else []
    ways += [f"stages = {layers // chunks}"] if layers >= chunks else []
    ways += [f"{stages * chunks} layers"]
    return (
        f"stages {stages} × chunks {chunks} = {stages * chunks} parts for {layers} layers: each part needs one. "
        f"Use {' or '.join(ways)}."
    )


def block_costs(
    model: "ModelConfig", sequence_length: int, activation_bytes: int = 2
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Costs and cut sizes of a model's blocks from formulas, for one sequence.

    Embedding and head are not among them: all stages share them.

    Args:
        model: sizes and architecture.
        sequence_length: T, in tokens.
        activation_bytes: bytes of one activation, 2 for bfloat16.

    Returns:
        FLOPs of each block, forward and backward; and bytes of activations T · D at each cut between two of them.

    Example:
        >>> from jaxpar.config import ModelConfig
        >>> block_costs(ModelConfig(architecture="llama", vocab_size=10, hidden_size=4, intermediate_size=6,
        ...     num_hidden_layers=2, num_attention_heads=2), sequence_length=8)
        ((9600, 9600), (64,))
    """
    L = model.num_hidden_layers
    flops = sequence_length * block_flops_per_token(model, sequence_length)
    return (flops,) * L, (sequence_length * model.hidden_size * activation_bytes,) * (L - 1)
