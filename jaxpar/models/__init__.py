"""Models built from the layers, and what any other model must provide to be trained the same way."""

from jaxpar.models.check import check_model
from jaxpar.models.facts import Facts, facts_of
from jaxpar.models.protocol import LanguageModel, forward, stack
from jaxpar.models.transformer import Block, Transformer

__all__ = ["Block", "Facts", "LanguageModel", "Transformer", "check_model", "facts_of", "forward", "stack"]
