"""The attempts of results.json as msgspec decodes them.

Only `plain_attempts` uses them. The limits are those of `schema.py`, and closer: a number has no exponent, and a whole one at most 15 digits. So what is decoded here fits the schema.
Every key is required, another one is refused, and the names are those of the file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from leakaudit.results.schema import STRIP_CELLS, AttemptStatus

if TYPE_CHECKING:

    class Struct:
        """That of msgspec; types are the same where it is not installed."""

        def __init_subclass__(cls, **options: bool) -> None:
            """Take the options of msgspec."""

else:
    from msgspec import Struct

MOST = 10**15
"""Largest number, so that one without a fraction has no exponent in JSON. Our choice: larger ones do not occur."""

Number = Annotated[float, Meta(ge=-MOST, le=MOST)]
"""A number that is not too large to be written in digits."""

Amount = Annotated[float, Meta(ge=0, le=MOST)]
"""Such a number of 0 or more."""

Share = Annotated[float, Meta(ge=0, le=1)]
"""A number from 0 to 1."""

Whole = Annotated[int, Meta(ge=-MOST, le=MOST)]
"""A whole number."""

Strip = Annotated[str, Meta(pattern=rf"^[0-4a-d]{{{STRIP_CELLS}}}\Z")]
"""As `schema.Strip`."""


class MeasuredRow(Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A `Score` or a `Missing`; `plain_attempts` refuses a mixture."""

    value: Share | None = None
    n: Annotated[int, Meta(ge=1, le=MOST)] | None = None
    missing: str | None = None


class MissingRow(Struct, forbid_unknown_fields=True, gc=False):
    """A `Missing`."""

    missing: str


class SequenceRow(Struct, forbid_unknown_fields=True, gc=False):
    """A `SequenceScore`, with the former keys."""

    id: str
    hmac: str
    scores: dict[str, Share]
    longest_run: Whole | None
    strip: Strip | None
    min_tokens_bucket: str
    long_enough: bool
    own_score: Share | None
    proved: bool
    reachable: Share | None
    passes: bool | None
    r1: Share | None
    r2: Share | None
    rl: Share | None
    exact: bool | None
    token_recall: Share | None
    token_precision: Share | None
    longest_run_share: Share | None


class AttemptRow(Struct, forbid_unknown_fields=True, gc=False):
    """An `Attempt`."""

    step: str
    attack: str
    defense: str
    seed: Whole
    status: AttemptStatus
    reason: str
    stop: str
    adaptive: bool
    granted: tuple[str, ...]
    wall_s: Amount
    gpu_s: Amount
    events: tuple[str, ...]
    sequences: tuple[SequenceRow, ...]
    scores: dict[str, MeasuredRow]
    facts: dict[str, Number]
    told_by: dict[str, Share]
    guess_perplexity: Amount | MissingRow | None
    reachable_tokens: MeasuredRow | None
    reachable_sequences: MeasuredRow | None


decode: Callable[[bytes], list[Any]] = msgspec.json.Decoder(list[AttemptRow]).decode
"""Return the rows in a list of JSON.

Raises:
    msgspec.MsgspecError: they are not as they are described here.
    ValueError: the text is not UTF-8.
"""

encode: Callable[[list[Any]], bytes] = msgspec.json.Encoder(order="sorted").encode
"""Return rows as JSON with sorted keys and without spaces."""

Refused = msgspec.MsgspecError
"""What `decode` raises."""
