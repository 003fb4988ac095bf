"""Models built from the layers, and what any other model must provide to be trained the same way."""

from jaxpar.models.protocol import LanguageModel, forward, stack
from jaxpar.models.transformer import Block, Transformer

__all__ = ["Block", "LanguageModel", "Transformer", "forward", "stack"]
