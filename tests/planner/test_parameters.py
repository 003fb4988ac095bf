"""The list of parameters against the model's own tree, its layouts and its choice of dims for ZeRO."""

import math

import jax
import numpy as np
import pytest
from flax import nnx

from jaxpar.config import ModelConfig, OptimizerConfig
from jaxpar.flops import parameter_count
from jaxpar.layers import specs
from jaxpar.mesh import make_mesh
from jaxpar.models import Transformer
from jaxpar.optimizer import make_optimizer, opt_state_specs
from jaxpar.planner.parameters import block, optimizer_elements, parameters
from jaxpar.zero import Zero

SIZES = {
    "vocab_size": 500,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 20,
}
MODELS = {
    "llama": {},
    "tied": {"architecture": "llama", "tie_word_embeddings": True},
    "biases": {"architecture": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {},
    "gpt2": {},
}


def model_of(name: str) -> ModelConfig:
    return ModelConfig(**{"architecture": name, **SIZES, **MODELS[name]})


def own_tree(model: ModelConfig, data: int, pipe: int, tensor: int):
    """The model's parameters as shapes, their specs, and ZeRO's choice."""
    mesh = make_mesh(data, pipe, tensor, devices=jax.devices()[: data * pipe * tensor])
    abstract = nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0)))
    shapes = nnx.to_pure_dict(nnx.state(abstract, nnx.Param))
    own = specs(abstract, mesh)
    return mesh, shapes, own, Zero.of(1, shapes, own, data)


@pytest.mark.parametrize("name", MODELS)
def test_names_shapes_and_zero_dims(name: str):
    model = model_of(name)
    for data, pipe, tensor in ((2, 1, 4), (3, 2, 1), (4, 1, 1)):
        _, shapes, _, zero = own_tree(model, data, pipe, tensor)
        dims = jax.tree.structure(shapes).flatten_up_to(zero.dims)
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        own = {".".join(key.key for key in path): (p.shape, dim) for (path, p), dim in zip(leaves, dims, strict=True)}
        listed = {}
        for p in parameters(model):
            dim = p.zero_dim(data, pipe, tensor)
            stack = (model.num_hidden_layers,) if p.stacked else ()
            listed[p.name] = (*stack, *p.shape), None if dim is None else dim + len(stack)
        assert listed == own, (data, pipe, tensor)


@pytest.mark.parametrize("name", MODELS)
def test_elements_of_a_device(name: str):
    model = model_of(name)
    for data, pipe, tensor in ((1, 2, 4), (2, 1, 4), (2, 4, 1)):
        mesh, shapes, own, zero = own_tree(model, data, pipe, tensor)
        size = lambda p, spec, mesh=mesh: math.prod(jax.NamedSharding(mesh, spec).shard_shape(p.shape))
        whole = jax.tree.map(size, shapes, own)
        held = block(model, data, pipe, tensor)
        layers = model.num_hidden_layers // pipe
        listed = layers * (held.layer + held.layer_whole) + held.rest + held.rest_whole
        assert listed == sum(jax.tree.leaves(whole))
        split = layers * held.layer_whole + held.rest_whole + (layers * held.layer + held.rest) / data
        assert split == sum(jax.tree.leaves(jax.tree.map(size, shapes, zero.split)))


def test_all_of_them_are_counted():
    model = model_of("llama").model_copy(update={"vocab_multiple": 1})
    layers = model.num_hidden_layers
    assert sum(p.size * (layers if p.stacked else 1) for p in parameters(model)) == parameter_count(model)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon", "sgd"])
def test_elements_of_the_optimizer(optimizer: str, zero: int):
    model = model_of("llama")
    mesh, shapes, own, chosen = own_tree(model, 2, 2, 2)
    own = chosen.split if zero else own
    tx = make_optimizer(OptimizerConfig(name=optimizer, learning_rate=1e-3, decay_steps=2), lambda step: 1e-3)
    state = jax.eval_shape(tx.init, shapes)
    placed = jax.tree.map(
        # Counters and Muon's three coefficients aside.
        lambda s, spec: math.prod(jax.NamedSharding(mesh, spec).shard_shape(s.shape)) if s.size > 3 else 0,
        state,
        opt_state_specs(tx, shapes, own),
    )
    rows = model.num_hidden_layers // 2
    assert optimizer_elements(model, 2, 2, 2, zero, rows, optimizer) == np.sum(jax.tree.leaves(placed))
