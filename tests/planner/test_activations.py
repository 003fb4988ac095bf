"""What a layer keeps, against the leaves of JAX's own backward function in block view."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.config import ModelConfig
from jaxpar.layers import specs
from jaxpar.mesh import TENSOR, make_mesh
from jaxpar.models import Transformer
from jaxpar.models.protocol import cast, checkpointed
from jaxpar.planner.activations import kept

LAYERS, SEQUENCES, TOKENS = 3, 2, 64


def kept_by_jax(model: ModelConfig, tensor: int, remat: str, sequence_parallel: bool, dtype: str) -> int:
    """Bytes of the leaves that are stacked by layer and are no parameters, on one device."""
    mesh = make_mesh(tensor=tensor, devices=jax.devices()[:tensor])
    abstract = nnx.eval_shape(lambda: Transformer(model, sequence_parallel=sequence_parallel, rngs=nnx.Rngs(0)))
    graph, found = nnx.graphdef(abstract.blocks), []

    def run(blocks, x):
        blocks = cast(blocks, dtype)
        layer = checkpointed(lambda x, p: abstract.block(nnx.merge(graph, p), x, None), remat, in_scan=True)
        y, pull = jax.vjp(lambda blocks, x: jax.lax.scan(lambda x, p: (layer(x, p), None), x, blocks)[0], blocks, x)
        own = jax.tree.leaves(blocks)
        found.extend(leaf for leaf in jax.tree.leaves(pull) if not any(leaf is p for p in own))
        return y

    spread = P(None, TENSOR) if sequence_parallel else P()
    stacked = specs(abstract, mesh)["blocks"]
    shapes = nnx.to_pure_dict(nnx.state(abstract, nnx.Param))["blocks"]
    x = jax.ShapeDtypeStruct((SEQUENCES, TOKENS, model.hidden_size), dtype)
    jax.eval_shape(jax.shard_map(run, mesh=mesh, in_specs=(stacked, spread), out_specs=spread), shapes, x)
    per_layer = [leaf for leaf in found if leaf.ndim > 1 and leaf.shape[0] == LAYERS]
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in per_layer)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize(
    ("architecture", "tensor", "sequence_parallel", "dtype"),
    [
        ("llama", 1, False, "bfloat16"),
        ("llama", 2, False, "float32"),
        ("llama", 2, True, "bfloat16"),
        ("llama", 8, False, "bfloat16"),  # more devices than key and value heads
        ("gpt2", 2, True, "bfloat16"),
        ("qwen3", 2, False, "bfloat16"),
    ],
)
def test_layer(architecture: str, tensor: int, sequence_parallel: bool, dtype: str, remat: str):
    model = ModelConfig(
        architecture=architecture,
        vocab_size=64,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8 if architecture == "gpt2" else 4,
        max_position_embeddings=TOKENS,
    )
    found = kept(model, TOKENS, dtype, 1, tensor, remat, sequence_parallel, attention="xla").layer
    expected = kept_by_jax(model, tensor, remat, sequence_parallel, dtype) / LAYERS / SEQUENCES
    # Left out are scales of norms in float32 and the slice of replicated heads, at these sizes 1.5%. Of gelu_new's six
    # factors jax 0.12 keeps five.
    assert found == pytest.approx(expected, rel=0.06 if architecture == "gpt2" else 0.02)


ONE_LAYER = ModelConfig(
    architecture="llama",
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
)


def test_flash_keeps_no_pairs():
    layer = lambda tokens, attention: kept(ONE_LAYER, tokens, "bfloat16", 1, 1, "none", False, attention).layer
    assert layer(256, "flash") == 2 * layer(128, "flash")
    assert layer(256, "xla") - layer(256, "flash") == 4 * 256 * (256 * (4 + 2) + 4)  # a softmax's second number


def test_what_a_backward_holds():
    model = ONE_LAYER.model_copy(update={"num_key_value_heads": 2})
    of = lambda remat, attention: kept(model, 256, "bfloat16", 1, 1, remat, False, attention)
    hidden, weights = 6 * 2 * 256 * 128, 6 * 256 * 256 * 4
    assert (of("none", "flash").work, of("none", "xla").work) == (hidden, weights)
    assert of("full", "flash").work == of("dots", "flash").work == of("none", "flash").layer
    assert of("full", "xla").work == 2 * weights + hidden // 2
    copied = {(r, a): of(r, a).reordered for r in ("none", "full") for a in ("xla", "flash")}
    assert copied == {
        ("none", "xla"): 4 * 256 * 256 * 4,
        ("none", "flash"): 0,
        ("full", "xla"): 0,
        ("full", "flash"): 0,
    }
    # Heads of their own, or all in one group, need no other order.
    for groups in (1, 4):
        ungrouped = model.model_copy(update={"num_key_value_heads": groups})
        assert kept(ungrouped, 256, "bfloat16", 1, 1, "none", False, "xla").reordered == 0
