"""Which attention kernel a config gets on which devices."""

from typing import Literal

from jaxpar.config.errors import InputError

Implementation = Literal["xla", "cudnn"]


def choose_implementation(wanted: str, compute_dtype: str, platform: str) -> tuple[Implementation, str]:
    """Which attention kernel runs, and why; never changed afterwards.

    Args:
        wanted: `"auto"`, `"xla"` or `"cudnn"`.
        compute_dtype: dtype of the activations.
        platform: of the devices, as JAX names it: `"gpu"`, `"cpu"`, `"tpu"`.

    Raises:
        InputError: when cuDNN is asked for where it cannot run.

    Example:
        >>> choose_implementation("auto", "bfloat16", "cpu")
        ('xla', 'cuDNN flash attention needs a GPU, and the devices are cpu')
    """
    obstacle = None
    if platform not in ("gpu", "cuda"):
        obstacle = f"cuDNN flash attention needs a GPU, and the devices are {platform}"
    elif compute_dtype != "bfloat16":
        obstacle = f"cuDNN flash attention needs bfloat16, and train.compute_dtype is {compute_dtype}"
    if wanted == "xla":
        return "xla", "as configured"
    if wanted == "cudnn" and obstacle:
        raise InputError(f"model.attn_implementation cudnn: {obstacle}. Use auto or xla.")
    if obstacle:
        return "xla", obstacle
    return "cudnn", "as configured" if wanted == "cudnn" else "flash attention on a GPU in bfloat16"
