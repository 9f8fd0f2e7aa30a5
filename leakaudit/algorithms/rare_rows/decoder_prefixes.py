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

WIDTH = 512
"""Most prefixes of one length that are kept. Our choice: at one length, a batch of 128 sentences has at most 128 right ones."""

TAIL_WIDTH = 32
"""The same for the ends of sentences. Our choice: their beginnings are known."""

DROP = 15.0
"""By how much a prefix may fall below its best evidence, in nats, and still be continued. Chosen on training texts: a right prefix falls
by a few nats for each very frequent word; a wrong one falls for good."""

START_CHUNK = 4096
"""Prefixes of one pass. Our choice: one token of each takes less than 0.2 GB in a small model."""

OTHERS = 4
"""Other prefixes over which typical states are averaged. Our choice."""


@dataclass(frozen=True)
class Path:
    """A sequence of tokens with the evidence for it."""

    tokens: tuple[int, ...]
    begin: int
    """Number of its first tokens that were given."""
    evidence: float
    """Log-odds in nats of the tokens after them, with their priors."""


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

    def along(self, tokens: tuple[int, ...]) -> Tensor:
        """Return the states (T, D) of all prefixes of a sequence, and keep nothing."""
        device = next(self._model.parameters()).device
        return run_until(self._model, torch.tensor([tokens], device=device), self._head)[0].float()

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


class TypicalStates:
    """Mean states of a token after prefixes that are not of the batch."""

    def __init__(self, model: nn.Module, samples: Tensor) -> None:
        """Keep the prefixes.

        Args:
            model: a causal language model.
            samples: (n, T) token ids of prefixes, of which the first ones are used.
        """
        self._states = PrefixStates(model)
        self._samples = samples[:OTHERS]
        self._known: dict[tuple[int, int], Tensor] = {}

    def __call__(self, length: int, tokens: Tensor) -> Tensor:
        """Return (n, D) the typical states of tokens (n,) as the last of a length."""
        wanted = tokens.unique()
        new = torch.tensor([t for t in wanted.tolist() if (length, t) not in self._known], dtype=torch.long)
        if len(new):
            for token, mean in zip(new.tolist(), self._mean(length, new.to(tokens.device)), strict=True):
                self._known[length, token] = mean
        return torch.stack([self._known[length, token] for token in tokens.tolist()])

    def _mean(self, length: int, tokens: Tensor) -> Tensor:
        if length == 1:
            return self._states.alone(tokens[:, None]).mean(dim=0).expand(len(tokens), -1)
        short = length - 1 - self._samples.shape[1]
        filled = torch.cat([self._samples, self._samples[:, -1:].expand(-1, max(0, short))], dim=1)[:, : length - 1]
        self._states.start(filled)
        rows = torch.arange(len(filled), device=tokens.device).repeat_interleave(len(tokens))
        return self._states.extend(rows, tokens.repeat(len(filled))).view(len(filled), len(tokens), -1).mean(dim=0)


def grow(
    states: PrefixStates,
    rows: NextTokenRows,
    typical: TypicalStates,
    starts: Tensor,
    longest: int,
    budget: Budget,
    width: int = WIDTH,
) -> list[Path]:
    """Return the paths that no continuation makes more likely, the best first.

    Args:
        states: computes the states; what it held is lost.
        rows: the evidence.
        typical: what the evidence is compared with.
        starts: (n, T) first tokens of sentences.
        longest: largest number of tokens of a path.
        budget: when it is used up, the paths end where they are.
        width: most prefixes of one length that are kept.
    """
    tree = _Tree(starts.shape[1])
    kept = starts if len(starts) <= width else _likeliest(states, rows, typical, starts, width)
    given = states.start(kept)
    nodes = [tree.add(-1, path, 0.0) for path in kept.tolist()]
    total = torch.zeros(len(kept), device=given.device)
    fallen = total
    while nodes and states.paths.shape[1] < longest and not budget.exhausted():
        usual = typical(states.paths.shape[1], states.paths[:, -1])
        gain = rows.evidence(given, usual) + rows.prior(given)  # (n, M)
        below = (fallen[:, None] + gain).clamp_max(0.0)
        best = below.flatten().topk(min(width, below.numel()))
        flat = best.indices[best.values > -DROP]
        if not len(flat):
            break
        parent, column = flat // gain.shape[1], flat % gain.shape[1]
        total, fallen, tokens = total[parent] + gain[parent, column], below[parent, column], rows.tokens[column]
        born = zip(parent.tolist(), tokens.tolist(), total.tolist(), strict=True)
        nodes = [tree.add(nodes[mother], [token], evidence) for mother, token, evidence in born]
        given = states.extend(parent, tokens)
    return tree.best_paths()


def _likeliest(states: PrefixStates, rows: NextTokenRows, typical: TypicalStates, starts: Tensor, width: int) -> Tensor:
    """Return the starts (width, T) with the best continuation."""
    given = states.alone(starts)
    gain = rows.evidence(given, typical(starts.shape[1], starts[:, -1])) + rows.prior(given)
    return starts[gain.amax(dim=1).topk(width).indices]


class _Tree:
    """All prefixes of a search."""

    def __init__(self, begin: int) -> None:
        self._begin = begin
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
        return [Path(self._path(node), self._begin, self._evidence[node]) for node in ends]

    def _path(self, node: int) -> tuple[int, ...]:
        parts: list[list[int]] = []
        while node >= 0:
            parts.append(self._tokens[node])
            node = self._parents[node]
        return tuple(token for part in reversed(parts) for token in part)
