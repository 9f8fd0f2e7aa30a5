"""Log-probabilities of next tokens while many texts grow.

Letters: N texts, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from leakaudit.errors import PriorError
from leakaudit.plugins.prior_protocol import Scorer


class Continuations(Protocol):
    """Texts that grow together."""

    def begin(self, prefixes: Sequence[Sequence[int]]) -> Tensor:
        """Return (N, V) log-probabilities of the token after each of N texts.

        Args:
            prefixes: N texts of one length, at least one token long.
        """
        ...

    def extend(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Return (M, V) log-probabilities of the token after each longer text.

        Args:
            rows: (M,) which of the present texts each new one continues.
            tokens: (M,) the tokens that continue them.
        """
        ...


class CachedModel:
    """A causal language model of transformers that keeps keys and values.

    If the model returns no cache whose rows can be selected, every text is read again at each step.
    """

    def __init__(self, model: nn.Module, start: Sequence[int]) -> None:
        """Name the model and the tokens before every text; the model is left unchanged."""
        self._model = model
        self._start = list(start)
        self._ids = torch.zeros(0, 0, dtype=torch.long)
        self._cache: Any = None
        self._device = next(model.parameters()).device
        known = inspect.signature(model.forward).parameters
        self._options = {name: 1 for name in ("use_cache", "logits_to_keep") if name in known}

    def begin(self, prefixes: Sequence[Sequence[int]]) -> Tensor:
        """Read N texts of one length."""
        self._ids = torch.tensor([[*self._start, *prefix] for prefix in prefixes], device=self._device)
        self._cache = None
        return self._read(self._ids)

    def extend(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Read one more token of each chosen text."""
        self._ids = torch.cat([self._ids[rows], tokens[:, None]], dim=1)
        if self._cache is None:
            return self._read(self._ids)
        self._cache.batch_select_indices(rows)
        return self._read(tokens[:, None])

    @torch.no_grad()
    def _read(self, ids: Tensor) -> Tensor:
        mask = torch.ones_like(self._ids)
        given = {} if self._cache is None else {"past_key_values": self._cache}
        out = self._model(input_ids=ids, attention_mask=mask, **self._options, **given)
        cache = getattr(out, "past_key_values", None)
        self._cache = cache if hasattr(cache, "batch_select_indices") else None
        logits: Tensor = out.logits[:, -1]
        return logits.float().log_softmax(dim=1)


class ScorerModel:
    """A prior that reads every text again at each step, such as n-grams."""

    def __init__(self, scorer: Scorer) -> None:
        """Name the prior."""
        self._scorer = scorer
        self._texts: list[tuple[int, ...]] = []

    def begin(self, prefixes: Sequence[Sequence[int]]) -> Tensor:
        """Ask about N texts."""
        self._texts = [tuple(prefix) for prefix in prefixes]
        return self._ask()

    def extend(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Ask about the longer texts."""
        self._texts = [(*self._texts[row], token) for row, token in zip(rows.tolist(), tokens.tolist(), strict=True)]
        return self._ask()

    def _ask(self) -> Tensor:
        nats = self._scorer.next_token_nll(self._texts)
        if nats is None:
            raise PriorError("this prior scores whole texts and cannot say which token of the victim comes next")
        return -nats
