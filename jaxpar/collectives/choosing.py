"""From the config's grad_reduce section to the reduction that a run uses, and why."""

from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxpar import hardware
from jaxpar.collective_costs import choose, read_measured
from jaxpar.collectives.reduction import Reduction
from jaxpar.collectives.ring_order import read_links, ring_order
from jaxpar.config import GradReduceConfig, InputError
from jaxpar.mesh import DATA


class Chosen(NamedTuple):
    """A reduction, and a sentence that says why it is this one."""

    reduction: Reduction
    reason: str


def neighbours_per_host(mesh: Mesh, axis: str = DATA) -> int:
    """How many neighbours along an axis share a host; 1 where hosts do not hold equally many of them in a row.

    Example:
        >>> from jaxpar.mesh import make_mesh
        >>> neighbours_per_host(make_mesh(data=4, tensor=2))  # virtual devices are all on one host
        4
    """
    along = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1)
    hosts = np.vectorize(lambda device: device.process_index)(along).reshape(-1, mesh.shape[axis])
    n = hosts.shape[1]
    for size in (size for size in range(n, 0, -1) if n % size == 0):
        groups = hosts.reshape(len(hosts), -1, size)
        if (groups == groups[..., :1]).all():
            return size
    return 1


def choose_reduction(settings: GradReduceConfig, mesh: Mesh, gradient_bytes: int) -> Chosen:
    """The reduction over `data` that a config asks for.

    Args:
        settings: the section of a whole config, whose rules hold.
        mesh: of the run.
        gradient_bytes: what one device sums in a step.

    Raises:
        InputError: when a file that the section names cannot be used.
    """
    n = mesh.shape[DATA]
    per_host = settings.per_host or neighbours_per_host(mesh)
    algorithm, reason = settings.algorithm, f"{settings.algorithm}, as asked"
    if algorithm == "auto":
        device = hardware.find(mesh.devices.flat[0].device_kind)
        table = read_measured(settings.table, DATA) if settings.table else None
        choice = choose(min(gradient_bytes, settings.bucket_bytes), n, per_host, device, table, settings.across)
        algorithm, reason = choice.algorithm, choice.reason
    if algorithm == "hierarchical" and per_host in (1, n):
        algorithm = settings.across
        where = "all replicas are on one host" if per_host == n else "no two replicas next to each other share a host"
        reason = f"{algorithm} in place of hierarchical: {where}"
    order, parents = settings.order, None
    if settings.links and algorithm in ("ring", "tree"):
        links = read_links(settings.links, n)
        try:
            route = ring_order(links, per_host)
        except InputError as error:
            raise InputError(f"grad_reduce.links = {settings.links}: {error}") from None
        order, parents = (route.order, route.parents) if algorithm == "ring" else (None, route.parents)
        if parents is not None:
            algorithm = "tree"
        reason = f"{algorithm} over the links of {settings.links}: {route.how}"
    return Chosen(
        Reduction(
            algorithm,
            bucket_bytes=settings.bucket_bytes,
            wire_dtype=settings.wire_dtype,
            order=order if algorithm == "ring" else None,
            parents=parents,
            per_host=per_host,
            across=settings.across,
        ),
        reason,
    )
