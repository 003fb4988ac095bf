"""Fitting the few factors of a machine to measured steps, and judging predictions by measured layouts.

The factors are those of `jaxpar.planner.cluster.Efficiency`, each with its bounds. They are found by robust least
squares on the logarithm of the time of a step, so that a run that something else held up counts little.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np

from jaxpar.config import InputError
from jaxpar.planner.cluster import BOUNDS, Cluster, Efficiency
from jaxpar.planner.layout import Layout
from jaxpar.planner.measured import Row
from jaxpar.planner.price import price
from jaxpar.planner.systems import Foreign, System, foreign_price

FACTORS = ("matmul", "network", "latency", "layer_seconds", "stage_layer_seconds", "step_seconds")
"""The factors that a fit to many layouts finds."""
EAGER = Efficiency(matmul=0.6, latency=25.0, layer_seconds=4e-3, stage_layer_seconds=2e-3, step_seconds=0.02)
"""Where a fit to PyTorch programs starts: every kernel is started by the host."""
NOISE = 0.05
"""Errors of the logarithm above this count linearly and no more in the square."""
MOVES = (0.0, -0.15, 0.15)
"""Where a fit starts: shares of the way from the least to the largest value of each factor, from the given one."""
HELD_UP = 2.0
"""A run that takes this many times the predicted time was held up by something that no layout explains."""


def predict(row: Row, layout: Layout, cluster: Cluster, system: System | None) -> Foreign:
    """Seconds and bytes of one layout of a row, under jaxpar (`system` None) or another system."""
    machines = replace(cluster, hosts=row.hosts)
    if system is not None:
        return foreign_price(row.model, layout, row.workload, machines, system)
    found = price(row.model, layout, row.workload, machines)
    return Foreign(found.time.total, found.memory.total)


def fastest(row: Row, cluster: Cluster, system: System | None) -> tuple[Foreign, Layout]:
    """The fastest of a row's layouts that fits; the one that takes the least memory where none does."""
    found = [(predict(row, layout, cluster, system), layout) for layout in row.layouts]
    fits = [item for item in found if item[0].memory_bytes <= cluster.usable_bytes]
    if fits:
        return min(fits, key=lambda item: item[0].seconds)
    return min(found, key=lambda item: item[0].memory_bytes)


def told(rows: Sequence[Row], cluster: Cluster, system: System | None = None) -> tuple[str, ...]:
    """The factors of `FACTORS` that some measured run feels: runs within one host tell nothing of the network."""
    ran = [row for row in rows if row.seconds]

    def seconds(name: str, value: float) -> list[float]:
        changed = replace(cluster, efficiency=replace(cluster.efficiency, **{name: value}))
        return [fastest(row, changed, system)[0].seconds for row in ran]

    return tuple(name for name in FACTORS if seconds(name, BOUNDS[name][0]) != seconds(name, BOUNDS[name][1]))


def fit(
    rows: Sequence[Row], cluster: Cluster, system: System | None = None, factors: Sequence[str] = FACTORS
) -> Cluster:
    """Find factors by robust least squares, and again without the runs that took `HELD_UP` times as long as that says.

    Args:
        rows: measured; those that did not run are left out.
        cluster: where the fit starts; its hosts are those of each row in turn.
        system: whose programs were measured; None: jaxpar's.
        factors: names in `BOUNDS`; the others stay.

    Returns:
        The cluster with the factors found.

    Raises:
        InputError: when there are fewer rows than factors, or a factor is not known.
    """
    if unknown := [name for name in factors if name not in BOUNDS]:
        raise InputError(f"factor {unknown[0]} is not known. Known: {', '.join(BOUNDS)}.")
    ran = [row for row in rows if row.seconds]
    if len(ran) < len(factors):
        raise InputError(f"{len(ran)} runs that ended cannot tell {len(factors)} factors: {', '.join(factors)}.")
    found = _least_squares(ran, cluster, system, factors)
    others = [row for row in ran if row.seconds and row.seconds < HELD_UP * fastest(row, found, system)[0].seconds]
    return _least_squares(others, found, system, factors) if len(factors) <= len(others) < len(ran) else found


def _least_squares(rows: Sequence[Row], cluster: Cluster, system: System | None, factors: Sequence[str]) -> Cluster:
    from scipy.optimize import least_squares  # takes longer to import than a plan to make

    measured = np.log([row.seconds or np.nan for row in rows])
    low = np.log([max(BOUNDS[name][0], 1e-6) for name in factors])
    high = np.log([BOUNDS[name][1] for name in factors])
    start = np.log([max(getattr(cluster.efficiency, name), 1e-6) for name in factors])

    def machine(x: np.ndarray) -> Cluster:
        """0 to 1: from the least to the largest value of each factor, by its logarithm."""
        values = np.exp(low + x * (high - low)).tolist()
        factors_found = dict(zip(factors, values, strict=True))
        return replace(cluster, efficiency=replace(cluster.efficiency, **factors_found))

    def errors(x: np.ndarray) -> np.ndarray:
        found = machine(x)
        return np.log([fastest(row, found, system)[0].seconds for row in rows]) - measured

    # From several places: a factor that no row feels, as the time to start kernels where all are long, has no
    # derivative. Not from the bounds, where it is lopsided.
    begin = np.clip((start - low) / (high - low), 0.02, 0.98)
    solve = partial(least_squares, errors, bounds=(0, 1), loss="soft_l1", f_scale=NOISE, diff_step=1e-3)
    found = min((solve(np.clip(begin + move, 0.02, 0.98)) for move in MOVES), key=lambda found: found.cost)
    rounded = {name: float(f"{value:.6g}") for name, value in asdict(machine(found.x).efficiency).items()}
    return replace(cluster, efficiency=Efficiency(**rounded))  # as a file holds them


@dataclass(frozen=True)
class Cell:
    """Runs of one model on one number of hosts.

    Attributes:
        name: the model's.
        hosts: number of hosts.
        rows: runs that ended.
        tau: Kendall's τ-b between predicted and measured times.
        regret: 1 − measured speed of the layout that is ranked first / best measured speed. What is predicted not to
            fit ranks behind what is.
        chosen: the layout that is ranked first.
        error: mean of |predicted / measured tokens per second − 1|.
    """

    name: str
    hosts: int
    rows: int
    tau: float
    regret: float
    chosen: Layout
    error: float


@dataclass(frozen=True)
class Evaluation:
    """How good predictions are.

    Attributes:
        rows: runs that ended.
        mean_error: of |predicted / measured tokens per second − 1|.
        median_error: likewise.
        p90_error: its 90th percentile.
        held_up: share of runs that took more than `HELD_UP` times the predicted time.
        mean_error_of_others: mean error without those; 0 where there are no others.
        impossible: share of runs that ended and are predicted not to fit.
        cells: for each model and number of hosts.
    """

    rows: int
    mean_error: float
    median_error: float
    p90_error: float
    held_up: float
    mean_error_of_others: float
    impossible: float
    cells: tuple[Cell, ...]

    @property
    def tau(self) -> float:
        """Mean over cells."""
        return float(np.mean([cell.tau for cell in self.cells]))

    @property
    def regret(self) -> float:
        """Mean over cells."""
        return float(np.mean([cell.regret for cell in self.cells]))


def evaluate(rows: Sequence[Row], cluster: Cluster, system: System | None = None) -> Evaluation:
    """Compare predictions with measured runs.

    Args:
        rows: measured; those that did not run are left out.
        cluster: with its factors; its hosts are those of each row in turn.
        system: whose programs were measured; None: jaxpar's.
    """
    ran = [row for row in rows if row.seconds]
    found = [fastest(row, cluster, system) for row in ran]
    predicted = np.array([prediction.seconds for prediction, _ in found])
    fits = np.array([prediction.memory_bytes <= cluster.usable_bytes for prediction, _ in found])
    measured = np.array([row.seconds for row in ran])
    errors = np.abs(measured / predicted - 1)
    slow = measured > HELD_UP * predicted
    cells = []
    for key in dict.fromkeys((row.name, row.hosts) for row in ran):
        at = np.array([i for i, row in enumerate(ran) if (row.name, row.hosts) == key])
        first = at[np.lexsort((predicted[at], ~fits[at]))[0]]
        cells.append(
            Cell(
                *key,
                rows=len(at),
                tau=kendall_tau(predicted[at], measured[at]),
                regret=float(1 - measured[at].min() / measured[first]),
                chosen=found[first][1],
                error=float(errors[at].mean()),
            )
        )
    return Evaluation(
        rows=len(ran),
        mean_error=float(errors.mean()),
        median_error=float(np.median(errors)),
        p90_error=float(np.quantile(errors, 0.9)),
        held_up=float(slow.mean()),
        mean_error_of_others=float(errors[~slow].mean()) if not slow.all() else 0.0,
        impossible=float(1 - fits.mean()),
        cells=tuple(cells),
    )


def kendall_tau(a: np.ndarray, b: np.ndarray) -> float:
    """Kendall's τ-b, which corrects for ties; 0 where one of them is all ties.

    Example:
        >>> kendall_tau(np.array([1, 2, 3, 4]), np.array([1, 3, 2, 4]))
        0.666...
    """
    signs_a, signs_b = (np.sign(np.subtract.outer(x, x)) for x in (a, b))
    scale = np.sqrt((signs_a**2).sum() * (signs_b**2).sum())
    return float((signs_a * signs_b).sum() / scale) if scale else 0.0
