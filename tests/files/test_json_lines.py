"""Files of JSON lines: the end of a line, and messages on unreadable ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import pytest

from leakaudit.audit.simulation.texts import read_examples
from leakaudit.cli import main
from leakaudit.config.simulation import MAX_CLASSES
from leakaudit.errors import DataError
from leakaudit.files import json_lines
from leakaudit.plugins.prior_loading import read_texts
from leakaudit.results.journal import JournalEntry, Sample, load_journal
from tests.support import factories

BREAKS = ("\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e")
"""What `str.splitlines` takes for the end of a line, and JSON does not."""

GOOD = json.dumps({"text": "the old dog", "label": 1})


def _file(folder: Path, content: str | bytes, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return path


@pytest.mark.parametrize("mark", BREAKS[:3], ids=ascii)
def test_a_unicode_line_break_stands_inside_a_text(tmp_path: Path, mark: str) -> None:
    """JSON allows these unescaped in a string; they are part of the text."""
    text = f"the old{mark}dog"
    path = _file(tmp_path, json.dumps({"text": text, "label": 0}, ensure_ascii=False) + "\n" + GOOD + "\n")
    assert [example.text for example in read_examples(path, "classification")] == [text, "the old dog"]
    assert read_texts(path) == [text, "the old dog"]


@pytest.mark.parametrize("mark", BREAKS, ids=ascii)
def test_the_journal_reads_what_it_wrote(tmp_path: Path, mark: str) -> None:
    """A recovered token may be any character."""
    sample = Sample(
        step="st-000000", attack="span", defense="none", sequence="s-0", true_pattern="b", guess_pattern="b",
        true_tokens=(f"a{mark}b",),
    )  # fmt: skip
    entry = JournalEntry(attempt=factories.attempt(0), samples=(sample,))
    path = _file(tmp_path, 2 * (entry.model_dump_json() + "\n"), "journal.jsonl")
    assert load_journal(path) == [entry, entry]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + '\n{"text": "chased \\ud800 horse", "label": 1}\n', r"rows\.jsonl:2: .*half of a surrogate pair"),
        (GOOD + "\n" + '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n", r"rows\.jsonl:2: .*nested too deeply"),
        (GOOD + '\n{"text": "chased", "label": ' + "9" * 5000 + "}\n", r"rows\.jsonl:2: .*a number with too many digits"),
        (GOOD + '\n{"text": "chased", "label": 1000000000000000000}\n', r"rows\.jsonl:2: .*class from 0 to 99,999"),
        (GOOD + f'\n{{"text": "chased", "label": {MAX_CLASSES}}}\n', r"rows\.jsonl:2: .*renumber"),
        (GOOD + '\n{"text": "chased", "label": -1}\n', r"rows\.jsonl:2: .*a negative number"),
        (GOOD + '\n{"text": "chased", "label": 1.0}\n', r"rows\.jsonl:2: .*found float"),
        (GOOD + '\n{"text": "chased", "label": true}\n', r"rows\.jsonl:2: .*found bool"),
        (GOOD + '\n{"text": "chased", "label": 1e400}\n', r"rows\.jsonl:2: .*found float"),
        (GOOD.encode() + b'\n{"text": "chased \xff", "label": 1}\n', r"rows\.jsonl:2: is not UTF-8"),
        (GOOD + '\n{"\\ud800": "chased"}\n', r"rows\.jsonl:2: looked for the field 'text'"),
        (b"", r"rows\.jsonl: holds no rows"),
        (b"\xef\xbb\xbf\r\n \r\n", r"rows\.jsonl: holds no rows"),
    ],
    ids=[
        "lone surrogate", "deep", "huge number", "1e18", "one too many", "negative", "float", "bool", "infinite",
        "not UTF-8", "lone surrogate in a name", "empty", "blank",
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, content: str | bytes, message: str) -> None:
    """By file and number, without a word of it, in text that every terminal can print."""
    path = _file(tmp_path, content)
    with pytest.raises(DataError, match=message) as caught:
        read_examples(path, "classification")
    assert "chased" not in str(caught.value)
    str(caught.value).encode("utf-8")


def test_a_byte_order_mark_and_carriage_returns_are_no_part_of_a_row(tmp_path: Path) -> None:
    """Files of other systems have both."""
    path = _file(tmp_path, b"\xef\xbb\xbf" + f"{GOOD}\r\n\r\n{GOOD}\r\n".encode())
    assert [example.text for example in read_examples(path, "classification")] == ["the old dog"] * 2
    assert read_texts(path) == ["the old dog"] * 2


@pytest.mark.parametrize("content", ['{"text": "chased \\udfff"}\n', "[" * 100_000, '{"text": 5}\n'])
def test_a_prior_is_as_careful_with_its_texts(tmp_path: Path, content: str) -> None:
    """The same reader, the same words."""
    with pytest.raises(DataError, match=r"rows\.jsonl:1: ") as caught:
        read_texts(_file(tmp_path, content))
    assert "chased" not in str(caught.value)


def test_data_is_a_regular_file_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device has no end, and a pipe waits for a writer."""
    os.mkfifo(tmp_path / "rows.jsonl")
    for path in (tmp_path / "rows.jsonl", Path("/dev/zero"), tmp_path):
        with pytest.raises(DataError, match="is not a regular file"):
            read_texts(path)
    monkeypatch.setattr(json_lines, "MAX_DATA_BYTES", 1024)
    with pytest.raises(DataError, match="is larger than 1 KiB; is it the right file"):
        read_texts(_file(tmp_path, "a dog.\n" * 200, "a.txt"))


def test_a_plain_text_may_hold_any_line_break(tmp_path: Path) -> None:
    """There a Unicode line break does end a line of text."""
    assert read_texts(_file(tmp_path, "One dog.\u2028Two dogs. Three.\r\n", "a.txt")) == [
        "One dog.",
        "Two dogs.",
        "Three.",
    ]


def test_the_option_and_the_data_have_the_same_bound_on_classes() -> None:
    """The command line is read before torch is loaded, so it has a number of its own."""
    (option,) = [parameter for parameter in main.commands["simulate"].params if parameter.name == "num_labels"]
    assert isinstance(option.type, click.IntRange) and option.type.max == MAX_CLASSES
