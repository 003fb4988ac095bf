"""Why the others lose, each with its number: what the rules refuse, what does not fit, what is slower."""

from dataclasses import dataclass, replace

from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.price import Price
from jaxpar.planner.remedies import Task
from jaxpar.planner.search import Pricing, Search
from jaxpar.planner.space import Family, families
from jaxpar.planner.words import longer, mesh, too_much

CHOICES = ("data", "pipe", "tensor", "zero", "schedule", "microbatch", "remat", "sequence parallel", "algorithm")


GPIPE = "schedule", "gpipe"
"""The one family of which a single layout is priced: the best one, with this schedule."""


@dataclass(frozen=True)
class Rejected:
    """A value of a choice that the best layout does not have.

    Attributes:
        choice: as in `jaxpar.planner.space.families`.
        value: of the choice.
        and_above: the same holds for all greater values.
        reason: why it loses, with its number.
        price: of the fastest layout that has the value; where none fits, of the one that takes the least memory; for
            gpipe of the best layout with it; None where a rule of configs refuses it.
    """

    choice: str
    value: int | str
    and_above: bool
    reason: str
    price: Price | None


def rejected(found: Search, best: Price | None, task: Task, ask: Pricing) -> tuple[Rejected, ...]:
    """Say of every other value why it is not the best one's.

    Replicas are spoken of only where a rule refuses them or memory does, since pipe and tensor decide how many there
    are.

    Args:
        found: by the search.
        best: the fastest layout; None when nothing fits, and then only values that do not fit are spoken of.
        task: that was searched.
        ask: prices and bounds.
    """
    own = families(best.layout, task.workload) if best else []
    rows = []
    for choice in CHOICES:
        names = {family for family in (*found.families, *found.illegal) if family[0] == choice} - set(own)
        of_choice = []
        for family in sorted(names, key=lambda family: (isinstance(family[1], str), family[1])):
            if family in found.illegal:
                of_choice.append(Rejected(*family, False, found.illegal[family], None))
                continue
            price = found.families[family].fastest or found.families[family].leanest
            assert price, "every family has a layout that was priced"
            if not price.fits or (best and choice != "data"):
                of_choice.append(Rejected(*family, False, _reason(family, price, best, found, task, ask), price))
        fitting = [value for (name, value), at in found.families.items() if name == choice and at.fastest]
        if best or choice == "microbatch":
            of_choice = _folded(of_choice, fitting)
        elif len(of_choice) == 1:  # there was nothing to choose
            continue
        rows += of_choice
    return tuple(rows)


def _reason(family: Family, price: Price, best: Price | None, found: Search, task: Task, ask: Pricing) -> str:
    """Why a family loses, whose fastest layout or nearest to fit is priced."""
    said = ""
    if family[0] == "tensor" and task.cluster.per_host % int(family[1]):
        said = "crosses hosts" + (" (only with --tensor-across-hosts); " if family in found.compared else "; ")
    if family == GPIPE:
        said = "all else equal, "
    if not best or not price.fits:
        least = "" if family == GPIPE else "at least "
        return f"{said}{least}{too_much(price.memory, task.cluster.usable_bytes)}"
    if (alone := _alone(family, best.layout, task.workload)) and alone != price.layout:
        changed = ask.price(task.config.model, alone, task.workload, task.cluster)
        usable = task.cluster.usable_bytes
        why = longer(changed.time, best.time) if changed.fits else too_much(changed.memory, usable)
        said += f"all else equal, {why}; at best "
    on = "" if mesh(price.layout) == mesh(best.layout) else f", on {mesh(price.layout)}"
    return f"{said}{longer(price.time, best.time)}{on}"


def _alone(family: Family, best: Layout, workload: Workload) -> Layout | None:
    """The best layout with nothing but one value changed, where that is always legal."""
    choice, value = family
    if choice == "microbatch":
        count, rest = divmod(workload.global_batch, best.data * int(value))
        return None if rest or not count else replace(best, microbatches=count)
    if choice == "remat" or (choice in ("zero", "algorithm") and best.data > 1):
        return replace(best, **{choice: value})
    return None


def _folded(rows: list[Rejected], fitting: list[int | str]) -> list[Rejected]:
    """Of greater and greater numbers that are all refused, or all too large, one stands for all: the nearest to fit.

    Numbers below one that fits, the best layout's or another's, are not among them.
    """
    refused = lambda row: row.price is None
    most = max((value for value in fitting if isinstance(value, int)), default=0)
    beyond = lambda row: isinstance(row.value, int) and row.value > most
    while len(rows) > 1 and beyond(rows[-2]) and beyond(rows[-1]) and refused(rows[-1]) == refused(rows[-2]):
        nearest = min(rows[-2:], key=lambda row: row.price.memory.total if row.price else 0)
        rows = [*rows[:-2], replace(nearest, value=rows[-2].value, and_above=True)]
    return rows
