"""What the named architectures differ in beyond sizes."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_new"]


@dataclass(frozen=True)
class Architecture:
    """The traits of one architecture.

    Attributes:
        rotary: rotary positions; otherwise a learned table of them.
        layer_norm: LayerNorm with bias; otherwise RMSNorm.
        gated: the feed-forward layer has a gate.
        qkv_bias: query, key and value always have biases.
        all_bias: every projection always has a bias.
        qk_norm: an RMS norm over each query and key head.
        hidden_act: activation of the feed-forward layer, unless the config names another.
        tied: the head uses the embedding's table, unless the config says otherwise.
    """

    rotary: bool = True
    layer_norm: bool = False
    gated: bool = True
    qkv_bias: bool = False
    all_bias: bool = False
    qk_norm: bool = False
    hidden_act: Activation = "silu"
    tied: bool = False


ARCHITECTURES = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(qk_norm=True),
    "gpt2": Architecture(rotary=False, layer_norm=True, gated=False, all_bias=True, hidden_act="gelu_new", tied=True),
}
