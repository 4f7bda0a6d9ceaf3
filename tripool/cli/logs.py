"""Logs of the command itself: on standard error, as text or as JSON lines, without prompt text.

The processes of a deployment set up their own (`serve.process`), in the same form.
"""

from __future__ import annotations

import logging

from tripool.core.errors import ConfigError
from tripool.serve.process import JsonFormatter

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


def set_up_logs(level: str = "info", form: str = "text") -> None:
    """Send logs of this process to standard error.

    Raises:
        ConfigError: no such level or form.
    """
    if level not in LEVELS:
        raise ConfigError(f"--log-level is {level!r}; known are {', '.join(LEVELS)}")
    if form not in FORMATS:
        raise ConfigError(f"--log-format is {form!r}; known are {', '.join(FORMATS)}")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter("launcher") if form == "json"
                         else logging.Formatter("%(asctime)s %(levelname).1s launcher %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
