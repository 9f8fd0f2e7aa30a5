"""A fast reader of attempts, if msgspec is installed.

`pip install "leakaudit[fast]"` installs it. The reader takes attempts whose text is plain: ASCII without a backslash, numbers of a usual size, and exactly the keys that this version writes. What it
does not take is left to the reader in `usual.py`, so it refuses nothing. `tests/results/test_plain_attempts.py` compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from sys import intern
from typing import Any, TypeVar

from pydantic import BaseModel

from leakaudit.results.schema import Attempt, Measured, Missing, Score, SequenceScore

INSTALLED = find_spec("msgspec") is not None
"""Whether the decoder is there."""

_PLACES = b"|".join(rb'(?<=":%b[0-9]{%d}\.0)' % (sign, n) for n in range(1, 17) for sign in (b"", b"-"))
_WHOLE = re.compile(rb"\.0(?=[,}])(?:" + _PLACES + rb")")
"""The fraction of a whole number after a key."""

_SMALL = re.compile(rb'(?<=":)-?(?:0\.0000[0-9]+|[0-9.]+e-[0-9]+)(?=[,}])')
"""A number that Python writes with an exponent, or in another way than msgspec."""


_CONFUSING = (b'[":', b'{":', b',":', b':":')
"""A text that begins like the end of a key, or a key that ends like the beginning of a text. Without both and without a backslash, a quotation
mark and a colon always end a key, and what follows is a value."""


def read_plain(written: bytes) -> tuple[list[Attempt], bytes] | None:
    """Return attempts, and the text of which their digest is made.

    Args:
        written: attempts in JSON with commas between them.

    Returns:
        The attempts, with equal scores as one object, and their canonical text (`usual.canonical_text`) without the brackets. None if anything is
        not plain, or msgspec is not installed.
    """
    if not INSTALLED or not written.isascii() or b"\\" in written or b"\x7f" in written:
        return None
    from leakaudit.results import plain_rows

    try:
        rows = plain_rows.decode(b"[" + written + b"]")
        made = list(_attempts(rows))
    except (plain_rows.Refused, ValueError):
        return None
    text = plain_rows.encode(rows)[1:-1]
    if text.count(b'"') != written.count(b'"') or any(sign in text for sign in _CONFUSING):
        return None  # a key that occurs twice was read once
    text = _WHOLE.sub(b"", text)
    if b"e-" in text or b":0.0000" in text or b":-0.0000" in text:
        text = _SMALL.sub(lambda number: repr(float(number[0])).encode(), text)
    return made, text


def _attempts(rows: list[Any]) -> Iterator[Attempt]:
    """Yield the models of decoded attempts, in which equal texts are one object.

    Raises:
        ValueError: a key contradicts a score, or a number is also said to be missing.
    """
    known: dict[tuple[float, int], Score] = {}
    for row in rows:
        yield _model(
            Attempt,
            {
                "step": intern(row.step),
                "attack": intern(row.attack),
                "defense": intern(row.defense),
                "seed": row.seed,
                "status": row.status,
                "reason": intern(row.reason),
                "stop": intern(row.stop),
                "adaptive": row.adaptive,
                "granted": row.granted,
                "wall_s": row.wall_s,
                "gpu_s": row.gpu_s,
                "events": row.events,
                "sequences": tuple([_sequence(one) for one in row.sequences]),
                "scores": {name: _measured(one, known) for name, one in row.scores.items()},
                "facts": row.facts,
                "told_by": row.told_by,
                "guess_perplexity": _perplexity(row.guess_perplexity),
                "reachable_tokens": _or_none(row.reachable_tokens, known),
                "reachable_sequences": _or_none(row.reachable_sequences, known),
            },
            _OF_ATTEMPTS,
        )


def _sequence(row: Any) -> SequenceScore:
    scores = row.scores
    get = scores.get
    if (
        row.r1 != get("rouge1")
        or row.r2 != get("rouge2")
        or row.rl != get("rougeL")
        or row.token_recall != get("token_recall")
        or row.token_precision != get("token_precision")
        or row.longest_run_share != get("longest_run")
        or row.exact != get("exact")
    ):
        raise ValueError("a key contradicts a score")
    return _model(
        SequenceScore,
        {
            "id": intern(row.id),
            "hmac": row.hmac,
            "scores": scores,
            "longest_run": row.longest_run,
            "strip": row.strip and intern(row.strip),
            "min_tokens_bucket": intern(row.min_tokens_bucket),
            "long_enough": row.long_enough,
            "own_score": row.own_score,
            "proved": row.proved,
            "reachable": row.reachable,
            "passes": row.passes,
        },
        _OF_SEQUENCES,
    )


def _measured(row: Any, known: dict[tuple[float, int], Score]) -> Measured:
    key = row.value, row.n
    if row.missing is not None:
        if key != (None, None):
            raise ValueError("a number is also missing")
        return Missing(missing=row.missing)
    if (found := known.get(key)) is None:
        if None in key:
            raise ValueError("a number lacks a key")
        found = known[key] = _model(Score, {"value": row.value, "n": row.n}, _OF_SCORES)
    return found


def _or_none(row: Any, known: dict[tuple[float, int], Score]) -> Measured | None:
    return None if row is None else _measured(row, known)


def _perplexity(row: Any) -> float | Missing | None:
    return row if row is None or isinstance(row, float) else Missing(missing=row.missing)


_Model = TypeVar("_Model", bound=BaseModel)

_OF_ATTEMPTS, _OF_SEQUENCES, _OF_SCORES = ({*model.model_fields} for model in (Attempt, SequenceScore, Score))


def _model(kind: type[_Model], values: dict[str, Any], names: set[str]) -> _Model:
    """Return a model of checked values.

    `model_construct` makes the same one in ten times the time.
    """
    made = kind.__new__(kind)
    _set(made, "__dict__", values)
    _set(made, "__pydantic_fields_set__", names)
    _set(made, "__pydantic_extra__", None)
    _set(made, "__pydantic_private__", None)
    return made


_set = object.__setattr__
