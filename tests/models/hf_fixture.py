"""Tiny Hugging Face checkpoints with what torch computed from them, and their weights in our names and shapes.

Each folder of `tests/fixtures/hf` was written by transformers 5.24: a random model's `config.json` and
`model.safetensors`, logits and hidden states of three sequences (`logits.npz`), and the loss with every parameter's
gradient norm (`reference.json`). The loss is the mean over next tokens whose `attention_mask` is 1.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from jaxpar.config import ModelConfig

FOLDER = Path(__file__).parent.parent / "fixtures" / "hf"
NAMES = sorted(path.name for path in FOLDER.iterdir())

LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.out",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.query attention.key attention.value",
    "attn.c_proj": "attention.out",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}
"""Modules within a layer, by Hugging Face's names; GPT-2's `c_attn` holds three of ours side by side."""
OUTSIDE = {
    "model.embed_tokens": "embedding",
    "model.norm": "norm",
    "lm_head": "lm_head",
    "transformer.wte": "embedding",
    "transformer.wpe": "positions",
    "transformer.ln_f": "norm",
}


@dataclass(frozen=True)
class Place:
    """Where one of Hugging Face's arrays is in our tree.

    Attributes:
        leaves: dotted names; several where ours splits the array along its last dim.
        layer: index in the leading dim of our stacked blocks.
        transposed: theirs is `[out, in]`, ours `[in, out]`.
    """

    leaves: list[str]
    layer: int | None
    transposed: bool


def place(name: str) -> Place:
    """Where an array is, by Hugging Face's name."""
    module, _, kind = name.rpartition(".")
    parts = module.split(".")
    if module in OUTSIDE:
        ours, layer = [OUTSIDE[module]], None
    else:  # model.layers.0.mlp.up_proj, transformer.h.0.mlp.c_fc
        ours, layer = [f"blocks.{m}" for m in LAYER[".".join(parts[3:])].split()], int(parts[2])
    norm = "norm" in ours[0]
    leaf = "scale" if norm and kind == "weight" else kind
    return Place(
        [f"{m}.{leaf}" for m in ours], layer, kind == "weight" and parts[-1].endswith("_proj") and "c_" not in parts[-1]
    )


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

    def grad_norm(self, grads: dict[str, Any], name: str) -> float:
        """The norm of our gradients for one of Hugging Face's arrays."""
        at = place(name)
        parts = [_at(grads, leaf) if at.layer is None else _at(grads, leaf)[at.layer] for leaf in at.leaves]
        return float(np.sqrt(sum(np.sum(np.square(np.asarray(p, np.float64))) for p in parts)))


def _at(tree: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        tree = tree[name]
    return tree


def model_config(hf: dict[str, Any]) -> ModelConfig:
    """A `config.json` as our config; the names are the same, but for GPT-2's. Dropout is off, as in evaluation."""
    old = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
        "activation_function": "hidden_act",
    }
    values = {old.get(key, key): value for key, value in hf.items()}
    values.setdefault("intermediate_size", 4 * values["hidden_size"])
    values["architecture"] = values["model_type"]
    values["rope_theta"] = values.get("rope_parameters", {}).get("rope_theta")
    values["resid_pdrop"] = 0.0
    return ModelConfig.model_validate({key: values[key] for key in ModelConfig.model_fields if key in values})


def our_params(tensors: dict[str, np.ndarray], config: ModelConfig) -> dict[str, Any]:
    """The tree of a `Transformer`: matrices `[in, out]`, layers stacked, the vocabulary padded with zeros."""
    flat: dict[str, Any] = {}
    for name, array in tensors.items():
        at = place(name)
        pieces = np.split(array.T if at.transposed else array, len(at.leaves), axis=-1)
        for leaf, piece in zip(at.leaves, pieces, strict=True):
            if at.layer is not None:
                flat.setdefault(leaf, [None] * config.num_hidden_layers)[at.layer] = piece
            elif len(piece) == config.vocab_size and leaf != "norm.scale":
                flat[leaf] = np.pad(piece, ((0, config.padded_vocab_size - len(piece)), (0, 0)))
            else:
                flat[leaf] = piece
    stacked = {tuple(leaf.split(".")): np.stack(a) if isinstance(a, list) else a for leaf, a in flat.items()}
    return jax.tree.map(np.ascontiguousarray, nnx.traversals.unflatten_mapping(dict(sorted(stacked.items()))))


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
