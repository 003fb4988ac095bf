"""Which attention a plan prices: what a GPU will run, by the rule of `jaxpar.layers.attention`, without JAX."""

from jaxpar.config import InputError, ModelConfig
from jaxpar.planner.layout import Workload

COMPILED_WITH = "`jaxpar compile` for a GPU that is absent uses XLA's attention, and so reports more memory."
"""What to know of a plan with flash attention."""


def choose_attention(wanted: str, compute_dtype: str) -> str:
    """`"flash"` or `"xla"`: cuDNN's flash attention is for bfloat16 only.

    Args:
        wanted: `model.attn_implementation`.
        compute_dtype: `train.compute_dtype`.

    Raises:
        InputError: when cuDNN is asked for where it cannot run.

    Example:
        >>> choose_attention("auto", "bfloat16"), choose_attention("auto", "float32")
        ('flash', 'xla')
    """
    if wanted == "cudnn" and compute_dtype != "bfloat16":
        raise InputError(
            f"model.attn_implementation cudnn: cuDNN flash attention needs bfloat16, and train.compute_dtype is "
            f"{compute_dtype}. Use auto or xla."
        )
    return "flash" if wanted != "xla" and compute_dtype == "bfloat16" else "xla"


def attention_in_words(model: ModelConfig, workload: Workload) -> str:
    """Which attention, and why."""
    if workload.attention == "flash":
        return "cuDNN's flash attention"
    why = f"flash attention needs bfloat16, and train.compute_dtype is {workload.compute_dtype}"
    if model.attn_implementation == "xla":
        why = "model.attn_implementation is xla"
    return f"XLA's attention, which writes the scores of all pairs of tokens ({why})"
