"""The epsilon of DP-SGD, computed by an accountant of another package.

Each step draws every example with the same probability (Poisson sampling), and adds Gaussian noise to the sum of clipped gradients. Two data sets
are neighbours if one has one example more.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

from leakaudit.results.gaussian_dp import epsilon_of_mu


@dataclass(frozen=True)
class Epsilon:
    """The answer of an accountant."""

    value: float | None
    """Epsilon; None if there is none."""
    accountant: str
    """Package and mechanism, such as `opacus rdp`; empty where none is installed."""
    why_not: str = ""
    """Why there is no epsilon, as a clause; empty if there is one."""


NOTHING_INSTALLED = "no accountant is installed: install opacus or dp-accounting"


@lru_cache(maxsize=256)
def epsilon_of(noise_multiplier: float, sampling_rate: float, steps: int, delta: float) -> Epsilon:
    """Return the epsilon of DP-SGD by the first accountant that is installed.

    Opacus comes before dp-accounting. Both use Renyi differential privacy (Mironov et al. 2019, "Renyi Differential Privacy of the Sampled
    Gaussian Mechanism"), with the same orders.

    Args:
        noise_multiplier: standard deviation of the noise divided by the clipping bound.
        sampling_rate: probability with which a step draws an example, in (0, 1].
        steps: number of steps, at least 1.
        delta: in (0, 1).
    """
    if noise_multiplier <= 0:
        return Epsilon(None, "", "the noise multiplier is 0, so epsilon is infinite")
    package = next((name for name in ACCOUNTANTS if find_spec(name) is not None), None)
    if package is None:
        return Epsilon(None, "", NOTHING_INSTALLED)
    name, compute = ACCOUNTANTS[package]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on the largest order, which changes no bound
            value = compute(noise_multiplier, sampling_rate, steps, delta)
    except Exception as error:  # code of another package
        return Epsilon(None, name, f"the accountant failed ({type(error).__name__})")
    return Epsilon(value, name) if 0 <= value < math.inf else Epsilon(None, name, "no finite epsilon was found")


def by_opacus(noise_multiplier: float, sampling_rate: float, steps: int, delta: float) -> float:
    """Return epsilon by the RDP accountant of Opacus."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(noise_multiplier, sampling_rate, steps)]
    return float(accountant.get_epsilon(delta=delta, alphas=list(ORDERS)))


def by_dp_accounting(noise_multiplier: float, sampling_rate: float, steps: int, delta: float) -> float:
    """Return epsilon by the RDP accountant of Google's dp-accounting."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    one = PoissonSampledDpEvent(sampling_rate, GaussianDpEvent(noise_multiplier))
    accountant = RdpAccountant(orders=list(ORDERS))
    accountant.compose(SelfComposedDpEvent(one, steps))
    return float(accountant.get_epsilon(delta))


ORDERS: tuple[float, ...] = (*(1 + x / 10 for x in range(1, 100)), *map(float, range(12, 64)), 128.0, 256.0, 512.0)
"""Orders of the Renyi divergence that are tried; each gives a bound, and the least one counts. Those of Opacus, and three larger ones for small
epsilons."""

ACCOUNTANTS: Mapping[str, tuple[str, Callable[[float, float, int, float], float]]] = {
    "opacus": ("opacus rdp", by_opacus),
    "dp_accounting": ("dp-accounting rdp", by_dp_accounting),
}
"""Package -> name in the results, and function; in the order in which they are tried."""


PRV_ERROR = 0.01
"""Error of epsilon that is asked of Opacus's numerical accountant (Gopi et al. 2021, "Numerical Composition of Differential Privacy")."""


@lru_cache(maxsize=64)
def least_epsilon(noise_multiplier: float, sampling_rate: float, steps: int, delta: float) -> Epsilon:
    """Return an epsilon of DP-SGD that no correct accountant can be below.

    `epsilon_of` gives an upper bound; this is a lower one, from the distribution of the privacy loss: dp-accounting with optimistic rounding
    (Doroshenko et al. 2022), else Opacus's PRV accountant less twice its error.

    Args:
        noise_multiplier: standard deviation of the noise divided by the clipping bound, above 0.
        sampling_rate: probability with which a step draws an example, in (0, 1].
        steps: number of steps, at least 1.
        delta: in (0, 1).
    """
    if (above := epsilon_of(noise_multiplier, sampling_rate, steps, delta).value) is not None and above > MOST_NUMERIC:
        return Epsilon(_least_of_one_step(noise_multiplier, sampling_rate, delta), "one step of the sampled Gaussian")
    for package, (name, compute) in LEAST.items():
        if _has(package):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    value = compute(noise_multiplier, sampling_rate, steps, delta)
            except Exception as error:  # code of another package
                return Epsilon(None, name, f"the accountant failed ({type(error).__name__})")
            return (
                Epsilon(max(0.0, value), name)
                if value < math.inf
                else Epsilon(None, name, "no finite epsilon was found")
            )
    return Epsilon(None, "", NOTHING_INSTALLED)


MOST_NUMERIC = 100.0
"""Epsilon up to which a numerical accountant is asked. Our choice: for 250 it took 6.6 s and 1 GB, for 5,000 minutes."""


def _least_of_one_step(noise_multiplier: float, sampling_rate: float, delta: float) -> float:
    """Return the epsilon of a single step, which is a lower bound for several.

    With the removal of one example the step's pair of distributions is q N(1/z, 1) + (1 - q) N(0, 1) against N(0, 1), for which
    delta(log(1 + q (e^e - 1))) = q delta_Gauss(e) exactly (Balle, Barthe and Gaboardi 2018, Theorem 8 and its tightness).
    """
    if delta >= sampling_rate:
        return 0.0
    whole = epsilon_of_mu(1 / noise_multiplier, delta / sampling_rate)
    return max(0.0, whole + math.log(sampling_rate + (1 - sampling_rate) * math.exp(-whole)))


def _has(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # its parent is not installed
        return False


def _least_by_dp_accounting(noise_multiplier: float, sampling_rate: float, steps: int, delta: float) -> float:
    import logging

    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # it warns on the root logger that it rounds in another way
    try:
        one = from_gaussian_mechanism(noise_multiplier, sampling_prob=sampling_rate, pessimistic_estimate=False)
        return float(one.self_compose(steps).get_epsilon_for_delta(delta))
    finally:
        root.setLevel(level)


def _least_by_opacus(noise_multiplier: float, sampling_rate: float, steps: int, delta: float) -> float:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(noise_multiplier, sampling_rate, steps)]
    return float(accountant.get_epsilon(delta=delta, eps_error=PRV_ERROR)) - 2 * PRV_ERROR


LEAST: Mapping[str, tuple[str, Callable[[float, float, int, float], float]]] = {
    "dp_accounting.pld": ("dp-accounting pld", _least_by_dp_accounting),
    "opacus": ("opacus prv", _least_by_opacus),
}
"""The same for `least_epsilon`."""
