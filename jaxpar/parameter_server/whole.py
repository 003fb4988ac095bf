"""The whole state of a run with parameter servers: cut over servers, and put together for checkpoints.

In async mode a step is several updates, and servers count updates: counters are turned on the way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxpar.config import Config, MeshConfig, ParallelConfig
from jaxpar.mesh import make_mesh
from jaxpar.models import check_model
from jaxpar.names import Named, like, named
from jaxpar.parameter_server.server import updates_per_step
from jaxpar.parameter_server.slices import Slice, Slices, assemble, cut, take, take_state
from jaxpar.step import MakeModel, Program, build, model_maker


class Whole:
    """The whole state of a run, by name, and how it is cut over servers.

    Args:
        config: of the run.
        make_model: builds the model.

    Attributes:
        program: of the run on one device, for shapes and initial values.
        slices: what each server owns.
    """

    def __init__(self, config: Config, make_model: MakeModel | None = None) -> None:
        alone = {"mesh": MeshConfig(devices=1), "parallel": ParallelConfig()}
        mesh = make_mesh(devices=jax.devices("cpu")[:1])
        self.program: Program = build(config.of_one_worker().model_copy(update=alone), mesh, make_model)
        self.params: Named = named(self.program.saved_state.params)
        self.opt_state: Named = named(self.program.saved_state.opt_state)
        self.slices = slices_of(config, self.params, self.program.padding)
        self._per_step = updates_per_step(config)

    def parts(self, state: Any) -> list[tuple[Named, Named]]:
        """Each server's parameters and optimizer state."""
        count = lambda steps: steps * self._per_step
        params, opt_state = named(state.params), _counted(named(state.opt_state), count)
        return [(take(params, slices), take_state(opt_state, self.params, slices)) for slices in self.slices]

    def state(self, parts: Sequence[tuple[Named, Named]], step: int, skipped: int, in_a_row: int) -> Any:
        """The state of which servers have these parts, as checkpoints hold it."""
        saved, counter = self.program.saved_state, lambda number: np.asarray(number, np.int32)
        params, opt_state = (
            assemble(shapes, self.params, list(zip(self.slices, kind, strict=True)))
            for shapes, kind in zip((self.params, self.opt_state), zip(*parts, strict=True), strict=True)
        )
        return saved._replace(
            step=counter(step),
            params=like(saved.params, params),
            opt_state=like(saved.opt_state, _counted(opt_state, lambda updates: updates // self._per_step)),
            skipped=counter(skipped),
            skipped_in_a_row=counter(in_a_row),
        )


def parameter_shapes(config: Config, make_model: MakeModel | None = None) -> Named:
    """Shapes of a run's parameters by name, for which no device of JAX has to start; the model is checked."""
    model = check_model(config, make_model or model_maker(config, "cpu"))
    return named(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def slices_of(
    config: Config, params: Mapping[str, Any], padding: Mapping[str, int] | None = None
) -> tuple[Slices, ...]:
    """What each server of a run owns.

    Args:
        config: of the run.
        params: its parameters, arrays or shapes.
        padding: how many rows at the end of a parameter fill it up, by name.

    Raises:
        InputError: more servers than parameters.
    """

    def filled(s: Slice) -> Slice:
        real = params[s.name].shape[0] - (padding or {}).get(s.name, 0)
        return replace(s, padding=s.stop - min(max(real, s.start), s.stop))

    parts = cut(params, config.parameter_server.servers, by_rows=config.optimizer.name != "adafactor")
    return tuple(tuple(filled(s) for s in part) for part in parts)


def _counted(opt_state: Named, turn: Callable[[Any], Any]) -> Named:
    """Counters of updates turned into counters of steps, or back: in async mode a step is several updates."""
    is_count = lambda name, leaf: np.issubdtype(leaf.dtype, np.integer) and name.endswith("count")
    return {name: turn(np.asarray(leaf)) if is_count(name, leaf) else leaf for name, leaf in opt_state.items()}
