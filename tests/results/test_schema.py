"""results.json and the journal: what is written can be read, missing is no zero."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from leakaudit.errors import ResultsError
from leakaudit.files import private_files
from leakaudit.results import schema as scores
from leakaudit.results.consistency import contradictions
from leakaudit.results.files import digest_of, load_results, to_json
from leakaudit.results.journal import load_journal
from leakaudit.results.schema import AttemptStatus, Missing, Score
from leakaudit.results.summary import summarise
from tests.support.factories import attempt, audit, journal_entry, results, step, with_scores

NOTHING = Missing(missing="nothing to measure")


def save(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_results_survive_their_own_json(tmp_path: Path) -> None:
    """Written and read back, from the file or from its folder."""
    found = audit(1, 2)
    save(tmp_path / "results.json", to_json(found))
    assert load_results(tmp_path) == load_results(tmp_path / "results.json") == found


def test_a_later_minor_version_is_read_and_a_later_major_one_is_not(tmp_path: Path) -> None:
    """1.x only adds keys; 2.0 may mean something else."""
    data = to_json(audit(1, 2)) | {"schema": "leakaudit.results/1.999", "news": 1}
    data["digest"] = digest_of(data)
    assert load_results(save(tmp_path / "results.json", data)).schema_ == "leakaudit.results/1.999"
    with pytest.raises(ResultsError, match=r"schema leakaudit\.results/2\.0; this version reads .*1\.x\. Upgrade"):
        load_results(save(tmp_path / "results.json", data | {"schema": "leakaudit.results/2.0"}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not readable as JSON"),
        ("[]", "is not a leakaudit results file"),
        ('{"schema": "leakaudit.results/1.0"}', "does not fit leakaudit.results/1.8: run: Field required"),
    ],
)
def test_a_broken_results_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    """The message says what is wrong, without a traceback."""
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ResultsError, match=message):
        load_results(tmp_path)


def test_a_missing_results_file_says_what_writes_one(tmp_path: Path) -> None:
    """The way out is in the message."""
    with pytest.raises(ResultsError, match="`leakaudit run` or `leakaudit simulate` writes one"):
        load_results(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_is_a_finite_number(value: float) -> None:
    """A number that does not exist is a Missing, never NaN."""
    with pytest.raises(ValidationError, match="finite"):
        Score(value=value)


def test_a_score_and_a_missing_one_come_back_as_what_they_were() -> None:
    """The two kinds are told apart by their keys."""
    found = attempt(0, scores={"rouge1": Score(value=0.5, n=2), "rougeL": Missing(missing="no order")})
    assert type(found).model_validate_json(found.model_dump_json()).scores == found.scores


def test_a_journal_torn_in_its_last_line_loses_that_line_only(tmp_path: Path) -> None:
    """A worker that is killed while it writes leaves half a line."""
    path = tmp_path / "journal.jsonl"
    whole = journal_entry(attempt(0, leaks=True), ["a", "b"]).model_dump_json()
    path.write_text(f"{whole}\n{whole[:40]}")
    assert [entry.attempt.step for entry in load_journal(path)] == ["st-000000"]
    path.write_text(f"{whole[:40]}\n{whole}\n")
    with pytest.raises(ResultsError, match="line 1 of 2 cannot be read"):
        load_journal(path)
    assert load_journal(tmp_path / "none.jsonl") == []


def test_private_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    """Mode 0600, written whole, nothing left beside it."""
    path = tmp_path / "private.txt"
    private_files.write_atomic(path, "first")
    private_files.write_atomic(path, "second")
    assert path.read_text() == "second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_summary_of_nothing_has_no_numbers() -> None:
    """Attempts that did not run make counts, not zeros."""
    (summary,) = summarise([attempt(0, status=AttemptStatus.ERROR), attempt(1, status=AttemptStatus.SKIPPED)])
    assert (summary.steps, summary.scores.get("exact"), summary.scores.get("rougeL"), summary.seconds_per_step) == (
        0,
        None,
        None,
        None,
    )
    assert summary.status_counts == {"error": 1, "skipped": 1}


def test_a_summary_weighs_every_sequence_alike() -> None:
    """One step with three sequences counts three times as much as a step with one."""
    one = attempt(0, scores={"rouge1": Score(value=1.0, n=3)}, wall_s=1.0)
    other = attempt(1, scores={"rouge1": Score(value=0.0, n=1)}, wall_s=3.0)
    (summary,) = summarise([one, other])
    assert (summary.scores.get("rouge1"), summary.seconds_per_step, summary.steps) == (0.75, 2.0, 2)


def test_the_spread_is_the_standard_deviation_of_the_seeds_means() -> None:
    """Means 0.75 and 0.25 deviate by the root of 1/8.

    One seed, or steps without a seed, have no spread.
    """
    values = (1.0, 0.5, 0.25, 0.25, 0.9)
    made = [attempt(number, scores={"rouge1": Score(value=value)}) for number, value in enumerate(values)]
    seeds = dict(zip((one.step for one in made), (1, 1, 2, 2), strict=False))
    (summary,) = summarise(made, seeds)
    assert summary.spread == {"rouge1": pytest.approx(0.125**0.5)}
    assert summary.scores["rouge1"] == pytest.approx(sum(values) / 5)
    assert summarise(made, dict.fromkeys(seeds, 1))[0].spread == {}
    assert summarise(made)[0].spread == {}


def test_the_schema_of_the_results_can_be_printed() -> None:
    """`leakaudit schema results` shows it; it names the fields as the file does."""
    assert {"schema", "steps", "attempts"} <= set(scores.Results.model_json_schema(by_alias=True)["properties"])
    assert results([step(0)]).steps[0].id == "st-000000"


def as_before(data: dict[str, Any], version: str) -> dict[str, Any]:
    """Turn results into those of an earlier version, which had no `scores`."""
    del data["catalogue"]
    for item in data["attempts"]:
        for sequence in item["sequences"]:
            del sequence["scores"]
    for summary in data["summaries"]:
        del summary["scores"]
        for key in ("precision", "nerr", "best_rl", "sentences_found"):
            del summary[key]
    return data | {"schema": f"leakaudit.results/{version}"}


def test_results_of_schema_1_2_are_read_as_without_a_catalogue(tmp_path: Path) -> None:
    """Their few keys become scores, and metrics are called by their names."""
    now = audit(1, 2)
    data = as_before(to_json(now), "1.2")
    data["digest"] = digest_of(data)
    found = load_results(save(tmp_path / "results.json", data))
    assert contradictions(found) == ()
    assert found.attempts == now.attempts
    assert found.catalogue.metric_label("rougeL") == "rougeL"


def _of_batch(value: float) -> dict[str, Score]:
    return {"best_rl": Score(value=value), "sentences_found": Score(value=value)}


def test_a_summary_has_short_keys_beside_token_recall() -> None:
    """A reader finds the four scores of version 1.4 where it finds token recall."""
    attempts = [
        attempt(i, leaks=leaks).model_copy(update={"scores": attempt(i, leaks=leaks).scores | _of_batch(float(leaks))})
        for i, leaks in enumerate((True, False))
    ]
    (summary,) = to_json(results([step(0), step(1)], attempts))["summaries"]
    asked = ("token_recall", "precision", "nerr", "best_rl", "sentences_found")
    assert {key: summary[key] for key in asked} == {
        "token_recall": summary["scores"]["token_recall"],
        "precision": summary["scores"]["token_precision"],
        "nerr": None,
        "best_rl": 0.5,
        "sentences_found": 0.5,
    }
    assert summary["texts_found"] == 1


@pytest.mark.parametrize("key", ["rl", "exact", "token_recall"])
def test_a_former_key_that_contradicts_the_scores_is_refused(tmp_path: Path, key: str) -> None:
    """Both say the same of a sequence, or nobody knows which is true."""
    data = to_json(audit(1, 2))
    data["attempts"][0]["sequences"][0][key] = 0.25
    data["digest"] = digest_of(data)
    with pytest.raises(ResultsError, match=rf"attempts\.0\.sequences\.0: Value error, {key} contradicts the score of"):
        load_results(save(tmp_path / "results.json", data))


def test_an_attack_s_own_score_is_read_by_its_former_name_and_not_by_both(tmp_path: Path) -> None:
    """Before 1.5 it was called confidence, which it is not."""
    data = as_before(to_json(audit(1, 2)), "1.5")
    text = data["attempts"][0]["sequences"][0]
    text["confidence"] = 0.25
    save(tmp_path / "results.json", {**data, "digest": digest_of(data)})
    with pytest.raises(ResultsError, match="unknown key 'confidence'"):
        load_results(tmp_path)
    del text["own_score"]
    data["schema"] = "leakaudit.results/1.4"
    save(tmp_path / "results.json", {**data, "digest": digest_of(data)})
    assert load_results(tmp_path).attempts[0].sequences[0].own_score == 0.25


def test_every_metric_of_a_step_is_in_its_summary() -> None:
    """Whatever it is called: nobody lists metrics by name."""
    (summary,) = summarise([attempt(0, scores={"newest": Score(value=0.5)}), attempt(1, scores={"newest": NOTHING})])
    assert summary.scores == {"newest": 0.5}


def test_results_of_schema_1_0_are_read_as_without_reachability(tmp_path: Path) -> None:
    """What 1.1 added is unknown there, neither in reach nor out of it."""
    data = as_before(to_json(audit(1, 2)), "1.0")
    for item in data["attempts"]:
        del item["reachable_tokens"], item["reachable_sequences"], item["scores"]["token_precision"]
        item["events"] = [event for event in item["events"] if event != "most_words"]
        for sequence in item["sequences"]:
            del sequence["reachable"], sequence["passes"], sequence["token_precision"]
    for summary in data["summaries"]:
        del summary["reachable_tokens"], summary["reachable_sequences"], summary["token_precision"]
    del data["digest"], data["regime"]["declared_defenses"]
    for item in data["steps"]:
        del item["n_sentences"]
    found = load_results(save(tmp_path / "results.json", data))
    assert contradictions(found) == ()
    assert {(a.reachable_tokens, a.reachable_sequences) for a in found.attempts} == {(None, None)}
    assert [s.outcome for a in found.attempts for s in a.sequences] == ["recovered", None, None]
    assert (found.summaries[0].reachable_tokens, found.summaries[0].reachable_sequences) == (None, None)


@pytest.mark.parametrize(
    ("exact", "reachable", "passes", "outcome"),
    [
        (True, 0.0, False, "recovered"),
        (False, 1.0, None, "search gave up"),
        (False, 0.9, None, "out of reach"),
        (False, 0.9, True, "search gave up"),
        (False, 1.0, False, "out of reach"),
        (False, None, None, None),
        (None, 1.0, True, None),
    ],
)
def test_a_text_that_did_not_come_back_was_in_reach_or_not(
    exact: bool | None, reachable: float | None, passes: bool | None, outcome: str | None
) -> None:
    """The attack's own test decides.

    Without one it matters whether every token was a candidate; without either, nobody knows.
    """
    (found,) = attempt(0).sequences
    known = with_scores(found, exact=None if exact is None else float(exact))
    assert known.model_copy(update={"reachable": reachable, "passes": passes}).outcome == outcome


def test_a_summary_of_reach_leaves_out_what_is_missing() -> None:
    """The mean is over the sequences of the attempts that could say."""
    told = attempt(0, reachable_tokens=Score(value=0.5, n=3), reachable_sequences=Missing(missing="no test"))
    silent = attempt(
        1, reachable_tokens=Missing(missing="cannot say"), reachable_sequences=Missing(missing="cannot say")
    )
    more = attempt(2, reachable_tokens=Score(value=1.0, n=1), reachable_sequences=Missing(missing="no test"))
    (summary,) = summarise([told, silent, more])
    assert (summary.reachable_tokens, summary.reachable_sequences) == (0.625, None)
