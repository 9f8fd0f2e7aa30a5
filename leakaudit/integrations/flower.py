"""`LeakAuditMod`, which shows an audit what a client of Flower sends.

    audited = LeakAuditMod("leakaudit-audit")

    @app.train(mods=[audited, LocalDpMod(...)])
    def train(message, context):
        trainer = ...
        LeakAuditCallback(audited.config(context)).attach(trainer)
        ...

A loop of your own begins its round with `watch_round(model, optimizer, tokenizer=tokenizer)`, wherever it makes its optimizer.

The callback keeps what the training made. The mod, as the first of the list, sees what is sent after all other mods. The report shows both,
and so what the mods between them change. As the last of the list it sees what the training function returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor

from leakaudit.callbacks.torch_loop import Watch
from leakaudit.capture.notify import notify
from leakaudit.capture.rounds.registry import audit_in, open_round
from leakaudit.config.audit import PluginSpec
from leakaudit.config.privacy import PrivacyConfig
from leakaudit.errors import LeakAuditError, SnapshotError, type_and_place


@dataclass(frozen=True)
class _Handled:
    """A message that a `LeakAuditMod` handles."""

    mod: LeakAuditMod
    context: Context
    audits: ExitStack
    """Ends the audits of the loops that began in it."""
    stated: Mapping[str, Any] = field(default_factory=dict)
    """The `privacy` and the `shipped_defense` of the audit's configuration, where a later mod states an epsilon."""


_handled: ContextVar[_Handled | None] = ContextVar("_handled", default=None)
"""The message of the `LeakAuditMod` that is furthest out, and so sees most of what is sent; None outside of messages."""


def watch_round(model: Any, optimizer: Any, *, config: Mapping[str, Any] | None = None, **more: Any) -> Watch:
    """Begin to audit a training loop; its round ends with the client's function.

    Call it before the first step, in the client's function or anything that it calls. It needs no `with` block, and the loop does not change.

    Args:
        model: what the loop calls, as in `watch`.
        optimizer: the optimizer of the loop.
        config: further keys of the audit's configuration, such as `rounds` or `attacks`.
        more: further arguments of `watch`, such as `tokenizer` or `num_labels`.

    Returns:
        The audit of the loop; it does nothing where no `LeakAuditMod` handles the message.
    """
    handled = _handled.get()
    if handled is None:
        notify("this training is not audited: `watch_round` runs outside of a function with `mods=[LeakAuditMod(...)]`")
        return Watch(model, optimizer, **more)
    audit = Watch(model, optimizer, config={**handled.mod.config(handled.context), **(config or {})}, **more)
    handled.audits.enter_context(audit)
    return audit


def stated_by_mods(call_next: ClientAppCallable) -> dict[str, Any]:
    """Return the keys of an audit's configuration that a later mod states.

    Flower's `LocalDpMod` states an epsilon of each message, and its settings say how it clips and how much noise it adds. Flower makes each link
    of the chain as a closure over the mod and the rest of the chain. Two mods that state one, or numbers that no guarantee has, give nothing.

    Returns:
        `privacy` and `shipped_defense`; empty without such a mod.
    """
    try:
        found = [mod for mod in _mods_in(call_next) if all(hasattr(mod, knob) for knob in _KNOBS)]
        if len(found) != 1:
            return {}
        numbers = {knob: getattr(found[0], knob) for knob in ("epsilon", "delta")}
        claim = {**numbers, "accountant": "flower localdp, per message", "covers": "message"}
        known = PrivacyConfig.model_validate(claim)
        epsilon, delta = float(numbers["epsilon"]), float(numbers["delta"])
        # sensitivity and formula of `LocalDpMod` (flwr 1.41, clientapp/mod/localdp_mod.py)
        sigma = float(found[0].sensitivity) * math.sqrt(2 * math.log(1.25 / delta)) / epsilon
        options: dict[str, float | int | str | bool] = {"bound": float(found[0].clipping_norm), "sigma": sigma}
        PluginSpec(name="clip-noise", options=options)
        stated = known.model_dump(mode="json", exclude_unset=True)
        return {"privacy": stated, "shipped_defense": {"name": "clip-noise", "options": options}}
    except Exception:  # code of other mods; a client never fails for want of a claim
        return {}


_KNOBS = ("epsilon", "delta", "clipping_norm", "sensitivity")
"""What a mod of local differential privacy has."""


def _mods_in(call: Any) -> Iterator[Any]:
    """Yield the mods in a chain of Flower, the outermost first."""
    seen: set[int] = set()
    while call is not None and id(call) not in seen:
        seen.add(id(call))
        cells = [cell.cell_contents for cell in getattr(call, "__closure__", None) or ()]
        links = [held for held in cells if isinstance(held, FunctionType) and held.__code__ is call.__code__]
        yield from (held for held in cells if not any(held is link for link in links))
        call = next(iter(links), None)


@dataclass(eq=False)
class LeakAuditMod:
    """A client mod for `mods=[...]`; it changes no message and raises nothing."""

    out_dir: Path | str = "leakaudit-audit"
    """Folder of the audits, one subfolder for each client."""
    _told: bool = field(default=False, init=False)
    """Whether the user knows that a client has no audit."""

    def folder(self, context: Context) -> Path:
        """Return the folder of a client's audit, for `out_dir` of its configuration.

        A simulation uses one process for several clients in turn, so the folder has the client's number: of its partition, or of its node.
        """
        return Path(self.out_dir).absolute() / f"client-{context.node_config.get('partition-id', context.node_id)}"

    def config(self, context: Context, **more: Any) -> dict[str, Any]:
        """Return the configuration of the audit in a client's training.

        Args:
            context: what Flower gives the training function.
            more: further keys of the configuration, such as `rounds` or `attacks`.
        """
        handled = _handled.get()
        stated = {} if handled is None else handled.stated
        return {"unit": "round", "out_dir": str(self.folder(context)), **stated, **more}

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Return the reply of the client and tell its audit what it holds."""
        if _handled.get() is not None:
            return call_next(message, context)
        with ExitStack() as audits:
            token = _handled.set(_Handled(self, context, audits, stated_by_mods(call_next)))
            try:
                reply = call_next(message, context)
            finally:
                _handled.reset(token)
        if message.metadata.message_type.startswith("train") and not reply.has_error():
            try:
                self._note(reply, self.folder(context))
            except Exception as error:
                ours = isinstance(error, LeakAuditError)
                notify(f"what is sent is not audited: {error if ours else type_and_place(error)}")
        return reply

    def _note(self, reply: Message, folder: Path) -> None:
        """Tell the audit in a folder what a reply sends.

        Raises:
            SnapshotError: the arrays are not the weights of the round.
        """
        weights: dict[str, Tensor] = {}
        for record in reply.content.array_records.values():
            for name, array in record.to_torch_state_dict().items():
                if name in weights and not torch.equal(weights[name], array):
                    raise SnapshotError(f"two records of the reply hold different arrays named {name!r}")
                weights[name] = array
        made = open_round(folder)
        if made is not None and not weights:
            made.release()
            notify(
                f"round {made.number} is audited as the training made it, not as it is sent: the reply holds no arrays, only "
                f"{', '.join(map(repr, reply.content))}; a mod masks or encrypts it"
            )
        elif made is not None:
            part = made.part_of(weights)
            weights = {part + name: array for name, array in weights.items()}
            left = made.not_covered(weights)
            made.sent(weights, beside=len(left))
            if left:
                notify(
                    f"{len(left)} of the {len(weights)} arrays of the reply are not of round {made.number}, or changed although nothing "
                    f"trained them; they leave without an audit, so what is sent is unverifiable; the first is {left[0]!r}"
                )
        elif weights and audit_in(folder) is None and not self._told:
            self._told = True
            notify(
                f"no training here is audited in {folder}; give the training's LeakAuditCallback that `out_dir`, and `unit: round`"
            )
