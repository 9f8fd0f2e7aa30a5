"""What was sent of a round, as an integration tells it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from leakaudit.client.facts import DeclaredDefense
from leakaudit.errors import LeakAuditError, SnapshotError
from leakaudit.models.wrappers import plain_name
from leakaudit.storage.held_rounds import add_sent, release
from leakaudit.storage.round_tensors import WIRE_TYPES
from leakaudit.storage.spool import Spool

MOST_WRAPPERS = 2
"""Most names of a server's wrappers before those of the client's model. Our choice."""


class TensorsBefore(Protocol):
    """The model's tensors before a round, in the process or in a list of them."""

    @property
    def trained(self) -> Mapping[str, Sequence[int]]:
        """Name -> shape of each parameter that the round trained."""

    @property
    def known(self) -> Mapping[str, str]:
        """Name that a client may use -> name of the tensor."""

    def as_before(self, name: str, sent: Tensor, *, differences: bool) -> bool:
        """Return whether a sent tensor is one that the round left as it was."""


@dataclass(eq=False)
class OpenRound:
    """The last round in this process, until it is known what was sent of it.

    Call `sent` once, before the next round begins. If nobody does, the round is audited as if the weights were sent as training left them.
    """

    number: int
    """Number of the round in its audit, counted from 0."""
    folder: Path
    """Folder of the audit."""
    before: TensorsBefore = field(repr=False)
    """The model's tensors before the round."""
    _spool: Spool = field(repr=False)
    _own: Sequence[DeclaredDefense] = field(repr=False)
    """Declared defences that are in the produced update already."""
    _declared: Sequence[DeclaredDefense] = field(repr=False)
    """Declared defences that the sent update goes through after that."""
    _later: Callable[[Callable[[], None]], None] = field(repr=False)
    """Runs a task beside training, after the round is on the disk."""
    kept: Callable[[], bool] = field(repr=False)
    """Whether the round is on the disk; known once the tasks beside training are done."""
    _said: bool = field(default=False, init=False, repr=False)
    lost: str = field(default="", init=False, repr=False)
    """Why the audit does not have what was said to be sent, "" if it has all of it.

    It is final once the tasks beside training are done.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters that the round trained, as `sent` expects them."""
        return tuple(self.before.trained)

    def sent(self, weights: Mapping[str, Tensor], *, differences: bool = False, beside: int = 0) -> None:
        """Say what left the machine; the round is then audited as produced and as sent.

        The tensors are copied; a thread beside training writes them.

        Args:
            weights: parameter name -> weights as they were sent, such as a state dict, of floating type. Names of a `PeftModel` or of a
                wrapper fit as well. Entries that the round did not train are ignored, and parameters without an entry were not sent.
            differences: whether `weights` holds differences from the weights before the round, as some protocols send them.
            beside: number of other tensors that leave, which nobody audits; what is sent is then unverifiable.

        Raises:
            SnapshotError: something was said already, or no entry is a parameter that the round trained, or one cannot be audited: its
                shape differs, it is sent twice with different values, or its numbers are none that weights have.
        """
        if self._said:
            raise SnapshotError(f"what was sent of round {self.number} was said already; the next round is another one")
        found = self._matched(weights)
        self._said, self.lost = True, "it is not written yet"
        copies = {name: _audited(w).to("cpu", copy=True) for name, w in found.items()}
        self._later(functools.partial(self._add, copies, differences=differences, beside=beside))

    def release(self) -> None:
        """Say that the weights were sent as training left them; later calls do nothing."""
        if not self._said:
            self._said = True
            self._later(lambda: _release(self._path))

    def not_covered(self, weights: Mapping[str, Tensor], *, differences: bool = False) -> list[str]:
        """Return the names of sent tensors that the audit of this round leaves out.

        It covers the parameters that the round trained, and other tensors of the model that are as they were before the round.

        Args:
            weights: as in `sent`.
            differences: as in `sent`.
        """
        before = self.before
        names = {given: before.known.get(plain_name(given), "") for given in weights}
        return [
            given
            for given, name in names.items()
            if name not in before.trained and not before.as_before(name, weights[given], differences=differences)
        ]

    def prefix_of(self, names: Collection[str]) -> str:
        """Return what stands before all sent names.

        A server's model that wraps the client's puts it there.

        With the shortest such prefix removed, every name is a tensor of the round's model. Empty if there is none, or if none is needed.

        Args:
            names: the sent names, such as `model.encoder.weight` for a parameter `encoder.weight`.
        """
        known = self.before.known
        parts = next(iter(names), "").split(".")[:MOST_WRAPPERS]
        for length in range(len(parts) + 1):
            prefix = "".join(f"{part}." for part in parts[:length])
            if all(one.startswith(prefix) and plain_name(one.removeprefix(prefix)) in known for one in names):
                return prefix
        return ""

    def part_of(self, names: Collection[str]) -> str:
        """Return what the model's names have before all sent names.

        A client that trains one part of its model may send the state dict of that part: `head.weight` is `heads.head.weight` of the model.
        Empty if a sent name is one of the model, or if no part or more than one has these names.

        Args:
            names: the sent names.
        """
        known, sent = self.before.known, [plain_name(one) for one in names]
        if not sent or any(one in known for one in sent):
            return ""
        paths = sorted(one.removesuffix(sent[0]) for one in known if one.endswith(f".{sent[0]}"))
        parts = {
            tuple(known[path + one] for one in sent): path
            for path in sorted(paths, key=len, reverse=True)
            if all(path + one in known for one in sent)
        }
        parts = {tensors: path for tensors, path in parts.items() if any(one in self.before.trained for one in tensors)}
        return next(iter(parts.values())) if len(parts) == 1 else ""

    def _matched(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sent weights under the names of the round's parameters."""
        known, shapes = self.before.known, self.before.trained
        found: dict[str, Tensor] = {}
        for given, w in weights.items():
            if (name := known.get(plain_name(given), "")) in shapes:
                _check(given, w, shapes[name])
                if name in found and not torch.equal(found[name], w):
                    raise SnapshotError(f"{name!r} is sent twice, with different values, the second time as {given!r}")
                found[name] = w
        if not found:
            first = next(iter(weights), "nothing")
            raise SnapshotError(
                f"none of {len(weights)} sent tensors is a parameter that the round trained; the first is {first!r}, expected were "
                f"names such as {next(iter(self.names), 'none')!r}"
            )
        return found

    def _add(self, weights: Mapping[str, Tensor], *, differences: bool, beside: int) -> None:
        if not self._path.is_dir():
            self.lost = "the round was not kept, or was attacked before"
            return  # the log says why
        recipients: Sequence[str] = self._spool.keys.recipients if self._spool.keys else ()
        try:
            add_sent(self._path, weights, self._own, self._declared, recipients, differences=differences, beside=beside)
        except LeakAuditError as error:
            self.lost = str(error)
            raise
        self.lost = ""

    @property
    def _path(self) -> Path:
        return self._spool.snapshot_folder(self.number)


def _release(folder: Path) -> None:
    release(folder)


def _check(name: str, sent: Tensor, shape: Sequence[int]) -> None:
    """Refuse a tensor that cannot be audited.

    Raises:
        SnapshotError: its shape, its type or its numbers are not those of weights.
    """
    if tuple(sent.shape) != tuple(shape):
        raise SnapshotError(
            f"{name!r} is sent in another shape than the parameter has, {tuple(sent.shape)} instead of {tuple(shape)}: give whole weights, "
            "after what compresses them was undone"
        )
    if not sent.is_floating_point():
        raise SnapshotError(
            f"{name!r} is sent as {_dtype(sent)}, and weights are audited as numbers of floating type: give them after what compresses "
            "them was undone"
        )
    if not bool(torch.isfinite(sent).all()):
        raise SnapshotError(f"{name!r} is sent with infinite or undefined numbers, which nobody can audit")
    if sent.dtype not in WIRE_TYPES and not torch.equal(sent.float().to(sent.dtype), sent):
        raise SnapshotError(
            f"{name!r} is sent as {_dtype(sent)} with digits that float32 does not have, so the audit would not see them: send float32"
        )


def _audited(sent: Tensor) -> Tensor:
    """Return a checked tensor in a type of `WIRE_TYPES`."""
    return sent.detach() if sent.dtype in WIRE_TYPES else sent.detach().float()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
