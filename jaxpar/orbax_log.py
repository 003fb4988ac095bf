"""Keeping Orbax's log off the console: what goes wrong there is told in our own words."""

import logging
import os
import sys
from typing import Any


class _NotFromOrbax(logging.Filter):
    """Drops what Orbax logs, progress and tracebacks, and what asyncio logs of Orbax's tasks that nobody waits for."""

    def filter(self, record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname + record.getMessage()


def quieten_orbax() -> None:
    """Keep Orbax's log off the console. `Checkpoints` tells of every error in it, all of which are raised too."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    if not any(isinstance(present, _NotFromOrbax) for present in loggers[0].filters):
        for logger in loggers:
            logger.addFilter(_NotFromOrbax())
        _drop_late_write_errors()


def _drop_late_write_errors() -> None:
    """Keep tracebacks of a full disk off the console.

    After the first write that fails Orbax closes its event loop. TensorStore's threads then cannot tell it of the
    others, and each that fails to is printed by `sys.unraisablehook`.
    """
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.object is not None or repr(unraisable.exc_value) != "RuntimeError('Event loop is closed')":
            before(unraisable)

    sys.unraisablehook = hook
