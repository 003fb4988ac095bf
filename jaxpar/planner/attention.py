"""Which attention a plan prices: what a GPU will run."""

from jaxpar.config import Config, ModelConfig, choose_implementation
from jaxpar.planner.layout import Workload

COMPILED_WITH = "`jaxpar compile` for a GPU that is absent uses XLA's attention, and so reports more memory."
"""What to know of a plan with flash attention."""


def attention_of(config: Config) -> str:
    """`"flash"` or `"xla"`: what a config gets on a GPU.

    Example:
        >>> from jaxpar.planner.model import read
        >>> attention_of(read("layers=2,hidden=64,heads=4,ffn=176,vocab=512").config)
        'flash'
    """
    wanted, dtype = config.model.attn_implementation, config.train.compute_dtype
    return "flash" if choose_implementation(wanted, dtype, "gpu")[0] == "cudnn" else "xla"


def attention_in_words(model: ModelConfig, workload: Workload) -> str:
    """Which attention, and why."""
    if workload.attention == "flash":
        return "cuDNN's flash attention"
    why = f"flash attention needs bfloat16, and train.compute_dtype is {workload.compute_dtype}"
    if model.attn_implementation == "xla":
        why = "model.attn_implementation is xla"
    return f"XLA's attention, which writes the scores of all pairs of tokens ({why})"
