"""The usual advice, and what it costs: data parallel alone while it fits; tensor inside a host; pipe across hosts.

After Megatron (arXiv:2104.04473, takeaways 1 to 3). The search does not follow it; it is told how the best layout
compares with it.
"""

from dataclasses import dataclass

from jaxpar.planner.cluster import Cluster
from jaxpar.planner.price import Price
from jaxpar.planner.search import Search
from jaxpar.planner.words import longer, mesh

ADVICE = "data parallel alone while it fits; then tensor, inside a host; then pipe, across hosts"


@dataclass(frozen=True)
class Advice:
    """What the usual advice gives.

    Attributes:
        price: of the fastest layout on the mesh that it leads to.
        text: the advice, the mesh, and how it compares with the best.
    """

    price: Price
    text: str


def advise(found: Search, best: Price, cluster: Cluster) -> Advice:
    """Follow the advice to the first mesh on which something fits.

    Args:
        found: by the search.
        best: the fastest layout.
        cluster: laid out over.
    """

    def steps(price: Price) -> tuple[int, bool, int]:
        pipe, tensor = price.layout.pipe, price.layout.tensor
        return pipe, cluster.per_host % tensor > 0, tensor if pipe == 1 else -tensor

    first = min(found.meshes(), key=steps)
    compared = "which by cost is the best too" if first == best else f"where {longer(first.time, best.time)}"
    return Advice(first, f"The usual advice ({ADVICE}) leads to {mesh(first.layout)}, {compared}.")
