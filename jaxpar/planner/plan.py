"""A plan: what was asked, the layouts in their order, and why the others lose; a value that is saved and compared."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from jaxpar.config import Config, InputError, ModelConfig
from jaxpar.planner import limits
from jaxpar.planner.advice import Advice, advise
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.layout import Workload
from jaxpar.planner.memory import PRICED_JAX
from jaxpar.planner.price import Price
from jaxpar.planner.reasons import Rejected, rejected
from jaxpar.planner.remedies import Task, remedies
from jaxpar.planner.search import Pricing, search


@dataclass(frozen=True)
class Plan:
    """A plan; the same inputs give the same one, byte for byte.

    Attributes:
        model: that is laid out.
        workload: of a step.
        cluster: laid out over.
        jax: the version whose compiled programs the memory is that of.
        requested_tokens: of a step, as asked for; None: the config's batch. The workload has the nearest that divides.
        notes: what of the input was changed or left out.
        tensor_across_hosts: whether groups over `tensor` might span hosts.
        ranked: the fastest layout of each mesh, best first, as many as were asked for; none when nothing fits.
        meshes: number of meshes on which some layout fits.
        rejected: the other values of each choice that the best layout makes.
        advice: what the usual advice gives; None when nothing fits.
        nearest: the layout that takes the least memory, when nothing fits.
        remedies: what would make it fit, when nothing fits.
        priced: layouts that were priced.
        bounded: layouts that bounds left out.
    """

    model: ModelConfig
    workload: Workload
    cluster: Cluster
    jax: str
    requested_tokens: int | None
    notes: tuple[str, ...]
    tensor_across_hosts: bool
    ranked: tuple[Price, ...]
    meshes: int
    rejected: tuple[Rejected, ...]
    advice: Advice | None
    nearest: Price | None
    remedies: tuple[str, ...]
    priced: int
    bounded: int

    @property
    def best(self) -> Price | None:
        """The fastest layout that fits."""
        return self.ranked[0] if self.ranked else None

    def to_json(self) -> str:
        """The plan as JSON, with the `total` of each time and memory; `from_json` gives the same plan back."""
        values = _ADAPTER.dump_python(self, mode="json")
        _add_totals(values)
        return json.dumps(values, indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` wrote.

        Raises:
            InputError: when the text is no plan.
        """
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise InputError(f"no plan: {'.'.join(map(str, first['loc']))}: {first['msg']}.") from None


_ADAPTER = TypeAdapter(Plan)


def _add_totals(values: Any) -> None:
    """Put in what programs would have to add up; reading leaves it out."""
    for name, value in values.items() if isinstance(values, dict) else enumerate(values):
        if name in ("memory", "time") and isinstance(value, dict):
            value["total"] = sum(value.values())
        elif isinstance(value, dict | list):
            _add_totals(value)


def make_plan(
    config: Config,
    workload: Workload,
    cluster: Cluster,
    *,
    tensor_across_hosts: bool = False,
    top: int = 10,
    requested_tokens: int | None = None,
    notes: Sequence[str] = (),
    ask: Pricing | None = None,
) -> Plan:
    """Make a plan.

    Args:
        config: the model, and what else the rules of configs look at; its own layout does not matter.
        workload: of a step.
        cluster: to lay out over.
        tensor_across_hosts: whether groups over `tensor` may span hosts.
        top: meshes that are listed.
        requested_tokens: of a step, as asked for, to be kept in the plan.
        notes: on the input, likewise.
        ask: prices and bounds, by default `jaxpar.planner.price`'s.

    Raises:
        InputError: when no layout can divide the batch, or the task is larger than `jaxpar.planner.limits`.
    """
    limits.check_model(config.model)
    limits.check_tokens(workload.tokens_per_step)
    limits.check_devices(cluster.devices, "the cluster")
    ask = ask or Pricing()
    found = search(config, workload, cluster, tensor_across_hosts=tensor_across_hosts, ask=ask)
    meshes = found.meshes()
    best = meshes[0] if meshes else None
    task = Task("as it is", config, workload, cluster, tensor_across_hosts)
    return Plan(
        model=config.model,
        workload=workload,
        cluster=cluster,
        jax=PRICED_JAX,
        requested_tokens=requested_tokens,
        notes=tuple(notes),
        tensor_across_hosts=tensor_across_hosts,
        ranked=tuple(meshes[:top]),
        meshes=len(meshes),
        rejected=rejected(found, best, task, ask),
        advice=advise(found, best, cluster) if best else None,
        nearest=None if best else found.leanest(),
        remedies=() if best else remedies(task, ask),
        priced=found.priced,
        bounded=found.bounded,
    )
