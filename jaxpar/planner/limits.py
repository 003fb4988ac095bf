"""How large a task may be: beyond, a search would take minutes and more, and no machine is near it."""

from jaxpar.config import InputError

DEVICES = 2**17
LAYERS = 2000
TOKENS = 2**36


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


def check_layers(layers: int) -> None:
    """Refuse a deeper model than a plan is made for.

    Raises:
        InputError: naming the bound.
    """
    if layers > LAYERS:
        raise InputError(f"model.num_hidden_layers {layers:,}: a plan is for at most {LAYERS:,} layers.")
