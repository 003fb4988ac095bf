"""A model that is not ours, with constants, tied parameters and dropout of its own, is the same on every layout."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from own_model import B, D, F, L, OwnModel, config

from jaxpar.layers.dropout import example_keys
from jaxpar.mesh import make_mesh
from jaxpar.names import named
from jaxpar.step import Program, build
from jaxpar.verify import random_batch

STEP = 2
LAYOUTS = {
    "pipeline": ((2, 2, 2), {"microbatches": 2}),  # 5 layers on 2 stages: one row is padding
    "pipeline, ZeRO 3": ((2, 2, 2), {"microbatches": 2, "zero": 3, "remat": "full", "unroll": 2}),
    "ZeRO 2, layer by layer": ((4, 1, 2), {"zero": 2, "remat": "dots"}),
}


@functools.cache
def one_device() -> tuple[Any, Any, Any]:
    """Parameters, and loss and gradients from the model's own methods, one layer after the other."""
    settings = config()
    model = OwnModel(nnx.Rngs(settings.train.seed))
    graph, params, constants = nnx.split(model, nnx.Param, ...)
    batch = random_batch(settings)

    @jax.jit
    @jax.value_and_grad
    def loss_and_grads(params: Any) -> jax.Array:
        model = nnx.merge(graph, params, constants)
        keys_B = example_keys(settings.train.seed, jnp.int32(STEP), jnp.arange(B))
        layer_graph, layers = nnx.split(model.blocks)
        x = model.embed(batch["tokens"])
        for i in range(L):
            keys = jax.vmap(lambda key, i=i: jax.random.fold_in(key, i))(keys_B)
            x = model.block(nnx.merge(layer_graph, jax.tree.map(lambda a, i=i: a[i], layers)), x, keys)
        losses = optax.softmax_cross_entropy_with_integer_labels(model.head(x), batch["targets"])
        return jnp.mean(losses, where=batch["mask"])

    loss, grads = loss_and_grads(params)
    return jax.device_get((nnx.to_pure_dict(params), loss, nnx.to_pure_dict(grads)))


def program(name: str) -> Program:
    layout, parallel = LAYOUTS[name]
    return build(config(layout, parallel=parallel), make_mesh(*layout), OwnModel)


@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradients_equal_one_device(name: str, quick_compiles: None):
    """With dropout, although `model.resid_pdrop` is 0: its masks are the same everywhere."""
    params, want_loss, want = one_device()
    built = program(name)
    state = built.init()
    for got, made in zip(jax.tree.leaves(built.to_saved(state).params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(got, made, rtol=1e-14)
    batch = jax.device_put(random_batch(config()), built.batch_sharding)
    means, grads = built.loss_and_grads(state.params, batch, jnp.int32(STEP))
    np.testing.assert_allclose(means["loss"], want_loss, rtol=1e-12)  # float64, added up in another order
    other = built.loss_and_grads(state.params, batch, jnp.int32(STEP + 1))[0]["loss"]
    assert abs(other - want_loss) > 1e-3 * want_loss  # other masks
    got = named(built.stacking.model_order(jax.device_get(grads)))
    assert got.keys() == named(want).keys()
    for path, g in named(want).items():
        assert np.abs(g).max() > 0, path
        np.testing.assert_allclose(got[path], g, rtol=0, atol=1e-11 * np.abs(g).max(), err_msg=path)


def test_checkpoints_hold_parameters_alone():
    built = program("pipeline")
    names = named(built.saved_state.params)
    assert names.keys() == {
        "out",  # which is the embedding as well
        "blocks/down",
        "blocks/gain",
        "blocks/norm/scale",
        "blocks/up",
        *(f"blocks/mix/layers/{place}/{kind}" for place in (0, 2) for kind in ("bias", "kernel")),
    }
    assert names["blocks/up"].shape == (L, D, F)
    assert built.facts.parameters == sum(a.size for a in names.values())
