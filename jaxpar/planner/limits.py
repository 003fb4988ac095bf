"""How large a task may be: beyond, a search would take minutes and more, and no machine is near it."""

from jaxpar.config import InputError, ModelConfig

DEVICES = 2**17
LAYERS = 2000
TOKENS = 2**36
WIDTH = 2**24


def check_devices(devices: int, where: str) -> None:
    """Refuse more devices than a plan is made for.

    Raises:
        InputError: naming the bound.
    """
    if devices > DEVICES:
        raise InputError(f"{where}: {devices:,} devices: a plan is for at most 2^17, {DEVICES:,}.")


def check_tokens(tokens: int) -> None:
    """Refuse a larger step than a plan is made for.

    Raises:
        InputError: naming the bound.
    """
    if tokens > TOKENS:
        raise InputError(f"{tokens:,} tokens a step: a plan is for at most 2^36, {TOKENS:,}.")


def check_model(model: ModelConfig) -> None:
    """Refuse a deeper or wider model than a plan is made for.

    Raises:
        InputError: naming the bound.
    """
    if model.num_hidden_layers > LAYERS:
        raise InputError(
            f"model.num_hidden_layers {model.num_hidden_layers:,}: a plan is for at most {LAYERS:,} layers."
        )
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings"):
        if (size := getattr(model, name)) > WIDTH:
            raise InputError(f"model.{name} {size:,}: a plan is for at most 2^24, {WIDTH:,}.")
