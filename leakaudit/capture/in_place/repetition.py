"""The repetition of a client's step on the live model.

The recorder has the calls of the model, the random states before them, and the gradients that the loss sent to the outputs. The same
object is called again, with its own kernels, precision, hooks and compiled graph. Nothing is rebuilt.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from leakaudit.capture.in_place.state_before import NotInPlaceError, StateBefore, restore_on_exit
from leakaudit.capture.observing.forward_hooks import BackwardPass, ForwardPass, sums
from leakaudit.client.recipe import StepRecipe
from leakaudit.models.tensors import outputs_of

SAME_GRADIENT = 1e-5
"""Relative difference of the sums of two gradients at an output up to which they count as one. Our choice: the order of additions
changes less in float32, and a second loss changes more."""


class _ReentrantError(Exception):
    """The model checkpoints activations in a way that needs `backward`."""


@dataclass
class Repetition:
    """One step that is computed again on the live model."""

    called: nn.Module
    """What the training loop calls."""
    passes: Sequence[ForwardPass]
    """The forward passes that the update comes from."""
    before: StateBefore
    named: Mapping[str, nn.Parameter]
    """Name -> parameter, of the model that is audited."""
    moved: Sequence[nn.Parameter]
    """Parameters of the optimizer."""
    recipe: StepRecipe
    loss_scale: float = 1.0
    """Factor of a GradScaler: it is in the gradients at the outputs, not in the update."""
    begin: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> a few entries of a trained parameter when the run began."""
    unexplained: bool = False
    """Whether, in the last repetition, the loss inside the model did not explain all gradients that arrived at the other outputs."""
    _reentrant: bool = False
    """Whether the model checkpoints activations in a way that needs `backward`."""

    def update(self, names: Iterable[str], differentiate: Callable[[], None] | None = None) -> dict[str, Tensor]:
        """Return the step's update, computed again.

        It is unscaled and clipped as the recipe says, and has the gradients' own types.

        Args:
            names: of the parameters. The update of a parameter that the step did not reach is zero.
            differentiate: fills the empty gradients; None for the step's own passes.

        Raises:
            NotInPlaceError: the step cannot be repeated here.
        """
        differentiate = differentiate or self._differentiate
        with ExitStack() as stack:
            restore_on_exit(stack, self.called, (*self._parameters(), *self.before.users.leaves))
            stack.enter_context(torch.enable_grad())
            self._reset()
            try:
                differentiate()
            except _ReentrantError:
                self._reentrant = True
                self._reset()
                differentiate()
            with torch.no_grad():
                self._unscale_and_clip()
                return {name: _gradient(self.named[name]) for name in names}

    def count_all_outputs(self) -> None:
        """Repeat with the gradients at all outputs from now on.

        Before this call, only the loss inside the model counts, if there is one.
        """
        for seen in self.passes:
            seen.counts_all_outputs = True

    def _parameters(self) -> list[nn.Parameter]:
        """Return every parameter that may have a gradient, once.

        Those of the called object come first, in its order.
        """
        every = (*self.called.parameters(), *self.named.values(), *self.moved)
        return list({id(p): p for p in every}.values())

    def _reset(self) -> None:
        """Restore the state before the first pass, and empty the gradients."""
        self.before.reset()
        for leaf in (*self._parameters(), *self.before.users.leaves):
            leaf.grad = None

    # ------------------------------------------------------------------ forward and backward

    def _differentiate(self) -> None:
        """Make the step's backward passes again, into the parameters' empty gradients.

        `torch.autograd.grad` reaches no hook that waits for a finished gradient (an optimizer in the backward pass, a reducer), but
        reentrant checkpointing needs `backward`; there such hooks are off.

        Raises:
            _ReentrantError: torch reported that the model needs `backward`.
        """
        self.unexplained = False
        for number in sorted({number for seen in self.passes for number in seen.contributing}):
            group = [seen for seen in self.passes if number in seen.contributing]
            with ExitStack() as stack:
                roots = [pair for seen in group for pair in self._forward(seen, seen.contributing[number], stack)]
                if roots:
                    self.backward([tensor for tensor, _ in roots], [gradient for _, gradient in roots])
            self.unexplained |= any(seen.contributing[number].unexplained for seen in group)

    def _forward(self, seen: ForwardPass, one: BackwardPass, stack: ExitStack) -> list[tuple[Tensor, Tensor]]:
        """Make one forward pass again.

        Returns:
            The outputs that the loss used, with the gradients that arrived there.

        The recorded gradient of an output already contains what arrived there through later outputs, so it replaces the gradient that
        arrives in the repetition.
        """
        assert seen.call is not None
        for parameter in self.called.parameters():
            if id(parameter) in seen.weights:
                stack.callback(setattr, parameter, "data", parameter.data)
                parameter.data = seen.weights[id(parameter)].to(parameter.device, copy=True)
        with ExitStack() as context:
            self.enter_context(seen, context)
            args, kwargs = seen.call.arguments()
            outputs = dict(outputs_of(self.called(*args, **kwargs)))
        scalars = {path: gradient for path, gradient in one.output_gradients.items() if gradient.dim() == 0}
        wanted = scalars if scalars and not seen.counts_all_outputs else one.output_gradients
        if lacking := [path for path in wanted if path not in outputs or not outputs[path].requires_grad]:
            raise NotInPlaceError(f"the repeated pass has no output {lacking[0]!r} that depends on the parameters")
        one.unexplained = {path for path in (*one.output_gradients, *one.sums) if path not in wanted}
        for path, output in outputs.items():
            if path in wanted and len(wanted) > 1:
                output.register_hook(functools.partial(_replace, one.output_gradients[path]))
            elif path in one.unexplained and output.requires_grad:
                output.register_hook(functools.partial(_compare, one, path))
        return [(outputs[path], gradient.to(outputs[path])) for path, gradient in wanted.items()]

    def enter_context(self, seen: ForwardPass, stack: ExitStack) -> None:
        """Restore the context of a pass until a stack is closed."""
        assert seen.context is not None
        seen.context.enter(stack)
        for module, mode in seen.modes:
            stack.callback(setattr, module, "training", module.training)
            module.training = mode
        torch.set_rng_state(seen.rng["cpu"])
        if "cuda" in seen.rng:
            torch.cuda.set_rng_state(seen.rng["cuda"], next(self.called.parameters()).device)

    def backward(self, tensors: list[Tensor], output_gradients: list[Tensor]) -> None:
        """Differentiate some outputs, and add the result to the parameters' gradients."""
        wanted = [p for p in self._parameters() if p.requires_grad]
        with ExitStack() as stack:
            _allow_in_fabric(stack)
            if self._reentrant:
                self._backward_without_hooks(tensors, output_gradients, wanted)
                return
            try:
                found = torch.autograd.grad(tensors, wanted, output_gradients, allow_unused=True)
            except RuntimeError as error:
                raise _ReentrantError if "use_reentrant" in str(error) else error from None
        with torch.no_grad():
            for parameter, gradient in zip(wanted, found, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _backward_without_hooks(
        self, tensors: list[Tensor], output_gradients: list[Tensor], wanted: list[nn.Parameter]
    ) -> None:
        """Call `backward`, without the hooks that wait for a finished gradient."""
        with ExitStack() as stack:
            for parameter in wanted:
                hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
                if hooks:
                    stack.callback(hooks.update, dict(hooks))
                    hooks.clear()
            torch.autograd.backward(tensors, output_gradients)

    def _unscale_and_clip(self) -> None:
        """Unscale and clip the gradients, as the client did."""
        with_gradient = [p for p in self._parameters() if p.grad is not None]
        if self.loss_scale != 1.0:
            for parameter in with_gradient:
                assert parameter.grad is not None
                parameter.grad = parameter.grad * (1.0 / self.loss_scale)
        if self.recipe.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(with_gradient, self.recipe.max_grad_norm)
        if self.recipe.max_grad_value:
            torch.nn.utils.clip_grad_value_(with_gradient, self.recipe.max_grad_value)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's gradient, dense; zero where there is none."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()


def _allow_in_fabric(stack: ExitStack) -> None:
    """Allow backward passes through modules of Fabric until a stack is closed.

    Under mixed precision, such modules refuse every backward pass that `Fabric.backward` does not make.
    """
    for name in ("lightning.fabric.wrappers", "lightning_fabric.wrappers"):
        wrappers = sys.modules.get(name)
        if wrappers is not None and hasattr(wrappers, "_in_fabric_backward"):
            stack.callback(setattr, wrappers, "_in_fabric_backward", wrappers._in_fabric_backward)
            wrappers._in_fabric_backward = True  # type: ignore[attr-defined]


def _compare(one: BackwardPass, path: str, gradient: Tensor) -> None:
    """Note whether the loss inside the model explains the gradient at an output.

    It does if it sends to that output all that arrived there in the client's step.
    """
    mine = sums(gradient.detach())
    held = one.sums.get(path)
    theirs = sums(one.output_gradients[path].to(gradient.device)) if held is None else held.to(mine.device)
    if bool((mine - theirs).abs().max() <= SAME_GRADIENT * theirs[1]):
        one.unexplained.discard(path)


def _replace(recorded: Tensor, arrived: Tensor) -> Tensor:
    """Return what arrived at an output in the client's own step."""
    return recorded.to(arrived)
