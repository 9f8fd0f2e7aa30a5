"""Prefixes of a batch, grown token by token along the head's rows.

Letters: n prefixes, M rows, T tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.algorithms.rare_rows.next_token_rows import NextTokenRows
from leakaudit.models.structure.trace import run_until
from leakaudit.plugins.budget import Budget

import os
VERBOSE=os.environ.get('V')
WIDTH = 512
"""Most prefixes of one length that are kept. Our choice: at one length, a batch of 128 sentences has at most 128 right ones."""

DROP = 15.0
"""By how much a prefix may fall below its best evidence, in nats, and still be continued. Chosen on training texts: a right prefix falls
by a few nats for each very frequent word; a wrong one falls for good."""

START_CHUNK = 4096
"""Tokens that are tried as a start in one pass. Our choice: it takes less than 0.2 GB in a small model."""


@dataclass(frozen=True)
class Path:
    """A sequence of tokens with the evidence for it."""

    tokens: tuple[int, ...]
    evidence: float
    """Log-odds in nats, the tokens' prior probabilities included."""


class PrefixStates:
    """The head's inputs at the ends of prefixes of one length, with cached keys."""

    def __init__(self, model: nn.Module) -> None:
        """Start without prefixes.

        Args:
            model: a causal language model; it is left as it was.
        """
        self._model = model
        self._head: Any = model.get_output_embeddings()  # type: ignore[operator]  # a method of every transformers model
        self._cache: Any = None
        self.paths = torch.zeros(0, 0, dtype=torch.long)
        """(n, T) token ids."""

    def alone(self, paths: Tensor) -> Tensor:
        """Return the states (n, D) of prefixes (n, T), and keep nothing."""
        parts = [run_until(self._model, part, self._head)[:, -1] for part in paths.split(START_CHUNK)]
        return torch.cat(parts).float()

    def start(self, paths: Tensor) -> Tensor:
        """Keep prefixes (n, T) and return their states (n, D)."""
        from transformers import DynamicCache

        self.paths = paths
        self._cache = DynamicCache(config=self._model.config)  # type: ignore[arg-type]
        return self._run(paths)

    def extend(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Replace the prefixes by continued ones, and return their states.

        Args:
            rows: (m,) numbers of the prefixes to continue.
            tokens: (m,) one token for each.

        Returns:
            (m, D) states.
        """
        self.paths = torch.cat([self.paths[rows], tokens[:, None]], dim=1)
        self._cache.batch_select_indices(rows)
        return self._run(tokens[:, None])

    def _run(self, ids: Tensor) -> Tensor:
        mask = torch.ones_like(self.paths)
        given = run_until(
            self._model, ids, self._head, attention_mask=mask, past_key_values=self._cache, use_cache=True
        )
        return given[:, -1].float()


def grow(states: PrefixStates, rows: NextTokenRows, starts: Tensor, longest: int, budget: Budget, typical=None) -> list[Path]:
    """Return the paths that no continuation makes more likely, the best first.

    Args:
        states: computes the states; what it held is lost.
        rows: the evidence.
        starts: (n, T) first tokens of sentences.
        longest: largest number of tokens of a path.
        budget: when it is used up, the paths end where they are.
    """
    tree = _Tree()
    kept = starts
    if len(starts) > WIDTH:
        first = states.alone(starts)
        kept = starts[(rows.evidence(first, first.mean(0, keepdim=True).expand_as(first)) + rows.prior(first)).logsumexp(dim=1).topk(WIDTH).indices]
    given = states.start(kept)
    nodes = [tree.add(-1, path, 0.0) for path in kept.tolist()]
    total, drop = torch.zeros(len(kept)), torch.zeros(len(kept))
    while len(nodes) and states.paths.shape[1] < longest and not budget.exhausted():
        gain = rows.evidence(given, typical(states.paths)) + rows.prior(given)  # (n, M)
        fallen = (drop[:, None] + gain).clamp_max(0.0)
        best = fallen.flatten().topk(min(WIDTH, fallen.numel()))
        flat = best.indices[best.values > -DROP]
        if not len(flat):
            break
        parent, column = flat // gain.shape[1], flat % gain.shape[1]
        total, drop = total[parent] + gain[parent, column], fallen[parent, column]
        tokens = rows.tokens[column]
        if VERBOSE: print(states.paths.shape, len(flat), float(drop.median()), int((total>40).sum()))
        nodes = [
            tree.add(nodes[p], [t], e)
            for p, t, e in zip(parent.tolist(), tokens.tolist(), total.tolist(), strict=True)
        ]
        given = states.extend(parent, tokens)
    return tree.best_paths()


class _Tree:
    """All prefixes of a search."""

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._tokens: list[list[int]] = []
        self._evidence: list[float] = []

    def add(self, parent: int, tokens: list[int], evidence: float) -> int:
        self._parents.append(parent)
        self._tokens.append(tokens)
        self._evidence.append(evidence)
        return len(self._parents) - 1

    def best_paths(self) -> list[Path]:
        """Return each path that is better than all its continuations and prefixes.

        The best come first.
        """
        below, above = list(self._evidence), list(self._evidence)  # best evidence among continuations, and prefixes
        for node, parent in enumerate(self._parents):
            above[node] = max(above[node], above[parent]) if parent >= 0 else above[node]
        for node in reversed(range(len(below))):
            if (parent := self._parents[node]) >= 0:
                below[parent] = max(below[parent], below[node])
        ends = [n for n, e in enumerate(self._evidence) if below[n] == e == above[n] and self._parents[n] >= 0]
        ends.sort(key=lambda node: -self._evidence[node])
        return [Path(self._path(node), self._evidence[node]) for node in ends]

    def _path(self, node: int) -> tuple[int, ...]:
        parts: list[list[int]] = []
        while node >= 0:
            parts.append(self._tokens[node])
            node = self._parents[node]
        return tuple(token for part in reversed(parts) for token in part)
