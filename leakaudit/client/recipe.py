"""The recipe of a step: how the client turned its batch into an update."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field

from leakaudit.client.facts import Facts


class StepRecipe(Facts):
    """How the client turned its batch into an update, as far as tensors do not say it."""

    training: bool = True
    """Whether the model was in training mode."""
    loss: Literal["forward", "pulls", "unsupported"] = "forward"
    """Where the loss came from.

    `forward`: the model's own output. `pulls`: from anywhere, known by the gradients that it sent to the model's outputs
    (`MicroBatch.output_gradients`). `unsupported`: from code that cannot be replayed.
    """
    loss_divisor: float = 1.0
    """Divisor of each micro-batch's loss before the backward pass."""
    max_grad_norm: float | None = None
    """Bound of the update's L2 norm; None without clipping."""
    max_grad_value: float | None = None
    """Bound of the absolute value of every entry of the update; None without clipping."""
    autocast: Literal["bf16", "fp16"] | None = None
    loss_scale: float = 1.0
    """Factor of a GradScaler on the loss, taken out of the update again.

    It keeps small gradients above zero in fp16.
    """
    kept_rng: bool = True
    """Whether the random states of the micro-batches were recorded."""
    eval_modules: tuple[str, ...] = ()
    """Modules in eval mode while the model as a whole was in training mode."""
    attention: str = ""
    """Attention implementation of the client's model, such as `sdpa`.

    In transformers' terms; empty if unknown.
    """
    neftune_alpha: float | None = None
    """Strength alpha of NEFTune's noise on the word embeddings.

    Uniform noise of alpha / sqrt(T D) (Jain et al. 2023, Algorithm 1); None without it.
    """
    processes: int = 1
    """Number of processes whose gradients the update averages.

    The micro-batches are those of all of them.
    """
    unaudited_parameters: int = Field(
        default=0, validation_alias=AliasChoices("outside", "unaudited_parameters"), serialization_alias="outside"
    )
    """Number of parameters that the client trains outside the rebuilt model.

    The update does not contain them. `outside` on disk.
    """
    patched: tuple[str, ...] = ()
    """Parts of the model with hooks or a `forward` of their own.

    As they were when the step began; a rebuilt model has none.
    """
    note: str = ""
    """Why the loss cannot be replayed, or empty."""
