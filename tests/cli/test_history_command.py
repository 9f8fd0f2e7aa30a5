"""`leakaudit history` tells nights, gaps and breaks apart."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from leakaudit.cli import main
from leakaudit.history.nights import HISTORY, History
from leakaudit.history.record import NightRecord
from leakaudit.results.sequential import confidence_sequence
from tests.support.factories import audit
from tests.support.nights import KEYS, gap, night, night_id
from tests.support.nights_folder import joined, nights_folder


def run(*arguments: object, charset: str = "utf-8", **environment: str) -> Result:
    runner = CliRunner(charset=charset, env={"COLUMNS": "100", **environment})
    return runner.invoke(main, ["history", *map(str, arguments)], catch_exceptions=False)


def write(folder: Path, records: Sequence[NightRecord]) -> Path:
    """Write a history, and return the folder of the nights."""
    history = History(folder / HISTORY)
    for record in joined(records):
        history = history.append(record)
    return folder


def rows(done: Result) -> dict[str, str]:
    """Return the lines of the table by their night."""
    return {line[:16]: line for line in done.stdout.splitlines() if re.match(r"\d{4}-", line)}


def test_every_night_has_a_row_with_counts_bound_and_exit_code(tmp_path: Path) -> None:
    """The bound is that of the confidence sequence, rounded up."""
    done = run("--folder", write(tmp_path, [night(0), night(1), night(2, k=3)]))
    found = rows(done)
    assert found[night_id(0)].split() == [night_id(0), "PASS", "0/20", "15.2%", "0"]
    assert found[night_id(2)].split() == [night_id(2), "FAIL", "3/20", "18.1%", "3"]
    assert 0.180 < confidence_sequence(3, 60).upper <= 0.181
    assert "Leak rate at most 18.1% and at least" in " ".join(done.stdout.split())
    assert "3 of 60 steps in comparable nights" in " ".join(done.stdout.split())


def test_clean_nights_are_summed_up_in_one_sentence(tmp_path: Path) -> None:
    """It holds at every look."""
    done = run("--folder", write(tmp_path, [night(number) for number in range(4)]))
    assert "Leak rate at most 4.4%, however often you look" in done.stdout
    assert confidence_sequence(0, 80).upper <= 0.044


def test_breaks_gaps_versions_and_alarms_are_named(tmp_path: Path) -> None:
    """A gap has its reason, a break its key."""
    other = KEYS | {"data": "mail"}
    records = [
        night(0, model_version="aa"),
        gap(1),
        night(2, keys=other, model_version="bb"),
        night(3, keys=other, model_version="bb", worse=True, repeated=4),
    ]
    found = rows(run("--folder", write(tmp_path, records)))
    assert "gap" in found[night_id(1)] and "the data file is missing" in found[night_id(1)]
    assert "the data set: not compared" in found[night_id(2)] and " new " in found[night_id(2)]
    assert "worse than the baseline; 4 steps" in found[night_id(3)] and " new " not in found[night_id(3)]


def test_a_night_without_a_judged_step_is_not_zero(tmp_path: Path) -> None:
    """Neither in the table, nor in the chart, nor in the sentence."""
    done = run("--folder", write(tmp_path, [night(0, n=0)]))
    assert "not judged" in rows(done)[night_id(0)] and "0/0" not in done.stdout
    assert "nothing is known about the leak rate" in done.stdout
    assert "? not judged" in done.stdout


def test_nights_that_nobody_started_are_gaps(tmp_path: Path) -> None:
    """The configuration says how often a night is due."""
    config = nights_folder(tmp_path, {0: audit(0, 20), 3: audit(0, 20)})
    done = run("--config", config)
    found = rows(done)
    assert list(found) == [night_id(number) for number in range(4)]
    assert "no night was started" in found[night_id(1)] and "no night was started" in found[night_id(2)]
    assert "95% confidence" in " ".join(done.stdout.split())
    assert f"No night was started since {night_id(3)}" in done.stdout


def test_one_unreadable_record_is_a_warning_and_a_gap(tmp_path: Path) -> None:
    """It is not a night that nobody started; the rest is shown."""
    config = nights_folder(tmp_path, {0: audit(0, 20), 1: audit(0, 20), 2: audit(0, 20)})
    (tmp_path / "all-nights" / HISTORY / f"{night_id(1)}.json").write_text('{"schema": "leakaudit.ni')
    done = run("--config", config)
    assert done.exit_code == 0 and list(rows(done)) == [night_id(number) for number in range(3)]
    assert "its record cannot be read" in rows(done)[night_id(1)]
    assert "warning:" in done.stderr and f"{night_id(1)}.json" in done.stderr


def test_a_history_of_a_newer_version_says_which_and_what_to_do(tmp_path: Path) -> None:
    """And an invented version cannot put control characters on the screen."""
    (tmp_path / HISTORY).mkdir()
    file = tmp_path / HISTORY / f"{night_id(0)}.json"
    file.write_text(json.dumps({"schema": "leakaudit.night/2.0", "tool": "3.1.0"}))
    done = run("--folder", tmp_path)
    assert done.exit_code == 5
    assert "a newer leakaudit wrote it (leakaudit.night/2.0, leakaudit 3.1.0); update this one" in done.stderr
    file.write_text(json.dumps({"schema": "leakaudit.night/2.0", "tool": "3\x1b[2J"}))
    assert "\x1b" not in run("--folder", tmp_path).stderr


def test_no_nights_are_an_error_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration, no folder, no night: each has its sentence."""
    monkeypatch.chdir(tmp_path)
    for arguments, code, said in (
        ([], 2, "name the configuration with --config"),
        (["--config", "other.yaml"], 2, "other.yaml"),
        (["--folder", "none"], 2, "none: no such folder"),
        (["--folder", tmp_path], 5, "no night is recorded yet"),
        (["--export", "csv"], 2, "--out"),
        (["--json", "--export", "csv", "--out", "x.csv"], 2, "one of them"),
    ):
        done = run(*arguments)
        assert (done.exit_code, said in done.stderr) == (code, True), (arguments, done.stderr)
    assert json.loads(run("--json").stdout)["exit"] == 2


def test_the_document_holds_what_the_table_shows(tmp_path: Path) -> None:
    """One document, also beside a warning; marks of steps stay in the records."""
    folder = write(tmp_path, [night(0, units=("01" * 8,)), gap(1), night(2, k=2)])
    (tmp_path / HISTORY / f"{night_id(3)}.json").write_text("{")
    found = json.loads(run("--folder", folder, "--json").stdout)
    assert [one["gap"] for one in found["nights"]] == [
        "",
        "the data file is missing",
        "",
        "its record cannot be read",
    ]
    assert found["nights"][2]["record"]["rates"][0]["k"] == 2 and found["nights"][3]["record"] is None
    assert found["sentence"].startswith("Leak rate at most") and "01" * 8 not in json.dumps(found)
    assert [bad["night"] for bad in found["unreadable"]] == [night_id(3)]


@pytest.mark.parametrize("charset", ["utf-8", "ascii", "latin-1", "cp437"])
def test_chart_and_table_fit_every_encoding(tmp_path: Path, charset: str) -> None:
    """Letters that a terminal cannot show end as question marks, never as a crash."""
    done = run("--folder", write(tmp_path, [night(0), gap(1, "Ж"), night(2, k=20)]), charset=charset)
    assert done.exit_code == 0
    text = done.stdout_bytes.decode(charset)
    assert ("█" in text) == (charset == "utf-8") and ("#" in text) == (charset != "utf-8")
    assert ("Ж" in text) == (charset == "utf-8")


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_chart_keeps_to_the_width_of_the_terminal(tmp_path: Path, width: int) -> None:
    """The latest nights are kept if not all fit, and the chart says so."""
    folder = write(tmp_path, [night(number, k=number % 3) for number in range(60)])
    done = run("--folder", folder, "--last", 60, COLUMNS=str(width))
    chart = done.stdout.partition("exact_sentence")[2].splitlines()
    assert max(map(len, chart[1:])) <= width
    assert ("the last 31 of 60 nights" in chart[0]) == (width == 40)
    assert chart[7].startswith("      0% ───")


def test_a_bar_is_as_high_as_its_rate(tmp_path: Path) -> None:
    """Half the steps fill half of the axis; one leak of many is seen."""
    done = run("--folder", write(tmp_path, [night(0, k=20), night(1, k=10), night(2, k=1, n=100), night(3)]))
    lines = done.stdout.splitlines()
    foot = next(number for number, line in enumerate(lines) if line.startswith("      0%"))
    columns = ["".join(line.ljust(100)[at] for line in lines[foot - 6 : foot]) for at in (9, 11, 13, 15)]
    assert [sum(char in "▁▂▃▄▅▆▇█" for char in column) for column in columns] == [6, 3, 1, 0]


def test_colour_needs_a_terminal(tmp_path: Path) -> None:
    """CliRunner is no terminal."""
    assert "\x1b" not in run("--folder", write(tmp_path, [night(0, k=3)])).stdout


@pytest.mark.parametrize("quiet", [True, False])
def test_no_colour_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    """A terminal gets colour unless NO_COLOR is set."""

    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    from leakaudit.cli import history

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1") if quiet else monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    with pytest.raises(SystemExit):
        history.history(["--folder", str(write(tmp_path, [night(0, k=3)]))])
    assert ("\x1b[31mFAIL" in screen.getvalue()) is not quiet


def test_csv_has_a_row_for_each_rate_and_guards_formulas(tmp_path: Path) -> None:
    """A gap has a row, too; what is missing is an empty cell."""
    folder = write(tmp_path, [night(0, k=2), gap(1, "=HYPERLINK(1)"), night(2, keys=KEYS | {"data": "@notes"})])
    out = tmp_path / "nights.csv"
    done = run("--folder", folder, "--export", "csv", "--out", out)
    assert done.exit_code == 0 and "3 nights written" in done.stdout
    found = list(csv.DictReader(io.StringIO(out.read_text())))
    assert [row["reason"] for row in found] == ["", "'=HYPERLINK(1)", ""]
    assert (found[0]["k"], found[0]["n"], found[0]["so_far_n"], found[0]["log_e"]) == ("2", "20", "20", "")
    assert (found[1]["k"], found[1]["event"], found[2]["key_data"]) == ("", "", "'@notes")
    assert out.stat().st_mode & 0o077 == 0


def test_an_export_holds_every_night_unless_asked_otherwise(tmp_path: Path) -> None:
    """A table of thirty rows of a year would be a trap."""
    folder, out = write(tmp_path, [night(number) for number in range(40)]), tmp_path / "nights.csv"
    run("--folder", folder, "--export", "csv", "--out", out)
    assert len(out.read_text().splitlines()) == 41
    run("--folder", folder, "--export", "csv", "--out", out, "--last", 5)
    assert len(out.read_text().splitlines()) == 6
    assert len(rows(run("--folder", folder))) == 30


def test_a_number_below_zero_stays_a_number(tmp_path: Path) -> None:
    """The guard is for texts."""
    record = night(0)
    rate = record.rates[0].model_copy(update={"log_e": -1.5})
    History(tmp_path / HISTORY).append(record.model_copy(update={"rates": (rate,)}))
    run("--folder", tmp_path, "--export", "csv", "--out", tmp_path / "nights.csv")
    assert ",-1.5," in (tmp_path / "nights.csv").read_text()


def test_parquet_names_the_package_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is optional."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    done = run("--folder", write(tmp_path, [night(0)]), "--export", "parquet", "--out", tmp_path / "n.parquet")
    assert done.exit_code == 2 and "python -m pip install pyarrow" in done.stderr
    assert not (tmp_path / "n.parquet").exists()


def test_parquet_holds_what_csv_holds(tmp_path: Path) -> None:
    """Its columns keep their types where every cell is empty."""
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = write(tmp_path, [night(0, k=2), gap(1)])
    assert run("--folder", folder, "--export", "parquet", "--out", tmp_path / "n.parquet").exit_code == 0
    table = parquet.read_table(tmp_path / "n.parquet")
    assert table.column("k").to_pylist() == [2, None] and str(table.schema.field("log_e").type) == "double"
    run("--folder", folder, "--export", "csv", "--out", tmp_path / "n.csv")
    assert table.column_names == (tmp_path / "n.csv").read_text().splitlines()[0].split(",")
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """With its name."""
    folder = write(tmp_path, [night(0)])
    done = run("--folder", folder, "--export", "csv", "--out", tmp_path / "none" / "n.csv")
    assert done.exit_code == 5 and "cannot be written" in done.stderr


def test_a_thousand_nights_print_in_a_second(tmp_path: Path) -> None:
    """As many as three years have; seconds of the processor."""
    (tmp_path / HISTORY).mkdir()
    for number in range(1000):
        record = night(number, k=number % 2, units=tuple(f"{number:08x}{step:08x}" for step in range(20)))
        (tmp_path / HISTORY / f"{record.night}.json").write_text(record.model_dump_json(by_alias=True))
    run("--folder", tmp_path, "--last", 1)  # imports
    spent = []
    for _ in range(2):  # the better of two: other processes share the caches
        start = time.process_time()
        done = run("--folder", tmp_path, "--last", 1000)
        spent.append(time.process_time() - start)
        assert len(rows(done)) == 1000
    assert min(spent) < 1.0, spent
