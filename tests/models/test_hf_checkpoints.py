"""Our model with Hugging Face's weights computes what torch computed, on one device and on a mesh."""

import json
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from jaxpar.config import Config, InputError
from jaxpar.layers import shardings, specs
from jaxpar.losses import cross_entropy
from jaxpar.mesh import VOCAB_AXES, make_mesh
from jaxpar.models import Transformer, forward
from jaxpar.step import build
from tests.models.hf_fixture import FOLDER, NAMES, Fixture, load, model_config, our_params

# Rounding in float32 stays below 1e-5 here; mistakes (a wrong epsilon, the other GELU) start at 7e-4.
LOGITS: dict[str, Any] = dict(rtol=0, atol=1e-4)
# Of a norm: float32 rounding is below 1e-5, mistakes change it by percents.
RELATIVE = 1e-3


class Ran(NamedTuple):
    """What our model computed; loss and gradients of the masked mean."""

    logits: np.ndarray
    loss: float
    grads: dict[str, Any]


@pytest.fixture(scope="module", params=NAMES)
def hf(request: pytest.FixtureRequest) -> Fixture:
    return load(request.param)


def abstract(hf: Fixture) -> Transformer:
    return nnx.eval_shape(lambda: Transformer(hf.config, rngs=nnx.Rngs(0)))


def on_one_device(hf: Fixture) -> Ran:
    """In global view."""
    graph = nnx.graphdef(abstract(hf))

    def loss(params: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits = forward(nnx.merge(graph, params), batch["tokens"])
        total, sums = cross_entropy(logits, batch["targets"], batch["mask"])
        return total / sums["tokens"], logits

    (value, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(hf.params, hf.batch(3))
    return Ran(np.asarray(logits), float(value), grads)


def on_a_mesh(hf: Fixture) -> Ran:
    """By the real program, data 2 × tensor 4: two key and value heads on four devices, three rows on two replicas."""
    mesh, rows = make_mesh(2, 1, 4), 4
    model = abstract(hf)
    graph = nnx.graphdef(model)
    config = Config.from_dict(
        {
            "model": hf.config.model_dump(),
            "mesh": {"data": 2, "tensor": 4},
            "data": {
                "train": ["unused"],
                "tokenizer": "unused.json",
                "sequence_length": hf.arrays["input_ids"].shape[1],
            },
            "optimizer": {"learning_rate": 1.0},
            "train": {"steps": 1, "global_batch": rows, "run_dir": "unused", "compute_dtype": "float32"},
        }
    )
    params = jax.device_put(hf.params, shardings(model, mesh))
    batch = jax.device_put(hf.batch(rows), NamedSharding(mesh, P("data")))
    means, grads = build(config, mesh).loss_and_grads(params, batch, np.int32(0))
    logits = jax.shard_map(
        lambda params, tokens: forward(nnx.merge(graph, params), tokens),
        mesh=mesh,
        in_specs=(specs(model, mesh), P("data")),
        out_specs=P("data", None, VOCAB_AXES[1]),
    )
    return Ran(np.asarray(jax.jit(logits)(params, batch["tokens"]))[:3], float(means["loss"]), jax.device_get(grads))


@pytest.fixture(scope="module", params=[on_one_device, on_a_mesh], ids=lambda run: run.__name__)
def ran(request: pytest.FixtureRequest, hf: Fixture) -> Ran:
    return request.param(hf)


def test_logits(hf: Fixture, ran: Ran):
    vocabulary = hf.config.vocab_size
    np.testing.assert_allclose(ran.logits[..., :vocabulary], hf.arrays["logits_nomask"], **LOGITS)
    np.testing.assert_array_equal(ran.logits[..., vocabulary:], -np.inf)
    # Padding stands at the end, where no token before it looks: no mask is needed to ignore it.
    seen = hf.arrays["attention_mask"] == 1
    np.testing.assert_allclose(ran.logits[seen][:, :vocabulary], hf.arrays["logits_masked"][seen], **LOGITS)


def test_loss(hf: Fixture, ran: Ran):
    assert hf.arrays["loss_masked"] == pytest.approx(hf.loss)
    assert ran.loss == pytest.approx(hf.loss, rel=RELATIVE)


def test_every_gradient_norm(hf: Fixture, ran: Ran):
    got = hf.norms_by_their_names(ran.grads)
    assert got == pytest.approx(hf.grad_norms, rel=RELATIVE)
    # Nothing of ours is left out of the comparison.
    total = float(np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(ran.grads))))
    assert total == pytest.approx(float(np.linalg.norm(list(hf.grad_norms.values()))), rel=RELATIVE)


def test_hidden_states(hf: Fixture):
    """After the embedding and after every block; the last one after the final norm."""
    graph = nnx.graphdef(abstract(hf))

    @jax.jit
    def hidden(params: Any, tokens: jax.Array) -> list[jax.Array]:
        model = nnx.merge(graph, params)
        block, layers = nnx.split(model.blocks)
        states = [model.embed(tokens)]
        for i in range(hf.config.num_hidden_layers):
            layer = nnx.merge(block, jax.tree.map(lambda p, i=i: p[i], layers))
            states.append(model.block(layer, states[-1], None))
        return [*states[:-1], model.norm(states[-1])]

    seen = hf.arrays["attention_mask"] == 1
    for i, got in enumerate(hidden(hf.params, hf.batch(3)["tokens"])):
        np.testing.assert_allclose(np.asarray(got)[seen], hf.arrays[f"hidden_{i}"][seen], err_msg=str(i), **LOGITS)


def hf_json(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name / "config.json").read_text())


def test_both_spellings_of_rotary_positions():
    """transformers 5 has one field, 4 had two; and `type` before `rope_type`."""
    new = hf_json("llama_rope_bias")
    rope = new.pop("rope_parameters")
    old = new | {"rope_theta": rope["rope_theta"], "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"}}
    older = json.loads(json.dumps(old).replace('"rope_type"', '"type"'))
    want = model_config(hf_json("llama_rope_bias"))
    assert model_config(old) == model_config(older) == want
    assert want.rope_scaling is not None and want.rope_scaling.factor == 8 and want.rope_theta == 50
    assert want.attention_bias and want.mlp_bias and want.head_dim == 8 and not want.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 50.0, "factor": 8.0}}, "type yarn is left out"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, "not all layers have it"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"num_experts": 4}, "num_experts = 4"),
        ({"attn_logit_softcapping": 30.0, "residual_multiplier": 2}, "attn_logit_softcapping, residual_multiplier"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "gemma"}, 'model_type "gemma"'),
        ({"hidden_size": None}, "hidden_size missing"),
    ],
)
def test_what_our_models_do_not_have_is_refused_by_name(changes: dict[str, Any], said: str):
    with pytest.raises(InputError, match=said):
        model_config(hf_json("qwen3") | changes)


def test_arrays_that_do_not_fit_the_config_are_refused_by_name():
    tensors = load_file(FOLDER / "qwen3" / "model.safetensors")
    config = model_config(hf_json("qwen3"))
    query = "model.layers.1.self_attn.q_norm.weight"
    others = {name: array for name, array in tensors.items() if name != query}
    cut = others | {query: np.ones(4, np.float32), "model.layers.2.mlp.up_proj.weight": np.ones((48, 32), np.float32)}
    said = r"layers\.2\.mlp\.up_proj\.weight \[48, 32\] is not known; .*q_norm\.weight is \[4\], and .* says \[8\]"
    for wrong, match in ((others, rf"{query} \[8\] is missing"), (cut, said)):
        with pytest.raises(InputError, match=match):
            our_params(wrong, config)
    untied = model_config(hf_json("qwen3") | {"tie_word_embeddings": False})
    with pytest.raises(InputError, match=r"lm_head\.weight \[67, 32\] is missing"):
        our_params(tensors, untied)
    # Saved although it is tied: only as a copy of the table.
    table = tensors["model.embed_tokens.weight"]
    assert our_params(tensors | {"lm_head.weight": table}, config).keys() == our_params(tensors, config).keys()
    with pytest.raises(InputError, match=r"lm_head\.weight \[67, 32\] is not known"):
        our_params(tensors | {"lm_head.weight": table + 1}, config)
