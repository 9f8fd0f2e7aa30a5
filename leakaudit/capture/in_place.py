"""Repeats a client's step where it was made, to verify its update.

This happens before the optimizer moves the weights.

The recorder has the calls of the model, the random states before them and what the loss sent back into the outputs. The same
object is called again, with its own kernels, precision, hooks and compiled graph, and the gradient is compared with the one that
the optimizer is about to get. Nothing is rebuilt, so the only difference allowed is the order in which a GPU adds.

Training must not notice. All that a repetition changes is put back by single calls that cannot fail half-way, registered
before the first change: gradients (the same tensors), buffers, modules' attributes, generators, modes.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.audit.comparison import error_up_to_a_factor, relative_error
from leakaudit.audit.verification import FLOAT32_TOLERANCE, ROUNDING, TOLERANCE, verify
from leakaudit.capture.forward_hooks import MOST_BYTES, Backward, Pass, sums
from leakaudit.capture.users_state import HOOKS, UsersState, keep_only
from leakaudit.capture.witness import few_entries
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import MicroBatch
from leakaudit.errors import NonFiniteUpdateError, SnapshotError
from leakaudit.models.tensors import outputs_of, version_of
from leakaudit.results.schema import Verification, VerificationStatus

IN_PLACE_TOLERANCE = 1e-6
"""Relative error up to which a repeated step counts as the same. Measured on a CPU: 0.0 in every cell of the matrix, in
bfloat16 and under autocast too, but for 2.7e-8 where a loop clips by itself. A wrong word is above 0.1."""

SPREAD = 4.0
"""Where two repetitions differ (kernels on a GPU that add in any order), how many times their distance the step may be off. Our
choice: three draws of one spread are seldom further apart."""

SAME_PULL = 1e-5
"""Relative difference of the sums of two gradients at an output up to which they are one. Our choice: above what the order of additions
changes in float32, below what a second loss is for."""

PENALTY = 0.02
"""Relative error up to which what is left of a few entries of each parameter counts as a penalty's gradient. Our choice: the rest of
another batch is off by almost all of it, rounding in bfloat16 by a hundredth."""

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, buffers, parts, hooks."""

REGISTERS = ("_parameters", "_buffers", "_modules", *HOOKS)
"""Attributes in which a module keeps what was registered with it."""

PRIVATE = ("grad_sample", "summed_grad")
"""Attributes of a parameter in which Opacus keeps gradients of examples."""


class NotInPlaceError(SnapshotError):
    """The error of a step that cannot be repeated where it was made.

    The message says why, and the rebuilt model checks the step.
    """


class UnheldError(SnapshotError):
    """The error of a loss that came from more outputs than were held.

    From the next step on, all outputs are held.
    """


@dataclass
class Before:
    """The called object as it was before the first forward pass of a step.

    It also holds what changed of it from pass to pass.
    """

    called: nn.Module
    attributes: list[tuple[nn.Module, dict[str, Any]]]
    """Of every module: its own plain attributes and tensors, its buffers; references."""
    copies: dict[int, tuple[Tensor, Tensor, int]]
    """Identity of a buffer or tensor attribute -> it, its copy, its version."""
    users: UsersState
    """What else the user's own code may change in a forward pass."""
    prints: Tensor | None = None
    """Fingerprints of the parameters before the first pass, (P,)."""
    held: int = 0
    """Bytes of weights that were held because they changed between passes."""

    @classmethod
    def of(cls, called: nn.Module) -> Before:
        """Note it now; small tensors are copied."""
        attributes, copies = [], {}
        for module in called.modules():
            own = {key: value for key, value in vars(module).items() if key not in INTERNAL or key == "training"}
            plain = {key: value for key, value in own.items() if isinstance(value, _STATE)}
            attributes.append((module, {**plain, "_buffers": dict(module._buffers)}))
            for tensor in (*module._buffers.values(), *own.values()):
                if isinstance(tensor, Tensor) and id(tensor) not in copies:
                    copies[id(tensor)] = (tensor, tensor.detach().clone(), version_of(tensor))
        return cls(called, attributes, copies, UsersState.of(called, iterators=True))

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Return the copy of a buffer; a new one where it was not there then."""
        known = self.copies.get(id(tensor))
        return tensor.detach().clone() if known is None else known[1]

    def note(self, seen: Pass) -> None:
        """Keep the weights and modes of a pass if they are not the first's.

        Adversarial training changes weights within a step.
        """
        seen.modes = [(m, m.training) for m, then in self.attributes if m.training != then.get("training", m.training)]
        prints = fingerprints(self.called)
        if self.prints is None:
            self.prints = prints
        if torch.equal(prints, self.prints):
            return
        changed = (prints != self.prints).tolist()
        moved = [p for p, other in zip(self.called.parameters(), changed, strict=True) if other]
        self.held += sum(p.numel() * p.element_size() for p in moved)
        seen.elsewhere = True
        if self.held <= MOST_BYTES:
            seen.weights = {id(p): p.detach().to("cpu", copy=True) for p in moved}


_STATE = (bool, int, float, str, type(None), Tensor)
"""Types of attributes that a forward pass may depend on and change."""


def fingerprints(model: nn.Module) -> Tensor:
    """Return a number of each parameter, (P,), that changes with it.

    The numbers are on the device of the first parameter.
    """
    with torch.no_grad():
        found = [_fingerprint(p.detach()) for p in model.parameters()]
    together: Tensor = torch.stack([one.to(found[0].device) for one in found])
    return together


def _fingerprint(tensor: Tensor) -> Tensor:
    digest = getattr(torch, "hash_tensor", None)  # exact, from torch 2.9 on
    if digest is None or not tensor.numel():
        norm: Tensor = torch.linalg.vector_norm(tensor.float())
        return norm.double().view(torch.int64)
    found: Tensor = digest(tensor)
    return found.view(torch.int64)


def check(
    step: ClientStep,
    observed: Mapping[str, Tensor],
    repetition: Repetition,
) -> Verification:
    """Repeat a step and stamp its update.

    Args:
        step: the client's step, on the live model.
        observed: parameter name -> update as the optimizer is about to get it.
        repetition: of it.

    Raises:
        NotInPlaceError: it cannot be repeated here.
        UnheldError: what its loss sent into the outputs was not held.
    """
    repetition.refuse()
    if any(defense is not None and defense.per_example for defense in step.facts.known_defenses):
        raise NotInPlaceError("a declared defence works on the gradient of each example")
    own = repetition.update(observed)
    if repetition.unexplained:
        if any(one.sums for seen in repetition.passes for one in seen.counted.values()):
            raise UnheldError(
                "its loss is computed from outputs of the model beside the loss that the model computes itself; from the next step that "
                "is due on they are held"
            )
        repetition.everything()
        own = repetition.update(observed)
    stamp = verify(step, observed, repeated=own, tolerance=IN_PLACE_TOLERANCE)
    if stamp.status is VerificationStatus.MISMATCH:
        spread = relative_error(repetition.update(observed), own)
        if spread > 0:
            most = TOLERANCE.get(step.recipe.autocast or step.facts.dtype, FLOAT32_TOLERANCE)
            stamp = verify(step, observed, repeated=own, tolerance=min(most, max(IN_PLACE_TOLERANCE, SPREAD * spread)))
    if stamp.status is VerificationStatus.MISMATCH and (beside := repetition.beside(observed, own)):
        stamp = stamp.model_copy(update={"status": VerificationStatus.UNVERIFIABLE, "note": beside})
    notes = [note for note in (stamp.note, repetition.note) if note]
    return stamp.model_copy(update={"where": "in place", "note": "; ".join(notes)})


@dataclass
class Repetition:
    """One step that is computed again on the live model."""

    called: nn.Module
    """What the training loop calls."""
    passes: Sequence[Pass]
    """Those that the update comes from."""
    before: Before
    named: Mapping[str, nn.Parameter]
    """Name -> parameter, of the model that is audited."""
    moved: Sequence[nn.Parameter]
    """What the optimizer moves."""
    recipe: StepRecipe
    loss_scale: float = 1.0
    """Of a GradScaler; it is in what was held of the loss, not in the update."""
    begin: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> a few entries of a trained parameter when the run began."""
    unexplained: bool = False
    """Whether a loss inside the model did not send all that arrived at the other outputs, as the last repetition showed."""
    _reentrant: bool = False
    """Whether the model checkpoints activations in a way that needs `backward`."""

    def refuse(self) -> None:
        """Refuse what cannot be repeated here.

        Raises:
            NotInPlaceError: names it.
        """
        if why := self._lacking():
            raise NotInPlaceError(why)

    def _lacking(self) -> str:
        modules = {kind.__name__ for module in self.called.modules() for kind in type(module).__mro__}
        if foreign := modules & {
            "GradSampleModule",
            "AbstractGradSampleModule",
            "FSDPModule",
            "FullyShardedDataParallel",
        }:
            return f"the model is one of {min(foreign)}, which keeps state of its own in a backward pass"
        if any(getattr(p, name, None) is not None for p in self.moved for name in PRIVATE):
            return "the model keeps gradients of examples"
        if not self.passes:
            return "the audit saw no forward pass that this update comes from"
        if opaque := self.before.users.opaque:
            return f"the model's own code uses an object that cannot be put back afterwards ({opaque})"
        for seen in self.passes:
            if seen.call is None or seen.surroundings is None:
                return "its forward passes were not seen whole"
            if seen.call.odd:
                return f"the model was called with a {seen.call.odd}, which the call may have changed"
            if seen.elsewhere and not seen.weights:
                return "its weights changed between forward passes by more than may be held"
        if self.before.prints is not None and not torch.equal(self.before.prints, fingerprints(self.called)):
            return "its weights changed between its forward pass and the optimizer's step"
        return ""

    @property
    def note(self) -> str:
        """Say what is unusual about the step."""
        elsewhere = sum(seen.elsewhere for seen in self.passes)
        if not elsewhere:
            return ""
        return (
            f"{elsewhere} of {len(self.passes)} forward passes ran on weights that were changed for them within the step, as adversarial "
            "training (FGM) does"
        )

    def beside(self, observed: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
        """Name a term of the loss that does not come through the outputs.

        The term is one that explains what is left of the update; the name is empty if none is known.

        Args:
            observed: name -> update as the optimizer gets it.
            own: the same, repeated.
        """
        if any(seen.differentiable for seen in self.passes):
            return (
                "a gradient was differentiated again (a penalty on gradients), and what that sends to the parameters does not come "
                "through the model's outputs"
            )
        left = {
            name: few_entries(observed[name]).double() - few_entries(own[name]).double()
            for name in self.begin
            if name in own
        }
        rounding = max((ROUNDING.get(update.dtype, 0.0) for update in own.values()), default=0.0)
        unsure = rounding * sum(float(few_entries(observed[name]).double().square().sum()) for name in left) ** 0.5
        now = {name: few_entries(self.named[name]).double() for name in left}
        whence = {
            "zero (an L2 penalty)": now,
            "those at the beginning of the run (FedProx, L2-SP)": {n: now[n] - self.begin[n].double() for n in left},
        }
        for name, distance in whence.items():
            if left and _multiple(left, distance, unsure):
                return (
                    f"beside the gradient of the batch the update holds a multiple of the weights' distance from {name}: who knows the "
                    "protocol takes it out, and the attacks here do not"
                )
        return ""

    def everything(self) -> None:
        """Repeat with everything that arrived at the outputs.

        Otherwise only the loss inside the model counts.
        """
        for seen in self.passes:
            seen.mixed = True

    def update(self, names: Iterable[str], differentiate: Callable[[], None] | None = None) -> dict[str, Tensor]:
        """Return the step's update, computed again.

        It is unscaled and clipped as the recipe says, and has the gradients' own types.

        Args:
            names: of the parameters; zero for one that the step did not reach.
            differentiate: fills the empty gradients; None for the step's own passes.
        """
        differentiate = differentiate or self._differentiate
        with ExitStack() as stack:
            self._put_back_afterwards(stack)
            stack.enter_context(torch.enable_grad())
            self._as_before()
            try:
                differentiate()
            except _ReentrantError:
                self._reentrant = True
                self._as_before()
                differentiate()
            with torch.no_grad():
                self._finish()
                return {name: self._found(self.named[name]) for name in names}

    # ------------------------------------------------------------------ whose loss it is

    def loss_is_inside(self, model: nn.Module) -> bool:
        """Return whether the model itself computed the loss, by its class.

        Nothing else may have been pulled in any pass.
        """
        replaced = {"forward", "loss_function", "_loss_function"} & vars(model).keys()
        return not replaced and all(set(seen.output_gradients) == {"loss"} for seen in self.passes)

    def loss_is_like(self, model: nn.Module, batches: Sequence[MicroBatch]) -> bool:
        """Return whether each pass has the gradient of the loss that the model's class computes, up to a factor.

        Args:
            model: that is audited.
            batches: the passes in its words.
        """
        pairs = zip(self.passes, batches, strict=True)
        return all(self._pass_is_like(seen, model, batch) for seen, batch in pairs)

    def _pass_is_like(self, seen: Pass, model: nn.Module, batch: MicroBatch) -> bool:
        labels = batch.inputs.get("labels", batch.withheld_inputs.get("labels"))
        if labels is None:
            return False
        alone = replace(self, passes=[seen], recipe=StepRecipe())
        theirs = alone.update(self.named)
        mine = alone.update(self.named, lambda: alone._send_back_own(model, {**batch.inputs, "labels": labels}))
        try:
            return error_up_to_a_factor(theirs, mine) <= TOLERANCE.get(self._precision(), FLOAT32_TOLERANCE)
        except NonFiniteUpdateError:
            return False

    def _send_back_own(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        """Send the loss of the model's class back, in the surroundings of the one pass."""
        (seen,) = self.passes
        with ExitStack() as around:
            self._surround(seen, around)
            device = next(model.parameters()).device
            given = {name: value.to(device, copy=True) for name, value in inputs.items()}
            loss = type(model).forward(model, **given, **seen.options).loss
        self._backward([loss], [torch.ones_like(loss)])

    def _precision(self) -> str:
        """Return the coarsest type in which the step was computed."""
        types = {p.dtype for p in self.named.values()} | {seen.autocast for seen in self.passes}
        return next((name for name in ("bfloat16", "float16") if getattr(torch, name) in types), "float32")

    # ------------------------------------------------------------------ what is put back

    def _put_back_afterwards(self, stack: ExitStack) -> None:
        """Register everything that brings training back to where it is now.

        Raises:
            NotInPlaceError: the user's code came to hold something since that cannot be put back; nothing was changed.
        """
        stack.callback(random.setstate, random.getstate())
        if (arrays := sys.modules.get("numpy")) is not None:
            stack.callback(arrays.random.set_state, arrays.random.get_state())
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            stack.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        for module in self.called.modules():
            registers = (vars(module).get(name) for name in REGISTERS)
            for values in (vars(module), *(one for one in registers if isinstance(one, dict))):
                stack.callback(values.update, dict(values))
                stack.callback(keep_only, values, frozenset(values))
        users = UsersState.of(self.called, iterators=False)
        if users.opaque:
            raise NotInPlaceError(
                f"the model's own code uses an object that cannot be put back afterwards ({users.opaque})"
            )
        for leaf in (*self._parameters(), *self.before.users.leaves, *users.leaves):
            stack.callback(setattr, leaf, "grad", leaf.grad)
        for function, *arguments in reversed(users.undo):
            stack.callback(function, *arguments)

    def _parameters(self) -> list[nn.Parameter]:
        """Return every parameter that may have a gradient, once.

        The called object's come first, in its order, then the optimizer's others.
        """
        every = (*self.called.parameters(), *self.named.values(), *self.moved)
        return list({id(p): p for p in every}.values())

    def _as_before(self) -> None:
        """Put attributes and buffers back to the state before the first pass.

        This also takes the gradients away.
        """
        again: dict[int, Tensor] = {}
        for key, (tensor, copy, version) in self.before.copies.items():
            if version_of(tensor) != version or not _same(tensor, copy):
                again[key] = copy.clone()
        for module, then in self.before.attributes:
            now = module._buffers
            now.update({k: t if t is None else again.get(id(t), t) for k, t in then["_buffers"].items()})
            plain = {k: v for k, v in then.items() if k != "_buffers"}
            vars(module).update({k: again.get(id(v), v) if isinstance(v, Tensor) else v for k, v in plain.items()})
        self.before.users.put_back()
        for leaf in (*self._parameters(), *self.before.users.leaves):
            leaf.grad = None

    # ------------------------------------------------------------------ forward and backward

    def _differentiate(self) -> None:
        """Make the step's backward passes again, into the parameters' empty gradients.

        `torch.autograd.grad` reaches no hook that waits for a finished gradient (an optimizer in the backward pass, a reducer), but
        reentrant checkpointing needs `backward`; there such hooks are off.

        Raises:
            _ReentrantError: the model needs `backward`, as was found out now.
        """
        self.unexplained = False
        for number in sorted({number for seen in self.passes for number in seen.counted}):
            group = [seen for seen in self.passes if number in seen.counted]
            with ExitStack() as stack:
                roots = [self._forward(seen, seen.counted[number], stack) for seen in group]
                tensors = [tensor for tensor, _ in (pair for pairs in roots for pair in pairs)]
                output_gradients = [pull for _, pull in (pair for pairs in roots for pair in pairs)]
                if tensors:
                    self._backward(tensors, output_gradients)
            self.unexplained |= any(seen.counted[number].open for seen in group)

    def _forward(self, seen: Pass, one: Backward, stack: ExitStack) -> list[tuple[Tensor, Tensor]]:
        """Make one forward pass again; return the outputs that the loss pulled, and how.

        What arrives at an output by way of a later one is in what was held of it already, so each is given as a whole.
        """
        assert seen.call is not None
        for parameter in self.called.parameters():
            if id(parameter) in seen.weights:
                stack.callback(setattr, parameter, "data", parameter.data)
                parameter.data = seen.weights[id(parameter)].to(parameter.device, copy=True)
        with ExitStack() as around:
            self._surround(seen, around)
            args, kwargs = seen.call.again()
            outputs = dict(outputs_of(self.called(*args, **kwargs)))
        scalars = {path: pull for path, pull in one.output_gradients.items() if pull.dim() == 0}
        wanted = scalars if scalars and not seen.mixed else one.output_gradients
        if lacking := [path for path in wanted if path not in outputs or not outputs[path].requires_grad]:
            raise NotInPlaceError(f"the repeated pass has no output {lacking[0]!r} that depends on the parameters")
        one.open = {path for path in (*one.output_gradients, *one.sums) if path not in wanted}
        for path, output in outputs.items():
            if path in wanted and len(wanted) > 1:
                output.register_hook(functools.partial(_instead, one.output_gradients[path]))
            elif path in one.open and output.requires_grad:
                output.register_hook(functools.partial(_compare, one, path))
        return [(outputs[path], pull.to(outputs[path])) for path, pull in wanted.items()]

    def _surround(self, seen: Pass, stack: ExitStack) -> None:
        """Put back what a pass depended on beside its arguments and the model."""
        assert seen.surroundings is not None
        seen.surroundings.enter(stack)
        for module, mode in seen.modes:
            stack.callback(setattr, module, "training", module.training)
            module.training = mode
        torch.set_rng_state(seen.rng["cpu"])
        if "cuda" in seen.rng:
            torch.cuda.set_rng_state(seen.rng["cuda"], next(self.called.parameters()).device)

    def _backward(self, tensors: list[Tensor], output_gradients: list[Tensor]) -> None:
        wanted = [p for p in self._parameters() if p.requires_grad]
        with ExitStack() as stack:
            _as_fabric_does(stack)
            if self._reentrant:
                self._backward_as_told(tensors, output_gradients, wanted)
                return
            try:
                found = torch.autograd.grad(tensors, wanted, output_gradients, allow_unused=True)
            except RuntimeError as error:
                raise _ReentrantError if "use_reentrant" in str(error) else error from None
        with torch.no_grad():
            for parameter, gradient in zip(wanted, found, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _backward_as_told(
        self, tensors: list[Tensor], output_gradients: list[Tensor], wanted: list[nn.Parameter]
    ) -> None:
        with ExitStack() as stack:
            for parameter in wanted:
                hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
                if hooks:
                    stack.callback(hooks.update, dict(hooks))
                    hooks.clear()
            torch.autograd.backward(tensors, output_gradients)

    # ------------------------------------------------------------------ what the recipe does with a gradient

    def _finish(self) -> None:
        """Take out the scale of a GradScaler and clip, as the client did."""
        with_gradient = [p for p in self._parameters() if p.grad is not None]
        if self.loss_scale != 1.0:
            for parameter in with_gradient:
                assert parameter.grad is not None
                parameter.grad = parameter.grad * (1.0 / self.loss_scale)
        if self.recipe.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(with_gradient, self.recipe.max_grad_norm)
        if self.recipe.max_grad_value:
            torch.nn.utils.clip_grad_value_(with_gradient, self.recipe.max_grad_value)

    def _found(self, parameter: nn.Parameter) -> Tensor:
        gradient = parameter.grad
        if gradient is None:
            return torch.zeros_like(parameter)
        return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()


def _as_fabric_does(stack: ExitStack) -> None:
    """Differentiate as `Fabric.backward` does.

    Under mixed precision, modules of Fabric refuse every other backward pass.
    """
    for name in ("lightning.fabric.wrappers", "lightning_fabric.wrappers"):
        wrappers = sys.modules.get(name)
        if wrappers is not None and hasattr(wrappers, "_in_fabric_backward"):
            stack.callback(setattr, wrappers, "_in_fabric_backward", wrappers._in_fabric_backward)
            wrappers._in_fabric_backward = True  # type: ignore[attr-defined]


class _ReentrantError(Exception):
    """The model checkpoints activations in a way that needs `backward`."""


def _compare(one: Backward, path: str, pull: Tensor) -> None:
    """Note whether the loss inside the model explains an output's gradient.

    That is so if the loss sends into that output all that arrived there in the client's step.
    """
    mine = sums(pull.detach())
    held = one.sums.get(path)
    theirs = sums(one.output_gradients[path].to(pull.device)) if held is None else held.to(mine.device)
    if bool((mine - theirs).abs().max() <= SAME_PULL * theirs[1]):
        one.open.discard(path)


def _multiple(left: Mapping[str, Tensor], distance: Mapping[str, Tensor], unsure: float) -> bool:
    """Return whether the entries are a multiple of a distance, 0 or more.

    Entries are what is left of each parameter's update; `PENALTY` is the relative error that is allowed.

    Args:
        left: name -> entries.
        distance: name -> entries.
        unsure: length of what rounding may have left.
    """
    unexplained = whole = 0.0
    for name, entries in left.items():
        along = distance[name]
        length = float(along.square().sum())
        factor = max(0.0, float(entries @ along) / length) if length else 0.0
        unexplained += float((entries - factor * along).square().sum()) if len(entries) > 1 else 0.0
        whole += float(entries.square().sum())
    return unsure <= whole**0.5 / 2 and whole > 0 and unexplained**0.5 <= PENALTY * whole**0.5 + unsure


def _instead(pull: Tensor, arrived: Tensor) -> Tensor:
    """Return what arrived at an output in the client's own step."""
    return pull.to(arrived)


def _same(tensor: Tensor, copy: Tensor) -> bool:
    return tensor.shape == copy.shape and torch.equal(tensor.detach(), copy)
