"""Bounds on the numbers in a model's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leakaudit.errors import ModelError
from leakaudit.files.strict_json import read_bounded

MAX_LAYERS = 10_000
"""Most layers of a configuration. Our choice: the deepest public model has about a thousand; for ten million, a configuration class alone
needs 20 s."""

MAX_NUMBER = 10**10
"""Largest whole number in a configuration. Our choice: a thousand times the longest context in use."""

MAX_LABELS = 1_000_000
"""Most classes of a configuration, which has a name for each. Our choice: large label sets have tens of thousands."""

MAX_CONFIG_BYTES = 16 * 1024 * 1024
"""Most bytes of a `config.json`. Our choice: a name for each of many classes takes a few."""


def check_config(path: Path) -> None:
    """Refuse a `config.json` with absurd numbers; one that is missing is accepted.

    Its syntax is not checked strictly: transformers writes `Infinity`.

    Raises:
        ModelError: the file cannot be read, or a number in it is too large. The message names file and key.
    """
    try:
        check_numbers(json.loads(read_bounded(path, MAX_CONFIG_BYTES)))
    except FileNotFoundError:
        return
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        why = str(error) if type(error) is ValueError else type(error).__name__
        raise ModelError(f"{path}: cannot be read as the configuration of a model ({why})") from None


def check_numbers(config: Any, key: str = "") -> None:
    """Refuse numbers that would need much time before a parameter is made.

    Raises:
        ModelError: a number is too large. The message names the key.
    """
    if isinstance(config, Mapping):
        for name, value in config.items():
            check_numbers(value, str(name))
    elif isinstance(config, list | tuple):
        if "layer" in key and len(config) > MAX_LAYERS:
            raise ModelError(f"the configuration lists {len(config)} items in {key!r}; at most {MAX_LAYERS} are read")
        for value in config:
            check_numbers(value, key)
    elif isinstance(config, int) and not isinstance(config, bool):
        most = MAX_LAYERS if "layer" in key else MAX_LABELS if key == "num_labels" else MAX_NUMBER
        if abs(config) > most:
            raise ModelError(
                f"the configuration asks for a {key!r} of more than {most}, which is the most that is read"
            )
