"""The data of one step while it is recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from leakaudit.capture.observing.entry_sample import EntrySample
from leakaudit.capture.observing.forward_hooks import ForwardPass
from leakaudit.capture.observing.optimizer_step import OptimizerStep
from leakaudit.capture.observing.withheld_inputs import assign_labels
from leakaudit.capture.recording.kept_step import KeptStep
from leakaudit.capture.recording.local_round import LocalRound
from leakaudit.capture.recording.step_trace import StepTrace
from leakaudit.client.snapshot import Manifest
from leakaudit.client.truth import MicroBatch, Truth
from leakaudit.errors import SnapshotError

SKIPPED = (
    "its optimizer made no step after its backward passes; a GradScaler skips steps whose gradients are not finite, as when a loss in fp16 "
    "overflows: train in bf16, or begin with a smaller `init_scale`"
)
"""Why a step is not kept whose gradients nobody used."""


@dataclass
class StepRecording:
    """The step that is being recorded, until it is copied."""

    step: int
    manifest: Manifest
    passes: list[ForwardPass] = field(default_factory=list)
    withheld_inputs: dict[str, Tensor] = field(default_factory=dict)
    """The whole batch, as the trainer told it before the forward pass."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Buffers before the first forward pass, which may change them (batch norm); copies."""
    local: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of this process before they are summed with those of others; filled where `observe` is `local`."""
    before: dict[str, Tensor] = field(default_factory=dict)
    """Copies of the weights at the first forward pass, if an earlier step showed that the weights change within a step. Empty otherwise."""
    round: LocalRound | None = None
    """The local steps of a round; None where `observe` is not `delta`, and before the first local step."""
    steps_done: int = 0
    """Local steps that the optimizer has made."""
    loss_scale: float = 1.0
    """Factor of a GradScaler: it is in the gradients while the passes are recorded."""
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    """Parameters of the model by name, as they were when the step was copied."""
    moving: list[nn.Parameter] = field(default_factory=list)
    """Parameters that the optimizers moved when the first forward pass began."""
    seen_weights: list[tuple[ForwardPass, EntrySample]] = field(default_factory=list)
    """Each forward pass, with a few entries of these parameters when it began."""
    ignored: set[int] = field(default_factory=set)
    """Identities of the optimizers that stepped before any forward pass of this step. Those steps belong to the step before."""
    restarts: int = 0
    """How often passes were left out, because only some of several optimizers had stepped when the next forward pass began."""
    trace: StepTrace | None = None
    """A few entries at the moments of each optimizer step; None where several processes or optimizers make the step."""
    problem: str = ""
    """Why the step cannot be kept, if that is known before its copy; empty otherwise."""

    def was_skipped(self) -> bool:
        """Return whether no optimizer step followed its backward passes."""
        return not self.steps_done and any(seen.backward is not None for seen in self.passes)

    def end_trace(self) -> None:
        """Note the final gradients, or the weights at the end of a round."""
        if self.trace is not None:
            (self.trace.given if self.round is None else self.trace.ended)()

    def counted_passes(self) -> list[ForwardPass]:
        """Return the passes that the update comes from, with their labels.

        Two passes over the same examples are marked as one batch.
        """
        passes = [p for p in self.passes if p.backward is not None] if self.round is None else self.round.passes
        for number, seen in enumerate(passes):
            seen.repeated_pass = any(
                _same_examples(seen, p)
                for p in passes[:number]
                if seen.backward == p.backward is not None or seen.on_other_weights
            )
        assign_labels(passes)  # only now: until here two passes over one batch have the same labels
        return passes

    def truth(self, passes: list[ForwardPass], convert: Callable[[MicroBatch], MicroBatch]) -> Truth:
        """Return the batch of some passes.

        Args:
            passes: those that the update comes from.
            convert: what is done with each micro-batch; it may refuse the step.
        """
        state = {} if self.round is None else self.round.state
        batches = tuple(convert(_micro_batch(seen, self.loss_scale)) for seen in passes)
        names = {id(parameter): name for name, parameter in self.parameters}
        return Truth(batches, optimizer_state=state, trace={} if self.trace is None else self.trace.tensors(names))


@dataclass
class CopiedStep:
    """A copied step whose optimizers have not all stepped yet."""

    recording: StepRecording
    optimizer_steps: dict[int, OptimizerStep] = field(default_factory=dict)
    """Identity of an optimizer -> what it was given."""
    kept: KeptStep | None = None
    """The copy; None if another process writes it, or if the step is too large for a copy."""
    notes: list[str] = field(default_factory=list)
    """What cannot be known of the step."""
    written: bool = False
    """Whether it is on the disk already, because it is too large for a copy."""
    entered: set[int] = field(default_factory=set)
    """Identities of the optimizers whose step has begun."""
    stepped: set[int] = field(default_factory=set)
    """Identities of the optimizers whose step is over."""

    def missing(self, optimizers: Sequence[torch.optim.Optimizer]) -> str:
        """Name the optimizers that have not stepped yet, as the end of a sentence."""
        left = [type(one).__name__ for one in optimizers if id(one) not in self.stepped]
        return f"{' and '.join(left)} had stepped"

    def restarted(self, attempts: int, optimizers: Sequence[torch.optim.Optimizer]) -> SnapshotError:
        """Return why a step that begins again and again is not kept."""
        return SnapshotError(
            f"in {attempts} attempts a forward pass began before {self.missing(optimizers)}; the audit needs all optimizers to step without a "
            "forward pass between them"
        )


def _same_examples(one: ForwardPass, two: ForwardPass) -> bool:
    """Return whether two passes are over the same texts with the same labels."""
    mine, others = (_examples(p) for p in (one, two))
    return mine.keys() == others.keys() and bool(mine) and all(torch.equal(mine[name], others[name]) for name in mine)


def _examples(seen: ForwardPass) -> dict[str, Tensor]:
    ids = {"input_ids": seen.inputs["input_ids"]} if "input_ids" in seen.inputs else seen.inputs
    labels = seen.inputs.get("labels", seen.withheld_inputs.get("labels"))
    return dict(ids) if labels is None else {**ids, "labels": labels}


def _micro_batch(seen: ForwardPass, loss_scale: float) -> MicroBatch:
    return MicroBatch(
        inputs=seen.inputs,
        rng=seen.rng,
        num_items=seen.num_items,
        options=seen.options,
        withheld_inputs=seen.withheld_inputs,
        output_gradients={path: gradient.to("cpu") / loss_scale for path, gradient in seen.output_gradients.items()},
        repeated_pass=seen.repeated_pass,
    )
