"""YAML that is misread is worse than YAML that is refused."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from leakaudit.config.strict_yaml import parse_yaml, read_yaml, validate_mapping
from leakaudit.config.yaml_document import MAX_BYTES
from leakaudit.errors import ConfigError


class Colour(StrEnum):
    """A closed set."""

    RED = "red"
    BLUE = "blue"


class Limit(BaseModel):
    """A nested model."""

    model_config = ConfigDict(extra="forbid")

    max_rate: float = Field(default=0.5, ge=0, le=1)
    names: str | tuple[str, ...] = "any"


class Form(BaseModel):
    """What the tests read."""

    model_config = ConfigDict(extra="forbid")

    title: str
    schema_: str = Field(default="x/1", alias="schema")
    rate: float = 0.0
    count: int = 0
    on_fire: bool = False
    colour: Colour = Colour.RED
    limits: tuple[Limit, ...] = ()
    main: Limit = Limit()


def read(text: str) -> Form:
    return parse_yaml(text, Form, source="form.yaml")


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text)
    return str(caught.value).splitlines()


def test_plain_words_mean_what_they_look_like() -> None:
    """1e-3 is a number, a date and a time are text, red is one of the colours."""
    form = read("title: 2026-11-02\nrate: 1e-3\ncount: 0x1f\non_fire: yes\ncolour: blue\nmain: {names: [1:30, b]}\n")
    assert (form.title, form.rate, form.count, form.on_fire, form.colour) == ("2026-11-02", 0.001, 31, True, "blue")
    assert form.main.names == ("1:30", "b")


@pytest.mark.parametrize("word", ["no", "Yes", "on", "OFF", "true"])
def test_a_word_for_yes_or_no_is_refused_where_text_belongs(word: str) -> None:
    """Norway is not false; the message says to quote it."""
    meaning = "yes" if word.lower() in ("yes", "on", "true") else "no"
    assert problems(f"title: {word}\n") == [
        f'form.yaml:1: title: expected text, but YAML reads {word} as {meaning}; write "{word}" in quotes'
    ]
    assert read(f"title: '{word}'\n").title == word


def test_a_number_is_refused_where_text_belongs() -> None:
    """A version such as 1.10 must not lose its zero."""
    assert problems("title: 1.10\n") == [
        'form.yaml:1: title: expected text, but YAML reads 1.10 as a number; write "1.10" in quotes'
    ]


def test_text_is_refused_where_a_number_belongs() -> None:
    """A quoted number is text."""
    assert problems("title: a\nrate: '0.5'\n") == [
        "form.yaml:2: rate: input should be a valid number, found '0.5'; write 0.5 without quotes"
    ]


def test_an_unknown_key_names_the_nearest_one() -> None:
    """The message has file, line, key and what was probably meant, at any depth."""
    assert problems("title: a\nlimits:\n  - max_rate: 0.1\n  - names: b\n    max_rogue: 0.1\n") == [
        "form.yaml:5: unknown key 'max_rogue'; did you mean 'max_rate'?"
    ]
    assert problems("title: a\nshema: x\n") == ["form.yaml:2: unknown key 'shema'; did you mean 'schema'?"]
    assert problems("title: a\nmain: {zzz: 1}\n") == ["form.yaml:2: unknown key 'zzz'; known keys: max_rate, names"]


def test_the_only_value_is_not_suggested_a_second_time() -> None:
    """The message names it already."""

    class Versioned(BaseModel):
        form: Literal["form/1"]

    with pytest.raises(ConfigError) as error:
        parse_yaml("form: form/2\n", Versioned, "form.yaml")
    assert str(error.value) == "form.yaml:1: form: input should be 'form/1'"


def test_every_problem_is_reported_at_once_in_the_order_of_the_file() -> None:
    """One run of the program is enough to mend the file."""
    found = problems("title: no\nrate: .nan\nrate: 2\nmain:\n  max_rate: 7\ncolour: green\nlimit: []\n")
    assert found == [
        'form.yaml:1: title: expected text, but YAML reads no as no; write "no" in quotes',
        "form.yaml:2: rate: .nan is not a finite number",
        "form.yaml:3: duplicate key 'rate'; line 2 has it already",
        "form.yaml:5: main.max_rate: input should be less than or equal to 1, found 7: it is a share from 0 to 1; did you mean 0.07?",
        "form.yaml:6: colour: input should be 'red' or 'blue'",
        "form.yaml:7: unknown key 'limit'; did you mean 'limits'?",
    ]


def test_a_missing_key_is_named_with_its_place() -> None:
    """A missing key has no line of its own; the place that lacks it is named."""
    assert problems("rate: 1\n") == ["form.yaml:1: key 'title' is missing"]


def test_of_a_unions_alternatives_the_nearest_is_explained() -> None:
    """A list with one bad item is about the item, not about the list being no text."""
    assert problems("title: a\nmain:\n  names:\n    - a\n    - no\n") == [
        'form.yaml:5: main.names[1]: expected text, but YAML reads no as no; write "no" in quotes'
    ]


@pytest.mark.parametrize("word", [".inf", "-.Inf", ".NaN", "1e999"])
def test_numbers_that_are_not_finite_are_refused(word: str) -> None:
    """A limit of infinity switches a rule off."""
    assert problems(f"title: a\nrate: {word}\n") == [f"form.yaml:2: rate: {word} is not a finite number"]


def test_a_leading_zero_must_be_decided() -> None:
    """010 is eight to one reader and ten to the other."""
    assert "starts with 0; write it in quotes for text" in problems("title: a\ncount: 010\n")[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title: a\n\trate: 1\n", r"form.yaml:2: found character '\\t' .*; indent with spaces"),
        ("title: [a\n", "form.yaml:2: expected ',' or ']'"),
        ("title: a\n---\ntitle: b\n", "form.yaml:2: a second document"),
        ("title: a\x00b\n", "form.yaml:1: a character that YAML does not allow"),
        ("- a\n- b\n", "form.yaml:1: expected keys and values, found a list; keys: title, schema"),
        ("# nothing\n", "form.yaml: is empty; expected keys: title, schema"),
        (
            "title: !!python/object/apply:os.system [id]\n",
            "form.yaml:1: tags such as '!!python/object/apply:os.system'",
        ),
        ("title: a\nmain: {<<: {max_rate: 1}}\n", "form.yaml:2: merge keys"),
        ("on: a\ntitle: b\n", "form.yaml:1: the key 'on' means yes, no or nothing in YAML; write it in quotes"),
        ("title: *missing\n", "form.yaml:1: found undefined alias"),
    ],
)
def test_what_cannot_be_read_is_named_by_line(text: str, message: str) -> None:
    """Syntax errors and the parts of YAML that we do not read."""
    with pytest.raises(ConfigError, match=message):
        read(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"k{i}: &k{i} [{'*a,' * 9}]\n" for i in range(9)), "50 aliases"),
        (
            "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 8}]\n" for i in range(1, 6)),
            "too large once its aliases",
        ),
        ("title: &a [*a]\n", "too large once its aliases"),
        ("title: " + "[" * 100 + "]" * 100, "nested more than 30 levels deep"),
        ("title: " + "[" * 50_000, "nested more than 30 levels deep"),
    ],
)
def test_a_bomb_is_refused_before_it_goes_off(text: str, message: str) -> None:
    """Aliases that multiply, refer to themselves or nest without end."""
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_an_anchor_may_be_used_sparingly() -> None:
    """Writing a list once and using it twice is fine."""
    form = read("title: a\nlimits:\n  - names: &both [a, b]\n  - names: *both\n")
    assert [limit.names for limit in form.limits] == [("a", "b"), ("a", "b")]


def test_files_are_read_with_the_same_care(tmp_path: Path) -> None:
    """Missing, binary, oversized and good files."""
    path = tmp_path / "form.yaml"
    with pytest.raises(ConfigError, match=r"form\.yaml: no such file"):
        read_yaml(path, Form)
    os.mkfifo(tmp_path / "pipe")
    for no_file in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):  # a pipe would wait for a writer
        with pytest.raises(ConfigError, match="is not a regular file"):
            read_yaml(no_file, Form)
    path.write_bytes(b"title: a\nrate: \xff\n")
    with pytest.raises(ConfigError, match=r"form\.yaml:2: is not UTF-8 text"):
        read_yaml(path, Form)
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than 256 KiB"):
        read_yaml(path, Form)
    path.write_text("\ufefftitle: a\r\n", encoding="utf-8")
    assert read_yaml(path, Form).title == "a"


def test_parsed_data_is_checked_alike() -> None:
    """A dict from elsewhere gets the same messages without lines."""
    assert validate_mapping({"title": "a", "colour": Colour.BLUE, "limits": ({"names": ("x",)},)}, Form, "options")
    with pytest.raises(ConfigError) as caught:
        validate_mapping({"titel": "a", "rate": float("nan")}, Form, source="options")
    assert str(caught.value).splitlines() == [
        "options: key 'title' is missing",
        "options: rate: nan is not a finite number",
        "options: unknown key 'titel'; did you mean 'title'?",
    ]


@given(st.text(alphabet=":-[]{}&*!|>'\"%@`#,? \n\tab01.e<~", max_size=60))
def test_whatever_the_file_holds_the_error_is_ours(text: str) -> None:
    """No input raises anything but a ConfigError."""
    message = "form.yaml"
    try:
        read(text)
    except ConfigError as error:
        message = str(error)
    assert message.startswith("form.yaml")
