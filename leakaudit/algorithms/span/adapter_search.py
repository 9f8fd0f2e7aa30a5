"""Search for the sentences of a language model's batch by adapter gradients.

The words are known (`adapter_words`), not their order. A sentence grows token by token: the inputs of all layers name the few next words
that the rows of the update allow (`row_evidence`), and the cosine of the prefix's own gradient with the observed one chooses among them
(`adapter_gradients`). Then single changes are tried as long as they raise the cosine. A language model's last token is no input of the
loss; it is the one whose probability the remaining gradient raises most. (Own derivation; gradients of prefixes are compared in DAGER,
Petrov et al. 2024, only as spans.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from leakaudit.algorithms.span.adapter_gradients import AdapterAgreement
from leakaudit.algorithms.span.adapter_inputs import AdapterInputs
from leakaudit.algorithms.span.row_evidence import Explained
from leakaudit.client.observation import Observation
from leakaudit.models.versions import call_with
from leakaudit.plugins.budget import Budget

BEAM = 8
"""Prefixes that are kept. Chosen on training texts: the right one was among the best six to eight."""

BY_GRADIENT, BY_INPUTS = 5, 2
"""Next words of a prefix whose gradients are computed: the best by slopes, and the best by inputs. Chosen on training texts."""

PATIENCE = 4
"""Tokens without a better cosine after which a sentence does not grow. Our choice."""

LAST = 128
"""Last tokens whose gradient is computed. Our choice: derivatives rank them, up to the length of their gradients."""

STEP = 0.01
"""Step of a difference quotient, as a share of the adapters' norm. Our choice: rounding is 1e-6, and the loss is nearly linear within it."""

CHANGES = 32
"""Changes of a sentence that are tried at once. Our choice: one pass of the model."""

NEARLY = 0.9
"""Cosine above which it is tested whether a guess is right.
Chosen on training texts: right guesses have 0.98 and more."""

BETTER = 1e-4
"""Least rise of the cosine that counts. Our choice."""

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """A sentence and its cosine with the observed gradient, other sentences included."""

    tokens: Tokens
    cosine: float


@dataclass(frozen=True)
class _Prefix:
    """A prefix that grows."""

    tokens: Tokens
    known: Explained
    gradient: Tensor | None
    """(P,) its own gradient; None without a loss."""
    cosine: float


@dataclass(frozen=True)
class SentenceSearch:
    """The search, made once for an observation."""

    seen: Observation
    inputs: AdapterInputs
    agreement: AdapterAgreement
    start: Explained
    """Nothing known, or the inputs of sentences that were found."""
    words: Tensor
    """(M,) token ids of the batch."""
    longest: int
    rng: torch.Generator
    budget: Budget
    is_right: Callable[[Sequence[Tokens]], bool]
    """Tells whether sentences are the whole batch."""
    before: tuple[Tokens, ...] = ()
    """The sentences that were found."""
    others: Tensor | None = None
    """(P,) sum of the gradients of the sentences that were found."""

    def sentence(self) -> Found | None:
        """Return the best sentence, or None if the budget ends before there is one."""
        grown = self._grow()
        best = max((self._ended(found) for found in grown[:2]), key=lambda found: found.cosine, default=None)
        return None if best is None else self.improved(best)

    def ended(self, tokens: Tokens) -> Found:
        """Return a sentence whose inputs are known, with the last token that fits best."""
        cosine = float(self._cosines([tokens])[0])
        return self._ended(Found(tokens, cosine))

    def beside(self, sentences: Sequence[Tokens]) -> SentenceSearch:
        """Return the search for one more sentence."""
        others = self.agreement.gradients(sentences).sum(dim=0) if sentences else None
        return replace(self, others=others, before=tuple(sentences))

    # ------------------------------------------------------------------ growth
    def _grow(self) -> list[Found]:
        """Return the best prefixes of any length, the best first."""
        first = self.seen.facts.vocabulary.starts_with
        known = self.start
        for length in range(1, len(first) + 1):
            given = self.inputs.run(self._ids([first[:length]]))
            known = known.with_inputs([each[0, -1] for each in given])
        live = [_Prefix(first, known, None, 0.0)]
        best: list[Found] = []
        waited = 0
        while live and waited < PATIENCE and len(live[0].tokens) < self.longest and not self.budget.exhausted():
            live = self._extended(live)
            waited = waited + 1 if best and live[0].cosine <= best[0].cosine else 0
            best = sorted([*best, *(Found(each.tokens, each.cosine) for each in live)], key=lambda e: -e.cosine)[:BEAM]
        return best

    def _extended(self, live: list[_Prefix]) -> list[_Prefix]:
        """Return the best prefixes that are one token longer."""
        made = self.inputs.children(self._ids([prefix.tokens for prefix in live]), self.words)
        grown = [
            (row, column)
            for row, prefix in enumerate(live)
            for column in self._next(prefix, [given[row] for given in made])
        ]
        paths = [(*live[row].tokens, int(self.words[column])) for row, column in grown]
        gradients = self._gradients(paths)
        cosines = self.agreement(gradients, self.others)
        alone = len(paths[0]) == 1  # no loss yet
        order = range(len(paths)) if alone else cosines.argsort(descending=True, stable=True)[:BEAM].tolist()
        return [
            _Prefix(
                paths[index],
                live[grown[index][0]].known.with_inputs([given[grown[index][0], grown[index][1]] for given in made]),
                None if alone else gradients[index],
                float(cosines[index]),
            )
            for index in order
        ]

    def _next(self, prefix: _Prefix, given: Sequence[Tensor]) -> list[int]:
        """Return the indices of the words that may follow, by inputs and by gradients.

        Args:
            prefix: with T tokens.
            given: for each group (M, D) inputs of the words behind it.
        """
        known = prefix.known
        parts = [
            known.gain(index, layer.whitened(each))
            for index, (layer, each) in enumerate(zip(known.layers, given, strict=True))
        ]
        nats = torch.stack(parts).sum(dim=0)
        if not prefix.tokens:
            return nats.topk(min(2 * BEAM, len(nats))).indices.tolist()
        slopes = self._slopes(prefix)[self.words]
        by_gradient = slopes.topk(min(BY_GRADIENT, len(slopes))).indices.tolist()
        by_inputs = nats.topk(min(BY_INPUTS, len(nats))).indices.tolist()
        return list(dict.fromkeys([*by_gradient, *by_inputs]))

    def _slopes(self, prefix: _Prefix) -> Tensor:
        """Return (V,): how much of the gradient that is left each next token explains.

        It is the inner product with the token's own gradient, over an estimate of the length of that gradient: the distance of the
        token's row of the head from the mean row.
        """
        parts = [each for each in (prefix.gradient, self.others) if each is not None]
        observed, left = self.agreement.observed, self.agreement.observed
        if parts:
            own = torch.stack(parts).sum(dim=0)
            left = observed - (own @ observed) / own.square().sum().clamp_min(1e-30) * own
        directions = self.agreement.directions(left)
        model, ids = self.seen.model, self._ids([prefix.tokens])
        weights = {name: model.get_parameter(name).detach() for name in directions}

        size = sum(float(weight.square().sum()) for weight in weights.values()) ** 0.5
        step = STEP * size / max(sum(float(each.square().sum()) for each in directions.values()) ** 0.5, 1e-30)

        def logits_at(distance: float) -> Tensor:
            given = {name: weight + distance * directions[name] for name, weight in weights.items()}
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            with torch.no_grad():
                logits: Tensor = call_with(model, given, inputs).logits[0, -1]
            return logits

        ahead, behind = logits_at(step), logits_at(-step)
        slope, chances = (ahead - behind) / (2 * step), ((ahead + behind) / 2).softmax(dim=0)
        head: Tensor = model.get_output_embeddings().weight.detach()  # type: ignore[operator]
        distance = (head - chances @ head).norm(dim=1)
        found: Tensor = -(slope - chances @ slope) / distance.clamp_min(1e-12)
        return found

    def _ids(self, paths: Sequence[Tokens]) -> Tensor:
        return torch.tensor(paths, dtype=torch.long, device=self.words.device).view(len(paths), -1)

    def _gradients(self, sequences: Sequence[Tokens]) -> Tensor:
        parts = [sequences[at : at + CHANGES] for at in range(0, len(sequences), CHANGES)]
        return torch.cat([self.agreement.gradients(part) for part in parts])

    def _cosines(self, sequences: Sequence[Tokens]) -> Tensor:
        return self.agreement(self._gradients(sequences), self.others)

    # ------------------------------------------------------------------ the last token
    def _ended(self, found: Found) -> Found:
        """Return the sentence with the last token that fits best, if one fits."""
        if self.budget.exhausted() or len(found.tokens) >= self.longest:
            return found
        ending = self.seen.facts.vocabulary.ends_with
        own = self._gradients([found.tokens])[0]
        names = (
            self._slopes(_Prefix(found.tokens, self.start, own, found.cosine))
            .topk(min(LAST, self.seen.facts.vocabulary.size))
            .indices.tolist()
        )
        longer = [(*found.tokens, name) for name in names]
        if ending and found.tokens[-len(ending) :] != ending:
            longer.append((*found.tokens, *ending))
        cosines = self._cosines(longer)
        best = int(cosines.argmax())
        return Found(longer[best], float(cosines[best])) if float(cosines[best]) > found.cosine + BETTER else found

    # ------------------------------------------------------------------ changes
    def improved(self, found: Found) -> Found:
        """Return the sentence after all single changes that raise the cosine."""
        while not self.right(found) and not self.budget.exhausted():
            better = self._better(found)
            if better is None:
                return found
            found = better
        return found

    def right(self, found: Found) -> bool:
        """Return whether the sentence and those before it are the whole batch."""
        return found.cosine > NEARLY and self.is_right([*self.before, found.tokens])

    def _better(self, found: Found) -> Found | None:
        """Return the best change of the first batch that holds a better one, or None."""
        changes = self._changes(found.tokens)
        while batch := list(islice(changes, CHANGES)):
            if self.budget.exhausted():
                return None
            cosines = self._cosines(batch)
            best = int(cosines.argmax())
            if float(cosines[best]) > found.cosine + BETTER:
                return Found(batch[best], float(cosines[best]))
        ended = self._ended(Found(found.tokens[:-1], 0.0)) if len(found.tokens) > 2 else found
        return ended if ended.cosine > found.cosine + BETTER else None

    def _changes(self, tokens: Tokens) -> Iterator[Tokens]:
        """Yield sentences with one change, those of neighbours first."""
        first = len(self.seen.facts.vocabulary.starts_with)
        head, rest = tokens[:first], tokens[first:]
        yield from (head + each for each in _swapped_neighbours(rest))
        if len(rest) > 1:
            yield head + rest[:-1]
        missing = [word for word in self.words.tolist() if word not in rest]
        inserted = [(*head, *rest[:at], word, *rest[at:]) for word in missing for at in range(len(rest) + 1)]
        replaced = [(*head, *rest[:at], word, *rest[at + 1 :]) for word in missing for at in range(len(rest))]
        options = [*(head + each for each in _moved(rest)), *inserted, *replaced]
        options += [head + rest[:at] + rest[at + 1 :] for at in range(len(rest))]
        for index in torch.randperm(len(options), generator=self.rng).tolist():
            yield options[index]


def _swapped_neighbours(tokens: Tokens) -> Iterator[Tokens]:
    for at in range(len(tokens) - 1):
        yield (*tokens[:at], tokens[at + 1], tokens[at], *tokens[at + 2 :])


def _moved(tokens: Tokens) -> Iterator[Tokens]:
    """Yield the sentences in which two tokens are exchanged, or one stands elsewhere."""
    for one in range(len(tokens)):
        for two in range(one + 2, len(tokens)):
            yield (*tokens[:one], tokens[two], *tokens[one + 1 : two], tokens[one], *tokens[two + 1 :])
            yield (*tokens[:one], *tokens[one + 1 : two + 1], tokens[one], *tokens[two + 1 :])
            yield (*tokens[:one], tokens[two], *tokens[one:two], *tokens[two + 1 :])
