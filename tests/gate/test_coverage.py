"""What an audit must cover: defences, kinds, shares of steps, the adversary."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from leakaudit import registry
from leakaudit.audit.results import threat_model_of
from leakaudit.config.audit import PluginSpec
from leakaudit.config.simulation import GRANTS
from leakaudit.errors import ConfigError
from leakaudit.gate import policy_parts
from leakaudit.gate.policy import load_policy
from leakaudit.gate.verdict import Status
from leakaudit.plugins.catalogue import catalogue
from leakaudit.plugins.names import own_names
from leakaudit.results.schema import AttemptStatus, Results, ThreatModel
from tests.support.factories import attempt, audit, results, step
from tests.support.judging import RED_LINE, judge

ACTIVE = ThreatModel(
    adversary="an active server, which changed the model before it sent it out (wide pooler)",
    sees="one client's update of the changed model",
)
GRANTED = ThreatModel(granted=("labels", "words"))


def tried(share: int, status: AttemptStatus = AttemptStatus.NOT_APPLICABLE) -> Results:
    """Build a clean audit of 60 steps where tag ran to its end on some of them."""
    others = [attempt(i, "tag", status=AttemptStatus.RAN if i < share else status) for i in range(60)]
    return results([step(i) for i in range(60)], [*(attempt(i) for i in range(60)), *others])


def described(found: Results) -> Results:
    """Add what the attacks of an audit look for."""
    names = [name for name in found.run.battery.attacks if name in dict(registry.attacks)]
    made = catalogue([(name, registry.attacks[name]) for name in names], [], [])
    described = found.catalogue.model_copy(update={"attacks": made.attacks})
    return found.model_copy(update={"catalogue": described})


LOOSE = {"max_censored": 0.9, "max_error_share": 0.9}


@pytest.mark.parametrize(
    ("found", "required", "said"),
    [
        (audit(0, 60), {"defenses": ["prune"]}, "requires the defences prune; no attack ran to its end under them."),
        (
            tried(53),
            {"attacks": ["tag"], "attacks_share": 0.9},
            "requires that the attack tag runs to its end on 90% of the steps; from the updates you ship (no defence) it did on 53 of 60 (88.3%).",
        ),
        (
            tried(53, AttemptStatus.BUDGET_EXHAUSTED),
            {"attacks": ["tag"], "attacks_share": 0.9},
            "it did on 53 of 60 (88.3%)",
        ),
        (described(audit(0, 60)), {"kinds": ["labels"]}, "requires an attack on labels; none ran to its end on any"),
        (
            described(audit(0, 60)),
            {"kinds": ["text", "words"], "attacks_share": 0.5},
            "requires that an attack on words runs to its end on 50% of the steps",
        ),
        (
            audit(0, 60, threat_model=ACTIVE),
            {"threat_model": {"adversary": "honest-but-curious server"}},
            "is about the adversary 'honest-but-curious server'; that of the audit is 'an active server, which",
        ),
        (
            audit(0, 60),
            {"threat_model": {"adversary": "active server"}},
            "that of the audit is 'honest-but-curious server'.",
        ),
        (
            audit(0, 60, threat_model=ACTIVE),
            {"threat_model": {"sees": "one client's transmitted update"}},
            'that of the audit sees "one client\'s update of the changed model".',
        ),
        (
            audit(0, 60, threat_model=GRANTED),
            {"threat_model": {"granted_at_most": ["labels"]}},
            "is about attacks that are given labels at most; the audit gave them words.",
        ),
        (
            audit(0, 60, threat_model=GRANTED),
            {"threat_model": {"granted_at_most": []}},
            "given nothing at most; the audit gave them labels, words.",
        ),
    ],
)
def test_an_audit_that_did_not_cover_what_is_required_does_not_pass(
    found: Results, required: dict[str, Any], said: str
) -> None:
    """The sentence says what was asked for and what was found; a leak still fails."""
    assert judge(found, RED_LINE, evidence=LOOSE).verdict is Status.PASS
    verdict = judge(found, RED_LINE, evidence=LOOSE, requires=required)
    assert verdict.verdict is Status.INCONCLUSIVE and said in verdict.sentence, verdict.sentence
    leaking = audit(1, 59, threat_model=found.threat_model)
    assert judge(leaking, RED_LINE, evidence=LOOSE, requires=required).verdict is Status.FAIL


@pytest.mark.parametrize(
    ("found", "required"),
    [
        (tried(54), {"attacks": ["tag"], "attacks_share": 0.9}),
        (described(audit(0, 60)), {"kinds": ["text"], "attacks_share": 1.0}),
        (audit(0, 60, threat_model=ACTIVE), {"threat_model": {"adversary": "active server"}}),
        (
            audit(0, 60),
            {"threat_model": {"adversary": "honest-but-curious server", "sees": "one client's transmitted update"}},
        ),
        (
            audit(0, 60, threat_model=GRANTED),
            {"granted": ["words"], "threat_model": {"granted_at_most": ["words", "labels"]}},
        ),
    ],
)
def test_an_audit_that_covered_it_passes(found: Results, required: dict[str, Any]) -> None:
    """The share itself is enough: 54 of 60 are 90 %."""
    assert judge(found, RED_LINE, evidence=LOOSE, requires=required).verdict is Status.PASS


def test_a_share_is_asked_under_each_judged_defence() -> None:
    """What ran on the shipped update only says nothing of another defence."""
    steps = [step(i) for i in range(60)]
    noised = [attempt(i, d, "prune", status=s) for i in range(60) for d, s in _RAN_AND_NOT]
    found = results(steps, [*(attempt(i, name) for i in range(60) for name in ("span", "tag")), *noised])
    required = {"attacks": ["tag"], "attacks_share": 0.5}
    pruned = {"id": "pruned", "event": "exact_sentence", "max_count": 0, "scope": {"defense": "prune"}}
    assert judge(found, RED_LINE, evidence=LOOSE, requires=required).verdict is Status.PASS
    warned = judge(found, RED_LINE, pruned | {"level": "warn"}, evidence=LOOSE, requires=required)
    assert warned.verdict is Status.PASS
    verdict = judge(found, RED_LINE, pruned, evidence=LOOSE, requires=required)
    assert verdict.verdict is Status.INCONCLUSIVE and "under the defence prune it did on 0 of 60" in verdict.sentence


_RAN_AND_NOT = (("span", AttemptStatus.RAN), ("tag", AttemptStatus.NOT_APPLICABLE))


@pytest.mark.parametrize(
    ("requires", "said"),
    [
        ("{defenses: [prun]}", "the defence 'prun' is unknown; did you mean 'prune'?"),
        ("{kinds: [txt]}", "did you mean 'text'?"),
        ("{granted: [label]}", "did you mean 'labels'?"),
        (
            "{threat_model: {adversary: honest server}}",
            "input should be 'honest-but-curious server' or 'active server'",
        ),
        ("{threat_model: {granted_at_most: [length]}}", "did you mean 'lengths'?"),
        ("{attacks_share: 0.5}", "attacks_share says on how many steps attacks or kinds must have run; name one"),
        ("{attacks: [span], attacks_share: 0}", "greater than 0"),
        ("{granted: [words], threat_model: {granted_at_most: [labels]}}", "granted requires words, which granted_at"),
    ],
)
def test_a_name_that_no_audit_can_have_is_refused(tmp_path: Path, requires: str, said: str) -> None:
    """With its line and the nearest name: such a policy could never pass."""
    path = tmp_path / "policy.yaml"
    path.write_text(
        "schema: leakaudit.policy/1\nname: n\nrules: [{id: r, event: exact_sequence, max_count: 0}]\n"
        f"requires: {requires}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_policy(path, own_names())
    assert said in str(caught.value) and f"{path}:4" in str(caught.value)


def test_the_words_of_a_policy_are_those_of_an_audit() -> None:
    """Grants, adversaries and what they see are written by other modules."""
    assert get_args(policy_parts.Grant) == GRANTS
    honest, active = threat_model_of(None, ()), threat_model_of(PluginSpec(name="wide-pooler"), ())
    sees = policy_parts.RequiredThreatModel.model_fields["sees"].annotation
    assert {honest.sees, active.sees} == set(get_args(get_args(sees)[0]))
    for made, name in ((honest, "honest-but-curious server"), (active, "active server")):
        found = audit(0, 60, threat_model=made)
        assert judge(found, RED_LINE, requires={"threat_model": {"adversary": name}}).verdict is Status.PASS
