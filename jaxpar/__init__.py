"""jaxpar: train transformer language models over a data × pipe × tensor mesh."""

__version__ = "0.1.0"
