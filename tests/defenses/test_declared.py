"""Every registered defence, declared and applied, is verified."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from leakaudit.algorithms.labels.clipping import scale_is_known
from leakaudit.audit.applied_defenses import defenses_found
from leakaudit.audit.declared_noise import STANDARD_ERRORS
from leakaudit.audit.verification import verify
from leakaudit.client.facts import DeclaredDefense
from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep
from leakaudit.defenses.dp_sgd import DpSgd
from leakaudit.plugins.defense_protocol import Defense
from leakaudit.registry import defenses
from leakaudit.results.schema import Verification, VerificationStatus
from tests.support import tiny
from tests.support.any_defense import STEPS, TEXTS, at_drawn_knobs

DECLARED = [(name, kind) for name, kind in defenses if not kind.of_step]
"""The defences that a run can declare: the others are recipes, which a recorder sees."""


def _sent(defense: Defense, step: ClientStep, seed: int = 0) -> Observation:
    return defense(step, step.observe(), torch.Generator().manual_seed(seed))


def _recorded(step: ClientStep, seen: Observation) -> dict[str, Tensor]:
    """Return the update as a recorder sees it: zero where nothing is sent."""
    return {name: seen.update.get(name, torch.zeros_like(g)) for name, g in step.observe().update.items()}


def _declaring(step: ClientStep, *declared: DeclaredDefense) -> ClientStep:
    return dataclasses.replace(step, facts=step.facts.model_copy(update={"defenses": declared}))


def _narrowed(step: ClientStep, seen: Observation) -> ClientStep:
    """Return the step as the audit declares it, with its frozen parameters."""
    return dataclasses.replace(step, facts=seen.facts)


def _matches(found: Verification) -> None:
    assert found.status not in (VerificationStatus.MISMATCH, VerificationStatus.UNVERIFIABLE), found
    assert found.absent == () and found.noiseless == (), found


@pytest.mark.parametrize("task", STEPS)
@pytest.mark.parametrize(("name", "kind"), DECLARED)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_defence_that_is_declared_and_applied_verifies(
    name: str, kind: type[Defense], task: str, data: st.DataObject
) -> None:
    """At every strength; as a run ships it and as the audit declares it."""
    step, _ = STEPS[task]
    defense = data.draw(at_drawn_knobs(kind))
    seen = _sent(defense, step, seed=3)
    shipped = () if defense.is_identity() else (defense.declared(),)
    _matches(verify(_declaring(step, *shipped), _recorded(step, seen)))
    _matches(verify(_narrowed(step, seen), seen.update))


@pytest.mark.parametrize("task", STEPS)
@pytest.mark.parametrize(("name", "kind"), DECLARED)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_another_batch_under_the_same_defence_is_a_mismatch(
    name: str, kind: type[Defense], task: str, data: st.DataObject
) -> None:
    """If noise hides the difference, the stamp's standard error says so."""
    step, other = STEPS[task]
    defense = data.draw(at_drawn_knobs(kind))
    declared = _declaring(step, *(() if defense.is_identity() else (defense.declared(),)))
    found = verify(declared, _recorded(other, _sent(defense, other)))
    if found.status is VerificationStatus.NOISED:
        sigma = defense.added_noise(other, other.update())
        clean = dict(defense.expected(step, step.update(), step.update(), 0.0))
        others = dict(defense.expected(other, other.update(), other.update(), 0.0))
        assert 2 * STANDARD_ERRORS * sigma >= _apart(clean, others), found
    else:
        assert found.status is VerificationStatus.MISMATCH, found


def _apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return |1 - k| |g|, with k g the part of the other update along this one."""
    g, h = (torch.cat([update[name].double().flatten() for name in one]) for update in (one, other))
    return abs(1 - float(g @ h) / float(g @ g)) * float(g.norm())


@pytest.mark.parametrize("task", STEPS)
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kind in DECLARED if not kind().is_identity()])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_defence_that_is_declared_and_missing_is_said(
    name: str, kind: type[Defense], task: str, data: st.DataObject
) -> None:
    """The step is then verified as undefended.

    A defence that could have made the raw update may stay declared.
    """
    step, _ = STEPS[task]
    defense = data.draw(at_drawn_knobs(kind))
    assume(not defense.is_identity())
    raw = step.observe().update
    declared = _declaring(step, defense.declared())
    found = verify(declared, raw)
    assert found.status is VerificationStatus.VERIFIED, found
    left = [declared.known() for declared in defenses_found(declared, found, raw)]
    assert not any(plugin.added_noise(step, raw) for plugin in left)
    if defense.added_noise(step, raw) > 0:
        assert f"{name} is not in the update" in found.note
    if found.absent:
        assert left == [] and "it was sent undefended" in found.note


@pytest.mark.parametrize("name", ["gaussian-noise", "laplace-noise"])
@pytest.mark.parametrize(("declared", "applied"), [(0.1, 1.0), (1.0, 0.1), (1.0, 1.3), (8.0, 16.0), (0.5, 0.6)])
def test_noise_of_another_strength_is_a_mismatch(name: str, declared: float, applied: float) -> None:
    """More than a tenth off, up or down."""
    step, _ = STEPS["classification"]
    sent = _sent(defenses.create(name, {"scale": applied}), step).update
    found = verify(_declaring(step, defenses.create(name, {"scale": declared}).declared()), sent)
    assert found.status is VerificationStatus.MISMATCH, found


def test_private_noise_of_another_strength_is_a_mismatch() -> None:
    """Its level is known exactly, from the declaration alone."""
    step, _ = STEPS["classification"]
    sent = _sent(DpSgd(noise_multiplier=1.0, max_grad_norm=0.5), step)
    assert sent.noise_sigma == pytest.approx(1.0 * 0.5 / len(TEXTS))
    declared = DpSgd(noise_multiplier=0.5, max_grad_norm=0.5).declared()
    assert verify(_declaring(step, declared), sent.update).status is VerificationStatus.MISMATCH


def test_clipping_without_its_noise_stays_declared_as_clipping() -> None:
    """An attack must not take the mean of clipped gradients for the mean gradient."""
    step, _ = STEPS["classification"]
    defense = DpSgd(noise_multiplier=1.0, max_grad_norm=1e-3)
    clipped = _sent(DpSgd(noise_multiplier=0.0, max_grad_norm=1e-3), step).update
    declared = _declaring(step, defense.declared())
    found = verify(declared, clipped)
    assert found.status is VerificationStatus.VERIFIED
    assert found.note == "the declared noise of dp-sgd is not in the update"
    (left,) = defenses_found(declared, found, clipped)
    assert left.parameters["noise_multiplier"] == 0.0 and left.parameters["max_grad_norm"] == 1e-3


def test_a_defence_that_is_not_registered_makes_a_step_unverifiable_and_never_a_mismatch() -> None:
    """Its effect is unknown; if it had none, it is reported as missing."""
    step, other = STEPS["classification"]
    declared = _declaring(step, DeclaredDefense(name="of-another-protocol", parameters={"strength": 3}))
    for update in (other.update(), {name: g.sign() for name, g in step.update().items()}):
        found = verify(declared, update)
        assert found.status is VerificationStatus.UNVERIFIABLE
        assert "of-another-protocol" in found.note and "not registered" in found.note
        assert [d.name for d in defenses_found(declared, found, update)] == ["of-another-protocol"]
    same = verify(declared, step.update())
    assert same.status is VerificationStatus.VERIFIED and same.absent == ("of-another-protocol",)
    assert defenses_found(declared, same, step.update()) == ()


def test_an_update_of_zeros_is_a_mismatch_unless_somebody_unknown_may_have_made_it() -> None:
    """No registered defence sends zeros for an update that is not zero."""
    step, _ = STEPS["classification"]
    zeros = {name: torch.zeros_like(g) for name, g in step.update().items()}
    assert verify(step, zeros).status is VerificationStatus.MISMATCH
    declared = _declaring(step, DeclaredDefense(name="of-another-protocol"))
    assert verify(declared, zeros).status is VerificationStatus.UNVERIFIABLE


def test_a_declared_private_sgd_that_cannot_be_repeated_and_is_not_there_is_undefended() -> None:
    """The undefended step is computed first; what cannot be repeated was not needed."""
    step, _ = STEPS["classification"]
    local = dataclasses.replace(step, facts=step.facts.model_copy(update={"view": "delta", "learning_rate": 0.1}))
    declared = _declaring(local, DpSgd().declared())
    found = verify(declared, local.update())
    assert found.status is VerificationStatus.VERIFIED and found.absent == ("dp-sgd",)
    assert defenses_found(declared, found, local.update()) == ()


@pytest.mark.parametrize("factor", [0.25, 3.0])
@pytest.mark.parametrize("name", ["round", "quantize", "sign", "prune"])
def test_a_factor_before_a_defence_is_found(name: str, factor: float) -> None:
    """A user's own loop clips first and rounds then."""
    step, _ = STEPS["classification"]
    seen = step.observe()
    scaled = dataclasses.replace(seen, update={n: factor * g for n, g in seen.update.items()})
    defense = defenses.create(name)
    sent = defense(step, scaled, torch.Generator().manual_seed(0)).update
    found = verify(_declaring(step, defense.declared()), sent)
    if name == "sign":
        assert found.status is VerificationStatus.VERIFIED  # signs have no length
    else:
        assert found.status is VerificationStatus.SCALED, found
        assert found.scale == pytest.approx(factor, rel=2e-3)


def test_a_clipped_example_contributes_no_more_than_the_bound() -> None:
    """Sum of clipped gradients over their number, by hand from one step an example."""
    step, _ = STEPS["classification"]
    bound = 0.5
    sent = _sent(DpSgd(noise_multiplier=0.0, max_grad_norm=bound), step).update
    expected = {name: torch.zeros_like(g) for name, g in sent.items()}
    for text, label in zip(TEXTS, [0, 1, 2], strict=True):
        own = tiny.client_step(step.model, tiny.bert_tokenizer(), [text], [label]).update()
        norm = float(torch.cat([g.flatten() for g in own.values()]).norm())
        assert norm > bound  # otherwise the test says nothing
        for name, g in own.items():
            expected[name] += g * min(1.0, bound / norm) / len(TEXTS)
    for name, g in sent.items():
        torch.testing.assert_close(g, expected[name], rtol=1e-3, atol=1e-6)


def test_private_sgd_says_where_it_cannot_be_computed() -> None:
    """On a difference of weights, and on top of a defence that comes after it.

    An update without it is recognised all the same: the local steps without a defence explain it.
    """
    step, _ = STEPS["classification"]
    local = dataclasses.replace(step, facts=step.facts.model_copy(update={"view": "delta", "learning_rate": 0.1}))
    with pytest.raises(Exception, match="difference of weights after local steps"):
        DpSgd()(local, local.observe(), torch.Generator())
    declared = _declaring(local, DpSgd().declared())
    found = verify(declared, _recorded(step, _sent(DpSgd(), step)))
    assert found.status is VerificationStatus.UNVERIFIABLE and "difference of weights" in found.note
    found = verify(declared, step.update())
    assert found.status is VerificationStatus.VERIFIED and found.absent == ("dp-sgd",)
    rounded = _sent(defenses.create("round"), step)
    with pytest.raises(Exception, match="the run ships round"):
        DpSgd()(step, rounded, torch.Generator())
    with pytest.raises(ValueError, match="infinite; give a bound"):
        DpSgd(max_grad_norm=math.inf)


@pytest.mark.parametrize("name", [name for name, kind in defenses if kind.resized])
def test_what_keeps_no_length_is_not_matched_by_length(name: str) -> None:
    """Signs and clipped examples have no length to match."""
    step, _ = STEPS["classification"]
    assert scale_is_known(step.observe())
    assert not scale_is_known(_sent(defenses.create(name), step))


@pytest.mark.parametrize("scale", [0.1, 1.0, 8.0])
def test_lost_dropout_masks_under_declared_noise_are_no_mismatch(scale: float) -> None:
    """The cosine is judged as far as noise allows; the opposite direction fails."""
    model = tiny.bert(num_labels=3, dropout=0.1)
    step = tiny.client_step(model, tiny.bert_tokenizer(), TEXTS, [1, 1, 1], training=True)
    torch.manual_seed(5)
    seen = step.observe()
    declared = _declaring(step, defenses.create("gaussian-noise", {"scale": scale}).declared())
    sent = defenses.create("gaussian-noise", {"scale": scale})(step, seen, torch.Generator().manual_seed(0)).update
    found = verify(declared, sent)
    if scale > 1.0:  # more noise than another mask makes
        assert found.status is VerificationStatus.NOISED
    else:
        assert (
            found.status is VerificationStatus.UNVERIFIABLE and "the dropout masks cannot be drawn again" in found.note
        )
        back = {name: -g for name, g in sent.items()}
        assert verify(declared, back).status is VerificationStatus.MISMATCH


def test_noise_that_was_rounded_afterwards_is_at_worst_unverifiable() -> None:
    """Signs of noised entries have no strength that could be compared."""
    step, _ = STEPS["classification"]
    noised = _sent(defenses.create("gaussian-noise", {"scale": 1.0}), step)
    signs = defenses.create("sign")(step, noised, torch.Generator())
    declared = _declaring(step, *(d.known().declared() for d in signs.facts.defenses))
    assert verify(declared, signs.update).status is VerificationStatus.UNVERIFIABLE
    rounded = defenses.create("round")(step, noised, torch.Generator())
    declared = _declaring(step, *(d.known().declared() for d in rounded.facts.defenses))
    assert verify(declared, rounded.update).status is VerificationStatus.NOISED
    assert signs.noise_sigma > 0
