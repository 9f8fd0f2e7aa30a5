"""Where an attack computes."""

from __future__ import annotations

import torch

from leakaudit.errors import ConfigError


def choose_device(wanted: str) -> torch.device:
    """Return the device for `auto`, `cpu` or `cuda`; `auto` takes a GPU if there is one.

    Raises:
        ConfigError: a GPU was asked for and there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, but torch finds no GPU; use auto or cpu")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)
