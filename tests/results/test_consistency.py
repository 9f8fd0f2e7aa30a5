"""Results that contradict themselves are refused; honest ones never are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from leakaudit import registry
from leakaudit.audit.scoring.score import score
from leakaudit.gate import evaluate as gate
from leakaudit.gate import events
from leakaudit.gate.verdict import Status
from leakaudit.plugins.catalogue import catalogue
from leakaudit.plugins.metric_protocol import Guess
from leakaudit.results import former_keys
from leakaudit.results import schema as scores
from leakaudit.results.as_sent import AS_SENT
from leakaudit.results.consistency import contradictions, unexplained_steps
from leakaudit.results.events import EVENTS, shown_events
from leakaudit.results.files import to_json
from leakaudit.results.schema import Attempt, AttemptStatus, Results, StepRecord, VerificationStatus
from tests.support.factories import NOW, attempt, audit, changed, policy, results, step
from tests.support.leaking import CASES

RED_LINE = {"id": "red-line", "event": "exact_sentence", "max_count": 0}
FIRST = "st-000000"


def edited(found: Results, edit: Callable[[dict[str, Any]], None]) -> Results:
    """Change the JSON data of results, and nothing that follows from it."""
    data = to_json(found)
    edit(data)
    return Results.model_validate(data)


def put(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return the edit that puts `value` at `path`."""

    def edit(data: dict[str, Any]) -> None:
        here: Any = data
        for part in path[:-1]:
            here = here[part]
        here[path[-1]] = value

    return edit


def put_score(*path: str | int, value: float) -> Callable[[dict[str, Any]], None]:
    """Return an edit that sets the score at `path` and removes former keys."""

    def edit(data: dict[str, Any]) -> None:
        here: Any = data
        for part in path[:-1]:
            here = here[part]
        here["scores"][path[-1]] = value
        for key in {*former_keys.OF_SEQUENCES, *former_keys.OF_SUMMARIES} & set(here):
            del here[key]

    return edit


def sixty_under_ten_names(data: dict[str, Any]) -> None:
    for item in data["steps"]:
        item["snapshot"] = data["steps"][item["step"] % 10]["snapshot"]


def every_flag(data: dict[str, Any]) -> None:
    for item in data["attempts"]:
        for sequence in item["sequences"]:
            sequence["long_enough"] = False


def twice(data: dict[str, Any]) -> None:
    data["attempts"].append(copy.deepcopy(data["attempts"][0]))


def endless(data: dict[str, Any]) -> None:
    for item in data["attempts"]:
        item["wall_s"] = 1.7e308


def a_small_model(data: dict[str, Any]) -> None:
    data["regime"]["hidden"] = 9  # texts have 9-16 tokens
    data["steps"][0]["beyond_hidden"] = False


def a_large_batch(data: dict[str, Any]) -> None:
    data["regime"]["hidden"] = 4097  # its one text has 9-16 tokens
    data["steps"][0] |= {"beyond_hidden": False, "n_tokens_bucket": "4097-8192"}


def sent(i: int) -> StepRecord:
    """Build a step whose update was changed before it was sent."""
    return step(i).model_copy(update={"sent": step(i).verification})


def half_sent(**last: Any) -> Results:
    """Build an audit of two leaking steps, the first changed before it was sent.

    Args:
        last: what the attempt on the second step, as it was sent, says.
    """
    attempts = [attempt(0, leaks=True), attempt(1, leaks=True), attempt(0, defense=AS_SENT)]
    return results([sent(0), step(1)], [*attempts, attempt(1, defense=AS_SENT, **last)])


def one_number(data: dict[str, Any]) -> None:
    for item in data["steps"]:
        item["step"] = 0


LEAKS = "attempts", 0
SEQUENCE = (*LEAKS, "sequences", 0)
ROWS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "an exact score without its event": (
        put(*LEAKS, "events", value=[]),
        "'exact_sentence' is missing, but its scores show",
    ),
    "an event without its score": (
        put("attempts", 9, "events", value=["exact_sequence"]),
        "named, but its scores do not show",
    ),
    "the sentence event alone removed": (
        put(*LEAKS, "events", value=["exact_sequence", "all_words", "most_words"]),
        "the event 'exact_sentence' is missing",
    ),
    "a leaking sentence called short": (put(*SEQUENCE, "long_enough", value=False), "counts as no sentence of 8"),
    "all sentences called short": (every_flag, "sequence sq-0 of 9-16 tokens counts as no sentence of 8"),
    "a length that is none": (
        put(*SEQUENCE, "min_tokens_bucket", value="7-16"),
        "has the length '7-16', which is not a range",
    ),
    "another minimum": (put("min_tokens", value=17), "counts as a sentence of 17"),
    "exact denied": (put_score(*SEQUENCE, "exact", value=0.0), "exact is 1 of 1, and its sequences come to 0 of 1"),
    "exact with a lower score": (put_score(*SEQUENCE, "rougeL", value=0.4), "is exact, but its scores are not 1"),
    "a step's score lowered": (put(*LEAKS, "scores", "rougeL", "value", value=0.1), "rougeL is 0.1 of 1"),
    "a step's score missing": (
        put(*LEAKS, "scores", "rougeL", value={"missing": "not run"}),
        "rougeL is missing, and its sequences have it",
    ),
    "a score of nothing": (put(*LEAKS, "sequences", value=[]), "0 sequences, the step has 1"),
    "one number in all steps": (one_number, "has the number 0"),
    "a step twice": (lambda data: data["steps"].append(data["steps"][0]), f"step {FIRST} is recorded twice"),
    "an attempt twice": (twice, "is recorded 2 times"),
    "an attempt on no step": (
        put(*LEAKS, "step", value="st-000099"),
        "attempts on step st-000099, which is not recorded",
    ),
    "an attack of no battery": (put(*LEAKS, "attack", value="spam"), "the attack 'spam', which is not in the battery"),
    "a defence of no battery": (
        put(*LEAKS, "defense", value="prune"),
        "the defence 'prune', which is not in the battery",
    ),
    "an attempt dropped": (lambda data: data["attempts"].pop(0), "the summary of span under none says"),
    "a leak declared a crash": (put(*LEAKS, "status", value="error"), "did not run, but it names an event"),
    "a mismatch that was attacked": (
        put("steps", 0, "verification", "status", value="mismatch"),
        f"the update of step {FIRST} comes from another batch, but attacks ran on it",
    ),
    "verified with an error of 100": (
        put("steps", 0, "verification", "relative_error", value=100.0),
        "is stamped verified with a relative error of 100",
    ),
    "noised without a defence": (
        put("steps", 0, "verification", "status", value="noised"),
        "noised, but no defence was shipped",
    ),
    "a defence written by hand": (
        put("steps", 0, "shipped_defense", value="dp-sgd"),
        f"step {FIRST} ships 'dp-sgd', which the run did not declare",
    ),
    "a search called needless": (
        put("attempts", 1, "status", value="not_needed"),
        "was not needed, but no attack recovered every text of the step",
    ),
    "out of time without a stop": (put(*LEAKS, "status", value="budget_exhausted"), "stopped for 'done'"),
    "another seed": (put(*LEAKS, "seed", value=7), "has the seed 7, the run has 0"),
    "an event twice": (put(*LEAKS, "events", value=["exact_sentence"] * 2), "names the event 'exact_sentence' twice"),
    "an event that does not exist": (put(*LEAKS, "events", value=["all_word"]), "'all_word', which does not exist"),
    "a reach that nothing shows": (
        put(*LEAKS, "reachable_sequences", value={"value": 1.0, "n": 1}),
        "reachable_sequences is scored, and no sequence has it",
    ),
    "a summary of other attempts": (
        put_score("summaries", 0, "exact", value=0.0),
        "says exact 0, but the attempts give 0.1",
    ),
    "times beyond counting": (endless, "the attempts hold numbers from which no summary can be computed"),
    "no summaries": (put("summaries", value=[]), "there are 0 summaries of 1 pairs"),
    "a control of two of one": (put("controls", "positive", "k", value=2), "the positive control counts 2 of 1"),
    "more controls than steps": (
        put("controls", "negative", "n", value=99),
        "the negative control ran on 99 steps of 10",
    ),
    "a step too many in the coverage": (
        put("coverage", "audited_steps", value=60),
        "counts 60 audited steps, and 10 are",
    ),
    "the end of the calendar": (
        put("run", "finished", value="9999-12-31"),
        "finished at '9999-12-31', which is not a point in",
    ),
    "a time beyond the calendar": (
        put("run", "finished", value="9999-12-31T23:59:59-23:00"),
        "finished at '9999-12-31T23:59:59-23:00', which is not a point in time",
    ),
    "no date": (put("run", "finished", value="yesterday"), "finished at 'yesterday', which is not a point in time"),
    "a text as long as the hidden size": (
        a_small_model,
        "step st-000000 has a text of 9 tokens or more, but fewer inputs than the hidden size of 9",
    ),
    "a batch whose texts must be longer than the hidden size": (
        a_large_batch,
        "step st-000000 has a text of 4097 tokens or more, but fewer inputs than the hidden size of 4097",
    ),
    "an attack run and not run": (
        put("coverage", "not_run", value=[{"what": "span", "why": "known to the tool"}]),
        "the attack 'span' is in the battery and among those that were not run",
    ),
}
"""What was tried or is its sibling: name -> (edit, part of the sentence)."""


@pytest.mark.parametrize("row", ROWS)
def test_a_contradiction_is_an_error_with_its_sentence(row: str) -> None:
    """Exit code 5, never a verdict on evidence of which half is untrue."""
    edit, message = ROWS[row]
    verdict = gate.evaluate(edited(audit(1, 9), edit), policy(RED_LINE), now=NOW)
    assert (verdict.verdict, verdict.exit_code) == (Status.ERROR, 5)
    assert any(message in problem for problem in verdict.problems), verdict.problems
    assert verdict.sentence.startswith("The evidence cannot be judged: ") and not verdict.sentence.endswith("..")


def test_ten_updates_under_sixty_names_are_ten_steps() -> None:
    """One update under several names is one piece of evidence; its leaks count."""
    assert gate.evaluate(audit(0, 60), policy(RED_LINE), now=NOW).verdict is Status.PASS
    verdict = gate.evaluate(edited(audit(0, 60), sixty_under_ten_names), policy(RED_LINE), now=NOW)
    assert (verdict.verdict, verdict.rules[0].n) == (Status.INCONCLUSIVE, 10)
    assert "50 steps repeat the update of another step and did not count again." in verdict.sentence
    leaks_last = results([step(i) for i in range(60)], [attempt(i, leaks=i == 59) for i in range(60)])
    verdict = gate.evaluate(edited(leaks_last, sixty_under_ten_names), policy(RED_LINE), now=NOW)
    assert (verdict.verdict, verdict.rules[0].k) == (Status.FAIL, 1)
    assert verdict.rules[0].worst is not None and verdict.rules[0].worst.step == "st-000059"


def test_attempts_that_nothing_explains_keep_a_rule_from_passing() -> None:
    """Only an interruption or a refused snapshot explains missing attempts."""
    full = results([step(i) for i in range(60)], [attempt(i, name) for i in range(60) for name in ("span", "tag")])
    short = changed(full, attempts=full.attempts[:-1])
    assert (unexplained_steps(full), unexplained_steps(short)) == (0, 1)
    lenient = policy(RED_LINE, evidence={"min_steps": 1, "max_error_share": 0.5})
    verdict = gate.evaluate(short, lenient, now=NOW)
    assert verdict.verdict is Status.INCONCLUSIVE
    assert "1 step lacks attempts that were due, and nothing in the results explains it." in verdict.sentence
    stopped = changed(short, run=short.run.model_copy(update={"interrupted": True}))
    refused = changed(short, coverage=short.coverage.model_copy(update={"skipped_snapshots": 1}))
    assert [gate.evaluate(found, lenient, now=NOW).verdict for found in (full, stopped, refused)] == [Status.PASS] * 3


@pytest.mark.parametrize(
    "status", [VerificationStatus.UNVERIFIABLE, VerificationStatus.STOCHASTIC, VerificationStatus.SCALED]
)
def test_a_step_that_was_attacked_unverified_is_no_contradiction(status: VerificationStatus) -> None:
    """What comes back from it is proof, whatever the stamp."""
    assert contradictions(results([step(0, status)], [attempt(0, leaks=True)])) == ()


@pytest.mark.parametrize(
    "shipped", ["dp-sgd(noise_multiplier=1, max_grad_norm=1e+06)", "sign+prune(share=0.5)", "sign"]
)
def test_a_shipped_defence_is_declared_whatever_its_numbers(shipped: str) -> None:
    """A step names a defence with its numbers, the declaration without."""
    found = results([step(0, VerificationStatus.NOISED, shipped)], [attempt(0)])
    declared = found.regime.model_copy(update={"declared_defenses": ("sign", "prune", "dp-sgd")})
    assert contradictions(changed(found, regime=declared)) == ()
    undeclared = changed(found, regime=declared.model_copy(update={"declared_defenses": ()}))
    assert len(contradictions(undeclared)) == 1


def test_an_update_sent_as_produced_has_one_result() -> None:
    """A leak cannot stay with the produced update where the sent one is the same."""
    assert contradictions(half_sent(leaks=True)) == ()
    (problem,) = contradictions(half_sent())
    assert problem == "step st-000001 was sent as produced, but span says something else of the two updates"


def test_a_changed_update_has_attempts_as_sent() -> None:
    """Else attempts on the produced update would count as those on what left."""
    (problem,) = contradictions(results([sent(0)], [attempt(0)]))
    assert problem == "step st-000000 was changed before it was sent, but the battery has no updates as sent"


@pytest.mark.parametrize("case", CASES)
def test_honest_results_are_consistent(case: str) -> None:
    """Those that the mutation test starts from, and their copy read back."""
    assert contradictions(CASES[case][0]) == ()


def test_the_gate_knows_every_event_and_one_of_its_own() -> None:
    """A policy can name each event that an attempt can have."""
    assert {*events.EVENTS} == {*EVENTS, "in_reach"}


class Words:
    """A tokenizer for which a token is a word."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Return words."""
        return " ".join(f"w{token}" for token in ids)


class Found:
    """A reconstruction."""

    def __init__(self, sequences: Any = None, tokens: Any = None, label_counts: Any = None) -> None:
        self.sequences: list[Guess] | None = sequences
        self.tokens: tuple[int, ...] | None = tokens
        self.label_counts: tuple[int, ...] | None = label_counts
        self.counts_told = True
        self.counts_are_shares = False


class Text:
    """A guessed sequence."""

    own_score, proved = 1.0, False

    def __init__(self, *token_ids: int) -> None:
        self.token_ids = token_ids


LONG, SHORT = tuple(range(10, 20)), (30, 31)


@pytest.mark.parametrize(
    "found",
    [
        Found(sequences=[Text(*LONG), Text(*SHORT)]),
        Found(sequences=[Text(*LONG[:9], 99)]),
        Found(sequences=[Text(*SHORT)]),
        Found(sequences=[Text(*reversed(LONG)), Text(*SHORT)]),
        Found(sequences=[]),
        Found(tokens=(*LONG, *SHORT)),
        Found(tokens=(*LONG, *SHORT, *range(100, 150))),
        Found(tokens=LONG[:5]),
        Found(tokens=()),
        Found(label_counts=(1, 1)),
        Found(label_counts=(2, 0)),
    ],
)
def test_the_scoring_names_the_events_that_its_scores_show(found: Found) -> None:
    """The rule for making results and the rule for checking them agree."""
    scored = score(found, [LONG, SHORT], [0, 1], 2, Words(), frozenset(), min_tokens=8)
    sequences = tuple(
        scores.SequenceScore(
            id=f"s-{i}",
            hmac="",
            scores={name: value for name, value in s.numbers.items() if value is not None},
            min_tokens_bucket="9-16",
            long_enough=s.long_enough,
        )
        for i, s in enumerate(scored.sequences)
    )
    done = Attempt(
        step=FIRST,
        attack="a",
        defense="none",
        seed=0,
        status=AttemptStatus.RAN,
        sequences=sequences,
        scores=dict(scored.scores),
    )
    shown = {name for name, yes in shown_events(done).items() if yes}
    made = set(scored.events)
    assert shown == made


def test_every_attack_of_the_battery_is_described_or_none() -> None:
    """Without a description an attack seems to have no limit at D."""
    found = audit(0, 60)
    names = found.run.battery.attacks
    whole = catalogue([(name, registry.attacks[name]) for name in names], [], []).attacks
    described = found.catalogue.model_copy(update={"attacks": whole})
    assert not contradictions(changed(found, catalogue=described))
    cut = described.model_copy(
        update={"attacks": {name: whole[name] for name in names[1:]} or {"other": whole[names[0]]}}
    )
    said = f"the catalogue does not describe the attack {names[0]!r} of the battery"
    assert said in contradictions(changed(found, catalogue=cut))
