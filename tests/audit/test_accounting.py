"""Epsilon of DP-SGD: against published figures, a second library, and bad input."""

from __future__ import annotations

import math
from importlib.util import find_spec

import pytest

from leakaudit.audit import accounting
from leakaudit.audit.accounting import ORDERS, by_dp_accounting, by_opacus, epsilon_of, least_epsilon
from leakaudit.audit.privacy import privacy_of
from leakaudit.config.audit import AuditConfig
from leakaudit.results.schema import Privacy

ABADI = (4.0, 0.01, 10_000, 1e-5)
"""Abadi et al. 2016, section 3.2: noise multiplier, sampling rate, steps, delta."""

MNIST = (1.3, 250 / 60_000, 3_600, 1e-5)
"""The first row of the table in the tutorial of TensorFlow Privacy on MNIST (15 epochs, batches of 250)."""

PUBLISHED = [(ABADI, 1.26), (MNIST, 1.18)]
"""With the epsilon that they print."""


@pytest.mark.parametrize(("asked", "printed"), PUBLISHED)
def test_epsilon_agrees_with_published_figures(asked: tuple[float, float, int, float], printed: float) -> None:
    """Wrong: noise, rate or steps in the wrong place or unit.

    Both publications convert orders to epsilon by Abadi et al., Theorem 2. The newer conversion of both libraries gives less, but not by much.
    """
    pytest.importorskip("opacus")
    from opacus.accountants.analysis.rdp import compute_rdp

    noise, rate, steps, delta = asked
    orders = list(range(2, 65))
    spent = compute_rdp(q=rate, noise_multiplier=noise, steps=steps, orders=orders)
    former = min(one + math.log(1 / delta) / (order - 1) for order, one in zip(orders, spent, strict=True))
    assert former == pytest.approx(printed, abs=0.005)
    found = epsilon_of(*asked)
    assert found.accountant == "opacus rdp" and found.value is not None
    assert 0.75 * printed < found.value < printed


@pytest.mark.parametrize("asked", [ABADI, MNIST, (0.7, 250 / 60_000, 10_800, 1e-5), (1.0, 1.0, 1, 1e-5)])
def test_both_libraries_agree_within_a_hundredth(asked: tuple[float, float, int, float]) -> None:
    """Wrong: an epsilon that depends on which of the two is installed."""
    pytest.importorskip("opacus")
    pytest.importorskip("dp_accounting")
    assert by_opacus(*asked) == pytest.approx(by_dp_accounting(*asked), rel=0.01)


def test_a_single_release_is_near_the_exact_epsilon() -> None:
    """Wrong: an epsilon below the exact one of the Gaussian mechanism.

    Balle and Wang 2018, Theorem 8.
    """
    pytest.importorskip("opacus")
    found = epsilon_of(1.0, 1.0, 1, 1e-5).value or 0.0

    def normal(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    delta = normal(0.5 - found) - math.exp(found) * normal(-0.5 - found)
    assert 0 < delta <= 1e-5


def test_noise_of_zero_has_no_epsilon() -> None:
    """Wrong: infinity, which JSON does not have, or a division by zero."""
    found = epsilon_of(0.0, 0.01, 10, 1e-5)
    assert found.value is None and "infinite" in found.why_not


def test_without_an_accountant_there_is_no_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: zero, or an exception that ends the audit."""
    monkeypatch.setattr(accounting, "find_spec", lambda _name: None)
    epsilon_of.cache_clear()
    found = epsilon_of(1.0, 0.01, 10, 1e-5)
    epsilon_of.cache_clear()
    assert found.value is None and "install opacus or dp-accounting" in found.why_not


def test_an_accountant_that_fails_ends_no_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: its exception, whose message may be private, in the results."""

    def fails(*_numbers: float) -> float:
        raise RuntimeError("private")

    monkeypatch.setattr(accounting, "find_spec", lambda name: object())
    monkeypatch.setattr(accounting, "ACCOUNTANTS", {"opacus": ("opacus rdp", fails)})
    epsilon_of.cache_clear()
    found = epsilon_of(1.0, 0.01, 10, 1e-5)
    epsilon_of.cache_clear()
    assert found.value is None and found.why_not == "the accountant failed (RuntimeError)"


def test_orders_are_those_of_opacus_and_larger() -> None:
    """Wrong: fewer orders, which give a larger epsilon than Opacus prints."""
    accountants = pytest.importorskip("opacus.accountants")
    assert set(map(float, accountants.RDPAccountant.DEFAULT_ALPHAS)) <= set(ORDERS)


# ---------------------------------------------------------------------- the statements in the results


def config(**keys: object) -> AuditConfig:
    """Return a configuration with these keys."""
    return AuditConfig.model_validate(keys)


KNOWN = {"sampling_rate": 0.01, "steps": 10_000, "delta": 1e-5}


def test_each_noisy_defence_of_the_battery_has_a_statement() -> None:
    """Wrong: a statement on a defence without noise, or none on DP-SGD."""
    found = privacy_of(
        config(defenses=["dp-sgd(noise_multiplier=4.0)", "prune(share=0.9)"], privacy=KNOWN), (), declared=False
    )
    assert [one.defense for one in found] == ["dp-sgd(noise_multiplier=4.0)"]
    assert (found[0].origin, found[0].noise_multiplier, found[0].steps) == ("computed", 4.0, 10_000)
    if find_spec("opacus"):
        assert found[0].epsilon == pytest.approx(1.035, abs=0.001)


def test_unknown_steps_give_no_epsilon() -> None:
    """Wrong: an epsilon for a guessed number of steps."""
    (found,) = privacy_of(config(defenses=["dp-sgd"], privacy={"delta": 1e-5}), (), declared=False)
    assert found.epsilon is None
    assert found.why_not == "the configuration does not name sampling_rate, steps (`privacy`)"


def test_a_defence_that_only_clips_has_no_epsilon() -> None:
    """Wrong: infinity, or an epsilon of another noise."""
    (found,) = privacy_of(config(defenses=["dp-sgd(noise_multiplier=0.0)"], privacy=KNOWN), (), declared=False)
    assert found.epsilon is None and "infinite" in found.why_not


def test_a_claim_stands_beside_what_the_accountant_said() -> None:
    """Wrong: a claim in place of the accountant's number."""
    told = Privacy(epsilon=5.0, delta=1e-5, accountant="opacus rdp", origin="accountant", noise_multiplier=0.8)
    claim = {"epsilon": 3.0, "delta": 1e-5, "accountant": "paper"}
    own, claimed = privacy_of(config(privacy=claim), (told,), declared=True)
    assert own == told
    assert (claimed.origin, claimed.epsilon, claimed.noise_multiplier) == ("claim", 3.0, 0.8)


def test_a_shipped_defence_is_computed_where_the_training_has_no_accountant() -> None:
    """Wrong: no statement on a declared defence, or one where none is declared."""
    asked = config(shipped_defense="dp-sgd(noise_multiplier=4.0)", privacy=KNOWN)
    assert privacy_of(asked, (), declared=False) == ()
    (found,) = privacy_of(asked, (), declared=True)
    assert (found.defense, found.origin) == ("none", "computed")


def test_the_least_epsilon_of_tiny_noise_is_found_without_a_numerical_accountant() -> None:
    """Wrong: no number, or one above the true epsilon.

    Opacus's accountant took minutes and gigabytes for it.
    """
    pytest.importorskip("opacus")
    found = least_epsilon(0.01, 0.25, 4, 1e-5)
    assert found.value is not None and 5_000 < found.value < 6_000
    one = least_epsilon(1.0, 0.5, 1, 1e-5)
    assert one.value is not None
    assert accounting._least_of_one_step(1.0, 0.5, 1e-5) == pytest.approx(one.value, abs=0.05)
