"""The model that a Hugging Face `config.json` stands for.

What would change a model's size and has no counterpart here is refused; what changes nothing that a plan counts is left
out, and said. So without such notes, the model section says everything that the file does about what a model computes.
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxpar.config import InputError
from jaxpar.config.architectures import ARCHITECTURES

GPT2 = {
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
"""Our names and those of GPT-2's config."""
ROTARY = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL = (
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "layer_norm_epsilon", "attention_bias",
    "mlp_bias", "tie_word_embeddings", "initializer_range", "rope_theta",
)  # fmt: skip
OTHER_KINDS = {
    "is_encoder_decoder": "a model with an encoder",
    "add_cross_attention": "attention to an encoder",
    "text_config": "a model of several parts; the language model alone is the object text_config",
    "kv_lora_rank": "latent attention",
    "num_nextn_predict_layers": "layers that predict further tokens",
}
"""Fields that change a model's size where they are set, and what they stand for."""
WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
ROPE_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
NO_MATTER = {
    "architectures", "attention_dropout", "attn_pdrop", "bos_token_id", "dtype", "embd_pdrop", "eos_token_id",
    "model_type", "n_ctx", "pad_token_id", "pretraining_tp", "quantization_config", "reorder_and_upcast_attn",
    "resid_pdrop", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "task_specific_params", "torch_dtype", "transformers_version", "unk_token_id", "use_cache",
    "_name_or_path",
}  # fmt: skip
"""Fields that change no logits (token ids, types, dropout, heads of other kinds), and those that are read elsewhere."""
ONLY = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "use_mrope": False}
"""Fields that mean something, and their value in all of jaxpar's models."""


def from_hugging_face(values: Mapping[str, Any], origin: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The model section that a Hugging Face `config.json` stands for, and what was left out.

    Args:
        values: of the file.
        origin: its name, for errors.

    Raises:
        InputError: when the model is of another kind, or fields are missing.
    """
    _refuse_other_kinds(values, origin)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise InputError(f"{origin}: model_type {json.dumps(kind)} must be one of {', '.join(ARCHITECTURES)}.")
    needed = GPT2 if kind == "gpt2" else {name: name for name in ROTARY}
    if kind not in ("gpt2", "llama"):  # Hugging Face's llama has as many as heads by default, the others a number
        needed["num_key_value_heads"] = "num_key_value_heads"
    if missing := [theirs for theirs in needed.values() if values.get(theirs) is None]:
        raise InputError(f"{origin}: {', '.join(missing)} missing, which a {kind} model has.")
    model = {"architecture": kind, **{ours: values[theirs] for ours, theirs in needed.items()}}
    model |= {name: values[name] for name in OPTIONAL if values.get(name) is not None}
    if kind == "gpt2":
        if not isinstance(values["n_embd"], int):
            raise InputError(f"{origin}: n_embd = {json.dumps(values['n_embd'])}: must be a whole number.")
        model["intermediate_size"] = values.get("n_inner") or 4 * values["n_embd"]
        model |= {"hidden_act": values["activation_function"]} if values.get("activation_function") else {}
        return model, _unknown(values, {*needed.values(), *OPTIONAL, "n_inner", "activation_function"})
    if kind == "llama" and values.get("num_key_value_heads") is not None:
        model["num_key_value_heads"] = values["num_key_value_heads"]
    model.setdefault("rms_norm_eps", 1e-6)  # transformers' default in all of them
    if kind == "qwen3":
        model.setdefault("head_dim", 128)  # transformers, Qwen3Config
    notes = _window(model, values, origin) + _rotary(model, values, origin)
    known = {*needed, *OPTIONAL, *WINDOW, "num_key_value_heads", "rope_parameters", "rope_scaling"}
    notes += _unknown(values, known)
    if values.get("quantization_config"):
        notes += ("quantization_config is left out: in training weights have train.param_dtype.",)
    return model, notes


def _refuse_other_kinds(values: Mapping[str, Any], origin: str) -> None:
    """Say of a model that is no dense decoder what makes it another, whatever it calls itself."""
    for name, value in values.items():
        if "expert" in name and isinstance(value, int) and value > 1:
            raise InputError(
                f"{origin}: {name} = {value}: a mixture of experts, which jaxpar does not have; "
                "it plans dense decoders."
            )
    for name, what in OTHER_KINDS.items():
        if values.get(name):
            raise InputError(f"{origin}: {name} is set: {what}, which jaxpar does not have; it plans dense decoders.")


def _unknown(values: Mapping[str, Any], known: set[str]) -> tuple[str, ...]:
    """What is set in the file and read nowhere, by name."""
    other = [name for name, only in ONLY.items() if values.get(name, only) not in (only, None)]
    notes = tuple(f"{name} is left out: in jaxpar it is always {json.dumps(ONLY[name])}." for name in other)
    known = known | NO_MATTER | ONLY.keys() | OTHER_KINDS.keys()
    if unknown := [name for name, value in values.items() if name not in known and value is not None]:
        notes += (f"left out, as jaxpar does not know what they stand for: {', '.join(unknown)}.",)
    return notes


def _window(model: dict[str, Any], values: Mapping[str, Any], origin: str) -> tuple[str, ...]:
    """Put in the sliding window where all layers have it: in jaxpar all do, or none."""
    kind, types = model["architecture"], values.get("layer_types")
    size = values.get("sliding_window", 4096 if kind == "mistral" else None)  # transformers, MistralConfig
    first = 0 if kind == "mistral" else values.get("max_window_layers", 28)  # transformers, Qwen2Config: layers before
    if not isinstance(types or [], list) or not isinstance(first, int):
        raise InputError(f"{origin}: layer_types must be a list, max_window_layers a whole number.")
    if others := sorted({str(name) for name in types or []} - {"full_attention", "sliding_attention"}):
        return (f"layer_types {', '.join(others)} are left out: jaxpar has full_attention and sliding_attention.",)
    if size is None or not values.get("use_sliding_window", kind == "mistral"):
        return ()
    if all(name == "sliding_attention" for name in types) if types else first <= 0:
        model["sliding_window"] = size
        return ()
    return ("sliding_window is left out: in the file not all layers have it, and in jaxpar all do or none.",)


def _rotary(model: dict[str, Any], values: Mapping[str, Any], origin: str) -> tuple[str, ...]:
    """Put in what the file says of rotary positions: transformers 5 keeps it in one field, earlier ones in two."""
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(values.get(name) or {}, dict):
            raise InputError(
                f'{origin}: {name} = {json.dumps(values[name])}: must be an object, as {{"type": "linear"}}.'
            )
    rope = values.get("rope_parameters") or {}
    scaling = values.get("rope_scaling") or rope
    theta = rope.get("rope_theta", model.get("rope_theta"))
    if theta is not None:
        if not isinstance(theta, int | float):
            raise InputError(f"{origin}: rope_theta = {json.dumps(theta)}: must be a number.")
        model["rope_theta"] = float(theta)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    known = {"rope_theta", "rope_type", "type"}
    if kind == "llama3":
        model["rope_scaling"] = {"rope_type": kind} | {name: scaling[name] for name in ROPE_LLAMA3 if name in scaling}
        known.update(ROPE_LLAMA3)
    elif kind != "default":
        return (f"rope_scaling of type {kind} is left out, jaxpar has llama3's only; it changes no time and memory.",)
    if unknown := [name for name, value in {**rope, **scaling}.items() if name not in known and value is not None]:
        return (f"left out of the rotary positions, as jaxpar has no such thing: {', '.join(unknown)}.",)
    return ()
