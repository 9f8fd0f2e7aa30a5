"""Every registered defence at drawn knobs, and steps to apply it to."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import assume
from hypothesis import strategies as st

from leakaudit.client.step import ClientStep
from leakaudit.plugins import Defense
from tests.support import tiny

TEXTS = ["the old dog chased a cat .", "a small bird saw the red fish .", "never one horse"]
OTHERS = ["two big trees and a river", "the house found a blue road !", "always on"]

VALUES: dict[Any, tuple[Any, ...]] = {
    float: (0.05, 0.3, 0.5, 0.9, 1.0, 4.0),
    int: (2, 3, 4, 8, 16),
    bool: (False, True),
    str: ("",),
    types.NoneType: (None,),
}
"""Knobs to try by type, for whatever defence is registered; a combination that the defence refuses is left out."""


def _values(kind: Any) -> tuple[Any, ...]:
    """Return what to try for a knob of a type."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(value for part in get_args(kind) for value in _values(part))
    return VALUES[kind]


@st.composite
def at_drawn_knobs(draw: st.DrawFn, kind: type[Defense]) -> Defense:
    """Draw a defence of a class that does something."""
    hints = get_type_hints(kind)
    knobs = {
        field.name: draw(st.sampled_from(_values(hints[field.name])), label=field.name)
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
    }
    try:
        defense = kind(**knobs)
    except ValueError:
        assume(False)
    assume(not defense.error_feedback)  # one step alone cannot be audited
    return defense


def _classified(texts: list[str], labels: list[int]) -> ClientStep:
    return tiny.client_step(tiny.bert(num_labels=3), tiny.bert_tokenizer(), texts, labels)


def _continued(texts: list[str]) -> ClientStep:
    return tiny.client_step(tiny.gpt2_lm(), tiny.gpt2_tokenizer(), texts, task="causal-lm")


STEPS = {
    "classification": (_classified(TEXTS, [0, 1, 2]), _classified(OTHERS, [2, 2, 1])),
    "causal-lm": (_continued(TEXTS), _continued(OTHERS)),
}
"""Task -> a step and one of another batch on the same weights."""
