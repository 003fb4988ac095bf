"""The gradients of an update: weighted by their tokens, and added in the order of the shares.

Whatever order they come in, the sum has the same bits, and so have two runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxpar.parameter_server.rows import Sent, add


@dataclass
class Sum:
    """The gradients of an update, added up in the order of their shares.

    Attributes:
        total: sum over shares of tokens × gradient, by parameter.
        tokens: in the shares added.
        shares: how many are added.
        waiting: those that came before one with a lower number.
    """

    total: dict[str, np.ndarray] = field(default_factory=dict)
    tokens: float = 0.0
    shares: int = 0
    waiting: dict[int, tuple[float, Mapping[str, Sent]]] = field(default_factory=dict)

    def take(self, share: int, tokens: float, grads: Mapping[str, Sent]) -> bool:
        """Take a share in; False if it is there already: its worker died after pushing, and another did its work."""
        if share < self.shares or share in self.waiting:
            return False
        self.waiting[share] = tokens, grads
        while self.shares in self.waiting:
            tokens, grads = self.waiting.pop(self.shares)
            for name, sent in grads.items():
                if name not in self.total:
                    self.total[name] = np.zeros(sent.shape, sent.dtype)
                add(self.total[name], sent, tokens)
            self.tokens += tokens
            self.shares += 1
        return True

    def mean(self) -> dict[str, np.ndarray]:
        """The mean gradient over all tokens."""
        count = max(self.tokens, 1.0)
        return {name: total / total.dtype.type(count) for name, total in self.total.items()}
