"""The recipe of a step: how the client turned its batch into an update."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field

from leakaudit.client.facts import Facts
from leakaudit.models.code_marks import CodeMarks


class StepRecipe(Facts):
    """How the client turned its batch into an update, apart from the tensors."""

    training: bool = True
    """Whether the model was in training mode."""
    loss: Literal["forward", "pulls", "unsupported"] = "forward"
    """Where the loss came from.

    `forward`: the model computed it. `pulls`: other code computed it; its gradients at the model's outputs were recorded
    (`MicroBatch.output_gradients`). `unsupported`: the code that computed it cannot be replayed.
    """
    loss_divisor: float = 1.0
    """Divisor of each micro-batch's loss before the backward pass."""
    max_grad_norm: float | None = None
    """Bound of the update's L2 norm; None without clipping."""
    max_grad_value: float | None = None
    """Bound of the absolute value of every entry of the update; None without clipping."""
    autocast: Literal["bf16", "fp16"] | None = None
    loss_scale: float = 1.0
    """Factor of a GradScaler on the loss; the update is divided by it again.

    It keeps small gradients above zero in fp16.
    """
    step_sizes: tuple[int, ...] = ()
    """Number of micro-batches of each local step of a `delta`; empty if each local step has one."""
    kept_rng: bool = True
    """Whether the random states of the micro-batches were recorded."""
    eval_modules: tuple[str, ...] = ()
    """Modules in eval mode while the model as a whole was in training mode."""
    eval_by_pass: tuple[tuple[str, ...], ...] = ()
    """Modules in eval mode in each forward pass, if the passes differ in that; the name of the model itself is empty."""
    attention: str = ""
    """Attention implementation of the client's model, such as `sdpa`.

    The name is that of transformers. Empty if unknown.
    """
    neftune_alpha: float | None = None
    """Strength alpha of NEFTune's noise on the word embeddings.

    The noise is uniform, up to alpha / sqrt(T D) (Jain et al. 2023, Algorithm 1). None without noise.
    """
    processes: int = 1
    """Number of processes whose gradients the update averages.

    The recipe's step has the micro-batches of all processes.
    """
    window: int = 1
    """Number of consecutive updates that the adversary adds up, one for each micro-batch; the update is their mean.

    The weights of all of them are those before the step.
    """
    unaudited_parameters: int = Field(
        default=0, validation_alias=AliasChoices("outside", "unaudited_parameters"), serialization_alias="outside"
    )
    """Number of parameters that the client trains outside the rebuilt model.

    The update does not contain them. The name in files is `outside`.
    """
    code: CodeMarks = CodeMarks()
    """Digests of the code that the client's model ran; empty if unknown.

    Layers and hooks are as they were at the beginning of the step, functions as they were at the first kept step.
    """
    differentiated_again: bool = False
    """Whether the client differentiated a gradient again, as a penalty on gradients requires.

    What that sends to the parameters does not pass through the model's outputs, so it cannot be computed again.
    """
    unheld: tuple[str, ...] = ()
    """Outputs of the model whose gradients were too large to be recorded beside a loss that the model computed itself."""
    rounding_layers: tuple[str, ...] = ()
    """Quantised layers that round their inputs. The matrices alone are used when the step is computed again, so it is not quite the same."""
    note: str = ""
    """Why the loss cannot be replayed, or empty."""
