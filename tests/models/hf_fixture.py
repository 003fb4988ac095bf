"""Tiny Hugging Face checkpoints with what torch computed from them, and their weights in our names and shapes.

Each folder of `tests/fixtures/hf` was written by transformers (its README says how): a random model's `config.json` and
`model.safetensors`, logits and hidden states of three sequences (`logits.npz`), and the loss with every parameter's
gradient norm (`reference.json`). The loss is the mean over next tokens whose `attention_mask` is 1.

Nothing of a checkpoint is passed over: a field of `config.json` that our models have no counterpart of, and an array
too many, too few or of another shape, are errors that name it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from jaxpar.config import InputError, ModelConfig
from jaxpar.models import Transformer
from jaxpar.planner.hugging_face import from_hugging_face

FOLDER = Path(__file__).parent.parent / "fixtures" / "hf"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))

ROTARY = {
    "embedding": "model.embed_tokens",
    "blocks.attention_norm": "model.layers.{}.input_layernorm",
    "blocks.attention.query": "model.layers.{}.self_attn.q_proj",
    "blocks.attention.key": "model.layers.{}.self_attn.k_proj",
    "blocks.attention.value": "model.layers.{}.self_attn.v_proj",
    "blocks.attention.query_norm": "model.layers.{}.self_attn.q_norm",
    "blocks.attention.key_norm": "model.layers.{}.self_attn.k_norm",
    "blocks.attention.out": "model.layers.{}.self_attn.o_proj",
    "blocks.mlp_norm": "model.layers.{}.post_attention_layernorm",
    "blocks.mlp.gate": "model.layers.{}.mlp.gate_proj",
    "blocks.mlp.up": "model.layers.{}.mlp.up_proj",
    "blocks.mlp.down": "model.layers.{}.mlp.down_proj",
    "norm": "model.norm",
    "lm_head": "lm_head",
}
GPT2 = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "blocks.attention_norm": "transformer.h.{}.ln_1",
    "blocks.attention.query": "transformer.h.{}.attn.c_attn",
    "blocks.attention.key": "transformer.h.{}.attn.c_attn",
    "blocks.attention.value": "transformer.h.{}.attn.c_attn",
    "blocks.attention.out": "transformer.h.{}.attn.c_proj",
    "blocks.mlp_norm": "transformer.h.{}.ln_2",
    "blocks.mlp.up": "transformer.h.{}.mlp.c_fc",
    "blocks.mlp.down": "transformer.h.{}.mlp.c_proj",
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
}
"""Our modules and Hugging Face's, `{}` the layer; GPT-2's `c_attn` holds three of ours side by side, in this order."""


@dataclass(frozen=True)
class Place:
    """Where one of Hugging Face's arrays is in our tree.

    Attributes:
        leaves: dotted names; several where ours splits the array along its last dim.
        layer: index in the leading dim of our stacked blocks.
        transposed: theirs is `[out, in]`, ours `[in, out]`.
        shape: theirs.
    """

    leaves: list[str]
    layer: int | None
    transposed: bool
    shape: tuple[int, ...]


def _modules(config: ModelConfig) -> dict[str, str]:
    return ROTARY if config.traits.rotary else GPT2


def places(config: ModelConfig) -> dict[str, Place]:
    """Every array of a model, by Hugging Face's name, and where it is in ours."""
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    ours = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    found: dict[str, Place] = {}
    for ours_module, theirs_module in _modules(config).items():
        for leaf in [name for name in ours if name.rpartition(".")[0] == ours_module]:
            shape, kind = ours.pop(leaf), leaf.rpartition(".")[2]
            stacked = ours_module.startswith("blocks.")
            # torch's Linear is [out, in]; a table is [rows, width] in both, and GPT-2's Conv1D [in, out]
            transposed = stacked and config.traits.rotary and kind == "weight"
            if stacked:
                shape = shape[:0:-1] if transposed else shape[1:]
            elif ours_module in ("embedding", "lm_head"):
                shape = (config.vocab_size, *shape[1:])
            for layer in range(config.num_hidden_layers) if stacked else [None]:
                name = f"{theirs_module.format(layer)}.{'weight' if kind == 'scale' else kind}"
                before = found.get(name)
                leaves, width = ([*before.leaves, leaf], before.shape[-1]) if before else ([leaf], 0)
                found[name] = Place(leaves, layer, transposed, (*shape[:-1], width + shape[-1]))
    assert not ours, f"no Hugging Face name for {', '.join(ours)}"
    return found


@dataclass(frozen=True)
class Fixture:
    """One checkpoint.

    Attributes:
        config: its sizes.
        params: its weights as our models hold them, float32.
        arrays: `input_ids`, `attention_mask`, `logits_nomask`, `logits_masked`, `hidden_0`, ...
        loss: as torch computed it.
        grad_norms: by Hugging Face's names.
    """

    config: ModelConfig
    params: dict[str, Any]
    arrays: dict[str, np.ndarray]
    loss: float
    grad_norms: dict[str, float]

    def batch(self, rows: int) -> dict[str, np.ndarray]:
        """Tokens, next tokens and mask, filled up to `rows` with rows in which nothing counts."""
        ids, seen = self.arrays["input_ids"], self.arrays["attention_mask"]
        shifted = lambda x: np.pad(x[:, 1:], ((0, 0), (0, 1)))
        filled = lambda x: np.pad(x, ((0, rows - len(x)), (0, 0)))
        return {
            "tokens": filled(ids).astype(np.int32),
            "targets": filled(shifted(ids)).astype(np.int32),
            "mask": filled(shifted(seen)) == 1,
        }

    def norms_by_their_names(self, grads: dict[str, Any]) -> dict[str, float]:
        """The norms of our gradients, for each of Hugging Face's arrays."""
        flat = {".".join(path): leaf for path, leaf in nnx.traversals.flatten_mapping(grads).items()}
        parts = lambda at: [flat[leaf] if at.layer is None else flat[leaf][at.layer] for leaf in at.leaves]
        norm = lambda at: float(np.sqrt(sum(np.sum(np.square(np.asarray(p, np.float64))) for p in parts(at))))
        return {name: norm(at) for name, at in places(self.config).items()}


def model_config(hf: Mapping[str, Any]) -> ModelConfig:
    """A `config.json` as our config, without dropout, as in evaluation.

    Raises:
        InputError: when something in it has no counterpart in our models.
        ValidationError: when a value is none that our models have.
    """
    model, left_out = from_hugging_face(hf, "config.json")
    if left_out:
        raise InputError(f"config.json: {' '.join(left_out)}")
    return ModelConfig.model_validate(model)


def our_params(tensors: Mapping[str, np.ndarray], config: ModelConfig) -> dict[str, Any]:
    """The tree of a `Transformer`: matrices `[in, out]`, layers stacked, the vocabulary padded with zeros.

    Raises:
        InputError: when an array is missing, or is not known, or has another shape than the config says.
    """
    expected = places(config)
    head, table = "lm_head.weight", f"{_modules(config)['embedding']}.weight"
    if config.tie_word_embeddings and head in tensors and np.array_equal(tensors[head], tensors.get(table, ())):
        tensors = {name: array for name, array in tensors.items() if name != head}  # a copy that nobody reads
    if problems := list(_problems(tensors, expected)):
        raise InputError("model.safetensors: " + "; ".join(problems))
    stacks: dict[str, list[np.ndarray]] = {}  # places are in the order of layers
    for name, at in expected.items():
        array = tensors[name].T if at.transposed else tensors[name]
        for leaf, piece in zip(at.leaves, np.split(array, len(at.leaves), axis=-1), strict=True):
            stacks.setdefault(leaf, []).append(piece)
    padding = ((0, config.padded_vocab_size - config.vocab_size), (0, 0))
    flat = {
        tuple(leaf.split(".")): np.stack(arrays) if leaf.startswith("blocks.") else arrays[0]
        for leaf, arrays in stacks.items()
    }
    flat |= {path: np.pad(array, padding) for path, array in flat.items() if path[0] in ("embedding", "lm_head")}
    return jax.tree.map(np.ascontiguousarray, nnx.traversals.unflatten_mapping(dict(sorted(flat.items()))))


def _problems(tensors: Mapping[str, np.ndarray], expected: Mapping[str, Place]) -> Iterator[str]:
    for name in sorted(expected.keys() - tensors.keys()):
        yield f"{name} {list(expected[name].shape)} is missing"
    for name in sorted(tensors.keys() - expected.keys()):
        yield f"{name} {list(tensors[name].shape)} is not known"
    for name in sorted(expected.keys() & tensors.keys()):
        if tensors[name].shape != expected[name].shape:
            yield f"{name} is {list(tensors[name].shape)}, and the config says {list(expected[name].shape)}"


def load(name: str) -> Fixture:
    """Read a checkpoint by its folder's name."""
    folder = FOLDER / name
    config = model_config(json.loads((folder / "config.json").read_text()))
    reference = json.loads((folder / "reference.json").read_text())
    with np.load(folder / "logits.npz") as arrays:
        return Fixture(
            config,
            our_params(load_file(folder / "model.safetensors"), config),
            dict(arrays),
            reference["loss"],
            reference["grad_norms"],
        )
