"""Parts of the extra `leakaudit[audit]`, and what to type without them.

Gate, report and history need none of it. Capture and attacks need all of it, and use the torch that is there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from functools import cache
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


def require_supported(who: str) -> None:
    """Refuse to go on with parts that are older than leakaudit takes.

    Args:
        who: asks for it, such as `leakaudit worker`.

    Raises:
        MissingPartError: the message names the part, its version and the oldest one.
    """
    if why := too_old():
        raise MissingPartError(f"{who}: {why}")


def missing_part(error: ImportError, who: str) -> str | None:
    """Return the sentence for an import of a part that is missing.

    None if it failed for another reason, such as a part that is broken.
    """
    if isinstance(error, MissingPartError):
        return str(error)
    if old := too_old():
        return f"{who}: {old}"
    top = (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and top in OF_AUDIT and not _is_here(top):
        return _sentence(who, top)
    return None


def too_old(modules: Collection[str] = tuple(OF_AUDIT)) -> str:
    """Return a sentence on libraries that are older than leakaudit takes.

    Empty if there is none.

    What it takes is read from the metadata of the installed leakaudit; a checkout without metadata takes everything.

    Args:
        modules: names of modules; those that are not installed are left out.
    """
    found = []
    for module in modules:
        name = OF_AUDIT.get(module, module.replace("_", "-"))
        here, floor = _version(name), floors().get(name)
        if here is not None and floor is not None and numbers(here) < numbers(floor):
            found.append(f"{name} {here} (at least {floor})")
    if not found:
        return ""
    return f"these libraries are older than leakaudit takes: {', '.join(found)}; upgrade them to audit"


@cache
def floors() -> Mapping[str, str]:
    """Return distribution -> oldest version, for leakaudit's requirements."""
    from importlib import metadata

    try:
        lines = metadata.requires("leakaudit") or []
    except metadata.PackageNotFoundError:
        return {}
    pairs = [re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*\(?[^;]*?>=\s*([\d.]+)", line) for line in lines]
    return {pair[1].lower(): pair[2] for pair in pairs if pair is not None}


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, without zeros at the end.

    >>> numbers("2.4.0+cu121"), numbers("4.53.0.dev0") < numbers("4.53.1")
    ((2, 4), True)
    """
    leading = re.match(r"\d+(?:\.\d+)*", version)
    parts = [int(part) for part in leading[0].split(".")] if leading else []
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)


def _version(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _is_here(module: str) -> bool:
    return module in sys.modules or find_spec(module) is not None


def _sentence(who: str, module: str) -> str:
    return f"{who} needs {OF_AUDIT[module]}, which is not installed here: {COMMAND}"
