"""The accountant of a private optimizer, and the epsilon that it gives.

Opacus attaches its accountant to the optimizer as a hook of each step. This module finds it there by what it can do, without an import of Opacus.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from leakaudit.capture.observing.private_sgd import PrivateSgd
from leakaudit.config.privacy import PrivacyConfig
from leakaudit.results.schema import Privacy

MOST_NAME = 60
"""Most characters of an accountant's name in the results. Our choice: Opacus's have three."""


USUAL_DELTA = 1e-5
"""Delta of Abadi et al. (2016), section 5, for 60,000 and for 50,000 examples; Opacus asks for one below 1 / number of examples."""


@dataclass(frozen=True)
class History:
    """What an accountant counted: steps, with the noise and the sampling of each."""

    phases: tuple[tuple[float, float, int], ...]
    """Noise multiplier, sampling rate and number of steps, for steps in a row with the same numbers."""

    @classmethod
    def of(cls, accountant: Any) -> History:
        """Read the history of an accountant.

        Raises:
            ValueError: it has another form, or numbers that no step has. The message is a clause.
        """
        try:
            phases = tuple((float(noise), float(rate), int(steps)) for noise, rate, steps in accountant.history)
        except (TypeError, ValueError):
            raise ValueError("the accountant's history has a form that is not known") from None
        for noise, rate, steps in phases:
            if not 0 < rate <= 1:
                raise ValueError(f"the accountant counted steps with a sampling rate of {rate:g}, outside of (0, 1]")
            if not 0 <= noise < math.inf or steps < 0:
                raise ValueError(f"the accountant counted {steps} steps with a noise multiplier of {noise:g}")
        return cls(phases)

    @property
    def steps(self) -> int:
        """Number of steps."""
        return sum(steps for _, _, steps in self.phases)

    @property
    def least_noise(self) -> float | None:
        """The smallest noise multiplier; None without steps."""
        return min((noise for noise, _, _ in self.phases), default=None)

    @property
    def highest_rate(self) -> float | None:
        """The largest sampling rate; None without steps."""
        return max((rate for _, rate, _ in self.phases), default=None)


@dataclass(frozen=True)
class RunAccount:
    """The account of one run: its optimizer, and the accountant if there is one."""

    private: PrivateSgd
    accountant: Any
    """An object with `history` and `get_epsilon`; None without one."""
    before: int
    """Steps that it had counted when the run began."""

    @classmethod
    def of(cls, private: PrivateSgd | None) -> RunAccount | None:
        """Find the accountant of a run that begins; None for a run that is not private."""
        if private is None:
            return None
        accountant = next(_accountants(private.optimizer), None)
        try:
            before = 0 if accountant is None else History.of(accountant).steps
        except ValueError:  # the end of the run says it
            before = 0
        return cls(private, accountant, before)

    def stated(self, asked: PrivacyConfig, trained: int, called: Any) -> Privacy:
        """Return what the accountant says of the run so far.

        Args:
            asked: delta and sampling, as the configuration names them.
            trained: optimizer steps of this run.
            called: what the loop calls; Opacus's wrapper of a model knows whether batches are Poisson samples.
        """
        optimizer = self.private.optimizer
        known: dict[str, Any] = {
            "noise_multiplier": float(optimizer.noise_multiplier),
            "max_grad_norm": float(optimizer.max_grad_norm),
            "sampling": _sampling(called, asked),
            "origin": "accountant",
        }
        if self.accountant is None:
            return Privacy(**known, delta=asked.delta, why_not="no accountant is attached to the optimizer")
        known["accountant"] = _name_of(self.accountant)
        try:
            history = History.of(self.accountant)
            known |= {"steps": history.steps, "sampling_rate": history.highest_rate}
            known["noise_multiplier"] = known["noise_multiplier"] if not history.steps else history.least_noise
            self._check(history, trained)
            known["delta"] = delta = asked.delta or self._default_delta(history)
            quick = _quick_bound(history, delta)
            if quick is not None and quick > MOST_ASKED:
                note = f"{NOT_ASKED} {self._note(history, trained)}".rstrip()
                return Privacy(**known | {"accountant": QUICK}, epsilon=quick, note=note)
            epsilon = _epsilon(self.accountant, delta)
        except ValueError as error:
            return Privacy(**known, why_not=str(error))
        return Privacy(**known, epsilon=epsilon, note=self._note(history, trained))

    def _check(self, history: History, trained: int) -> None:
        """Refuse a history that gives no epsilon of this run.

        Raises:
            ValueError: says why, as a clause.
        """
        if history.steps == 0:
            raise ValueError("the accountant counted no step")
        counted = history.steps - self.before
        if counted < trained:
            raise ValueError(
                f"the accountant counted {max(counted, 0)} of the {trained} steps of this run, so its history is of another run or has a gap"
            )
        if not history.least_noise:
            raise ValueError("the noise multiplier was 0, so epsilon is infinite")

    def _default_delta(self, history: History) -> float:
        """Return 1e-5, or the largest power of ten below 1 / number of examples.

        It is the smaller of the two.

        Opacus rounds the expected batch down (`int(N q)`), and divides it by the processes. So N is below (batch * processes + 1) / q.

        Raises:
            ValueError: nothing shows the number of examples.
        """
        rate, batch = history.highest_rate, self.private.optimizer.expected_batch_size
        if rate is None or not batch:
            raise ValueError("there is no delta: name it in the configuration (`privacy: {delta: 1e-5}`)")
        processes = int(getattr(self.private.optimizer, "world_size", 1))
        return min(USUAL_DELTA, power_of_ten_below(rate / (float(batch) * processes + 1)))

    def _note(self, history: History, trained: int) -> str:
        more = history.steps - trained
        said = [f"The accountant counts {more} steps besides the {trained} of this run."] if more else []
        if len({noise for noise, _, _ in history.phases}) > 1:
            said.append("The noise changed during the run; the smallest multiplier is shown.")
        return " ".join(said)


def power_of_ten_below(value: float) -> float:
    """Return the largest power of ten that is strictly below a number.

    >>> power_of_ten_below(1 / 60_000), power_of_ten_below(0.01)
    (1e-05, 0.001)
    """
    return float(f"1e{math.ceil(round(math.log10(value), 9)) - 1}")


def _accountants(optimizer: Any) -> Iterator[Any]:
    """Yield the objects behind the step hook of an optimizer that give an epsilon."""
    hook = getattr(optimizer, "step_hook", None)
    held = [getattr(hook, "__self__", None)]
    for cell in getattr(hook, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
    yield from (one for one in held if callable(getattr(one, "get_epsilon", None)) and hasattr(one, "history"))


def _sampling(called: Any, asked: PrivacyConfig) -> str:
    """Return how the run draws its batches.

    Opacus forbids the accumulation of gradients where it makes Poisson samples. Where it is allowed, nothing is known.
    """
    forbidden = getattr(called, "grad_accumulation_allowed", None) is False
    return "poisson" if forbidden else asked.sampling


def _name_of(accountant: Any) -> str:
    """Return package and mechanism, such as `opacus rdp`."""
    package = type(accountant).__module__.partition(".")[0]
    mechanism = getattr(accountant, "mechanism", None)
    name = mechanism() if callable(mechanism) else type(accountant).__name__
    return ascii(f"{package} {name}")[1:-1][:MOST_NAME]


MOST_ASKED = 30.0
"""Epsilon up to which the run's accountant is asked. Our choice: a numerical one took 0.2 s for 16, 6.6 s and 1 GB for 250, and minutes for 5,000,
and it would run in the training process."""

NOT_ASKED = f"The run's own accountant was not asked, because it may take minutes for an epsilon above {MOST_ASKED:g}."

QUICK = "opacus rdp"
"""Name of the accountant that gives the quick bound."""


def _quick_bound(history: History, delta: float) -> float | None:
    """Return the epsilon of Renyi differential privacy, in milliseconds.

    None where Opacus is not loaded, or its functions have another form. Source: Mironov et al. 2019, "Renyi Differential Privacy of the Sampled
    Gaussian Mechanism", as Opacus computes it.
    """
    rdp = sys.modules.get("opacus.accountants.analysis.rdp")
    if rdp is None or not history.least_noise:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spent = sum(
                rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=steps, orders=list(_ORDERS))
                for noise, rate, steps in history.phases
            )
            epsilon = float(rdp.get_privacy_spent(orders=list(_ORDERS), rdp=spent, delta=delta)[0])
    except Exception:  # code of another package
        return None
    return epsilon if 0 <= epsilon < math.inf else None


_ORDERS = (1.1, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)
"""Orders of the Renyi divergence. Our choice: coarse, because the bound is only compared with `MOST_ASKED`, or large."""


def _epsilon(accountant: Any, delta: float) -> float:
    """Return the epsilon for a delta.

    Raises:
        ValueError: the accountant fails, or gives no finite number.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on orders at the end of a range, which change no bound
            epsilon = float(accountant.get_epsilon(delta=delta))
    except Exception as error:  # the code of another package, or of the user
        raise ValueError(f"the accountant failed ({type(error).__name__})") from None
    if not 0 <= epsilon < math.inf:
        raise ValueError("the accountant gave no finite epsilon")
    return epsilon
