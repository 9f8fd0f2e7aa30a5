"""The ends of the sentences whose prefixes are known, from adapters alone.

If all prefixes of a batch are known, the rows of the adapters give the gradient at A's output for every token (`adapter_rows`). At the last
input token of a sentence only that token's own loss counts: its gradient is J^T W^T (p - e_y), where p is known, W is the head, and J is the
derivative of the head's input by A's outputs at that token. So every token y of the vocabulary is compared with the observed gradient.
A sentence that ends where another one goes on shows in what the found sentences leave unexplained. (Own derivation; `last_tokens` does the
same with the last whole layer's update.)

Letters: N prefixes, M features of all A, H inputs of the head, V outputs of the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leakaudit.algorithms.padding import padded_batch
from leakaudit.algorithms.span.adapter_inputs import AdapterInputs
from leakaudit.algorithms.span.adapter_rows import AdapterRows
from leakaudit.client.observation import Observation
from leakaudit.models.structure import Adapter, Tail
from leakaudit.models.structure.trace import Watched, inputs_of, watched
from leakaudit.models.versions import empty_cache
from leakaudit.plugins.budget import Budget

LEFT = 0.05
"""Share of a prefix's gradient that, left unexplained, means that one more sentence ends there.
Our choice: rounding leaves 1e-3."""

PRESENT = 10.0
"""Least gradient at a leaf, in units of its errors. Our choice: the last prefixes of the pursuit may explain rounding alone."""

SURE = 0.999
"""Cosine from which last tokens explain a gradient. Our choice: the right ones have 0.9999 and more."""

MOST_TARGETS = 4
"""Most different last tokens behind one prefix. Our choice."""

MOST_EQUAL = 16
"""Most equal sentences. Our choice: a gradient that is no sentence's own may have any size."""

ROUNDS = 4
"""Times that sentences are looked for in what is left.
Our choice: each round finds those that end inside one more sentence."""

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Ends:
    """Sentences that explain the gradients at prefixes."""

    sentences: tuple[Tokens, ...]
    cosines: tuple[float, ...]
    """For each, the cosine between the observed and the explained gradient at its end, from 0 to 1."""

    @property
    def cosine(self) -> float:
        """The least cosine; 0 without sentences."""
        return min(self.cosines, default=0.0)


@dataclass(frozen=True)
class _End:
    """Sentences that end behind one prefix."""

    prefix: Tokens
    targets: tuple[int, ...]
    """Their last tokens, which are no inputs."""
    amount: float
    """Factor of the gradient of one sentence's loss."""
    cosine: float

    def sentences(self, unit: float) -> list[Tokens]:
        """Return the sentences; equal ones as often as they occur.

        Args:
            unit: the amount of one sentence.
        """
        count = min(max(1, round(self.amount / unit)), MOST_EQUAL) if unit > 0 else 1
        return [(*self.prefix, target) for target in self.targets for _ in range(count)]


class PrefixEnds:
    """The gradients at the prefixes of a batch, and the sentences that explain them."""

    def __init__(
        self,
        seen: Observation,
        inputs: AdapterInputs,
        rows: Sequence[AdapterRows],
        tail: Tail,
        prefixes: Sequence[Tokens],
    ) -> None:
        """Compute the gradients at all prefixes.

        Args:
            seen: the observation.
            inputs: computes inputs of the groups of adapters.
            rows: of each group.
            tail: names the head.
            prefixes: all prefixes of the batch, each with all its own prefixes.
        """
        self._seen, self._tail = seen, tail
        self._prefixes: tuple[Tokens, ...] = tuple(prefixes)
        self._leaves: tuple[Tokens, ...] = ()
        self._solve(inputs, rows)
        while self._prefixes and (wrong := self._without_gradient()):
            self._prefixes = tuple(prefix for prefix in self._prefixes if prefix not in wrong)
            self._solve(inputs, rows)

    def _solve(self, inputs: AdapterInputs, rows: Sequence[AdapterRows]) -> None:
        self._leaves = ()
        if not self._prefixes:
            return
        inner = {prefix[:-1] for prefix in self._prefixes}
        self._leaves = tuple(prefix for prefix in self._prefixes if prefix not in inner)
        self._inputs = self._inputs_of(inputs)
        solved = [
            (group, weights)
            for group, each, given in zip(inputs.groups, rows, self._inputs, strict=True)
            if (weights := each.weights(given)) is not None
        ]
        self._adapters: list[Adapter] = [adapter for group, _ in solved for adapter in group]
        none = [torch.zeros(len(self._prefixes), 0, dtype=torch.float64)]
        self._gradients = torch.cat([weights.values for _, weights in solved] or none, dim=1)  # (N, M)
        self._errors = torch.cat([weights.errors for _, weights in solved] or none, dim=1)

    def _without_gradient(self) -> set[Tokens]:
        """Return the leaves whose gradient is an error, so that they are not in the batch."""
        size = (self._gradients / self._errors).square().mean(dim=1).sqrt().tolist()
        leaves = set(self._leaves)
        return {
            prefix for prefix, errors in zip(self._prefixes, size, strict=True) if prefix in leaves and errors < PRESENT
        }

    @property
    def prefixes(self) -> tuple[Tokens, ...]:
        """The prefixes, without leaves that have no gradient."""
        return self._prefixes

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """For each group of adapters (N, D) float64: inputs at the prefixes' ends."""
        return self._inputs

    @property
    def leaves(self) -> tuple[Tokens, ...]:
        """The prefixes with a gradient that no other one continues."""
        return self._leaves

    def sentences(self, budget: Budget) -> Ends:
        """Return a language model's sentences; none if no layer gives the gradients."""
        found: list[Tokens] = []
        cosines: list[float] = []
        unit, left = 0.0, self._gradients
        for _ in range(ROUNDS if self._adapters and self._prefixes else 0):
            ends = [self._end(prefix, left) for prefix in self._open(left, found) if not budget.exhausted()]
            if not ends:
                break
            unit = unit or min((end.amount for end in ends if end.cosine > SURE), default=0.0)
            for end in ends:
                more = end.sentences(unit)
                found += more
                cosines += [max(0.0, end.cosine)] * len(more)
            if unit <= 0:
                break
            left = self._gradients - unit * self._simulated(found)
        return Ends(tuple(found), tuple(cosines))

    def _open(self, left: Tensor, found: Sequence[Tokens]) -> list[Tokens]:
        """Return the prefixes at which sentences end that are not yet found.

        At first these are the leaves, and later the longest prefixes with a gradient that is not explained.
        """
        if not found:
            return list(self._leaves)
        share = (left / self._errors).norm(dim=1) / (self._gradients / self._errors).norm(dim=1).clamp_min(1e-300)
        over = [prefix for prefix, part in zip(self._prefixes, share.tolist(), strict=True) if part > LEFT]
        inner = {prefix[:length] for prefix in over for length in range(len(prefix))}
        return [prefix for prefix in over if prefix not in inner]

    def _end(self, prefix: Tokens, left: Tensor) -> _End:
        """Return the last tokens that explain the gradient (M,) left at a prefix."""
        at = self._prefixes.index(prefix)
        wanted, atoms = left[at] / self._errors[at], self._atoms(prefix) / self._errors[at]
        targets: list[int] = []
        whole, cosine = torch.zeros_like(wanted), 0.0
        while len(targets) < MOST_TARGETS and cosine < SURE:
            every = whole + atoms
            cosines = every @ wanted / (every.norm(dim=1) * wanted.norm()).clamp_min(1e-300)
            best = int(cosines.argmax())
            if float(cosines[best]) <= cosine:
                break
            targets.append(best)
            whole, cosine = every[best], float(cosines[best])
        amount = float(whole @ wanted / whole.square().sum().clamp_min(1e-300))
        return _End(prefix, tuple(targets), amount, cosine)

    # ------------------------------------------------------------------ the model
    @property
    def _device(self) -> torch.device:
        return next(self._seen.model.parameters()).device

    def _inputs_of(self, inputs: AdapterInputs) -> tuple[Tensor, ...]:
        """Return for each group (N, D) float64 inputs at the ends of all prefixes."""
        ids, _ = padded_batch(self._seen, self._leaves)
        rows, columns = self._places(self._leaves)
        return tuple(given[rows, columns].double() for given in inputs.run(ids))

    def _places(self, sequences: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        """Return the row and column of every prefix's last token in a batch of sequences."""
        where = {
            sequence[:length]: (row, length - 1)
            for row, sequence in enumerate(sequences)
            for length in range(1, len(sequence) + 1)
        }
        places = torch.tensor([where[prefix] for prefix in self._prefixes], device=self._device)
        return places[:, 0], places[:, 1]

    def _atoms(self, prefix: Tokens) -> Tensor:
        """Return (V, M) float64: gradients of next tokens' losses at a prefix's end."""
        head = self._seen.model.get_submodule(self._tail.head)
        with inputs_of(head) as features, self._watched() as seen, torch.enable_grad():
            logits = self._behind(prefix)
        last = features[-1][0, -1]  # (H,)
        eye = torch.eye(len(last), dtype=last.dtype, device=last.device)
        slopes = torch.autograd.grad(last, self._in_order(seen), eye, is_grads_batched=True)
        weight: Tensor = head.weight.detach()  # type: ignore[operator]
        moved = weight @ torch.cat([slope.flatten(1) for slope in slopes], dim=1)  # (V, M)
        return (logits.detach().softmax(dim=0) @ moved - moved).double()

    def _behind(self, prefix: Tokens) -> Tensor:
        """Return (V,) logits behind a prefix, computed through its last token alone."""
        model, ids = self._seen.model, torch.tensor([prefix], device=self._device)
        more: dict[str, Any] = {}
        if len(prefix) > 1:
            more = {"past_key_values": empty_cache(model), "use_cache": True}
            with torch.no_grad():
                model(input_ids=ids[:, :-1], attention_mask=torch.ones_like(ids[:, :-1]), **more)
        logits: Tensor = model(input_ids=ids[:, -1:], attention_mask=torch.ones_like(ids), **more).logits
        return logits[0, -1]

    def _simulated(self, sentences: Sequence[Tokens]) -> Tensor:
        """Return (N, M) float64: gradients of sentences' loss at the prefixes."""
        ids, mask = padded_batch(self._seen, sentences)
        with self._watched() as seen, torch.enable_grad():
            scores = self._seen.model(input_ids=ids, attention_mask=mask).logits.log_softmax(dim=-1)
            loss = -(scores[:, :-1].gather(2, ids[:, 1:, None])[..., 0] * mask[:, 1:]).sum()
            made = torch.cat(torch.autograd.grad(loss, self._in_order(seen)), dim=2).double()  # (B, T, M)
        index = {prefix: number for number, prefix in enumerate(self._prefixes)}
        total = torch.zeros_like(self._gradients)
        for row, sentence in enumerate(sentences):
            for length in range(1, len(sentence)):
                total[index[sentence[:length]]] += made[row, length - 1]
        return total

    def _in_order(self, seen: Watched) -> list[Tensor]:
        return [seen.made[adapter.down.module] for adapter in self._adapters]

    def _watched(self) -> AbstractContextManager[Watched]:
        """Record the outputs of all A in the last forward pass."""
        return watched(self._seen.model, (adapter.down.module for adapter in self._adapters))
