"""Public facts of a client's step: what everybody in the protocol knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from leakaudit.client.optimizer import ClientOptimizer, UpdateKind
from leakaudit.errors import ConfigError
from leakaudit.models.vocabulary import Vocabulary
from leakaudit.registry import defenses

IGNORED_LABEL = -100
"""Label that PyTorch's cross-entropy ignores (default of its `ignore_index`)."""


class Facts(BaseModel):
    """Frozen data of a snapshot; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DeclaredDefense(Facts):
    """A declared defence: the protocol names it, so an adversary knows it.

    See architecture, honesty rule 5.
    """

    name: str
    parameters: dict[str, float | int | str | bool] = {}

    @model_validator(mode="before")
    @classmethod
    def _called_as_now(cls, data: Any) -> Any:
        """Read a declaration that was stored under an old name."""
        if not isinstance(data, dict) or data.get("name") not in defenses.renamed:
            return data
        name, parameters = defenses.current(data["name"], data.get("parameters", {}))
        return {**data, "name": name, "parameters": parameters}

    def with_numbers(self) -> str:
        """Return its name with its numbers, such as `gaussian-noise(scale=0.1)`."""
        numbers = {
            key: value
            for key, value in self.parameters.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        shown = ", ".join(f"{key}={value:g}" for key, value in numbers.items())
        return f"{self.name}({shown})" if numbers else self.name

    def known(self) -> Any:
        """Return the registered defence with these options; None if there is none.

        It is a `leakaudit.plugins.defense_protocol.Defense`.

        A protocol outside this project may declare a defence that no plugin implements. The caller then knows nothing about the update:
        any part of it may be noise, and the defence may have set any entry to zero.
        """
        try:
            return defenses.create(self.name, self.parameters)
        except ConfigError:
            return None


class DeclaredServer(Facts):
    """The change that an active server made to the model before sending it.

    The server is the adversary, so attacks know the change.
    """

    name: str
    parameters: dict[str, float | int | str | bool] = {}


class ReplacedWords(Facts):
    """How a client replaces words of its texts by similar ones before it trains.

    The protocol names it, so attacks know it. The update is that of the changed texts.
    """

    share: float = Field(gt=0, le=1)
    """Chance that a word is replaced, each by itself."""
    nearest: int = Field(ge=1)
    """Number of words with the most similar embeddings (cosine), one of which is drawn."""


class Granted(Facts):
    """The facts that the threat model grants an attack beyond the update.

    The results print it with every score.
    """

    labels: tuple[int, ...] | None = None
    """One class per sequence, in the order of the batch."""
    lengths: tuple[int, ...] | None = None
    """Number of tokens of each sequence, in the order of the batch.

    Special tokens count; padding does not count.
    """
    words: tuple[int, ...] | None = None
    """Ids of the distinct tokens of the batch, in ascending order."""
    longest: int | None = None
    """Number of tokens of the longest sequence, special tokens included."""
    counts: tuple[tuple[int, int], ...] | None = None
    """Pairs of a token id of the batch and how often it occurs in the batch, in ascending order of the ids."""

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], labels: Sequence[int], names: Collection[str]) -> Granted:
        """Return what a threat model grants of a batch.

        Args:
            texts: B sequences of token ids without padding.
            labels: one class per sequence, if they are known.
            names: the facts to grant.
        """
        counts = Counter(token for ids in texts for token in ids)
        everything: dict[str, Any] = {
            "labels": tuple(labels),
            "lengths": tuple(map(len, texts)),
            "words": tuple(sorted(counts)),
            "longest": max(map(len, texts), default=0),
            "counts": tuple(sorted(counts.items())),
        }
        return cls(**{name: everything[name] for name in names})

    def names(self) -> tuple[str, ...]:
        """Return the names of the granted facts."""
        return tuple(name for name in type(self).model_fields if getattr(self, name) is not None)


class PublicFacts(Facts):
    """The facts that every participant of the protocol knows about a step."""

    task: Literal["classification", "causal-lm", "masked-lm", "encoder-decoder", "other"]
    num_labels: int | None = None
    training_mode: bool
    """Whether dropout was active."""
    dropout: dict[str, float] = {}
    """Module name -> dropout rate, for every dropout module with a rate above 0."""
    shared: tuple[str, ...]
    """Parameters with a transmitted update."""
    frozen: tuple[str, ...] = ()
    """Parameters without a transmitted update."""
    tied: tuple[tuple[str, str], ...] = ()
    """Pairs of names of the same parameter.

    An example is the input embedding and the language-model head.
    """
    vocabulary: Vocabulary
    input_shape: tuple[int, ...] | None = None
    """Shape of one example if the model classifies arrays; None for text."""
    batch_size_bound: int | None = None
    """Largest batch the protocol allows; the batch size itself is not public."""
    max_grad_norm: float | None = None
    """Clipping bound of the whole update, if the client clips."""
    loss_divisor: float | None = 1.0
    """Divisor of each micro-batch's loss (gradient accumulation).

    None if the divisor is not one number.
    """
    own_loss: bool | None = None
    """Whether the loss is the model's own, up to a factor.

    The protocol makes the loss public. None if this was not checked.
    """
    dtype: str = "float32"
    """Precision in which the client computed the update."""
    view: Literal["local", "reduced", "delta"] = "local"
    """How the update is defined.

    `local`: gradient of one process. `reduced`: mean over all processes. `delta`: (weights before - weights after) / (learning rate *
    local steps). After plain SGD this is the mean of the local steps' gradients plus the rounding of the weights.
    """
    local_steps: int = 1
    """Number K of local steps before the client sends its `delta`.

    The protocol sets it.
    """
    learning_rate: float | None = None
    """Mean learning rate of the local steps, of the optimizer's first parameter group."""
    optimizer: ClientOptimizer | None = None
    """Optimizer of the local steps of a `delta`; None for plain SGD with `learning_rate`."""
    defenses: tuple[DeclaredDefense, ...] = ()
    replaced: ReplacedWords | None = None
    """How the client replaces words of its texts; None if it trains on its own words."""
    granted: Granted = Granted()
    server: DeclaredServer | None = None
    """None for a server that sends the model as it is, as in every recorded run."""

    @property
    def update_kind(self) -> UpdateKind:
        """What the update is made of: a gradient, or the local steps of an optimizer."""
        if self.view != "delta":
            return "gradient"
        return "sgd" if self.optimizer is None else self.optimizer.kind

    @property
    def known_defenses(self) -> tuple[Any, ...]:
        """The declared defences as plugins, in the order in which they apply.

        None stands for a defence that is not registered.
        """
        return tuple(declared.known() for declared in self.defenses)
