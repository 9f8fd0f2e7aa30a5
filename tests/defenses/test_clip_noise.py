"""`clip-noise` clips and blurs the whole update, under its old name as well."""

from __future__ import annotations

import math

import pytest
import torch

from leakaudit.client.facts import DeclaredDefense
from leakaudit.defenses.clip_noise import ClipNoise
from leakaudit.errors import ConfigError
from leakaudit.plugins.names import own_names, unknown
from leakaudit.plugins.testing import check_defense
from leakaudit.registry import defenses


def _update() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {"w": torch.randn(300, 200, generator=rng), "b": torch.randn(200, generator=rng)}


@pytest.mark.parametrize("bound", [0.5, 10.0, 1e6])
def test_clipping_is_that_of_torch_and_never_lengthens(bound: float) -> None:
    """All tensors count as one vector, as in `clip_grad_norm_`."""
    update = _update()
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in update.values()]
    for parameter, g in zip(parameters, update.values(), strict=True):
        parameter.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(parameters, bound)
    sent = ClipNoise(bound=bound, sigma=0.0).changed(update, torch.Generator())
    for parameter, g in zip(parameters, sent.values(), strict=True):
        torch.testing.assert_close(g, parameter.grad, rtol=1e-4, atol=1e-6)


def test_the_noise_does_not_depend_on_the_update_and_is_stated_in_its_units() -> None:
    """It is sigma on the wire, and sigma over the unit in the update."""
    update, unit = _update(), 0.05
    known = ClipNoise(bound=math.inf, sigma=0.2).prepared(update, unit)
    sent = known.changed(update, torch.Generator().manual_seed(1))
    assert float((sent["w"] - update["w"]).std()) == pytest.approx(0.2 / unit, rel=0.02)
    assert known.noise(sent) == pytest.approx(0.2 / unit)


@pytest.mark.parametrize(
    "defense", [ClipNoise(bound=0.1), ClipNoise(bound=0.1, sigma=0.01), ClipNoise(bound=math.inf, sigma=1.0)]
)
def test_the_contract_holds(defense: ClipNoise) -> None:
    """No step that declares it would be called a mismatch."""
    check_defense(defense)


def test_a_declaration_under_the_old_name_is_the_same_defence() -> None:
    """Stored snapshots and configurations hold the old names of defence and option."""
    stored = {"name": "clip-difference", "parameters": {"norm": 0.5, "sigma": 0.1, "unit": 2.0}}
    declared = DeclaredDefense.model_validate(stored)
    assert declared == ClipNoise(bound=0.5, sigma=0.1, unit=2.0).declared()
    assert defenses.create("clip-difference", {"norm": "0.5"}) == ClipNoise(bound=0.5)
    assert defenses["clip-difference"] is ClipNoise
    assert "clip-difference" not in defenses.names()


def test_a_policy_may_name_what_older_results_call_the_defence() -> None:
    """It would otherwise be refused as misspelt."""
    assert unknown("clip-difference(norm=1)", own_names().defenses) is None
    assert unknown("clip-differences", own_names().defenses) is not None


def test_the_old_option_belongs_to_the_old_name_alone() -> None:
    with pytest.raises(ConfigError, match="has no option 'norm'"):
        defenses.create("clip-noise", {"norm": 1.0})


@pytest.mark.parametrize("knobs", [{"bound": 0.0}, {"sigma": -1.0}, {"sigma": math.inf}, {"unit": 0.0}])
def test_impossible_knobs_are_refused(knobs: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        ClipNoise(**knobs)
