"""What the coordinator tells of: an update that was made, and that some were taken back."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.parameter_server.worker import Gradient


class RolledBack(Exception):
    """The servers went back to a snapshot.

    Attributes:
        step: steps that are done there.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"rolled back to step {step}")
        self.step = step


def means(gradients: Sequence[Gradient]) -> dict[str, float]:
    """Their means over tokens, over all their tokens together."""
    tokens = max(sum(g.tokens for g in gradients), 1)
    return {name: sum(g.means[name] * g.tokens for g in gradients) / tokens for name in gradients[0].means}


@dataclass(frozen=True)
class Update:
    """An update that was made.

    Attributes:
        step: of which batch.
        parts: which parts of it.
        tokens: how many.
        grad_norm: of the mean gradient.
        staleness: versions between the parameters it was computed with and those it was added to.
        skipped: updates so far that changed nothing, loss or gradient not being finite, this one included.
        skipped_in_a_row: of these the last ones.
        gradients: where the numbers come from.
    """

    step: int
    parts: tuple[int, ...]
    tokens: float
    grad_norm: float
    staleness: int
    skipped: int
    skipped_in_a_row: int
    gradients: tuple[Gradient, ...]
