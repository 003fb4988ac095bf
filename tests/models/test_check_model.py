"""What is refused of a model, each by name and before anything compiles; and what is right after all."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from own_model import FLOAT, D, L, Layer, OwnModel, config

from jaxpar.config import InputError
from jaxpar.layers import VocabParallelEmbedding
from jaxpar.mesh import make_mesh
from jaxpar.models import Transformer, check_model, facts_of, stack
from jaxpar.parameter_server.whole import parameter_shapes
from jaxpar.step import abstract_batch, build

Change = Callable[[Any, nnx.Rngs], None]


def model(change: Change | None = None, layers: int = L, make_layer: Any = Layer, **methods: Any) -> Any:
    """A maker of the model, changed after it is made, or with other methods."""

    def make(rngs: nnx.Rngs) -> nnx.Module:
        made = type("Changed", (OwnModel,), methods)(rngs, layers, make_layer)
        if change:
            change(made, rngs)
        return made

    return make


def layer(change: Change | None = None, call: Any = None) -> Any:
    """Likewise a maker of its layers; `call` gets what the layer gave."""

    class Changed(Layer):
        def __init__(self, rngs: nnx.Rngs) -> None:
            super().__init__(rngs)
            if change:
                change(self, rngs)

        def __call__(self, x: jax.Array, keys_B: jax.Array | None) -> Any:
            y = super().__call__(x, keys_B)
            return call(self, y) if call else y

    return Changed


def sets(**values: Callable[[nnx.Rngs], Any]) -> Change:
    """A change that sets attributes."""

    def change(module: Any, rngs: nnx.Rngs) -> None:
        for name, value in values.items():
            setattr(module, name, value(rngs))

    return change


def unset(name: str) -> Change:
    return lambda module, _: delattr(module, name)


def counts(layer: Any, y: jax.Array) -> jax.Array:
    layer.calls[...] += 1
    return y


def averaged(layer: Any, y: jax.Array) -> jax.Array:
    return layer.bn(y.astype(jnp.float32)).astype(y.dtype)


def blocks(make: Callable[[nnx.Rngs], Any]) -> Change:
    return sets(blocks=make)


def share_out_of_the_stack(made: Any, rngs: nnx.Rngs) -> None:
    made.also = nnx.List([made.blocks.up])


def embedding(rows: int) -> Change:
    return sets(table=lambda rngs: nnx.Embed(rows, D, rngs=rngs, **FLOAT))


def plain_lookup(model: Any, tokens: jax.Array) -> jax.Array:
    return model.table.embedding[tokens]


def hashed(model: Any, tokens: jax.Array) -> jax.Array:
    """Ids beyond the table are meant to share rows."""
    return model.table(tokens % 30) + model.table(jnp.minimum(tokens // 30, 29)) + model.positions[...]


dense = lambda width: lambda rngs: nnx.Linear(D, width, use_bias=False, rngs=rngs, **FLOAT)
by_dense = lambda model, x: model.to_logits(x)

REFUSED: dict[str, tuple[Any, list[str]]] = {
    "more layers": (model(layers=7), ["has 7 layers (the leading dim of blocks.", "num_hidden_layers is 5", "=7"]),
    "fewer layers": (model(layers=3), ["has 3 layers", "model.num_hidden_layers is 5"]),
    "layers that differ": (
        model(sets(blocks=lambda rngs: nnx.Dict(a=stack(Layer, 5, rngs), b=stack(Layer, 4, rngs)))),
        ["leading dims in `blocks`", "blocks.a.down has 5", "blocks.b.down has 4", "jaxpar.models.stack"],
    ),
    "a list of layers": (
        model(blocks(lambda rngs: nnx.List([Layer(rngs) for _ in range(L)]))),
        ["blocks.0.down has 12", "blocks.0.mask has 6", "jaxpar.models.stack"],
    ),
    "a scalar in the stack": (
        model(blocks(lambda rngs: nnx.Dict(a=stack(Layer, 5, rngs), b=nnx.Param(jnp.float64(1))))),
        ["blocks.a.down has 5", "blocks.b has none"],
    ),
    "layers without parameters": (
        model(blocks(lambda rngs: stack(lambda _: nnx.Dropout(0.1), L, rngs))),
        ["`blocks` of the model, Changed, has no parameters"],
    ),
    "no blocks": (model(unset("blocks")), ["Changed, has no `blocks`", "jaxpar.models.stack"]),
    "no head": (
        lambda rngs: type("Headless", (nnx.Module,), {"embed": 0, "block": 0, "blocks": 0})(),
        ["Headless, has no `head`: activations to logits"],
    ),
    "batch statistics": (
        model(make_layer=layer(sets(bn=lambda r: nnx.BatchNorm(D, dtype=jnp.float32, rngs=r, **FLOAT)), averaged)),
        ["blocks.bn.mean (BatchStat) is state that changes", "nnx.RMSNorm"],
    ),
    "Flax's dropout": (
        model(make_layer=layer(sets(drop=lambda r: nnx.Dropout(0.1, rngs=r)), lambda self, y: self.drop(y))),
        ["blocks.drop.rngs.", "(Rng", "keys_B", "jaxpar.layers.dropout"],
    ),
    "streams that are kept": (model(sets(rngs=lambda rngs: rngs)), ["rngs.", "Keep no rngs in a model"]),
    "a counter": (
        model(make_layer=layer(sets(calls=lambda _: nnx.Variable(jnp.int32(0))), counts)),
        ["blocks.calls (Variable) is state that changes", "Compute it from the inputs"],
    ),
    "an array as it is": (
        model(make_layer=layer(sets(rotary=lambda _: jnp.ones(3)))),
        ["blocks.rotary is a JAX array", "nnx.Variable or a NumPy array"],
    ),
    "whole numbers to learn": (
        model(sets(ids=lambda _: nnx.Param(jnp.arange(3, dtype=jnp.int32)))),
        ["parameter ids is int32[3]: only real floating-point numbers"],
    ),
    "complex numbers to learn": (
        model(sets(phase=lambda _: nnx.Param(jnp.ones(3, jnp.complex64)))),
        ["phase is complex64"],
    ),
    "another type of parameters": (
        model(make_layer=layer(sets(extra=lambda r: nnx.Linear(D, D, rngs=r)))),
        ["parameter blocks.extra.bias is float32[5,10], train.param_dtype is float64", "param_dtype=float64"],
    ),
    "a layout of too many dims": (
        model(make_layer=layer(sets(extra=lambda _: nnx.Param(jnp.ones(D, jnp.float64), layout=P(None, "tensor"))))),
        ["parameter blocks.extra: the layout", "is for 2 dims, one layer's array has 1"],
    ),
    "shared with what is outside": (
        model(share_out_of_the_stack),
        ["blocks.up and also.0 are one variable"],
    ),
    "a small table": (model(embedding(30)), ["`embed` looks tokens up in a table of 30 rows, model.vocab_size is 37"]),
    "a small table, indexed": (model(embedding(36), embed=plain_lookup), ["a table of 36 rows"]),
    "our table of other size": (
        model(sets(table=lambda rngs: VocabParallelEmbedding(36, D, multiple=8, rngs=rngs, **FLOAT))),
        ["table is a VocabParallelEmbedding of 36 tokens, model.vocab_size is 37"],
    ),
    "a head of other size": (
        model(sets(to_logits=dense(41)), head=by_dense),
        ["`head` gives float64[8,6,41]", "V 37 or 40", "model.vocab_multiple 8"],
    ),
    "a head that takes the last token": (
        model(head=lambda model, x: OwnModel.head(model, x)[:, -1]),
        ["`head` gives float64[8,37]", "[8,6,V]"],
    ),
    "another width": (
        model(embed=lambda model, tokens: jnp.ones((*tokens.shape, 12))),
        ["a width of 12, model.hidden_size is 10"],
    ),
    "ids as activations": (
        model(embed=lambda model, tokens: tokens),
        ["`embed` gives int32[8,6], must give one array"],
    ),
    "a block that rounds": (
        model(make_layer=layer(call=lambda _, y: y.astype(jnp.float32))),
        ["`block` turns float64[8,6,10] into float32[8,6,10]", "train.compute_dtype, float64"],
    ),
    "a block that rounds in evaluations": (
        model(
            block=lambda model, layer, x, keys_B: layer(x, keys_B).astype(x.dtype if keys_B is not None else "float32")
        ),
        ["into float32[8,6,10]"],
    ),
    "a block that cuts": (model(make_layer=layer(call=lambda _, y: y[:, 1:])), ["into float64[8,5,10]"]),
    "a block that uses what is outside": (
        model(
            sets(shared=lambda r: nnx.Param(jnp.ones(D))),
            block=lambda model, layer, x, keys_B: layer(x, keys_B) * model.shared[...],
        ),
        ["`block` uses the parameter shared", "outside `blocks`"],
    ),
    "a block with two results": (model(make_layer=layer(call=lambda _, y: (y, y))), ["into a tuple"]),
    "our own of other sizes": (
        lambda rngs: Transformer(config(intermediate_size=16).model, param_dtype=jnp.float64, rngs=rngs),
        ["The Transformer has 4,850 parameters", "would have 4,250", "config.model"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str):
    make_model, said = REFUSED[name]
    with pytest.raises(InputError) as refused:
        facts_of(config(), make_model)
    for words in said:
        assert words in str(refused.value), refused.value


FINE: dict[str, Any] = {
    "as it is": model(),
    "a table with room": model(embedding(64), head=lambda model, x: OwnModel.head(model, x)),
    "ids that share rows": model(embedding(30), embed=hashed),
    "a padded head": model(sets(to_logits=dense(40)), head=by_dense),
    "statistics that stay": model(
        sets(bn=lambda r: nnx.BatchNorm(D, use_running_average=True, rngs=r, **FLOAT)),
        head=lambda model, x: OwnModel.head(model, model.bn(x)),
    ),
    "Flax's dropout without streams": model(
        make_layer=layer(sets(drop=lambda _: nnx.Dropout(0.1, deterministic=True)), lambda self, y: self.drop(y))
    ),
}


@pytest.mark.parametrize("name", FINE)
def test_what_fits_is_not_refused(name: str):
    check_model(config(), FINE[name])


def test_activations_may_be_wider_than_the_computation():
    """The blocks decide: what they keep can be carried through layers and stages, whatever `train.compute_dtype` is."""
    built = build(config((1, 2, 1), train={"compute_dtype": "bfloat16"}), make_mesh(1, 2, 1), model())
    built.loss_and_grads.lower(
        built.abstract_state.params,
        abstract_batch(config(), built),
        jnp.int32(0),
    )


@pytest.mark.parametrize("layers", [3, 7])
def test_every_way_to_train_asks(layers: int):
    """A pipeline, which would have trained 5 layers; and parameter servers, before any process starts."""
    settings = config((1, 2, 1))
    with pytest.raises(InputError, match=f"has {layers} layers .* is 5"):
        build(settings, make_mesh(1, 2, 1), model(layers=layers))
    with pytest.raises(InputError, match=f"has {layers} layers .* is 5"):
        parameter_shapes(settings, model(layers=layers))
