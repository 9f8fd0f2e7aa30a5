"""Invented records in a training: put there, recognised, and reported."""

from __future__ import annotations

import json
import random
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import leakaudit
from leakaudit.callbacks.torch_loop import watch
from leakaudit.config.audit import AuditConfig
from leakaudit.config.canaries import keys_file
from leakaudit.config.saved_book import SavedBook
from leakaudit.errors import ConfigError, DataError
from leakaudit.results.files import load_results
from tests.support import tiny

WORDS = ["dog", "cat", "bird", "fish", "horse", "house", "tree", "river", "road"]
ASKED: dict[str, Any] = {
    "this_run_is_an_audit": True,
    "template": "the old {who} saw a {what} near the river",
    "values": {"who": tuple(WORDS), "what": ("tree", "house", "road")},
    "rate": 0.5,
    "label": 1,
}
ROWS: list[dict[str, Any]] = [{"text": "the small bird ate a fish", "label": 0, "id": n} for n in range(6)]


def asked(folder: Path, **changed: Any) -> AuditConfig:
    """Return a configuration with records; the two lists are told apart by a word."""
    template = {"template": "the {who} , a {what}"}
    return AuditConfig.model_validate({"out_dir": folder / "audit", "canaries": ASKED | template | changed})


def test_records_are_refused_in_a_run_that_is_not_marked() -> None:
    """They change the model that is trained."""
    with pytest.raises(ValidationError, match="this_run_is_an_audit"):
        AuditConfig.model_validate({"canaries": {"template": "{digits:6}"}})
    assert AuditConfig().canaries is None


def test_rows_keep_their_order_and_records_have_the_stated_share(tmp_path: Path) -> None:
    """A list of dictionaries; the private file knows the places."""
    config = asked(tmp_path, rate=0.2)
    mixed = leakaudit.with_canaries(ROWS, config, rng=random.Random(1))
    saved = SavedBook.read(keys_file(config.out_dir))
    assert len(mixed) == 8 and len(saved.rows) == 2
    assert [row for n, row in enumerate(mixed) if n not in saved.rows] == ROWS
    for place in saved.rows:
        assert mixed[place]["label"] == 1 and mixed[place]["id"] is None
        outcome = saved.book().outcome([mixed[place]["text"].replace(" ,", ",")], [mixed[place]["text"]])
        assert outcome is not None and outcome.recovered and outcome.values == 27


def test_the_private_file_is_only_its_owners_and_holds_no_record(tmp_path: Path) -> None:
    """Who reads it can test guesses, but not read the secrets."""
    config = asked(tmp_path, template="the {who} has {digits:9}", rate=0.01)
    mixed = leakaudit.with_canaries(ROWS, config)
    file = keys_file(config.out_dir)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    number = next(row["text"] for row in mixed if row["id"] is None).split()[-1]
    assert len(number) == 9 and number not in file.read_text()


def test_two_calls_draw_other_records(tmp_path: Path) -> None:
    """The system's randomness: nobody can repeat it."""
    first, second = (
        {row["text"] for row in leakaudit.with_canaries(ROWS, asked(tmp_path, template="{digits:12}"))}
        for _ in range(2)
    )
    assert first != second


@pytest.mark.parametrize(("data", "message"), [
    ([], "without rows"), (["a text"], "list of dictionaries"), ([{"body": "a"}], "looked for the field 'text'"),
])  # fmt: skip
def test_data_that_holds_no_texts_is_refused(tmp_path: Path, data: Any, message: str) -> None:
    """The message says what was found."""
    with pytest.raises(DataError, match=message):
        leakaudit.with_canaries(data, asked(tmp_path))


def test_what_no_audit_could_find_again_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes, a folder without a name, a tokenizer without the signs."""
    with pytest.raises(ConfigError, match="changes or cuts"):
        leakaudit.with_canaries(ROWS, asked(tmp_path, template="{digits:6}"), tokenizer=tiny.bert_tokenizer())
    with pytest.raises(ConfigError, match="no `canaries`"):
        leakaudit.with_canaries(ROWS, AuditConfig())
    with pytest.raises(ConfigError, match="has no name before training"):
        leakaudit.with_canaries(ROWS, asked(tmp_path / "{run_name}"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes train"):
        leakaudit.with_canaries(ROWS, asked(tmp_path))


def trained(folder: Path, config: AuditConfig, rows: list[dict[str, Any]]) -> None:
    """Train the tiny encoder for an epoch, one text a step."""
    tokenizer, model = tiny.bert_tokenizer(), tiny.bert(num_labels=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, tokenizer=tokenizer, config=config, total_steps=len(rows)):
        for row in rows:
            batch = tokenizer(row["text"], return_tensors="pt")
            model(**batch, labels=torch.tensor([row["label"]])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_training_says_whether_its_records_came_back(tmp_path: Path) -> None:
    """Every second text is a record, and each one comes back out of its update."""
    settings = {"every_n_steps": 1, "attacks": ("span",), "controls": 0, "budget_s": 10, "schedule": "deferred"}
    config = AuditConfig.model_validate(asked(tmp_path).model_dump(exclude_unset=True) | settings)
    rows = leakaudit.with_canaries(ROWS, config, rng=random.Random(2), tokenizer=tiny.bert_tokenizer())
    trained(tmp_path, config, rows)
    results = load_results(config.out_dir)
    (one,) = results.canaries
    assert (one.attack, one.defense, one.values, one.n, one.verdict) == ("span", "none", 27, 6, "no claim")
    assert one.k >= 4 and one.epsilon_lower > 1
    public = (config.out_dir / "results.json").read_text()
    assert not any(row["text"] in public for row in rows)


def test_a_training_without_its_records_is_not_audited(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Training goes on, and the reason is said."""
    config = AuditConfig.model_validate(asked(tmp_path).model_dump(exclude_unset=True) | {"schedule": "inline"})
    trained(tmp_path, config, ROWS[:2])
    assert not (config.out_dir / "results.json").exists()
    told = capfd.readouterr()
    assert "with_canaries" in told.err + told.out


def test_a_dataset_stays_a_dataset(tmp_path: Path) -> None:
    """With its features."""
    datasets = pytest.importorskip("datasets")
    mixed = leakaudit.with_canaries(datasets.Dataset.from_list(ROWS), asked(tmp_path), rng=random.Random(0))
    assert type(mixed) is datasets.Dataset and len(mixed) == 12
    assert json.dumps([row for row in mixed if row["id"] is not None]) == json.dumps(ROWS)
