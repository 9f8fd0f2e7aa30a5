"""Parts of the extra `leakaudit[audit]`, and what to type without them.

Gate, report and history need none of it. Capture and attacks need all of it, and use the torch that is there.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from leakaudit.errors import MissingPartError

OF_AUDIT = {
    "accelerate": "accelerate",
    "blake3": "blake3",
    "numpy": "numpy",
    "psutil": "psutil",
    "rouge_score": "rouge-score",
    "safetensors": "safetensors",
    "scipy": "scipy",
    "tokenizers": "tokenizers",
    "torch": "torch",
    "transformers": "transformers",
}
"""Module -> distribution, for each one of the extra. A test compares them with `pyproject.toml`."""

COMMAND = 'pip install "leakaudit[audit]"'
"""What to type. Where torch is installed, pip leaves it as it is."""

_NEEDED = ("torch", "transformers", *sorted({*OF_AUDIT} - {"torch", "transformers", "accelerate", "blake3"}))
"""What every audit imports, what people know first. Only the Trainer of transformers needs accelerate, and digests do without blake3."""


def require_audit(who: str) -> None:
    """Refuse to go on where a part of an audit is missing.

    Nothing of the parts is imported for that.

    Args:
        who: asks for it, such as `leakaudit.callbacks`.

    Raises:
        MissingPartError: the message names the part and the command to type.
    """
    missing = next((module for module in _NEEDED if not _is_here(module)), None)
    if missing is not None:
        raise MissingPartError(_sentence(who, missing))


def missing_part(error: ImportError, who: str) -> str | None:
    """Return the sentence for an import of a part that is missing.

    None if it failed for another reason, such as a part that is broken.
    """
    if isinstance(error, MissingPartError):
        return str(error)
    top = (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and top in OF_AUDIT and not _is_here(top):
        return _sentence(who, top)
    return None


def _is_here(module: str) -> bool:
    return module in sys.modules or find_spec(module) is not None


def _sentence(who: str, module: str) -> str:
    return f"{who} needs {OF_AUDIT[module]}, which is not installed here: {COMMAND}"
