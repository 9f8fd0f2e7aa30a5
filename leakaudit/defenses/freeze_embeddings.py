"""`freeze-embeddings`: train and send everything but the embedding tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from leakaudit.plugins import ClientStep, Defense, Observation, Update, defense


@defense("freeze-embeddings")
@dataclass(frozen=True)
class FreezeEmbeddings(Defense):
    """Send no update of the embedding tables.

    The non-zero rows of such an update show the words and the lengths of the batch. If a table is tied to an output head, the head is
    frozen, too. If the client clips, the rest of the update keeps the clipping factor that was computed with the tables. So it has the
    direction of a run with frozen tables, but may be shorter.
    """

    tables: Literal["all", "words", "none"] = "all"
    """`all`: word, position and token-type tables. `words`: the word embedding only. `none`: no defence."""

    label: ClassVar[str] = "frozen embeddings"
    meaning: ClassVar[str] = "Sends no update of the embedding tables."
    identity: ClassVar[Mapping[str, Any]] = {"tables": "none"}
    source: ClassVar[str] = "FILM (Gupta et al. 2022, Sec. 5); LAMP (Balunovic et al. 2022, App. A.1) assumes it"
    protects: ClassVar[str] = (
        "Hides which words and how many positions are in the batch from readers of embedding rows."
    )
    cost: ClassVar[str] = "Little for a pretrained model, much for one trained from scratch (FILM, Table 5)."

    def __call__(self, step: ClientStep, seen: Observation, rng: torch.Generator) -> Observation:
        """Return the update without the chosen tables. The result declares `tables`."""
        withheld = self.withheld(seen.model)
        if not withheld & set(seen.update):
            return seen
        kept = {name: tensor for name, tensor in seen.update.items() if name not in withheld}
        return seen.under(self.declared(), kept)

    def _tables(self, model: nn.Module) -> list[Tensor]:
        if self.tables == "none":
            return []
        if self.tables == "words":
            return [model.get_input_embeddings().weight]  # type: ignore[operator]
        return [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]

    def expected(self, step: ClientStep, recomputed: Update, observed: Update, tolerance: float) -> Update:
        """Return the recomputed update with zeros for the chosen tables.

        A client that does not train a table records zeros for it.
        """
        withheld = self.withheld(step.model)
        return {name: torch.zeros_like(g) if name in withheld else g for name, g in recomputed.items()}

    def withheld(self, model: nn.Module) -> frozenset[str]:
        """Return the names of the chosen tables."""
        frozen = {id(table) for table in self._tables(model)}
        return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in frozen)
