"""The audit: what it runs, repeats and writes, and what it never writes."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import jsonschema
import pytest
import torch

from leakaudit.audit.audit import Audit
from leakaudit.client.facts import DeclaredDefense, Granted
from leakaudit.client.observation import Observation
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.snapshot import Provenance, Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.config.audit import AuditConfig
from leakaudit.errors import AnatomyError, ConfigError, ResultsError
from leakaudit.gate.policy import default_policy
from leakaudit.gate.verdict import Verdict
from leakaudit.history.keys import keys_of
from leakaudit.models.recipe import ModelRecipe
from leakaudit.plugins.attack_protocol import APPLIES, Applicability, GuessedSequence, Reconstruction, not_applicable
from leakaudit.plugins.budget import Budget
from leakaudit.plugins.defense_protocol import Defense
from leakaudit.registry import attack, attacks, defense, defenses
from leakaudit.reports import write_report
from leakaudit.results.consistency import contradictions
from leakaudit.results.files import load_results
from leakaudit.results.journal import JournalEntry, load_journal
from leakaudit.results.schema import AttemptStatus, Missing, Results, Score, Tally, TextMode, VerificationStatus
from tests.support import tiny

TEXTS = ("the old dog chased a small red horse near the river", "one bird never ate two big fish today")
WORDS = ("chased", "horse", "river", "bird", "never")
"""Words of the batch that stand in no sentence of ours."""

SECRET = "chased-horse-near-river"


@dataclass(frozen=True)
class _Fake:
    """Common part of the fake attacks: they guess the first sequence they were told."""

    goal: ClassVar[Literal["text", "words", "labels"]] = "text"
    source: ClassVar[str] = "made for a test"
    threat_model: ClassVar[str] = "made for a test"
    ids: ClassVar[tuple[int, ...]] = (2, 6, 7, 3)
    calls: ClassVar[list[str]] = []

    def applies(self, seen: Observation) -> Applicability:
        return APPLIES


@attack("fake-guess")
@dataclass(frozen=True)
class Guesses(_Fake):
    """Guess token ids from the generator, so that a seed shows."""

    length: int = 9

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        self.calls.append("fake-guess")
        ids = torch.randint(5, len(tiny.VOCABULARY), (self.length,), generator=rng).tolist()
        return Reconstruction(
            (GuessedSequence(tuple(ids), 0.5),), diagnostics={"numbers": 1.0, "unbounded": float("inf")}
        )


@attack("fake-proves")
@dataclass(frozen=True)
class Proves(_Fake):
    """Recover the text of the step and prove it, or claim so of another text."""

    right: bool = True
    grants: ClassVar[tuple[str, ...]] = ()

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        self.calls.append("fake-proves")
        text = TEXTS[0] if self.right else TEXTS[1]
        ids = tuple(tiny.bert_tokenizer()(text)["input_ids"])
        return Reconstruction((GuessedSequence(ids, own_score=1.0, proved=True),))


@attack("fake-proves-granted")
@dataclass(frozen=True)
class ProvesGranted(Proves):
    """The same, with what only this attack was granted."""

    grants: ClassVar[tuple[str, ...]] = ("words",)


@attack("fake-searches")
@dataclass(frozen=True)
class Searches(_Fake):
    """Take long and find nothing."""

    slow: ClassVar[bool] = True

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        self.calls.append("fake-searches")
        return Reconstruction((GuessedSequence(self.ids, 0.1),))


@attack("fake-raises")
@dataclass(frozen=True)
class Raises(_Fake):
    """Raise with private text in the message."""

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        raise ValueError(SECRET)


@attack("fake-greedy")
@dataclass(frozen=True)
class Greedy(_Fake):
    """Ask for more memory than a GPU has, once."""

    at: int = 1
    """Number of that call."""

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        self.calls.append("greedy")
        if self.calls.count("greedy") == self.at:
            raise torch.OutOfMemoryError(SECRET)
        return Reconstruction(sequences=(GuessedSequence(self.ids, own_score=1.0),))


@attack("fake-lost")
@dataclass(frozen=True)
class Lost(_Fake):
    """Find a part missing in the middle of the work."""

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        raise AnatomyError("looked for a pooler, found none")


@attack("fake-refuses")
@dataclass(frozen=True)
class Refuses(_Fake):
    """Never apply."""

    def applies(self, seen: Observation) -> Applicability:
        return not_applicable("there is nothing to work on")

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        raise AssertionError("was called although it does not apply")


@attack("fake-slow")
@dataclass(frozen=True)
class Slow(_Fake):
    """Run out of budget with a guess in hand."""

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        return Reconstruction((GuessedSequence(self.ids, 0.1),), stop="budget")


@attack("fake-labels")
@dataclass(frozen=True)
class Labels(_Fake):
    """Say what was granted."""

    goal: ClassVar[Literal["text", "words", "labels"]] = "labels"

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        labels = torch.tensor(seen.facts.granted.labels or (0,))
        return Reconstruction(label_counts=tuple(torch.bincount(labels, minlength=seen.facts.num_labels or 2).tolist()))


@dataclass(frozen=True)
class _Reach:
    """Every token but one is a candidate; a long enough sequence passes.

    Or it raises an exception with private text.
    """

    raises: bool = False

    def tokens(self, ids: tuple[int, ...]) -> tuple[bool, ...]:
        if self.raises:
            raise ValueError(SECRET)
        return tuple(token != tiny.VOCABULARY["dog"] for token in ids)

    def passes(self, ids: tuple[int, ...]) -> bool | None:
        return len(ids) > 10


@attack("fake-reach")
@dataclass(frozen=True)
class Reaches(_Fake):
    """Say what was in reach."""

    broken: bool = False

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        return Reconstruction((GuessedSequence(self.ids, 0.1),), reach=_Reach(self.broken))


@defense("fake-broken")
@dataclass(frozen=True)
class Broken(Defense):
    """Fail with private text in the message."""

    identity: ClassVar[Mapping[str, Any]] = {}
    source: ClassVar[str] = "made for a test"
    protects: ClassVar[str] = "nothing"
    cost: ClassVar[str] = "nothing"

    def __call__(self, client: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
        raise RuntimeError(SECRET)


@defense("fake-halves")
@dataclass(frozen=True)
class Halves(Defense):
    """Halve the update."""

    identity: ClassVar[Mapping[str, Any]] = {}
    source: ClassVar[str] = "made for a test"
    protects: ClassVar[str] = "nothing"
    cost: ClassVar[str] = "nothing"

    def __call__(self, client: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
        halved = {name: 0.5 * tensor for name, tensor in seen.update.items()}
        return seen.under(DeclaredDefense(name="fake-halves"), halved)


FAKE_ATTACKS: dict[str, Any] = {
    "fake-guess": Guesses,
    "fake-raises": Raises,
    "fake-greedy": Greedy,
    "fake-lost": Lost,
    "fake-refuses": Refuses,
    "fake-slow": Slow,
    "fake-labels": Labels,
    "fake-proves": Proves,
    "fake-proves-granted": ProvesGranted,
    "fake-searches": Searches,
}
FAKE_DEFENSES: dict[str, Any] = {"fake-broken": Broken, "fake-halves": Halves}
for _name in FAKE_ATTACKS:  # registered where they are used only, so that no other test meets them
    del attacks._plugins[_name]
for _name in FAKE_DEFENSES:
    del defenses._plugins[_name]


@contextmanager
def _registered() -> Iterator[None]:
    """Register the fakes for the duration of the block."""
    for registry, plugins in ((attacks, FAKE_ATTACKS), (defenses, FAKE_DEFENSES)):
        for name, plugin in plugins.items():
            registry.register(name)(plugin)
    try:
        yield
    finally:
        for registry, plugins in ((attacks, FAKE_ATTACKS), (defenses, FAKE_DEFENSES)):
            for name in plugins:
                del registry._plugins[name]


@pytest.fixture
def _fakes() -> Iterator[None]:
    """Register the fakes for one test."""
    _Fake.calls.clear()
    with _registered():
        yield


pytestmark = pytest.mark.usefixtures("_fakes")


@cache
def _snapshot(step: int = 0, texts: tuple[str, ...] = TEXTS[:1]) -> Snapshot:
    """Return the snapshot of a step of the tiny BERT, shared by all tests.

    Nobody changes it.
    """
    model = tiny.bert(num_labels=3)
    client = tiny.client_step(model, tiny.bert_tokenizer(), list(texts), [1] * len(texts))
    return Snapshot(
        observation=client.observe(),
        truth=client.truth,
        recipe=client.recipe,
        model_recipe=ModelRecipe.of(model),
        provenance=Provenance(framework="test", step=step),
    )


def _audit(folder: Path, *names: Any, seed: int = 0, **more: Any) -> Audit:
    config = AuditConfig.model_validate({"out_dir": folder, "attacks": names, "seed": seed, "controls": 0, **more})
    return Audit(folder, config, tiny.bert_tokenizer())


def _attempts(audit: Audit) -> dict[tuple[str, str, str], JournalEntry]:
    return {(e.attempt.step, e.attempt.attack, e.attempt.defense): e for e in audit.entries}


def test_a_policy_with_a_wrong_name_is_an_error_at_the_end_as_well(tmp_path: Path) -> None:
    """A policy that was edited meanwhile leaves results and no invented verdict."""
    policy = tmp_path / "policy.yaml"
    rule = "  - {id: red-line, event: exact_sentence, max_count: 0, scope: {attack: spam}}\n"
    policy.write_text(f"schema: leakaudit.policy/1\nname: release\nrules:\n{rule}")
    audit = _audit(tmp_path / "run", "llg", policy=policy)
    audit.step(_snapshot())
    with pytest.raises(ConfigError, match="the attack 'spam' is unknown; did you mean 'span'"):
        audit.finish()
    assert (tmp_path / "run" / "results.json").exists() and not (tmp_path / "run" / "verdict.json").exists()


def test_every_attack_runs_under_every_defense_on_every_step(tmp_path: Path) -> None:
    """The undefended update comes first; each attempt is one line of the journal."""
    seen: list[str] = []
    audit = _audit(tmp_path / "run", "fake-guess", "fake-labels", defenses=["fake-halves"])
    audit.report_to(lambda entry: seen.append(f"{entry.attempt.step} {entry.attempt.attack} {entry.attempt.defense}"))
    for step in (0, 40):
        audit.step(_snapshot(step))
    assert seen == [
        f"{step} {attack} {defense}"
        for step in ("st-000000", "st-000040")
        for defense in ("none", "fake-halves")
        for attack in ("fake-guess", "fake-labels")
    ]
    assert load_journal(tmp_path / "run" / "journal.jsonl") == list(audit.entries)
    assert all(entry.attempt.status is AttemptStatus.RAN for entry in audit.entries)


def test_quick_attacks_come_first_whatever_their_place_in_the_battery(tmp_path: Path) -> None:
    """Under every defence; what is slow is a property of the attack."""
    audit = _audit(tmp_path, "fake-searches", "fake-guess", defenses=["fake-halves"])
    assert audit.step(_snapshot())
    ran = [(entry.attempt.attack, entry.attempt.defense) for entry in audit.entries]
    quick, slow = [[(name, defense) for defense in ("none", "fake-halves")] for name in ("fake-guess", "fake-searches")]
    assert ran == quick + slow
    results = audit.finish()
    assert results.run.battery.attacks == ("fake-searches", "fake-guess")
    assert results.run.battery.slow == ("fake-searches",)


def test_slow_attacks_wait_while_other_steps_wait_for_quick_ones(tmp_path: Path) -> None:
    """A later call, also of another process, continues with them and runs the control."""
    first = _audit(tmp_path, "fake-searches", "fake-guess", controls=1)
    assert first.only_slow_left(0) is False
    assert first.step(_snapshot(), lambda: True) is False
    assert [entry.attempt.attack for entry in first.entries] == ["fake-guess"]
    second = _audit(tmp_path, "fake-searches", "fake-guess", controls=1)
    assert second.only_slow_left(0) and not second.has_audited(0)
    assert second.step(_snapshot(), lambda: True), "a step that comes again is not put off again"
    assert second.has_audited(0) and second.controls_left == 0
    assert [entry.attempt.attack for entry in second.entries] == ["fake-guess", "fake-searches"]


def test_attacks_on_texts_are_not_needed_where_every_text_is_proved(tmp_path: Path) -> None:
    """Neither slow nor quick ones run; attacks on labels do."""
    audit = _audit(tmp_path, "fake-proves", "fake-guess", "fake-searches", "fake-labels", defenses=["fake-halves"])
    assert audit.step(_snapshot(), lambda: True), "no slow attack is left to wait for"
    found = {name: one.attempt for (_, name, defense), one in _attempts(audit).items() if defense == "none"}
    assert found["fake-proves"].recovers_every_text and found["fake-proves"].status is AttemptStatus.RAN
    assert found["fake-labels"].status is AttemptStatus.RAN
    for name in ("fake-guess", "fake-searches"):
        assert (found[name].status, found[name].scores, found[name].events) == (AttemptStatus.NOT_NEEDED, {}, ())
        assert found[name].reason == "fake-proves had recovered every text of this step"
    assert not {"fake-guess", "fake-searches"} & set(_Fake.calls)
    results = audit.finish()
    assert contradictions(results) == ()
    searched = next(summary for summary in results.summaries if summary.attack == "fake-searches")
    assert searched.status_counts == {"not_needed": 1}
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "not needed in " in page and "fake-proves had recovered every text of this step" in page


@pytest.mark.parametrize(
    ("proof", "texts", "more"),
    [
        ("fake-proves(right=false)", TEXTS[:1], {}),
        ("fake-proves", TEXTS, {}),
        ("fake-proves-granted", TEXTS[:1], {}),
        ("fake-proves", TEXTS[:1], {"attack_recovered_steps": True}),
    ],
    ids=["a wrong text", "one of two texts", "granted more", "asked for"],
)
def test_a_proof_of_less_than_every_text_stops_no_attack(
    tmp_path: Path, proof: str, texts: tuple[str, ...], more: dict[str, Any]
) -> None:
    """Nor does one by an attack that was granted more, or if all are asked for."""
    audit = _audit(tmp_path, proof, "fake-searches", **more)
    audit.step(_snapshot(0, texts))
    assert [entry.attempt.status for entry in audit.entries] == [AttemptStatus.RAN] * 2


def test_a_second_audit_of_the_same_folder_repeats_nothing(tmp_path: Path) -> None:
    """A worker that was killed between two attempts goes on with the next one."""
    first = _audit(tmp_path, "fake-guess", defenses=["fake-halves"])
    first.step(_snapshot(0))
    assert len(_Fake.calls) == 2
    second = _audit(tmp_path, "fake-guess", defenses=["fake-halves"])
    second.step(_snapshot(0))
    assert len(_Fake.calls) == 2
    assert second.entries == first.entries
    second.step(_snapshot(1))
    assert len(_Fake.calls) == 4


def test_a_torn_last_line_is_cut_and_its_attempt_repeated(tmp_path: Path) -> None:
    """SIGKILL in the middle of a write leaves half a line; everything before it stays."""
    first = _audit(tmp_path, "fake-guess", defenses=["fake-halves"])
    first.step(_snapshot(0))
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_bytes()
    lines = whole.splitlines(keepends=True)
    journal.write_bytes(lines[0] + lines[1][: len(lines[1]) // 2])
    second = _audit(tmp_path, "fake-guess", defenses=["fake-halves"])
    assert journal.read_bytes() == lines[0]
    second.step(_snapshot(0))
    assert len(_Fake.calls) == 3
    again = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    for done, before in zip(again, map(json.loads, lines), strict=True):
        assert done["attempt"] | {"wall_s": 0} == before["attempt"] | {"wall_s": 0}


def test_a_last_line_without_its_newline_is_completed(tmp_path: Path) -> None:
    """A kill may fall inside a line; the next line starts on its own."""
    _audit(tmp_path, "fake-guess").step(_snapshot(0))
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().rstrip(b"\n"))
    second = _audit(tmp_path, "fake-guess")
    second.step(_snapshot(1))
    assert len(load_journal(journal)) == 2
    assert len(_Fake.calls) == 2


def test_a_damaged_line_in_the_middle_is_no_torn_line(tmp_path: Path) -> None:
    """It was not this tool that wrote it; going on would lose attempts in silence."""
    audit = _audit(tmp_path, "fake-guess", defenses=["fake-halves"])
    audit.step(_snapshot(0))
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_text(encoding="utf-8").splitlines()
    journal.write_text("\n".join(["{", *lines[1:]]) + "\n", encoding="utf-8")
    with pytest.raises(ResultsError, match=r"journal\.jsonl: line 1 of 2 cannot be read"):
        _audit(tmp_path, "fake-guess", defenses=["fake-halves"])


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"budget_s": 5.0},
        {"defenses": ["fake-halves"]},
        {"attacks": ["fake-guess(length=3)"]},
        {"adaptive": False},
    ],
    ids=["seed", "budget", "defences", "knobs", "knowledge"],
)
def test_a_folder_keeps_to_one_battery(tmp_path: Path, other: dict[str, Any]) -> None:
    """Mixed batteries would be one average of two measurements."""
    _audit(tmp_path, "fake-guess")
    config = AuditConfig.model_validate({"attacks": ["fake-guess"], "controls": 0} | other)
    with pytest.raises(ResultsError, match=r"holds an audit by another battery .*; give another folder, or remove"):
        Audit(tmp_path, config, tiny.bert_tokenizer())


def test_a_crash_is_an_error_with_type_and_place_and_without_its_message(tmp_path: Path) -> None:
    """The message of an exception may hold the batch; the other attacks go on."""
    audit = _audit(tmp_path, "fake-raises", "fake-guess")
    audit.step(_snapshot())
    found = _attempts(audit)
    crashed = found["st-000000", "fake-raises", "none"].attempt
    assert crashed.status is AttemptStatus.ERROR
    assert crashed.reason.startswith("ValueError at test_audit.py:")
    assert crashed.scores == {} and crashed.sequences == () and crashed.events == ()
    assert found["st-000000", "fake-guess", "none"].attempt.status is AttemptStatus.RAN
    audit.finish()
    for path in tmp_path.iterdir():
        assert SECRET not in path.read_text(encoding="utf-8"), path.name


@pytest.mark.parametrize(
    ("name", "reason"),
    [("fake-refuses", "there is nothing to work on"), ("fake-lost", "looked for a pooler, found none")],
)
def test_an_attack_that_does_not_apply_says_why_and_has_no_numbers(tmp_path: Path, name: str, reason: str) -> None:
    """Whether it says so before or finds out on the way: neither is a zero."""
    audit = _audit(tmp_path, name)
    audit.step(_snapshot())
    (entry,) = audit.entries
    assert (entry.attempt.status, entry.attempt.reason) == (AttemptStatus.NOT_APPLICABLE, reason)
    (summary,) = audit.finish().summaries
    assert summary.status_counts == {"not_applicable": 1}
    assert (
        summary.steps,
        summary.scores.get("exact"),
        summary.scores.get("rougeL"),
        summary.scores.get("label_accuracy"),
    ) == (0, None, None, None)


def test_an_attack_that_ran_out_of_budget_is_scored_by_its_best_guess(tmp_path: Path) -> None:
    """And still marked, so that nobody takes it for all there is."""
    audit = _audit(tmp_path, "fake-slow", budget_s=12.0)
    audit.step(_snapshot())
    (entry,) = audit.entries
    assert entry.attempt.status is AttemptStatus.BUDGET_EXHAUSTED
    assert entry.attempt.reason == "stopped after 12 s with its best guess so far"
    assert isinstance(entry.attempt.scores["rougeL"], Score)
    (summary,) = audit.finish().summaries
    assert summary.steps == 1 and summary.status_counts == {"budget_exhausted": 1}


def test_a_defense_that_fails_costs_its_own_cells_only(tmp_path: Path) -> None:
    """Every attack under it is an error; the undefended update is still attacked."""
    audit = _audit(tmp_path, "fake-guess", "fake-labels", defenses=["fake-broken", "fake-halves"])
    audit.step(_snapshot())
    by_defense: dict[str, set[AttemptStatus]] = {}
    for entry in audit.entries:
        by_defense.setdefault(entry.attempt.defense, set()).add(entry.attempt.status)
    assert by_defense == {
        "none": {AttemptStatus.RAN},
        "fake-broken": {AttemptStatus.ERROR},
        "fake-halves": {AttemptStatus.RAN},
    }
    broken = _attempts(audit)["st-000000", "fake-labels", "fake-broken"].attempt
    assert broken.reason.startswith("RuntimeError at test_audit.py:") and SECRET not in broken.reason


def test_a_defense_that_the_model_cannot_have_is_not_applicable(tmp_path: Path) -> None:
    """Neither an error nor a protected step; the reason shows no free text."""
    audit = _audit(tmp_path, "fake-guess", defenses=["lora(targets=nowhere)"])
    audit.step(_snapshot())
    (attempt,) = [entry.attempt for entry in audit.entries if entry.attempt.defense != "none"]
    assert attempt.status is AttemptStatus.NOT_APPLICABLE
    assert "the defence does not apply" in attempt.reason and "nowhere" not in attempt.reason


def test_an_audit_that_a_gpu_has_no_room_for_goes_on_on_the_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Finished attempts stay, the attempt is repeated, later steps use the CPU.

    On a CPU it is an error like others.
    """
    audit = _audit(tmp_path, "fake-guess", "fake-greedy")
    audit._on_gpu = True
    audit.step(_snapshot())
    audit.step(_snapshot(1))
    assert [e.attempt.status for e in audit.entries] == [AttemptStatus.RAN] * 4
    assert _Fake.calls.count("greedy") == 3 and audit.device.type == "cpu"
    assert caplog.text.count("the GPU is full: the audit of step 0 continues on the CPU") == 1
    assert SECRET not in caplog.text
    _Fake.calls.clear()
    (tmp_path / "cpu").mkdir()
    audit = _audit(tmp_path / "cpu", "fake-greedy")
    audit.step(_snapshot())
    (entry,) = audit.entries
    assert entry.attempt.status is AttemptStatus.ERROR and entry.attempt.reason.startswith("OutOfMemoryError at")


def test_a_control_that_a_gpu_has_no_room_for_is_repeated_on_the_cpu(tmp_path: Path) -> None:
    """Else it would silently be missing."""
    _Fake.calls.clear()
    audit = _audit(tmp_path, {"name": "fake-greedy", "options": {"at": 2}}, controls=1)
    audit._on_gpu = True
    audit.step(_snapshot())
    assert audit.device.type == "cpu" and not audit._on_gpu
    assert _Fake.calls.count("greedy") == 3 and audit.controls_left == 0


def test_a_verification_that_a_gpu_has_no_room_for_is_repeated_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing about the step, which would be called unverifiable."""
    plain, computed = ClientStep.update, []

    def update(self: ClientStep, **more: Any) -> Any:
        computed.append(self)
        if len(computed) == 1:
            raise torch.OutOfMemoryError(SECRET)
        return plain(self, **more)

    snapshot = _snapshot()
    monkeypatch.setattr(ClientStep, "update", update)
    audit = _audit(tmp_path, "fake-guess")
    audit._on_gpu = True
    audit.step(snapshot)
    (record,) = audit.finish().steps
    assert record.verification.status is VerificationStatus.VERIFIED and not audit._on_gpu


def test_a_snapshot_that_does_not_fit_its_batch_is_not_attacked(tmp_path: Path) -> None:
    """Scores against the wrong batch would be zeros that look like safety."""
    other = _snapshot(0, TEXTS[1:])
    mixed = replace(_snapshot(0), observation=other.observation)
    audit = _audit(tmp_path, "fake-guess", "fake-labels", defenses=["fake-halves"], controls=3)
    audit.step(mixed)
    assert _Fake.calls == []
    assert {e.attempt.status for e in audit.entries} == {AttemptStatus.SKIPPED}
    assert len(audit.entries) == 4
    results = audit.finish()
    (record,) = results.steps
    assert record.verification.status is VerificationStatus.MISMATCH
    assert all(
        s.scores.get("exact") is None and s.scores.get("rougeL") is None and s.steps == 0 for s in results.summaries
    )
    assert results.controls.positive.n == 0


def test_an_update_with_secret_factors_is_attacked_as_it_was_observed(tmp_path: Path) -> None:
    """Whoever scales each tensor by a number of its own does not escape.

    Neither does one who turns the sign around.
    """
    kept = _snapshot(0)
    factors = [(-1) ** i * 10.0 ** (i % 5 - 2) for i in range(len(kept.observation.update))]
    update = {name: k * value for k, (name, value) in zip(factors, kept.observation.update.items(), strict=True)}
    audit = _audit(tmp_path, "embedding-rows")
    audit.step(replace(kept, observation=replace(kept.observation, update=update)))
    results = audit.finish()
    assert results.steps[0].verification.status is VerificationStatus.RESCALED
    (found,) = results.attempts
    assert found.status is AttemptStatus.RAN and "all_words" in found.events
    assert contradictions(results) == ()


def test_real_updates_are_verified_before_they_are_attacked(tmp_path: Path) -> None:
    """Clipped or not, an update that comes from its batch is stamped so."""
    audit = _audit(tmp_path, "fake-guess")
    audit.step(_snapshot(0))
    snapshot = _snapshot(1)
    thrice = {name: 3.0 * tensor for name, tensor in snapshot.observation.update.items()}
    audit.step(replace(snapshot, observation=replace(snapshot.observation, update=thrice)))
    plain, scaled = audit.finish().steps
    assert plain.verification.status is VerificationStatus.VERIFIED
    assert scaled.verification.status is VerificationStatus.SCALED
    assert scaled.verification.scale == pytest.approx(3.0)


def _shipping(snapshot: Snapshot, name: str, **knobs: Any) -> Snapshot:
    """Return the snapshot of a run that ships a defence.

    A recorder keeps zeros for parameters that were not sent.
    """
    plugin = defenses.create(name, knobs)
    seen = plugin(ClientStep.of(snapshot), snapshot.observation, torch.Generator().manual_seed(0))
    update = {n: seen.update.get(n, torch.zeros_like(g)) for n, g in snapshot.observation.update.items()}
    facts = snapshot.observation.facts.model_copy(update={"defenses": (plugin.declared(),)})
    return replace(snapshot, observation=replace(snapshot.observation, update=update, facts=facts))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Observation]:
    """Note what an attack is shown."""
    shown: list[Observation] = []
    plain = Guesses.__call__

    def looking(self: Any, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        shown.append(seen)
        return plain(self, seen, rng, budget)

    monkeypatch.setattr(Guesses, "__call__", looking)
    return shown


def test_tables_that_a_run_withholds_are_not_shown_as_tables_of_zeros(tmp_path: Path, looks: list[Observation]) -> None:
    """They are frozen, as under a simulated `freeze-embeddings`.

    The raw view has them again.
    """
    audit = _audit(tmp_path, "fake-guess", defenses=["undefended"])
    audit.step(_shipping(_snapshot(), "freeze-embeddings"))
    (record,) = audit.finish().steps
    assert record.verification.status is VerificationStatus.VERIFIED
    assert record.shipped_defense == "freeze-embeddings"
    sent, raw = looks
    table = tiny.word_table(sent.model)
    assert table not in sent.update and table in sent.facts.frozen and table not in sent.facts.shared
    assert table in raw.facts.shared and bool(raw.update[table].any())


@pytest.mark.parametrize("adaptive", [True, False])
def test_an_attack_knows_the_defence_only_where_the_results_say_so(
    tmp_path: Path, looks: list[Observation], adaptive: bool
) -> None:
    """Without it the update is the same, and nothing is declared."""
    audit = _audit(tmp_path, "fake-guess", defenses=["random-mask(share=0.5)"], adaptive=adaptive)
    audit.step(_snapshot())
    results = audit.finish()
    assert {attempt.adaptive for attempt in results.attempts} == {adaptive}
    assert ("do not know" in keys_of(results, default_policy())["granted"]) == (not adaptive)
    seen = looks[-1]
    assert seen.zeroed == seen.resized == adaptive
    assert any(bool((g == 0).any()) for g in seen.update.values())


def test_a_shipped_defence_with_numbers_is_no_contradiction(tmp_path: Path) -> None:
    """The record names it with its declared numbers only.

    Numbers that belong to one step are left out.
    """
    audit = _audit(tmp_path, "fake-guess")
    audit.step(_shipping(_snapshot(), "gaussian-noise", scale=0.001))
    found = audit.finish()
    assert found.steps[0].shipped_defense == "gaussian-noise(scale=0.001)"
    assert found.regime.declared_defenses == ("gaussian-noise",)
    assert contradictions(found) == ()


def test_a_loss_or_a_clipping_bound_that_is_no_number_loses_no_step(tmp_path: Path) -> None:
    """A trainer may log NaN, and clip at infinity to read the norm of its gradients."""
    snapshot = _snapshot()
    odd = replace(
        snapshot,
        provenance=snapshot.provenance.model_copy(update={"loss": float("nan")}),
        recipe=snapshot.recipe.model_copy(update={"max_grad_norm": float("inf")}),
    )
    audit = _audit(tmp_path, "fake-guess")
    audit.step(odd)
    found = audit.finish()
    assert (found.steps[0].loss, found.regime.max_grad_norm) == (None, None)
    assert found.steps[0].verification.status is VerificationStatus.VERIFIED


def test_a_declared_defence_that_nobody_knows_is_said_and_attacked(tmp_path: Path, looks: list[Observation]) -> None:
    """What comes back is proof; an attack is told that all of the update may be noise."""
    snapshot = _snapshot()
    odd = {name: g.sign() for name, g in snapshot.observation.update.items()}
    facts = snapshot.observation.facts.model_copy(update={"defenses": (DeclaredDefense(name="secret-sauce"),)})
    audit = _audit(tmp_path, "fake-guess")
    audit.step(replace(snapshot, observation=replace(snapshot.observation, update=odd, facts=facts)))
    (record,) = audit.finish().steps
    assert record.verification.status is VerificationStatus.UNVERIFIABLE
    assert "secret-sauce is not registered here" in record.verification.note
    assert audit.entries[0].attempt.status is AttemptStatus.RAN
    assert looks[0].noise_sigma > 0 and looks[0].zeroed


def test_an_active_server_gets_what_the_run_would_send(tmp_path: Path, looks: list[Observation]) -> None:
    """The shipped noise is drawn again on the server's model.

    A step without it would promise too much.
    """
    server = {"name": "wide-pooler", "options": {"width": 40, "dimension": 8}}
    audit = _audit(tmp_path, "fake-guess", server=server)
    audit.step(_shipping(_snapshot(), "gaussian-noise", scale=1.0))
    audit.finish()
    (seen,) = looks
    assert seen.facts.server is not None and [d.name for d in seen.facts.defenses] == ["gaussian-noise"]
    assert seen.noise_sigma > 0
    table = seen.update[tiny.word_table(seen.model)]
    assert bool((table != 0).all())  # without noise, the rows of words that are not there are zero


def test_a_canary_is_recovered_and_does_not_match_the_batch(tmp_path: Path) -> None:
    """Positive control: attacks work. Negative control: they do not guess."""
    audit = _audit(tmp_path, "embedding-rows", "span", controls=2)
    for step in range(3):
        audit.step(_snapshot(step))
    controls = audit.finish().controls
    assert (controls.positive.k, controls.positive.n) == (2, 2)
    assert (controls.negative.k, controls.negative.n) == (0, 2)
    assert (
        controls.positive.note == "undefended canary steps: text by span; words by embedding-rows, span; labels by span"
    )
    assert controls.kinds["text"].by == {"embedding-rows": Tally(k=0, n=2), "span": Tally(k=2, n=2)}
    assert controls.kinds["words"].by["embedding-rows"] == Tally(k=2, n=2)
    assert controls.kinds["labels"].by == {"embedding-rows": Tally(k=0, n=2), "span": Tally(k=2, n=2)}


def test_a_label_attack_does_not_recover_the_text_of_a_canary(tmp_path: Path) -> None:
    """Its success stands under its own kind, beside the failure on texts."""
    audit = _audit(tmp_path, "llg", "fake-guess", controls=1)
    audit.step(_snapshot())
    controls = audit.finish().controls
    assert (controls.kinds["labels"].k, controls.kinds["text"].k, controls.positive.k) == (1, 0, 0)
    assert controls.kinds["text"].by["fake-guess"] == Tally(k=0, n=1)


def test_only_the_first_control_asks_attacks_whose_kind_came_back(tmp_path: Path) -> None:
    """A slow attack takes its whole budget on every canary else."""
    audit = _audit(tmp_path, "span", "fake-guess", controls=3)
    for step in range(3):
        audit.step(_snapshot(step))
    assert {name: own.n for name, own in audit.finish().controls.kinds["text"].by.items()} == {
        "span": 3,
        "fake-guess": 1,
    }


def test_a_blind_battery_fails_its_positive_control(tmp_path: Path) -> None:
    """An attack that guesses at random recovers no canary, and the results say so."""
    audit = _audit(tmp_path, "fake-guess", "fake-raises", controls=1)
    audit.step(_snapshot())
    controls = audit.finish().controls
    assert (controls.positive.k, controls.positive.n) == (0, 1)
    assert controls.positive.note == "no canary step was recovered"


def test_controls_are_not_run_twice(tmp_path: Path) -> None:
    """They are kept with the state, like everything that took time."""
    _audit(tmp_path, "fake-guess", controls=1).step(_snapshot())
    calls = len(_Fake.calls)
    audit = _audit(tmp_path, "fake-guess", controls=1)
    audit.step(_snapshot())
    assert len(_Fake.calls) == calls
    assert audit.finish().controls.positive.n == 1


def test_the_same_seed_gives_the_same_scores_and_another_seed_others(tmp_path: Path) -> None:
    """Whatever ran before: attempts draw from generators of their own."""

    def guesses(folder: str, *names: str, seed: int = 0) -> dict[str, Any]:
        audit = _audit(tmp_path / folder, *names, seed=seed)
        for step in range(3):
            audit.step(_snapshot(step))
        return {
            entry.attempt.step: (entry.attempt.scores, entry.samples)
            for entry in audit.entries
            if entry.attempt.attack == "fake-guess"
        }

    one = guesses("one", "fake-guess")
    assert one == guesses("two", "fake-guess")
    assert one == guesses("three", "fake-labels", "fake-guess")
    assert one != guesses("four", "fake-guess", seed=1)
    assert len({str(found) for found in one.values()}) > 1, "steps must not share one generator"


def test_what_does_not_exist_is_missing_with_its_reason_and_null_in_the_summary(tmp_path: Path) -> None:
    """A label attack has no ROUGE, a text attack no label accuracy."""
    audit = _audit(tmp_path, "fake-guess", "fake-labels")
    audit.step(_snapshot())
    found = _attempts(audit)
    text = found["st-000000", "fake-guess", "none"].attempt
    labels = found["st-000000", "fake-labels", "none"].attempt
    assert isinstance(text.scores["label_accuracy"], Missing)
    assert isinstance(labels.scores["rougeL"], Missing)
    by_attack = {summary.attack: summary for summary in audit.finish().summaries}
    assert (
        by_attack["fake-guess"].scores.get("label_accuracy") is None
        and by_attack["fake-guess"].scores.get("rougeL") is not None
    )
    assert (
        by_attack["fake-labels"].scores.get("rougeL") is None
        and by_attack["fake-labels"].scores.get("label_accuracy") is not None
    )


def test_what_is_granted_is_recorded_with_the_score(tmp_path: Path) -> None:
    """And for the whole audit, in its threat model."""
    snapshot = _snapshot()
    granted = replace(snapshot, observation=snapshot.observation.granting(Granted(labels=(1,))))
    audit = _audit(tmp_path, "fake-labels")
    audit.step(granted)
    (entry,) = audit.entries
    assert entry.attempt.granted == ("labels",)
    assert entry.attempt.events == ("label_counts",)
    assert audit.finish().threat_model.granted == ("labels",)


def test_facts_that_json_cannot_hold_are_left_out(tmp_path: Path) -> None:
    """JSON has no infinity."""
    audit = _audit(tmp_path, "fake-guess")
    audit.step(_snapshot())
    assert audit.entries[0].attempt.facts == {"numbers": 1.0}


def test_what_was_in_reach_is_stored_beside_the_scores(tmp_path: Path) -> None:
    """The attack says what was in reach of each true sequence.

    Eleven words with one that was no candidate, eight that all were; one sequence is long enough.
    """
    audit = _audit(tmp_path / "run", "fake-reach")
    audit.step(_snapshot(0, TEXTS))
    found = audit.entries[0].attempt
    assert found.reachable_tokens == Score(value=(10 / 11 + 1.0) / 2, n=2)
    assert found.reachable_sequences == Score(value=0.5, n=2)
    assert [(s.reachable, s.passes, s.outcome) for s in found.sequences] == [
        (10 / 11, True, "search gave up"),
        (1.0, False, "out of reach"),
    ]


def test_a_reach_that_fails_is_missing_and_the_scores_stand(tmp_path: Path) -> None:
    """With type and place, without the message; no zero, and the attempt still ran."""
    audit = _audit(tmp_path / "run", "fake-reach(broken=true)", "fake-guess")
    audit.step(_snapshot(0, TEXTS))
    broken, silent = (entry.attempt for entry in audit.entries)
    assert broken.status is AttemptStatus.RAN and isinstance(broken.scores["rouge1"], Score)
    assert isinstance(broken.reachable_tokens, Missing)
    assert re.fullmatch(
        r".* failed: ValueError at test_audit\.py:\d+, called from reachability\.py:\d+ \(_ask\)",
        broken.reachable_tokens.missing,
    )
    assert SECRET not in (tmp_path / "run" / "journal.jsonl").read_text()
    assert {(s.reachable, s.passes) for s in broken.sequences} == {(None, None)}
    assert silent.reachable_tokens == Missing(missing="the attack does not say what it could have reached")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """Give the folder and the results of a whole audit with every kind of outcome."""
    with _registered():
        return _whole_audit(tmp_path_factory.mktemp("finished") / "run")


def _whole_audit(folder: Path) -> tuple[Path, Results]:
    audit = _audit(
        folder,
        "embedding-rows",
        "span",
        "fake-raises",
        "fake-refuses",
        "fake-slow",
        "fake-labels",
        defenses=["fake-broken", "prune(share=0.5)"],
        controls=1,
    )
    for step in range(2):
        audit.step(_snapshot(step, TEXTS))
    return folder, audit.finish(total_steps=10, refused=1, not_kept=((3, "the spool was full"),))


def test_results_fit_the_published_schema_and_load_again(finished: tuple[Path, Results]) -> None:
    """An independent validator accepts it by the printed schema."""
    folder, results = finished
    raw = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(Results.model_json_schema(by_alias=True)).validate(raw)
    assert raw["schema"] == "leakaudit.results/1.8"
    assert load_results(folder) == results
    unseen = {AttemptStatus.SKIPPED, AttemptStatus.NOT_NEEDED}
    assert {a.status for a in results.attempts} == set(AttemptStatus) - unseen
    assert results.coverage.audited_steps == 2
    assert (results.coverage.total_steps, results.coverage.skipped_snapshots) == (10, 1)
    assert ("3 steps that should have been kept", "the spool was full") in [
        (item.what, item.why) for item in results.coverage.not_tested
    ]
    not_run = {item.what for item in results.coverage.not_run}
    assert {"tag", "idlg", "llg"} <= not_run and "span" not in not_run


def test_no_file_of_a_masked_audit_holds_text(finished: tuple[Path, Results]) -> None:
    """No output holds the text, although both sentences were recovered."""
    folder, results = finished
    recovered = [s.exact for a in results.attempts if a.attack == "span" and a.defense == "none" for s in a.sequences]
    assert any(recovered)
    for path in folder.iterdir():
        content = path.read_text(encoding="utf-8")
        assert not [word for word in WORDS if word in content], path.name


def test_results_hold_no_token_ids_and_no_class_counts(finished: tuple[Path, Results]) -> None:
    """They are in text mode `hash`, whatever the report may show."""
    folder, results = finished
    content = (folder / "results.json").read_text(encoding="utf-8")
    ids = tiny.bert_tokenizer()(TEXTS[0])["input_ids"]
    for form in (", ".join(map(str, ids[:3])), ",".join(map(str, ids[:3]))):
        assert form not in content
    assert results.run.text_mode is TextMode.HASH
    assert "counts" not in {key for attempt in json.loads(content)["attempts"] for key in attempt}


def test_everything_is_readable_by_its_owner_only(finished: tuple[Path, Results]) -> None:
    """The journal says which tokens were recovered."""
    folder, _ = finished
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    private = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir() if path.suffix != ".html"}
    assert private == dict.fromkeys(("journal.jsonl", "state.json", "results.json", "verdict.json"), 0o600)


def test_the_key_is_destroyed_when_the_audit_is_finished(tmp_path: Path) -> None:
    """Without it nobody can test a guessed sentence against the hashes."""
    audit = _audit(tmp_path, "fake-guess")
    audit.step(_snapshot())
    key = json.loads((tmp_path / "state.json").read_text(encoding="utf-8"))["key"]
    assert len(bytes.fromhex(key)) == 32
    audit.finish()
    assert all(key not in path.read_text(encoding="utf-8") for path in tmp_path.iterdir())


def test_an_audit_that_goes_on_after_it_was_finished_hashes_under_a_new_key(tmp_path: Path) -> None:
    """Under an empty key anybody could test a guessed sentence against the hash."""
    first = _audit(tmp_path, "fake-guess")
    first.step(_snapshot(0))
    first.finish()
    second = _audit(tmp_path, "fake-guess")
    second.step(_snapshot(1))
    assert len(json.loads((tmp_path / "state.json").read_text(encoding="utf-8"))["key"]) == 64


def test_an_interrupted_audit_keeps_its_key_for_the_rest(tmp_path: Path) -> None:
    """The same sentence has one hash before and after the interruption."""
    first = _audit(tmp_path, "fake-guess")
    first.step(_snapshot(0))
    assert first.finish(interrupted=True).run.interrupted
    second = _audit(tmp_path, "fake-guess")
    second.step(_snapshot(1))
    hashes = {sequence.hmac for entry in second.entries for sequence in entry.attempt.sequences}
    assert len(second.entries) == 2 and len(hashes) == 1


def test_hashes_of_one_sentence_agree_within_a_run_and_differ_between_runs(tmp_path: Path) -> None:
    """Steps can be compared, and runs cannot."""
    hashes = []
    for name in ("one", "two"):
        audit = _audit(tmp_path / name, "fake-guess")
        audit.step(_snapshot(0))
        audit.step(_snapshot(1))
        hashes.append({sequence.hmac for entry in audit.entries for sequence in entry.attempt.sequences})
    assert len(hashes[0]) == len(hashes[1]) == 1
    assert hashes[0] != hashes[1]


def test_text_modes_decide_what_the_journal_keeps(tmp_path: Path) -> None:
    """Hash: numbers. Masked: which tokens were right. Full: the tokens."""
    kept = {}
    for mode in TextMode:
        audit = _audit(tmp_path / mode, "fake-slow", text=mode, allow_full=mode is TextMode.FULL)
        audit.step(_snapshot())
        (kept[mode],) = audit.entries
    assert kept[TextMode.HASH].samples == () and kept[TextMode.HASH].labels is None
    (masked,) = kept[TextMode.MASKED].samples
    (full,) = kept[TextMode.FULL].samples
    assert masked.true_tokens is None and masked.guess_tokens is None
    assert len(masked.true_pattern) == len(TEXTS[0].split()) and set(masked.true_pattern) <= set("bu.")
    assert full.true_tokens == tuple(TEXTS[0].split())
    assert full.true_pattern == masked.true_pattern


@pytest.mark.parametrize("mode", [TextMode.HASH, TextMode.MASKED])
def test_results_give_parts_of_a_text_and_no_number_of_its_tokens(tmp_path: Path, mode: TextMode) -> None:
    """A strip has sixteen cells whatever the length of the text.

    A run of tokens beside "exact" would give the length.
    """
    audit = _audit(tmp_path, "fake-guess", text=mode)
    audit.step(_snapshot())
    audit.finish()
    written = json.loads((tmp_path / "results.json").read_text())
    (found,) = written["attempts"][0]["sequences"]
    assert found["longest_run"] is None and 0.0 <= found["longest_run_share"] <= 1.0
    assert (found["strip"] is None) == (mode is TextMode.HASH)
    assert mode is TextMode.HASH or re.fullmatch("[0-4a-d]{16}", found["strip"])
    private = (tmp_path / "journal.jsonl").read_bytes()
    shown = (tmp_path / "report.html").read_bytes()
    (tmp_path / "journal.jsonl").unlink()
    verdict = Verdict.model_validate_json((tmp_path / "verdict.json").read_bytes())
    again = write_report(tmp_path, mode, now=datetime.now(UTC), verdict=verdict)
    assert private and again.read_bytes() == shown


def test_an_audit_without_a_step_has_no_results(tmp_path: Path) -> None:
    """An empty results file would read as a clean one."""
    with pytest.raises(ResultsError, match="no step was audited, so there are no results"):
        _audit(tmp_path, "fake-guess").finish()


def test_two_settings_of_one_attack_have_labels_of_their_own(tmp_path: Path) -> None:
    """The bare name is used only where it is unambiguous."""
    config = AuditConfig.model_validate({"attacks": ["fake-guess", "fake-guess(length=3)", "fake-slow"]})
    audit = Audit(tmp_path, config, tiny.bert_tokenizer())
    assert audit.battery.attacks == ("fake-guess", "fake-guess(length=3)", "fake-slow")


def test_the_step_record_tells_no_exact_lengths(tmp_path: Path) -> None:
    """Lengths are private: they come in powers of two."""
    audit = _audit(tmp_path, "fake-guess")
    audit.step(replace(_snapshot(7, TEXTS), provenance=Provenance(framework="test", step=7, total_steps=10)))
    (record,) = audit.finish().steps
    assert (record.id, record.phase, record.n_sequences) == ("st-000007", "late", 2)
    assert record.n_tokens_bucket == "17-32"  # 13 and 10 tokens
    assert record.verification.status is VerificationStatus.VERIFIED


def test_the_recipe_of_an_unreplayable_loss_is_stamped_unverifiable_and_attacked(tmp_path: Path) -> None:
    """A custom loss cannot be recomputed, which is no proof of a mismatch."""
    snapshot = replace(_snapshot(), recipe=StepRecipe(training=False, loss="unsupported", note="custom loss"))
    audit = _audit(tmp_path, "fake-guess")
    audit.step(snapshot)
    (record,) = audit.finish().steps
    assert record.verification.status is VerificationStatus.UNVERIFIABLE
    assert "custom loss" in record.verification.note
    assert audit.entries[0].attempt.status is AttemptStatus.RAN


def test_an_attempt_that_was_written_when_a_signal_came_is_in_the_results(tmp_path: Path) -> None:
    """A signal may come between the line in the journal and the note of it."""
    audit = _audit(tmp_path, "fake-guess")
    audit.step(_snapshot(0))
    audit._journal.entries.clear()
    assert len(audit.finish(interrupted=True).attempts) == 1
    audit._journal.entries.clear()
    audit.catch_up()
    assert len(audit.entries) == 1
