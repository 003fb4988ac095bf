"""The communication of one tensor-parallel block, read from its compiled program, and what the architectures hold."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.config import ModelConfig
from jaxpar.layers import specs
from jaxpar.mesh import make_mesh
from jaxpar.models import Block, Transformer

B, T, D, F, H, K, WAYS = 3, 12, 16, 24, 8, 6, 4
OPERATION = re.compile(r" = (.*?) (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)\(")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
WHOLE, BLOCK = (B, T, D), (B, T // WAYS, D)


def model(**changes: Any) -> ModelConfig:
    values = {
        "architecture": "llama",
        "vocab_size": 19,
        "vocab_multiple": 8,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": 3,
        "num_attention_heads": H,
        "head_dim": K,
        "max_position_embeddings": T,
    }
    return ModelConfig.model_validate(values | changes)


def collectives(text: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Kind and shape of the result of every collective in a compiled program.

    XLA joins collectives that do not wait for one another into one with several results; each result counts. Dims
    of size 1, which XLA puts and takes as it likes, are left out.
    """
    assert "-start(" not in text, "this compiler splits collectives in two; the pattern here does not know that"
    for results, kind in OPERATION.findall(text):
        for dtype, dims in ARRAY.findall(results):
            assert dtype == "f32"
            yield kind, tuple(int(d) for d in dims.split(",") if d not in ("", "1"))


def bytes_sent(counted: Counter[tuple[str, tuple[int, ...]]]) -> float:
    """Bytes that one of the devices sends for float32 results, with algorithms that send the least."""
    share = (WAYS - 1) / WAYS
    factor = {ALL_REDUCE: 2 * share, ALL_GATHER: share, REDUCE_SCATTER: share * WAYS}
    return sum(n * factor[kind] * 4 * np.prod(shape) for (kind, shape), n in counted.items())


def compiled(config: ModelConfig, sequence_parallel: bool, backward: bool) -> Counter[tuple[str, tuple[int, ...]]]:
    """The collectives of a block on four devices, forward, or forward and backward for weights and input."""
    mesh = make_mesh(tensor=WAYS)
    block = nnx.eval_shape(
        lambda: Block(
            config,
            sequence_parallel=sequence_parallel,
            implementation="xla",
            param_dtype=jnp.float32,
            rngs=nnx.Rngs(0),
        )
    )
    graph = nnx.graphdef(block)
    apply = lambda params, x: nnx.merge(graph, params)(x)

    def both(params: Any, x: jax.Array, w: jax.Array) -> Any:
        y, gradients = jax.vjp(apply, params, x)
        return y, gradients(w)

    layout = specs(block, mesh)
    tokens = P(None, "tensor") if sequence_parallel else P()
    if backward:
        f = jax.shard_map(both, mesh=mesh, in_specs=(layout, tokens, tokens), out_specs=(tokens, (layout, tokens)))
    else:
        f = jax.shard_map(apply, mesh=mesh, in_specs=(layout, tokens), out_specs=tokens)
    x = jax.ShapeDtypeStruct(WHOLE, jnp.float32)
    params = nnx.to_pure_dict(nnx.state(block, nnx.Param))
    return Counter(collectives(jax.jit(f).lower(params, *[x] * (1 + backward)).compile().as_text()))


KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({}, 0),
    "llama with 2 kv heads": ({"num_key_value_heads": 2}, 0),
    "gpt2": ({"architecture": "gpt2"}, 0),
    "qwen3": ({"architecture": "qwen3"}, 2),
}
"""Changes to the model, and the number of its q/k norms."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_adds_twice_forward_and_twice_backward(kind: str):
    """Activations `[B, T, D]` and nothing else, but the gradients of weights that are whole on every device and see
    a part of the work there: q/k norms, which see the device's heads, and kv heads that are copied."""
    config = model(**KINDS[kind][0])
    assert compiled(config, False, backward=False) == {(ALL_REDUCE, WHOLE): 2}
    want = Counter({(ALL_REDUCE, WHOLE): 4})
    if norms := KINDS[kind][1]:
        want[ALL_REDUCE, (K,)] = norms
    if config.num_key_value_heads < WAYS:
        want[ALL_REDUCE, (D, config.num_key_value_heads * K)] = 2
    assert compiled(config, False, backward=True) == want


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_parallel_block_gathers_and_scatters(kind: str):
    """Two pairs each way, in which as many bytes travel as in two all-reduces.

    The gradients of norms and of biases after the sum are added at the end, as each device saw its own tokens: D
    numbers each.
    """
    config = model(**KINDS[kind][0])
    forward = compiled(config, True, backward=False)
    assert forward == {(ALL_GATHER, WHOLE): 2, (REDUCE_SCATTER, BLOCK): 2}
    assert bytes_sent(forward) == bytes_sent(Counter({(ALL_REDUCE, WHOLE): 2})) == 4 * 3 / 4 * B * T * D * 4
    want = Counter({(ALL_GATHER, WHOLE): 4, (REDUCE_SCATTER, BLOCK): 4})
    # Two norms' scales; GPT-2 has two norms' scales and biases, and the biases of `out` and `down`.
    want[ALL_REDUCE, (D,)] = 6 if config.architecture == "gpt2" else 2
    if norms := KINDS[kind][1]:
        want[ALL_REDUCE, (K,)] = norms
    if config.num_key_value_heads < WAYS:
        want[ALL_REDUCE, (D, config.num_key_value_heads * K)] = 2
    assert compiled(config, True, backward=True) == want


LINEAR, BIASED, RMS = {"weight"}, {"weight", "bias"}, {"scale"}
LAYER_NORM = {"scale", "bias"}
NAMES: dict[str, dict[str, set[str]]] = {
    "llama": {"query": LINEAR, "out": LINEAR, "gate": LINEAR, "down": LINEAR, "attention_norm": RMS},
    "mistral": {"query": LINEAR, "out": LINEAR, "gate": LINEAR, "down": LINEAR, "attention_norm": RMS},
    "qwen2": {"query": BIASED, "out": LINEAR, "gate": LINEAR, "down": LINEAR, "attention_norm": RMS},
    "qwen3": {"query": LINEAR, "out": LINEAR, "gate": LINEAR, "query_norm": RMS, "attention_norm": RMS},
    "gpt2": {"query": BIASED, "out": BIASED, "up": BIASED, "down": BIASED, "attention_norm": LAYER_NORM},
}


@pytest.mark.parametrize("architecture", NAMES)
def test_the_weights_of_an_architecture(architecture: str):
    config = model(architecture=architecture)
    params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))))
    blocks = params["blocks"]
    parts = {**blocks["attention"], **blocks["mlp"], **blocks}
    for name, leaves in NAMES[architecture].items():
        assert set(parts[name]) == leaves, name
    assert ("gate" in parts) == (architecture != "gpt2")
    assert ("query_norm" in parts) == (architecture == "qwen3")
    assert ("positions" in params) == (architecture == "gpt2")
    assert ("lm_head" in params) == (architecture != "gpt2")
    assert {p.shape[0] for p in jax.tree.leaves(blocks)} == {3}
    assert params["embedding"]["weight"].shape == (24, D)


def test_what_ends_a_residual_branch_starts_smaller():
    """By the root of the number of branches, six here; GPT-2's rule."""
    config = model(initializer_range=0.5, hidden_size=64, intermediate_size=96)
    blocks = nnx.to_pure_dict(nnx.state(Transformer(config, rngs=nnx.Rngs(0)).blocks))
    for inner, out in (
        (blocks["attention"]["query"], blocks["attention"]["out"]),
        (blocks["mlp"]["up"], blocks["mlp"]["down"]),
    ):
        # Thousands of draws: within 5 standard errors, 5/√(2·9216) = 4 % of the standard deviation.
        assert np.std(inner["weight"]) == pytest.approx(0.5, rel=0.04)
        assert np.std(out["weight"]) == pytest.approx(0.5 / 6**0.5, rel=0.04)
