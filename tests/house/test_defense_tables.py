"""The papers' defence tables: printed numbers, rows, intervals, a small run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from leakaudit.registry import attacks, defenses
from tests.benchmarks import defense_tables, small_victim
from tests.benchmarks.defense_tables import Kept, Table, interval, rows_of, table_of
from tests.benchmarks.defense_tables_published import LAMP_5, LAMP_5_MCC, LAMP_8, LAMP_8_MCC
from tests.benchmarks.film_published import TABLE_4_DP_SGD, TABLE_4_PRUNING
from tests.benchmarks.matching_presets import TABLE_1
from tests.support import tiny

NAMES = ("lamp-5", "lamp-8", "film-4")


def _published(table: Table) -> dict[str, dict[str, str]]:
    return {each.spec.label: dict(each.published) for each in table.defences}


def test_without_a_defence_the_papers_tables_agree() -> None:
    """Table 8 and our row of sigma 0 repeat Table 1, which another benchmark holds."""
    of_table_1 = TABLE_1["cola"]
    assert LAMP_8[0.0] == of_table_1["lamp-cos"]
    assert list(LAMP_5[0.0].values()) == [of_table_1[name] for name in ("dlg", "tag", "lamp-cos", "lamp-l1l2")]
    assert LAMP_5_MCC[0.0] == LAMP_8_MCC[0.0] == 0.557


def test_printed_numbers_stand_beside_their_defence() -> None:
    """Some cells of each paper, read again from the paper."""
    noise, masks, film = (_published(table_of(name)) for name in NAMES)
    assert noise["gaussian-noise(sigma=0.002)"]["LAMP, cosine"] == "70.6 / 29.5 / 60.9"
    assert noise["gaussian-noise(sigma=0.01)"]["LAMP, L2+L1"] == "69.6 / 29.4 / 60.6"
    assert masks["prune(share=0.95, choose=random)"]["LAMP, cosine"] == "39.0 / 5.8 / 37.4"
    assert film["prune(share=0.9999)"]["FILM, bag"] == "1.00 / 0.90"
    assert film["freeze-embeddings(tables=words)"]["FILM, bag"] == "0.00 / 0.00"


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_a_registered_defence_and_every_contender_an_attack(name: str) -> None:
    """The tables can be asked for from the command line."""
    table = table_of(name, 10)
    for each in table.defences:
        defenses.create(each.spec.name, each.spec.options)
    for one in table.contenders:
        attacks.create(one.spec.name, one.spec.options)
    strengths = {"lamp-5": len(LAMP_5), "lamp-8": len(LAMP_8), "film-4": len(TABLE_4_PRUNING) + len(TABLE_4_DP_SGD) + 1}
    assert len(table.defences) == strengths[name]


def test_the_interval_of_equal_numbers_is_not_a_point() -> None:
    """The exact bound for 0 of 2 at 97.5 % is 0.842."""
    assert interval([0.0, 0.0]) == pytest.approx((0.0, 0.8419), abs=1e-4)
    assert interval([0.4]) is None
    low, high = interval([0.4, 0.5, 0.6]) or (0.0, 0.0)
    assert (low, high) == pytest.approx((0.5 - 0.2484, 0.5 + 0.2484), abs=1e-4)  # t = 4.3027, s = 0.1


def test_our_row_follows_the_printed_one() -> None:
    """Mean, n, remarks and who knows what stand in the row of the attack."""
    table = table_of("lamp-8")
    kept = [Kept("none", "span", {"rougeL": value, "rouge1": value}, 2.0, "budget") for value in (0.5, 1.0)]
    rows = list(rows_of(table, kept))
    printed = next(number for number, row in enumerate(rows) if "89.6 / 51.9 / 76.2" in row)
    assert "| `span` | the defence | 2 | 75.0 / - / 75.0 | 75.0 (0 to 100) |" in rows[printed + 1]
    assert "budget (2 of 2)" in rows[printed + 1]


def test_a_small_run_prints_each_defence_and_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a file keeps is not computed again, and holds no text."""
    model, data, keep = tmp_path / "model", tmp_path / "data.jsonl", tmp_path / "kept.jsonl"
    tiny.bert().save_pretrained(model)  # type: ignore[operator]
    tiny.bert_tokenizer().save_pretrained(model)
    data.write_text(
        "".join(json.dumps({"text": text, "label": 0}) + "\n" for text in ("a bird saw the horse", "two fish ate"))
    )
    given = ["lamp-8", "--data", str(data), "--model", str(model), "--seeds", "1", "--steps", "1", "--only", "span"]
    given += ["--budget", "2", "--keep", str(keep)]
    defense_tables.main(given)
    first = capsys.readouterr().out
    assert first.count("| `span` | the defence | 1 |") == len(LAMP_8)
    assert "| `none` | `span` | the defence | 1 | 100.0 / 100.0 / 100.0 | 100.0 | 100.0 |" in first
    assert "bird" not in keep.read_text()
    kept = keep.read_bytes()
    defense_tables.main([*given, "--kept-only"])
    assert capsys.readouterr().out == first
    assert keep.read_bytes() == kept


def test_a_frozen_word_embedding_shows_no_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed bag holds all words without a defence, and none behind it."""
    texts = tmp_path / "texts.jsonl"
    sentence = "one old sailor told us that the harbour had been closed for many years and nobody knew why it was"
    texts.write_text(
        "".join(json.dumps({"text": f"{sentence} {end}", "label": 0}) + "\n" for end in ("so", "shut", "left"))
    )
    small_victim.main(["--texts", str(texts), "--folder", str(tmp_path / "victim"), "--steps", "1"])
    given = ["film-4", "--data", str(texts), "--model", str(tmp_path / "victim"), "--seeds", "1", "--steps", "1"]
    defense_tables.main([*given, "--only", "no such", "--defenses", "none;freeze-embeddings(tables=words)"])
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("| `")]
    words = [row.split(" | ")[8].split(" / ") for row in rows if "`bag as printed`" in row]
    assert [recall for _, recall in words] == ["100.0", "0.0"]  # a tied head fills all rows, so that precision is low
