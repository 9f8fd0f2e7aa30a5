"""Data files of several formats give the same examples."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from leakaudit.audit.simulation.examples import Example, Fields, read_data
from leakaudit.audit.simulation.tables import content_of
from leakaudit.audit.simulation.texts import Simulator
from leakaudit.cli import main
from leakaudit.config.simulation import Simulation
from leakaudit.errors import DataError, ModelError
from tests.support import tiny

MAIL = Fields("body", "kind")
ROWS: list[dict[str, Any]] = [
    {"body": "the old dog, a horse", "kind": "spam"},
    {"body": 'a "red" cat\nand a bird', "kind": "ham"},
    {"body": "", "kind": "ham"},
    {"body": "à chat", "kind": "urgent"},
]
FOUND = (Example("the old dog, a horse", 1), Example('a "red" cat\nand a bird', 0), Example("à chat", 2))
_QUOTED = 'body{0}kind\n"the old dog, a horse"{0}spam\n"a ""red"" cat\nand a bird"{0}ham\n{0}ham\nà chat{0}urgent\n'


def _file(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "form"),
    [
        ("mail.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS), "JSONL"),
        ("mail.json", json.dumps(ROWS, indent=1), "JSON"),
        ("mail.txt", json.dumps(ROWS), "JSON"),
        ("mail.csv", _QUOTED.format(","), "CSV"),
        ("mail.csv", "\ufeff" + _QUOTED.format(";"), "CSV"),
        ("mail.TSV", _QUOTED.format("\t"), "TSV"),
    ],
)
def test_every_text_format_gives_the_same_examples(tmp_path: Path, name: str, content: str, form: str) -> None:
    """Names of classes are numbered in sorted order.

    The empty text is left out and counted.
    """
    read = read_data(_file(tmp_path, name, content), "classification", MAIL)
    assert (read.rows, read.form, read.classes, read.empty) == (FOUND, form, ("ham", "spam", "urgent"), 1)


@pytest.mark.parametrize("ending", ["parquet", "arrow", "feather"])
def test_files_of_pyarrow_give_the_same_examples(tmp_path: Path, ending: str) -> None:
    """The content decides, not the ending."""
    arrow = pytest.importorskip("pyarrow")
    table, path = arrow.Table.from_pylist(ROWS), tmp_path / f"mail.{ending}.data"
    if ending == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        kind = arrow.ipc.new_file if ending == "feather" else arrow.ipc.new_stream
        with kind(str(path), table.schema) as writer:
            writer.write_table(table)
    read = read_data(path, "classification", MAIL)
    assert (read.rows, read.form) == (FOUND, "Parquet" if ending == "parquet" else "Arrow")
    damaged = _file(tmp_path, "damaged", path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"damaged: is damaged: (Parquet|Arrow) cannot be read"):
        read_data(damaged, "classification", MAIL)


def test_a_folder_of_datasets_gives_the_same_examples(tmp_path: Path) -> None:
    """Several files are joined in the order of the rows.

    A folder of splits names them.
    """
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(tmp_path / "mail", num_shards=2)
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(tmp_path / "both")
    read = read_data(tmp_path / "mail", "classification", MAIL)
    assert (read.rows, read.form, read.empty) == (FOUND, "a folder of datasets", 1)
    assert len(content_of(tmp_path / "mail")) > 100
    with pytest.raises(DataError, match=r"both: holds the splits test, train; give the folder of one"):
        read_data(tmp_path / "both", "classification", MAIL)


def test_without_pyarrow_its_files_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no dependency."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"is a file of Parquet, which needs the package pyarrow: `python -m pip"):
        read_data(_file(tmp_path, "mail.parquet", b"PAR1....PAR1"), "classification", MAIL)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            "sentence,class\nsecret,1\n",
            r"a\.csv:2: looked for the field 'body' .* found class, sentence; did you mean 'sentence'",
        ),
        (
            "a.csv",
            "bodies,kind\nsecret,1\n",
            r"found bodies, kind; did you mean 'bodies'\? Name it: --text-field bodies",
        ),
        (
            "a.csv",
            "body,kinds\nsecret,1\n",
            r"the field 'kind' .* Found the fields body, kinds; .* --label-field kinds",
        ),
        (
            "a.csv",
            "body,x\nsecret,1\n",
            r"the field 'kind' .* Found the fields body, x; name the right one with --label-field",
        ),
        ("a.csv", "body,kind\nsecret,secret,1\n", r"a\.csv:2: has 3 cells, and the header names 2"),
        ("a.csv", "body,kind\nsecret,spam\nsecret,\n", r"a\.csv:3: .* found nothing"),
        ("a.csv", "body,kind\nsecret,-1\n", r"a\.csv:2: .* a negative number"),
        ("a.csv", "body,body\nsecret,-1\n", r"a\.csv:1: the header names a field twice"),
        ("a.csv", "body,kind\n", r"a\.csv: holds no rows$"),
        ("a.csv", "body,kind\n ,1\n", r"a\.csv: holds no rows with a text$"),
        ("a.csv", b"body,kind\nsecret \xe9,1\n", r"a\.csv: is not UTF-8"),
        ("a.json", '[{"body": "secret"}, 7]', r"a\.json:2: the item of the JSON array is not an object; found int"),
        ("a.json", '[{"body": "secret"', r"a\.json:1: is not JSON"),
        ("a.csv.gz", b"\x1f\x8b\x08secret", r"is packed \(gzip\); unpack it"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    """By row and field, never by its content."""
    with pytest.raises(DataError, match=message) as caught:
        read_data(_file(tmp_path, name, content), "classification", MAIL)
    assert "secret" not in str(caught.value).replace(str(tmp_path), "")


def test_whole_numbers_of_a_format_without_types_are_the_classes(tmp_path: Path) -> None:
    """Sorted as texts, 10 would come before 2."""
    path = _file(tmp_path, "a.csv", "text,label\none,10\ntwo,2.0\n")
    read = read_data(path, "classification")
    assert ([row.label for row in read.rows], read.classes) == ([10, 2], ())


def test_a_second_file_has_the_numbers_of_the_first(tmp_path: Path) -> None:
    """The evaluation of a frontier may miss a class, and must not have another one."""
    first = read_data(_file(tmp_path, "a.csv", _QUOTED.format(",")), "classification", MAIL)
    second = read_data(_file(tmp_path, "b.csv", "body,kind\na dog,urgent\n"), "classification", MAIL, first)
    assert second.rows == (Example("a dog", 2),)
    for labels, message in (("other", "a label that no row of --data has"), ("1", "a label that no row")):
        with pytest.raises(DataError, match=message):
            read_data(_file(tmp_path, "c.csv", f"body,kind\na dog,{labels}\n"), "classification", MAIL, first)
    numbers = read_data(_file(tmp_path, "d.csv", "body,kind\na dog,1\n"), "classification", MAIL)
    with pytest.raises(DataError, match="its labels are texts, and those of --data are numbers"):
        read_data(tmp_path / "b.csv", "classification", MAIL, numbers)
    with pytest.raises(DataError, match="its labels are numbers, and those of --data are texts"):
        read_data(_file(tmp_path, "e.jsonl", '{"body": "a", "kind": 1}'), "classification", MAIL, first)


def test_names_of_classes_are_printed_without_what_a_terminal_executes(tmp_path: Path) -> None:
    """And not at all where output is kept."""
    read = read_data(_file(tmp_path, "a.csv", "text,label\none,\x1b[31mred\ntwo,blau\n"), "classification")
    [form, classes] = read.notices(Path("a.csv"), names=True)
    assert form == "a.csv: read as CSV, 2 rows"
    assert classes.endswith(r"as 2 classes: \x1b[31mred = 0, blau = 1")
    assert "blau" not in "".join(read.notices(Path("a.csv"), names=False))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with a classifier of three classes."""
    folder = tmp_path_factory.mktemp("model")
    tiny.bert(num_labels=3, seed=1).save_pretrained(folder)  # type: ignore[operator]
    tiny.bert_tokenizer().save_pretrained(folder)
    return folder


def test_a_stored_classifier_keeps_its_number_of_classes(tmp_path: Path, model: Path) -> None:
    """Data with two of its three classes fit.

    Data with a fourth do not, and another number is refused by name.
    """
    two = _file(tmp_path, "two.csv", "text,label\nthe old dog,0\na cat,1\n")
    made = Simulator(Simulation(model, two, steps=1))
    assert made.model.config.num_labels == 3  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="do not fit a head of 2 classes; the model has 3 classes: add --num-labels 3"):
        Simulator(Simulation(model, two, num_labels=2))
    four = _file(tmp_path, "four.csv", "text,label\nthe old dog,0\na cat,3\n")
    with pytest.raises(
        DataError, match=r"has a label 3, and the classifier in .* has 3 classes: its labels go from 0 to 2"
    ):
        Simulator(Simulation(model, four))


def test_the_names_of_fields_are_part_of_what_an_audit_depends_on(tmp_path: Path, model: Path) -> None:
    """Another field is another audit."""
    path = _file(tmp_path, "a.csv", "text,label,other\nthe old dog,0,1\na cat,1,0\n")
    what = Simulation(model, path, steps=1)
    assert Simulator(what).digest != Simulator(replace(what, label_field="other")).digest


@pytest.mark.parametrize("ci", ["", "true"])
def test_simulate_prints_the_numbers_of_classes_once(
    tmp_path: Path, model: Path, ci: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the terminal, not in CI, and never in results or report."""
    monkeypatch.setenv("CI", ci)
    data = _file(tmp_path, "a.csv", "body,kind\nthe old dog,zebrafish\na cat,aardvark\nthe house,aardvark\n")
    out = tmp_path / "out"
    options = ["--text-field", "body", "--label-field", "kind", "--attacks", "idlg", "--controls", "0", "--steps", "2"]
    done = CliRunner().invoke(
        main, ["simulate", "--model", str(model), "--data", str(data), "--out", str(out), *options]
    )
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count("aardvark = 0, zebrafish = 1") == (0 if ci else 1)
    assert done.stderr.count("numbered in sorted order as 2 classes") == 1
    for file in ("results.json", "report.html", "verdict.json", "journal.jsonl"):
        assert "aardvark" not in (out / file).read_text(encoding="utf-8")
    assert "--label-field <text>" in json.loads((out / "results.json").read_text())["run"]["command"]
