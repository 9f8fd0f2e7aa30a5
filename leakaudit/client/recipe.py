"""The recipe of a step: how the client turned its batch into an update."""

from __future__ import annotations

from typing import Literal

from leakaudit.client.facts import Facts


class StepRecipe(Facts):
    """How the client turned its batch into an update, as far as tensors do not say it."""

    training: bool = True
    loss: Literal["forward", "pulls", "label_smoothing", "unsupported"] = "forward"
    """Where the loss came from: the model's own output, wherever it was as far as its pulls on the model's outputs tell, the
    trainer's label smoother, or code that cannot be replayed."""
    label_smoothing: float = 0.0
    loss_divisor: float = 1.0
    """The trainer divides each micro-batch's loss by this before the backward pass."""
    pass_num_items: bool = False
    """Whether the model's forward was given `num_items_in_batch`."""
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    """Every entry of the update was cut to this size, if at all."""
    autocast: Literal["bf16", "fp16"] | None = None
    loss_scale: float = 1.0
    """Factor that a GradScaler put on the loss and took out of the update, so that small gradients survive in fp16."""
    kept_rng: bool = True
    eval_modules: tuple[str, ...] = ()
    """Modules that the client kept in eval mode while the model as a whole trained."""
    attention: str = ""
    """Implementation of attention in the client's model, as transformers calls it (`sdpa`); empty where it is not known."""
    neftune_alpha: float | None = None
    """Uniform noise of alpha / sqrt(T D) on the word embeddings (NEFTune, Jain et al. 2023, Algorithm 1)."""
    processes: int = 1
    """Processes over whose gradients the update is the mean; the micro-batches are those of all of them."""
    outside: int = 0
    """Parameters that the client trains outside the model that is rebuilt; they are not part of the update here."""
    patched: tuple[str, ...] = ()
    """Parts of the model that had a `forward` or hooks of their own when the step began; a model that is made again has none."""
    note: str = ""
