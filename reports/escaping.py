"""Escaping of text: active characters are printed as their codes."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from markupsafe import Markup, escape


# ---------------------------------------------------------------------------------------------------------- hostile text
def visible(text: str) -> Markup:
    """Return `text` for HTML, with every active character as its code.

    Active characters have an effect instead of a visible shape: control characters (also in escape sequences), direction marks,
    zero-width characters, lone surrogates and private-use characters. They could reverse the order of a verdict, hide a word or make
    writing fail.
    """
    chip = Markup('<span class="chip">{}</span>')
    return Markup("").join(chip.format(_code(char)) if _acts(char) else escape(char) for char in str(text))


def plain(text: str) -> str:
    """Return `text` with codes for active characters, without any markup.

    It serves HTML attributes, titles, charts and the terminal.
    """
    return "".join(f"[{_code(char)}]" if _acts(char) else char for char in str(text))


_ACTIVE = re.compile(r"([\\`*_\[\]<>#|~@$&]|^[-+])")
"""Characters that Markdown, HTML, mentions or formulas give a meaning, and the beginnings of a list."""


def markdown_text(text: str) -> str:
    r"""Return a text without a meaning for Markdown.

    >>> print(markdown_text("<b> @ann | `x`"))
    \<b\> \@ann \| \`x\`
    """
    return _ACTIVE.sub(r"\\\1", plain(str(text)))


def _acts(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def _code(char: str) -> str:
    return {"\n": "↵", "\t": "⇥"}.get(char, f"U+{ord(char):04X}")


def finalize(value: Any) -> Any:
    """Escape a value that a template prints.

    Raises:
        TypeError: the value is None, which no report may print.
    """
    if value is None:
        raise TypeError("the report was about to print None: say in words what is missing")
    return value if isinstance(value, Markup) or not isinstance(value, str) else visible(value)
