"""What was sent of a round, as an integration tells it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from leakaudit.capture.describe import RunDescription, declared_defenses
from leakaudit.config.audit import NONE
from leakaudit.errors import SnapshotError
from leakaudit.models.wrappers import plain_name
from leakaudit.storage.held_rounds import add_sent, release
from leakaudit.storage.spool import Spool

PEFT_PREFIX = "base_model.model."
"""Prefix that a `PeftModel` adds to the names of the model inside it."""


@dataclass(eq=False)
class OpenRound:
    """The last round in this process, until it is known what was sent of it.

    Call `sent` once, before the next round begins. If nobody does, the round is audited as if the weights were sent as training left them.
    """

    number: int
    """Number of the round in its audit, counted from 0."""
    folder: Path
    """Folder of the audit."""
    _spool: Spool = field(repr=False)
    _description: RunDescription = field(repr=False)
    _later: Callable[[Callable[[], None]], None] = field(repr=False)
    """Runs a task beside training, after the round is on the disk."""
    kept: Callable[[], bool] = field(repr=False)
    """Whether the round is on the disk; known once the tasks beside training are done."""
    _said: bool = field(default=False, init=False, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters that the round trained, as `sent` expects them."""
        return self._description.facts.shared

    def sent(self, weights: Mapping[str, Tensor], *, differences: bool = False) -> None:
        """Say what left the machine; the round is then audited as produced and as sent.

        The tensors are copied; a thread beside training writes them.

        Args:
            weights: parameter name -> weights as they were sent, such as a state dict. Names of a `PeftModel` or of a wrapper fit as well.
                Entries that the round did not train are ignored, and parameters without an entry were not sent.
            differences: whether `weights` holds differences from the weights before the round, as some protocols send them.

        Raises:
            SnapshotError: something was said already, or no entry is a parameter that the round trained, or its shape differs.
        """
        if self._said:
            raise SnapshotError(f"what was sent of round {self.number} was said already; the next round is another one")
        found = self._matched(weights)
        self._said = True
        copies = {name: w.detach().to("cpu", copy=True) for name, w in found.items()}
        self._later(functools.partial(self._add, copies, differences=differences))

    def release(self) -> None:
        """Say that the weights were sent as training left them; later calls do nothing."""
        if not self._said:
            self._said = True
            self._later(lambda: _release(self._path))

    def not_covered(self, weights: Mapping[str, Tensor], *, differences: bool = False) -> list[str]:
        """Return the names of sent tensors about which an audit of this round says nothing.

        It says something about the parameters that the round trained, and about other tensors of the model that did not change.

        Args:
            weights: as in `sent`.
            differences: as in `sent`.
        """
        judged = self._trained()
        frozen = {
            alias: w for name, w in self._description.model.state_dict().items() for alias in aliases(plain_name(name))
        }
        left = {given: w for given, w in weights.items() if plain_name(given) not in judged}
        return [given for given, w in left.items() if not _unchanged(w, frozen.get(plain_name(given)), differences)]

    def _trained(self) -> dict[str, str]:
        """Return the name of each parameter that the round trained, by all names that a client may use."""
        return {alias: name for name in self.names for alias in reversed(aliases(name))}

    def _matched(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sent weights under the names of the round's parameters."""
        trained = dict(self._description.model.named_parameters())
        shapes = {plain_name(name): p.shape for name, p in trained.items()}
        known = self._trained()
        found = {known[name]: w for given, w in weights.items() if (name := plain_name(given)) in known}
        if not found:
            first = next(iter(weights), "nothing")
            raise SnapshotError(
                f"none of {len(weights)} sent tensors is a parameter that the round trained; the first is {first!r}, expected were "
                f"names such as {next(iter(self.names), 'none')!r}"
            )
        wrong = [name for name, w in found.items() if w.shape != shapes[name]]
        if wrong:
            raise SnapshotError(
                f"{len(wrong)} sent tensors have another shape than the parameter; {wrong[0]!r} is {tuple(found[wrong[0]].shape)}, the "
                f"parameter {tuple(shapes[wrong[0]])}: give whole weights, after what compresses them was undone"
            )
        return found

    def _add(self, weights: Mapping[str, Tensor], *, differences: bool) -> None:
        if not self._path.is_dir():
            return  # the round was not kept, and the log says why
        own = declared_defenses(NONE, self._description.private)
        declared = declared_defenses(self._description.shipped_defense, None)
        recipients: Sequence[str] = self._spool.keys.recipients if self._spool.keys else ()
        add_sent(self._path, weights, own, declared, recipients, differences=differences)

    @property
    def _path(self) -> Path:
        return self._spool.snapshot_folder(self.number)


def _release(folder: Path) -> None:
    release(folder)


def _unchanged(sent: Tensor, known: Tensor | None, differences: bool) -> bool:
    """Return whether a sent tensor is one of the model as it was before the round."""
    if known is None or sent.shape != known.shape:
        return False
    return not sent.any() if differences else torch.equal(sent.to("cpu"), known.detach().to("cpu", sent.dtype))


def aliases(name: str) -> list[str]:
    """Return the names that a parameter has in the state dicts of a client.

    `peft` saves adapters without their name, and adds a prefix.

    >>> aliases("h.0.lora_A.default.weight")[-1]
    'base_model.model.h.0.lora_A.weight'
    """
    short = name.replace(".default.", ".").removesuffix(".default")
    return [name, PEFT_PREFIX + name, short, PEFT_PREFIX + short]
