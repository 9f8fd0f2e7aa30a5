"""What a configuration says of a training, whatever framework it is for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

TABLES = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings")
"""Names of word embeddings in models of transformers."""


@dataclass(frozen=True)
class PackedBase:
    """Base weights that are stored in few bits."""

    said: str
    """Key and value of the configuration."""
    in_layers: bool | None = True
    """Whether layers hold packed numbers (bitsandbytes, GPTQ, AWQ), or the tensors themselves (torchao); None if nobody tried this kind."""


@dataclass(frozen=True)
class Adapter:
    """What is trained beside frozen weights."""

    kind: str
    """`lora`, `ia3`, ... as peft names it, in lower case."""
    rank: int | None = None
    saved: tuple[str, ...] = ()
    """Modules that are trained and sent whole."""
    on_tensors: tuple[str, ...] = ()
    """Names of parameters, such as those of experts, that get an adapter without a layer of their own."""

    @property
    def saves_tables(self) -> bool:
        """Return whether the word embedding is trained and sent whole."""
        return any(table in one for one in self.saved for table in TABLES)


@dataclass(frozen=True)
class Rounds:
    """A client that sends what changed after several local steps."""

    local_steps: int | None = None
    """K; None where the configuration does not tell it, such as for an epoch."""


@dataclass(frozen=True)
class Recipe:
    """What a configuration says; None and empty where it says nothing."""

    source: str
    """Which kind of file it is."""
    model: str = ""
    hidden_size: int | None = None
    """D of the model."""
    packed: PackedBase | None = None
    adapter: Adapter | None = None
    trains_tables: bool | None = None
    """Whether the word embedding is trained."""
    optimizer: str = ""
    texts: int | None = None
    """Texts, or packed sequences, of one pass."""
    passes: int = 1
    """Passes of one step: the accumulation."""
    tokens: int | None = None
    """Longest sequence, in tokens."""
    packing: bool = False
    """Whether every sequence is filled with texts."""
    strategy: str = ""
    """How the model is distributed, as the framework calls it."""
    fsdp2: bool = False
    mesh: tuple[str, ...] = ()
    """Keys that split one model over processes: tensors, sequences or experts."""
    rounds: Rounds | None = None
    pictures: str = ""
    """Key and value that tell of inputs other than text."""
    objective: str = ""
    """A way to train that no test of capture has."""
    own_code: tuple[str, ...] = ()
    """Keys that replace code of the model."""
    compiled: bool = False
    half: bool = False
    """Whether passes are computed in bfloat16 or float16."""
    scaled: bool = False
    """Whether a GradScaler scales the loss (float16)."""
    foreign: bool = False
    """Whether the model's code comes with its weights."""

    @property
    def most_tokens(self) -> int | None:
        """Return the most tokens of one step of this process; None if unknown."""
        if self.texts is None or self.tokens is None:
            return None
        return self.texts * self.passes * self.tokens


Kind = Literal["refused", "untested", "weaker", "note"]


@dataclass(frozen=True)
class Finding:
    """What one part of a configuration means for an audit."""

    kind: Kind
    """`refused`: no step is kept. `untested`: nobody tried it. `weaker`: captured, but what is not found is no evidence. `note`: a fact."""
    said: str
    """Keys and values that it is about."""
    why: str
    change: str = ""
    """The cheapest change that removes it; empty if there is none to make."""


@dataclass(frozen=True)
class Reads:
    """What is read of an update of this kind."""

    column: str
    """The column of docs/attacks_by_update.md."""
    attacks: tuple[str, ...]
    """Attacks that run on it."""
    lines: tuple[str, ...] = field(default=())
    """Sentences with figures: tokens, hidden size, rank, local steps."""
