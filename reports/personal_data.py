"""Classes of personal data that a text shows by its form alone.

Names and places have no form; only a tagger would find them, so the absence of a class says nothing.
"""

from __future__ import annotations

import re

_FORMS = (
    ("e-mail", re.compile(r"[\w.+-]{1,64}\s?@\s?[\w-]{1,63}(?:\s?\.\s?[\w-]{1,63}){1,4}")),
    ("web address", re.compile(r"\b(?:https?\s?:\s?/|www\s?\.)", re.IGNORECASE)),
    ("account number", re.compile(r"\b[A-Z]{2}\d{2}(?:\s?[\dA-Z]{4}){3,7}", re.IGNORECASE)),
    (
        "date",
        re.compile(r"\b(?:\d{4}\s?-\s?\d{1,2}\s?-\s?\d{1,2}|\d{1,2}\s?[./]\s?\d{1,2}\s?[./]\s?(?:19|20)?\d{2})\b"),
    ),
    ("phone or other long number", re.compile(r"(?<![\w.])\+?\d(?:[\s/()-]{0,2}\d){6,14}(?!\w)")),
)
"""Class -> its form. Spaces are allowed around signs, because a tokenizer parts words there."""


def classes_in(text: str) -> list[str]:
    """Return the classes of personal data that a text shows.

    They are in the order of their risk.

    >>> classes_in("mail anna @ example . org or call 0171 5550199")
    ['e-mail', 'phone or other long number']
    """
    return [name for name, form in _FORMS if form.search(text)]
