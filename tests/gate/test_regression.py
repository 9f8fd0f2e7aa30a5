"""Rules on the difference from a baseline: worse, no worse, or undecided and why."""

from __future__ import annotations

from typing import Any

import pytest

from leakaudit.capture.plan import steps_to_pass
from leakaudit.gate.early import decided
from leakaudit.gate.evaluate import evaluate
from leakaudit.gate.verdict import RuleVerdict, Status, Verdict
from leakaudit.history.compare import compare
from leakaudit.history.reference import reference_of
from leakaudit.results.schema import AttemptStatus, Results, VerificationStatus
from tests.support.factories import NOW, attempt, audit, changed, policy, results, step

VERSUS: dict[str, Any] = {"id": "no-worse", "event": "exact_sentence", "versus_baseline": {"margin": 0.1}}
FEW = {"evidence": {"min_steps": 1}}


def marked(found: Results, run: str, first: int = 0, pairing: str = "aa" * 8) -> Results:
    """Give an audit another run, and each step the mark of its batch."""
    steps = tuple(one.model_copy(update={"batch": f"{first + one.step:016x}"}) for one in found.steps)
    return changed(found, steps=steps, run=found.run.model_copy(update={"pairing": pairing, "id": run}))


def against(base: Results, new: Results, *rules: dict[str, Any], **extra: Any) -> Verdict:
    """Judge an audit by its difference from another one."""
    asked = policy(*(rules or (VERSUS,)), **FEW | extra)
    return evaluate(new, asked, now=NOW, reference=reference_of(base, new, asked))


def rule_of(verdict: Verdict, name: str = "no-worse") -> RuleVerdict:
    (found,) = [rule for rule in verdict.rules if rule.id == name]
    return found


@pytest.mark.parametrize(
    ("base", "new", "status"),
    [
        ((0, 60), (0, 60), Status.PASS),
        ((6, 54), (6, 54), Status.PASS),
        ((0, 60), (20, 40), Status.FAIL),
        ((20, 40), (0, 60), Status.PASS),
        ((0, 20), (0, 20), Status.INCONCLUSIVE),
        ((0, 60), (6, 54), Status.INCONCLUSIVE),
    ],
)
def test_the_bounds_of_the_difference_decide(base: tuple[int, int], new: tuple[int, int], status: Status) -> None:
    """A worse audit does not pass, and few steps decide nothing."""
    found = rule_of(against(marked(audit(*base), "old"), marked(audit(*new), "new")))
    assert found.status is status
    assert found.versus is not None
    assert (found.versus.run, found.versus.paired, found.kind, found.threshold) == (
        "old",
        True,
        "versus_baseline",
        0.1,
    )
    assert (found.versus.base_k, found.versus.k) == (base[0], new[0])
    assert (found.more_clean_steps is not None) == (status is Status.INCONCLUSIVE)


def test_as_many_more_clean_steps_as_are_said_decide() -> None:
    """The sentence promises no pass that does not come."""
    found = rule_of(against(marked(audit(0, 20), "old"), marked(audit(0, 20), "new")))
    assert found.more_clean_steps == 9
    assert "9 more clean steps would decide" in found.sentence
    assert against(marked(audit(0, 29), "old"), marked(audit(0, 29), "new")).verdict is Status.PASS


def test_the_same_batches_are_paired_and_others_are_not() -> None:
    """Six leaks on the same batches are no change; on other ones they may be.

    Marks under another key pair nothing.
    """
    base = marked(audit(6, 54), "old")
    paired = rule_of(against(base, marked(audit(6, 54), "new")))
    for other in (marked(audit(6, 54), "new", first=100), marked(audit(6, 54), "new", pairing="bb" * 8)):
        apart = rule_of(against(base, other))
        assert apart.versus is not None
        assert not apart.versus.paired
        assert apart.status is Status.INCONCLUSIVE
        assert (paired.upper or 1) < (apart.upper or 0)
    assert paired.status is Status.PASS
    assert "on the same batches" in paired.sentence


def test_a_step_without_its_pair_is_not_left_out() -> None:
    """Leaks on new batches count, although thirty other batches are shared and clean."""
    found = rule_of(against(marked(audit(0, 60), "old"), marked(audit(30, 30), "new", first=30)))
    assert found.versus is not None
    assert (found.versus.paired, found.status) == (False, Status.FAIL)


@pytest.mark.parametrize("first", [0, 100])
def test_the_numbers_are_those_of_the_command_compare(first: int) -> None:
    """Both commands count and bound alike, in pairs and in two samples."""
    base, new = marked(audit(2, 58), "old"), marked(audit(9, 51), "new", first=first)
    found = rule_of(against(base, new))
    (shown,) = compare(base, new, policy(VERSUS)).differences
    versus = found.versus
    assert versus is not None
    assert ((versus.base_k, versus.base_n), (versus.k, versus.n)) == (shown.base, shown.new)
    assert (versus.paired, found.lower, found.upper) == (shown.paired, shown.lower, shown.upper)
    words = found.sentence.partition("the rate changed")[2].partition(".  ")[0]
    assert words.split(". ")[0] in shown.sentence


def with_unjudged(leaks: int, clean: int, unjudged: int, run: str, first: int = 0) -> Results:
    """Build an audit in which some steps ran out of time."""
    total = leaks + clean + unjudged
    tried = [
        attempt(i, leaks=i < leaks, status=AttemptStatus.BUDGET_EXHAUSTED if i >= leaks + clean else AttemptStatus.RAN)
        for i in range(total)
    ]
    return marked(results([step(i) for i in range(total)], tried), run, first)


@pytest.mark.parametrize("first", [0, 500])
def test_a_step_that_nobody_judged_is_feared_on_both_sides(first: int) -> None:
    """It is no way to pass, neither in this audit nor in the baseline."""
    clean = with_unjudged(0, 100, 0, "clean", first)
    assert rule_of(against(with_unjudged(0, 100, 0, "old"), clean)).status is Status.PASS
    new = rule_of(against(with_unjudged(0, 100, 0, "old"), with_unjudged(0, 80, 20, "new", first)))
    assert (new.status, new.unjudged) == (Status.INCONCLUSIVE, 20)
    assert "20 steps of this audit could not be judged" in new.sentence
    assert (new.upper or 0) > 0.2
    old = rule_of(against(with_unjudged(10, 60, 30, "old"), with_unjudged(20, 80, 0, "new", first)))
    assert (old.lower or 0) < 0 < (old.upper or 0)


def test_unjudged_steps_that_the_policy_accepts_are_not_feared() -> None:
    """`max_unjudged` means the same as in other rules."""
    base, new = with_unjudged(0, 100, 0, "old"), with_unjudged(0, 98, 2, "new")
    strict, lenient = (
        rule_of(against(base, new, evidence={"min_steps": 1, "max_unjudged": share})) for share in (None, 0.02)
    )
    assert (lenient.upper or 1) < (strict.upper or 0)


def test_an_audit_that_differs_in_a_key_is_undecided_and_the_key_is_named_with_both_values() -> None:
    """It is never compared silently."""
    other = audit(0, 60, defense="none")
    other = changed(other, regime=other.regime.model_copy(update={"batch_size": 8}))
    verdict = against(marked(other, "old"), marked(audit(0, 60), "new"))
    assert verdict.verdict is Status.INCONCLUSIVE
    assert "the shape of a batch" in verdict.sentence
    assert "8 texts" in verdict.sentence
    assert "1 texts" in verdict.sentence
    assert rule_of(verdict).versus is None


def test_a_rule_that_may_warn_is_a_warning_only_where_nothing_can_be_compared() -> None:
    """And the other rules decide; without a baseline it stays undecided."""
    warns = VERSUS | {"on_not_comparable": "warn"}
    rate = {"id": "rate", "event": "exact_sentence", "max_rate": 0.05}
    other = audit(0, 60)
    other = changed(other, regime=other.regime.model_copy(update={"batch_size": 8}))
    verdict = against(marked(other, "old"), marked(audit(0, 60), "new"), warns, rate)
    assert (verdict.verdict, rule_of(verdict).level) == (Status.PASS, "warn")
    assert "only warns here" in rule_of(verdict).reasons[0]
    asked = policy(warns, rate, **FEW)
    assert verdict.policy_digest == asked.digest, "the policy that was given is recorded"
    missing = evaluate(marked(audit(0, 60), "new"), asked, now=NOW)
    assert (missing.verdict, rule_of(missing).level) == (Status.INCONCLUSIVE, "error")
    worse = rule_of(against(marked(audit(0, 60), "old"), marked(audit(30, 30), "new"), warns, rate))
    assert (worse.status, worse.level) == (Status.FAIL, "error")


def test_without_a_baseline_only_these_rules_are_undecided_and_say_what_to_do() -> None:
    """The absolute rules are judged as ever."""
    verdict = evaluate(
        audit(0, 60), policy(VERSUS, {"id": "rate", "event": "exact_sentence", "max_rate": 0.05}), now=NOW
    )
    assert {rule.id: rule.status for rule in verdict.rules} == {
        "no-worse": Status.INCONCLUSIVE,
        "rate": Status.PASS,
    }
    assert "leakaudit baseline set RUN" in verdict.sentence
    assert verdict.baseline is None


def test_an_audit_is_not_compared_with_itself() -> None:
    """A baseline that is set from the leaking run would let it pass."""
    same = marked(audit(30, 30), "new")
    verdict = against(same, same)
    assert verdict.verdict is Status.INCONCLUSIVE
    assert "this audit itself" in verdict.sentence


def test_what_the_baseline_did_not_count_or_judge_is_undecided() -> None:
    """It is not taken for a baseline without leaks."""
    new, asked = marked(audit(0, 60), "new"), policy(VERSUS, **FEW)
    words = policy(VERSUS | {"event": "all_words"}, **FEW)
    found = evaluate(new, asked, now=NOW, reference=reference_of(marked(audit(1, 59), "old"), new, words))
    assert "did not count what this rule counts" in found.sentence
    blind = marked(results([step(0)], [attempt(0, status=AttemptStatus.ERROR)]), "old")
    assert "No step of the baseline old could be judged" in against(blind, new).sentence


def test_the_evidence_floor_holds_for_a_comparison_as_well() -> None:
    """A passing difference on too few steps, or with a failed control, is no pass."""
    base, new = marked(audit(0, 40), "old"), marked(audit(0, 40), "new")
    assert against(base, new).verdict is Status.PASS
    assert against(base, new, evidence={"min_steps": 59}).verdict is Status.INCONCLUSIVE
    blind = marked(audit(0, 40, positive=(0, 1)), "new")
    assert against(base, blind).verdict is Status.INCONCLUSIVE


def test_an_update_of_another_batch_is_no_clean_step() -> None:
    """Such a step is not judged, so it is feared."""
    steps = [step(i, VerificationStatus.MISMATCH if i < 20 else VerificationStatus.VERIFIED) for i in range(60)]
    new = marked(results(steps, [attempt(i) for i in range(20, 60)]), "new")
    assert against(marked(audit(0, 60), "old"), new).verdict is not Status.PASS


def test_the_verdict_names_the_baseline_by_run_and_digest() -> None:
    """Whoever reads it later can find what was compared."""
    base = marked(audit(0, 60), "old")
    used = against(base, marked(audit(0, 60), "new")).baseline
    assert used is not None
    assert (used.run, used.results_digest, used.digest) == ("old", base.digest, "")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (VERSUS | {"max_rate": 0.05}, "exactly one of"),
        (VERSUS | {"versus_baseline": {"margin": 0.0}}, "greater than 0"),
        (VERSUS | {"versus_baseline": {"margin": 1.0}}, "0.99"),
        (VERSUS | {"on_not_comparable": "warn"}, "could never fail"),
        ({"id": "a", "event": "all_words", "max_count": 0, "on_not_comparable": "warn"}, "goes with versus_baseline"),
        ({"id": "a", "metric": "rougeL", "statistic": "mean", "versus_baseline": {"margin": 0.1}}, "goes with event"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(rule: dict[str, Any], said: str) -> None:
    """A policy cannot be weakened by a slip."""
    with pytest.raises(ValueError, match=said):
        policy(rule)


def test_a_run_keeps_as_many_steps_as_a_margin_needs() -> None:
    """59 clean steps show a rate of 5 %, and a margin of 3 % needs 99 pairs."""
    asked = policy(VERSUS | {"versus_baseline": {"margin": 0.03}})
    assert steps_to_pass(asked) == 99
    pairs = marked(audit(0, 99), "old"), marked(audit(0, 99), "new")
    assert against(*pairs, asked.rules[0].model_dump(exclude_none=True)).verdict is Status.PASS


def test_nothing_ends_early_because_no_baseline_was_at_hand() -> None:
    """While steps are audited nothing is compared, so nothing is decided."""
    assert decided(audit(0, 200), policy(VERSUS), now=NOW) is None
