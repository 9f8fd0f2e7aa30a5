"""Honest results of six steps, of which one leaks in one way.

The gate must never pass them, however they are edited.
"""

from __future__ import annotations

from collections.abc import Callable

from leakaudit.results.schema import Attempt, Measured, Results, Score, StepRecord, VerificationStatus
from tests.support.factories import attempt, of_sequences, policy, results, sequence, step, unguessed, with_scores

STEPS = 6
LEAKS = 3
"""Number of the step that leaks."""
POLICY = {"evidence": {"min_steps": 5, "max_error_share": 0.9, "max_censored": 0.9}}
"""A floor so low that only the leak itself keeps the audit from passing."""


def _text(number: int, recall: float, *, passes: bool = False, attack: str = "span", defense: str = "none") -> Attempt:
    """Build an attack on two texts; `recall` is of the first.

    The second text is too short for a sentence.
    """
    first = sequence(f"s-{number:06d}-0", recall).model_copy(update={"passes": passes, "reachable": float(passes)})
    second = sequence(f"s-{number:06d}-1", 0.2, long_enough=False).model_copy(
        update={"passes": False, "reachable": 0.5}
    )
    return of_sequences(attempt(number, attack, defense), [first, second])


def _bag(number: int, recall: float) -> Attempt:
    first = with_scores(sequence(f"s-{number:06d}-0", recall, bag=True), token_precision=0.75)
    second = sequence(f"s-{number:06d}-1", 0.2, long_enough=False, bag=True)
    done = attempt(number, "embedding-rows", kind="bag", recall=0.5)
    return of_sequences(done, [first, with_scores(second, token_precision=0.75)])


def _labels(number: int, share: float) -> Attempt:
    scores: dict[str, Measured] = {name: Score(value=share, n=2) for name in ("label_accuracy", "label_exact")}
    sequences = (unguessed(f"s-{number:06d}-0"), unguessed(f"s-{number:06d}-1", long_enough=False))
    done = attempt(number, "llg", kind="labels", scores=scores)
    return done.model_copy(update={"sequences": sequences})


def _step(number: int) -> StepRecord:
    return step(number, VerificationStatus.VERIFIED, n_sequences=2).model_copy(
        update={"n_tokens_bucket": "17-32", "n_sentences": 1}
    )


def _audit(of_step: Callable[[int, bool], list[Attempt]]) -> Results:
    attempts = [done for i in range(STEPS) for done in of_step(i, i == LEAKS)]
    return results([_step(i) for i in range(STEPS)], attempts, positive=(3, 3), negative=(0, 3))


def _sentence(i: int, leaks: bool) -> list[Attempt]:
    return [_text(i, 1.0 if leaks else 0.1), _bag(i, 0.2), _labels(i, 0.0)]


def _sentence_alone(i: int, leaks: bool) -> list[Attempt]:
    return [_text(i, 1.0 if leaks else 0.1)]


def _words(i: int, leaks: bool) -> list[Attempt]:
    return [_text(i, 0.1), _bag(i, 0.9 if leaks else 0.2), _labels(i, 0.0)]


def _reach(i: int, leaks: bool) -> list[Attempt]:
    return [_text(i, 0.1, passes=leaks), _text(i, 0.1, defense="prune"), _labels(i, 0.0)]


def _reach_alone(i: int, leaks: bool) -> list[Attempt]:
    return [_text(i, 0.1, passes=leaks)]


def _counts(i: int, leaks: bool) -> list[Attempt]:
    return [_text(i, 0.1), _labels(i, 1.0 if leaks else 0.0)]


def _two_defenses(i: int, leaks: bool) -> list[Attempt]:
    return [_text(i, 1.0 if leaks else 0.1), _text(i, 0.1, defense="prune")]


def _rule(event: str) -> dict[str, object]:
    return {"id": "red-line", "event": event, "max_count": 0}


CASES = {
    "sentence": (_audit(_sentence), policy(_rule("exact_sentence"), **POLICY)),
    "sentence-alone": (_audit(_sentence_alone), policy(_rule("exact_sequence"), **POLICY)),
    "words": (_audit(_words), policy(_rule("most_words"), **POLICY)),
    "reach-alone": (_audit(_reach_alone), policy(_rule("in_reach"), **POLICY)),
    "labels": (_audit(_counts), policy(_rule("label_counts"), **POLICY)),
    "overlap": (
        _audit(_two_defenses),
        policy({"id": "red-line", "metric": "rougeL", "statistic": "max", "max_value": 0.5}, **POLICY),
    ),
}
"""Name -> honest results and a policy that they fail by the one step that leaks."""
