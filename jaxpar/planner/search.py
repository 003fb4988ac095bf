"""The search: the fastest layout that fits, of all and of every family.

That the others lose is shown by the fastest layout of each family (`jaxpar.planner.space`), so that is what is looked
for, and the search is exact for every one of them. A layout is left out only when a bound shows that it does not fit
(`least_memory_bytes`), or that it is slower than the fastest so far of each of its families (`least_seconds`). The
algorithm of the reduction changes communication over `data` alone: without that, the time of a layout with one
algorithm is a bound for the same layout with another.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxpar.config import Config, InputError, ModelConfig
from jaxpar.planner import price as pricing
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.price import Price
from jaxpar.planner.space import Family, Space, families, simplicity


class Pricing(NamedTuple):
    """What the search asks, each as in `jaxpar.planner.price`."""

    price: Callable[..., Price] = pricing.price
    least_memory_bytes: Callable[..., float] = pricing.least_memory_bytes
    least_seconds: Callable[..., float] = pricing.least_seconds


Key = tuple[float, tuple[int, ...]]
"""Seconds or bytes, and what breaks ties."""
WORST: Key = (math.inf, ())


@dataclass
class Found:
    """What is known of a family.

    Attributes:
        fastest: of the layouts that fit; None when none does.
        leanest: the layout that takes the least memory, exact where nothing fits.
        by_time: time and simplicity of the fastest.
        by_memory: memory and simplicity of the leanest.
    """

    fastest: Price | None = None
    leanest: Price | None = None
    by_time: Key = WORST
    by_memory: Key = WORST

    def add(self, price: Price, by_time: Key, by_memory: Key) -> None:
        """Take a layout of the family into account."""
        if price.fits and by_time < self.by_time:
            self.fastest, self.by_time = price, by_time
        if by_memory < self.by_memory:
            self.leanest, self.by_memory = price, by_memory


@dataclass
class Search:
    """What a search found.

    Attributes:
        families: those with legal layouts.
        illegal: sizes of an axis that the rules of configs refuse, with the rule.
        compared: values that were priced for comparison and are not allowed.
        priced: number of layouts that were priced.
        bounded: number of layouts that bounds left out.
    """

    families: dict[Family, Found] = field(default_factory=dict)
    illegal: dict[Family, str] = field(default_factory=dict)
    compared: set[Family] = field(default_factory=set)
    priced: int = 0
    bounded: int = 0

    def meshes(self) -> list[Price]:
        """The fastest layout of each mesh on which one fits, best first; the simpler of equally fast ones."""
        on = [found for (choice, _), found in self.families.items() if choice == "mesh"]
        return [found.fastest for found in sorted(on, key=lambda found: found.by_time) if found.fastest]

    def leanest(self) -> Price:
        """The layout that takes the least memory, exact when nothing fits."""
        on = [found for (choice, _), found in self.families.items() if choice == "mesh" and found.leanest]
        leanest = min(on, key=lambda found: found.by_memory).leanest
        assert leanest, "there is a legal mesh, and some layout of it was priced"
        return leanest


def search(
    config: Config,
    workload: Workload,
    cluster: Cluster,
    *,
    tensor_across_hosts: bool = False,
    ask: Pricing | None = None,
) -> Search:
    """Find the fastest layout of every family.

    Args:
        config: the model, and what else the rules of configs look at; its own layout does not matter.
        workload: of a step.
        cluster: to lay out over.
        tensor_across_hosts: whether groups over `tensor` may span hosts. If not, those that would are priced for
            comparison.
        ask: prices and bounds.

    Raises:
        InputError: when no layout can divide the batch, or none with `tensor` inside hosts.
    """
    ask = ask or Pricing()
    space = Space(config, workload, cluster)
    result = Search()
    meshes = space.meshes()
    result.illegal = space.illegal
    crossing = [] if tensor_across_hosts else sorted({t for _, _, t in meshes if not space.inside_host(t)})
    if all(tensor in crossing for _, _, tensor in meshes):
        raise InputError(
            f"{workload.batch_as_given}: every layout on {cluster.devices} devices that divides it "
            f"has groups over tensor that span hosts. Allow them with --tensor-across-hosts, or use a batch of "
            f"{space.nearest_batch(workload.global_batch, inside_hosts=True)} sequences."
        )
    result.compared = {("tensor", tensor) for tensor in crossing}
    look = _Look(space, ask, result)
    look.at(layout for sizes in meshes if sizes[2] not in crossing for layout in space.layouts(sizes))
    look.at(layout for sizes in meshes if sizes[2] in crossing for layout in space.layouts(sizes))
    look.at_gpipe()
    return result


@dataclass
class _Look:
    """Looking at layouts, whose families go into `result`."""

    space: Space
    ask: Pricing
    result: Search

    def at(self, layouts: Iterable[Layout]) -> None:
        """Look at layouts, all of them allowed or all for comparison."""
        light, heavy = [], []
        for layout in layouts:
            least = self.ask.least_memory_bytes(self.space.config.model, layout, self.space.workload)
            if least > self.space.cluster.usable_bytes:
                heavy.append((least, simplicity(layout), layout))
            else:
                light.append((self.ask.least_seconds(*self._about(layout)), simplicity(layout), layout))
        for seconds, _, layout in sorted(light):
            self._time(layout, seconds)
        for least, _, layout in sorted(heavy):
            self._memory(layout, least)

    def at_gpipe(self) -> None:
        """Price the best layout with gpipe, to show why that is not looked at."""
        best = next(iter(self.result.meshes()), None)
        if best and best.layout.pipe > 1:
            gpipe = self.ask.price(*self._about(replace(best.layout, schedule="gpipe")))
            self.result.families["schedule", "gpipe"] = Found(gpipe if gpipe.fits else None, gpipe)

    def _about(self, layout: Layout) -> tuple[ModelConfig, Layout, Workload, Cluster]:
        return self.space.config.model, layout, self.space.workload, self.space.cluster

    def _families(self, layout: Layout) -> list[Found]:
        """What is known of the families of a layout; one that is only for comparison counts for its tensor size."""
        own = ("tensor", layout.tensor)
        names = [own] if own in self.result.compared else families(layout, self.space.workload)
        return [self.result.families.setdefault(name, Found()) for name in names]

    def _price(self, layout: Layout) -> Price:
        price = self.ask.price(*self._about(layout))
        self.result.priced += 1
        simple = simplicity(layout)
        by_time, by_memory = (price.time.total, simple), (price.memory.total, simple)
        for found in self._families(layout):
            found.add(price, by_time, by_memory)
        return price

    def _time(self, layout: Layout, seconds: float) -> None:
        """Price a layout with every algorithm, unless it takes too long for its families."""
        algorithms = self.space.algorithms(layout)
        for algorithm in algorithms:
            variant = replace(layout, algorithm=algorithm)
            if not any(seconds <= found.by_time[0] for found in self._families(variant)):
                self.result.bounded += 1
                continue
            price = self._price(variant)
            if not price.fits:
                self.result.bounded += len(algorithms) - algorithms.index(algorithm) - 1
                return
            seconds = max(seconds, price.time.total - price.time.data)

    def _memory(self, layout: Layout, least: float) -> None:
        """Price a layout that does not fit, where it may be the leanest of a family in which none does."""
        without = [found for found in self._families(layout) if found.fastest is None]
        if any(least <= found.by_memory[0] for found in without):
            self._price(layout)
        else:
            self.result.bounded += len(self.space.algorithms(layout))
