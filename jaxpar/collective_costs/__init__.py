"""What collectives cost, by algorithm: a model, and measurements that override it; imports no JAX."""

from jaxpar.collective_costs.choice import Choice, Measured, choose, read_measured, seconds_between
from jaxpar.collective_costs.links import ALGORITHMS, Algorithm, Group, Op
from jaxpar.collective_costs.model import seconds

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Choice",
    "Group",
    "Measured",
    "Op",
    "choose",
    "read_measured",
    "seconds",
    "seconds_between",
]
