"""What the user reads at the end of training: attempts, time left, verdict."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from leakaudit.capture.outcome import outcome
from leakaudit.capture.worker.progress import Progress
from leakaudit.config.audit import AuditConfig
from leakaudit.files.private_files import write_atomic
from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.policy import default_policy
from leakaudit.gate.verdict import to_json
from leakaudit.results.files import to_json as results_json
from leakaudit.results.files import with_digest
from leakaudit.results.journal import JournalEntry
from leakaudit.results.schema import Attempt, AttemptStatus, Battery, Results, VerificationStatus
from leakaudit.storage.spool import Spool
from leakaudit.storage.spool_files import write_battery
from tests.support import tiny
from tests.support.factories import NOW, attempt, audit, results, step

ATTACKS = ("embedding-rows", "span", "tag")


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """A spool with two waiting snapshots, of which a worker has claimed the first."""
    made = Spool.create(tmp_path / "audit" / "spool", AuditConfig(), tiny.bert_tokenizer())
    for number in (0, 20):
        made.snapshot_folder(number).mkdir()
    made.queue.claim()
    return made


def finish(spool: Spool, number: int, attack: str, seconds: float) -> None:
    """Write down a finished attempt, as the worker does."""
    one = attempt(number, attack).model_copy(update={"wall_s": seconds})
    with (spool.root.parent / "journal.jsonl").open("a") as journal:
        journal.write(JournalEntry(attempt=one).model_dump_json() + "\n")


def note(spool: Spool, **more: Any) -> None:
    write_battery(spool.root, Battery(digest="sha256:0", attacks=ATTACKS, defenses=("none",), budget_s=60.0, **more))


def test_before_the_worker_has_begun_only_the_queue_is_known(spool: Spool) -> None:
    """No time is made up."""
    assert Progress(spool).look() == ("the side process is starting, 2 kept steps to attack", None)


def test_budgets_bound_the_time_until_each_attack_was_seen(spool: Spool) -> None:
    """Then its own times count."""
    note(spool)
    clock = [0.0]
    progress = Progress(spool, clock=lambda: clock[0])
    assert progress.look()[0] == "attempt 1 of 6: embedding-rows on step 0, up to 60 s; at most 6 min left"
    finish(spool, 0, "embedding-rows", 1.0)
    finish(spool, 0, "span", 10.0)
    journal = spool.root.parent / "journal.jsonl"
    clock[0] = journal.stat().st_mtime
    said, left = progress.look()
    assert said == "attempt 3 of 6: tag on step 0, up to 60 s; at most 2 min left"
    assert left == 60 + 1 + 10 + 60
    finish(spool, 0, "tag", 50.0)
    os.utime(journal, (1_000_000, 1_000_000))
    clock[0] = 1_000_000.0
    assert progress.look() == ("attempt 4 of 6: embedding-rows on step 20, up to 60 s; about 1 min left", 61.0)
    finish(spool, 20, "embedding-rows", 1.0)
    finish(spool, 20, "span", 10.0)
    os.utime(journal, (1_000_000, 1_000_000))
    clock[0] = 1_000_010.0
    assert progress.look() == ("attempt 6 of 6: tag on step 20, up to 60 s; about 40 s left", 40.0)
    clock[0] = 1_000_100.0
    assert progress.look()[1] == 0.0, "an attempt that takes longer than the one before takes no negative time"


def test_slow_attacks_on_all_steps_come_after_the_others(spool: Spool) -> None:
    """As the worker does it: a snapshot is claimed again for its slow attacks."""
    note(spool, slow=("span",))
    progress = Progress(spool)
    said = []
    for number, attack in ((0, "embedding-rows"), (0, "tag"), (20, "embedding-rows"), (20, "tag"), (0, "span")):
        if (number, attack) == (20, "embedding-rows"):
            spool.queue.give_back(spool.root / "000000.run")
            assert spool.queue.claim(last=lambda path: path.stem == "000000") == spool.root / "000020.run"
        if (number, attack) == (0, "span"):
            spool.queue.give_back(spool.root / "000020.run")
            spool.queue.claim()
        said.append(progress.look()[0].partition(", up to")[0])
        finish(spool, number, attack, 1.0)
    assert said == [
        "attempt 1 of 6: embedding-rows on step 0",
        "attempt 2 of 6: tag on step 0",
        "attempt 3 of 6: embedding-rows on step 20",
        "attempt 4 of 6: tag on step 20",
        "attempt 5 of 6: span on step 0",
    ]


def test_when_all_attempts_are_made_the_report_is_waited_for(spool: Spool) -> None:
    """The control step has no number of its own."""
    note(spool)
    for number in (0, 20):
        for attack in ATTACKS:
            finish(spool, number, attack, 1.0)
    assert Progress(spool).look() == ("the last control step and the report", None)


def test_an_attempt_that_crashed_says_nothing_of_the_time(spool: Spool) -> None:
    """A snapshot that is refused has attempts of no seconds."""
    note(spool)
    journal = spool.root.parent / "journal.jsonl"
    crashed = Attempt(step="st-000000", attack="tag", defense="none", status=AttemptStatus.ERROR, reason="lost", seed=0)
    journal.write_text(JournalEntry(attempt=crashed).model_dump_json() + "\n")
    assert "at most" in Progress(spool).look()[0]


def written(folder: Path, found: Results) -> Path:
    folder.mkdir()
    found = with_digest(found)
    write_atomic(folder / "results.json", json.dumps(results_json(found)))
    verdict = evaluate(found, default_policy(), now=NOW)
    write_atomic(folder / "verdict.json", json.dumps(to_json(verdict)))
    return folder


def test_the_last_words_of_a_run_that_leaks(tmp_path: Path) -> None:
    """Verdict, steps and what they leaked."""
    assert outcome(written(tmp_path / "audit", audit(5, 0))) == ("FAIL: 5 of 5 steps leaked a sentence",)


def test_the_last_words_of_a_run_without_evidence_enough(tmp_path: Path) -> None:
    """It names what the policy lacks."""
    (said,) = outcome(written(tmp_path / "audit", audit(0, 5)))
    assert said.startswith("INCONCLUSIVE: 0 of 5 steps leaked a sentence")
    assert "the policy asks for 59 steps of evidence; there are 5" in said


def test_steps_that_could_not_be_checked_are_said_with_the_reason(tmp_path: Path) -> None:
    """Nobody looks into a folded table of the report for it."""
    odd = step(1, VerificationStatus.UNVERIFIABLE)
    why = "the client's loss came from the model's output 'log_probs', and the rebuilt model has none of that name"
    odd = odd.model_copy(update={"verification": odd.verification.model_copy(update={"note": why})})
    found = results([step(0), odd], [attempt(0, leaks=True), attempt(1)])
    _, unchecked = outcome(written(tmp_path / "audit", found))
    assert (
        unchecked == f"1 of 2 kept steps could not be checked, so nothing that did not come back counts as safe: {why}"
    )


def test_without_a_verdict_there_are_no_last_words(tmp_path: Path) -> None:
    """A folder that holds none, or one that cannot be read."""
    assert outcome(tmp_path) == ()
    (tmp_path / "verdict.json").write_text("{")
    assert outcome(tmp_path) == ()
