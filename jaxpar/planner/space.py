"""Which layouts are looked at: all that the rules of configs allow, without doubles and without what never wins.

Left out are

* doubles: ZeRO and reduction algorithms with one replica, hierarchical reduction where the replicas do not share hosts
  or are all on one, sequence parallel with tensor 1;
* gpipe: it takes the ticks of 1f1b, keeps at least as many activations, and hides messages in fewer of the ticks;
* more chunks than are needed for a largest part of as many layers, where all layers cost the same: more messages and
  more live inputs at the same pace.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from jaxpar.config import Config, InputError, MeshConfig
from jaxpar.config.nearest import divisors, nearest
from jaxpar.config.rules import problems
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.words import mesh

REMATS = ("none", "dots", "full")
ROUNDING = 0.025
"""How far a batch may be from what was asked for, so that more replicas divide it."""
ALGORITHMS = ("native", "ring", "tree", "halving_doubling", "hierarchical")
Family = tuple[str, int | str]
"""A choice and one value of it, as ("zero", 0) or ("remat", "full"): all layouts that have it."""


def simplicity(layout: Layout) -> tuple[int, ...]:
    """What breaks ties, least first: axes used, ZeRO stage, recomputation, the rest as it stands in `Layout`."""
    return (
        sum(size > 1 for size in (layout.data, layout.pipe, layout.tensor)),
        layout.zero,
        REMATS.index(layout.remat),
        layout.sequence_parallel,
        layout.chunks,
        layout.schedule != "1f1b",
        ALGORITHMS.index(layout.algorithm),
        layout.microbatches,
        layout.tensor,
        layout.pipe,
    )


def families(layout: Layout, workload: Workload) -> list[Family]:
    """The families that a layout belongs to.

    Example:
        >>> families(Layout(8, 1, 1, microbatches=2), Workload(4096, 64))[3:7]
        [('tensor', 1), ('zero', 0), ('schedule', '1f1b'), ('microbatch', 4)]
    """
    return [
        ("mesh", mesh(layout)),
        ("data", layout.data),
        ("pipe", layout.pipe),
        ("tensor", layout.tensor),
        ("zero", layout.zero),
        ("schedule", "interleaved 1f1b" if layout.chunks > 1 else layout.schedule),
        ("microbatch", workload.sequences_per_microbatch(layout)),
        ("remat", layout.remat),
        ("sequence parallel", "on" if layout.sequence_parallel else "off"),
        ("algorithm", layout.algorithm),
    ]


def chunk_counts(layers: int, pipe: int) -> list[int]:
    """For each number of layers that the largest part may have, the fewest chunks with which it has that many.

    Example:
        >>> chunk_counts(layers=80, pipe=8), chunk_counts(layers=80, pipe=1), chunk_counts(layers=3, pipe=4)
        ([1, 2, 3, 4, 5, 10], [1], [])
    """
    if pipe == 1:
        return [1]
    fewest: dict[int, int] = {}
    for chunks in range(1, layers // pipe + 1):
        fewest.setdefault(-(-layers // (pipe * chunks)), chunks)
    return list(fewest.values())


def _multiples(near: float, units: list[int]) -> list[int]:
    """Of each unit the multiples on both sides of a number, ascending; 0 is none."""
    return sorted({max(1, math.floor(near / unit) + up) * unit for unit in units for up in (0, 1)})


@dataclass
class Space:
    """The layouts of a task.

    Attributes:
        config: what is planned; its layout does not matter.
        workload: of a step.
        cluster: to lay out over.
        illegal: filled by `meshes`: sizes of an axis that the rules refuse, with the rule's text.
    """

    config: Config
    workload: Workload
    cluster: Cluster
    illegal: dict[Family, str] = field(default_factory=dict)

    def inside_host(self, tensor: int) -> bool:
        """Whether groups of so many neighbours never span two hosts."""
        return self.cluster.per_host % tensor == 0

    def rule(self, layout: Layout) -> str | None:
        """The first rule of configs that a layout breaks."""
        axes = MeshConfig.model_construct(data=layout.data, pipe=layout.pipe, tensor=layout.tensor, devices=None)
        parallel = self.config.parallel.model_copy(
            update={
                name: getattr(layout, name)
                for name in ("schedule", "chunks", "microbatches", "remat", "sequence_parallel", "zero")
            }
        )
        reduce = self.config.grad_reduce.model_copy(update={"algorithm": layout.algorithm})
        config = self.config.model_copy(update={"mesh": axes, "parallel": parallel, "grad_reduce": reduce})
        return next(iter(problems(config)), None)

    def meshes(self) -> list[tuple[int, int, int]]:
        """The legal (data, pipe, tensor); sizes of an axis that are in none of them are kept with their rule.

        Raises:
            InputError: when there is none, with the nearest global batch for which there is one.
        """
        devices, legal = self.cluster.devices, []
        for tensor, pipe in product(divisors(devices), repeat=2):
            if devices % (tensor * pipe):
                continue
            layout = Layout(devices // (tensor * pipe), pipe, tensor)
            if not self.rule(layout):
                legal.append((layout.data, pipe, tensor))
        if not legal:
            raise InputError(self._no_mesh())
        for axis, place in (("data", 0), ("pipe", 1), ("tensor", 2)):
            for size in sorted(set(divisors(devices)) - {sizes[place] for sizes in legal}):
                alone = replace(Layout(1, 1, 1), **{axis: size})
                self.illegal[axis, size] = self.rule(alone) or "the axes that would have to go with it are refused"
        return legal

    def nearest_batch(self, wanted: float, *, inside_hosts: bool = False) -> int:
        """The number of sequences, nearest to what is wanted, that some mesh divides; the larger of two as near.

        Args:
            wanted: sequences of a step, perhaps no whole number.
            inside_hosts: only meshes count whose groups over `tensor` lie inside hosts.
        """
        legal = _multiples(wanted, self._replicas(inside_hosts))
        return min(legal, key=lambda count: (abs(count - wanted), -count))

    def round_batch(self, wanted: float, *, inside_hosts: bool = False) -> int:
        """A number of sequences for about so many: within 2.5% the one that most replicas divide, else the nearest."""
        closest = self.nearest_batch(wanted, inside_hosts=inside_hosts)
        legal = _multiples(wanted, self._replicas(inside_hosts))
        near = [count for count in legal if abs(count - wanted) <= ROUNDING * wanted] or [closest]
        return max(near, key=lambda count: (math.gcd(count, self.cluster.devices), -abs(count - wanted), count))

    def _replicas(self, inside_hosts: bool = False) -> list[int]:
        """Numbers of replicas that some mesh has, whatever the batch: one for every device is always among them."""
        devices = self.cluster.devices
        train = self.config.train.model_copy(update={"global_batch": devices})  # all numbers of replicas divide it
        other = Space(self.config.model_copy(update={"train": train}), self.workload, self.cluster)
        meshes = other.meshes()
        return sorted({data for data, _, tensor in meshes if not inside_hosts or self.inside_host(tensor)})

    def _no_mesh(self) -> str:
        """Say which batches some mesh could divide, and what keeps the meshes from it that would divide this one."""
        batch, tokens, devices = self.workload.global_batch, self.workload.sequence_length, self.cluster.devices
        replicas = self._replicas()
        legal = _multiples(batch, replicas)
        return (
            f"{self.workload.batch_as_given}: no layout on {devices} devices can divide {batch} sequences "
            f"over its replicas, which can be {', '.join(map(str, replicas))}. Use {nearest(legal, batch)} "
            f"sequences ({nearest([count * tokens for count in legal], batch * tokens)} tokens).{self._refused()}"
        )

    def _refused(self) -> str:
        """Of the meshes whose replicas divide the batch the one with the most, and the rule that it breaks."""
        devices = self.cluster.devices
        for data in reversed([n for n in divisors(devices) if self.workload.global_batch % n == 0]):
            for tensor in divisors(devices // data):
                layout = Layout(data, devices // data // tensor, tensor)
                deep = layout.pipe <= self.config.model.num_hidden_layers
                if deep and self.inside_host(tensor) and (rule := self.rule(layout)):
                    return f" On {mesh(layout)}, which would divide them, {rule}"
        return ""

    def layouts(self, sizes: tuple[int, int, int]) -> Iterator[Layout]:
        """The legal layouts on a mesh, with the native reduction.

        Each choice is held against the rules by itself: no rule looks at two of those that vary on a mesh.
        """
        base, costs = Layout(*sizes), self.workload.layer_costs
        replicas, layers = self.workload.global_batch // base.data, self.config.model.num_hidden_layers
        values = {
            "zero": range(4 if base.data > 1 else 1),
            "chunks": range(1, layers // base.pipe + 1) if costs and base.pipe > 1 else chunk_counts(layers, base.pipe),
            "microbatches": divisors(replicas),
            "remat": REMATS,
            "sequence_parallel": (False, True) if base.tensor > 1 else (False,),
        }
        legal = [[v for v in several if not self.rule(replace(base, **{name: v}))] for name, several in values.items()]
        for chosen in product(*legal):
            yield replace(base, **dict(zip(values, chosen, strict=True)))

    def algorithms(self, layout: Layout) -> tuple[str, ...]:
        """The reduction algorithms that differ from each other over a layout's replicas."""
        if layout.data == 1:
            return ALGORITHMS[:1]
        shared = self.cluster.per_host // math.gcd(self.cluster.per_host, layout.pipe * layout.tensor)
        return ALGORITHMS if 1 < shared < layout.data else ALGORITHMS[:-1]
