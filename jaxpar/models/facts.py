"""What a model has, read off the model itself and not off the config that describes it."""

import math
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxpar.config import Config, InputError
from jaxpar.flops import flops_per_token, parameter_count
from jaxpar.layers import padding
from jaxpar.layers.layout import STACK
from jaxpar.models.check import MakeModel, check_model
from jaxpar.models.transformer import Transformer


class Facts(NamedTuple):
    """What a model has.

    Attributes:
        model: its parameters are shapes, its constants arrays: what `jaxpar.models.protocol.run` takes.
        ours: it is the `Transformer` that the config's model section describes.
        name: the architecture's; of a model that is not ours its class's.
        parameters: how many numbers are learned; rows that only fill up a vocabulary are left out.
        flops_per_token: of training. Of a model that is not ours 6 for each weight in the blocks' matrices and in a
            head of width × vocabulary: what it takes to multiply by each of them once, forward and backward. What our
            own has besides, attention's scores and weighted values, is not known of it.
    """

    model: Any
    ours: bool
    name: str
    parameters: int
    flops_per_token: int


def facts_of(config: Config, make_model: MakeModel) -> Facts:
    """Check a model, and read off what it has.

    Args:
        config: resolved.
        make_model: builds the model, a `LanguageModel`, from random number streams.

    Raises:
        InputError: see `check_model`; or a `Transformer` is not the one that the config describes.
    """
    model, sizes = check_model(config, make_model), config.model
    shapes = {path: param.shape for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    filled = padding(model)
    rows_of_padding = lambda path: filled.get("/".join(map(str, path)), 0)
    parameters = sum(math.prod(shape) - rows_of_padding(path) * math.prod(shape[1:]) for path, shape in shapes.items())
    ours = type(model) is Transformer
    if ours and parameters != parameter_count(sizes):
        raise InputError(
            f"The Transformer has {parameters:,} parameters, that of the config's model section would have "
            f"{parameter_count(sizes):,}. Build it from config.model."
        )
    # In a stack matrices have three dims.
    matrices = sum(math.prod(shape) for path, shape in shapes.items() if path[0] == STACK and len(shape) > 2)
    multiplied = 6 * (matrices + sizes.hidden_size * sizes.vocab_size)
    return Facts(
        model=_with_constants(model, make_model, config.train.seed),
        ours=ours,
        name=sizes.architecture if ours else type(model).__name__,
        parameters=parameters,
        flops_per_token=flops_per_token(sizes, config.data.sequence_length) if ours else multiplied,
    )


def _with_constants(model: Any, make_model: MakeModel, seed: int) -> Any:
    """The model with values for all that is no parameter, as its maker makes them from the seed."""
    graph, params, constants = nnx.split(model, nnx.Param, ...)
    if not jax.tree.leaves(constants):
        return model
    made = jax.jit(lambda: nnx.state(make_model(nnx.Rngs(seed)), nnx.Not(nnx.Param)))()
    return nnx.merge(graph, params, jax.device_get(made))
