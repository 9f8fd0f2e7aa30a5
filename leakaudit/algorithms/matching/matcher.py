"""Losses, derivatives, tokens and random starts of candidate batches.

Every attack by gradient matching uses a `Matcher`. It combines `CandidateGradients` (the gradients of candidates),
`Comparison` (their distance to the observed one), the public tokens and the regulariser.

Letters: N candidates, B sequences, T tokens, D hidden size, V vocabulary, C classes, P entries of dropout masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from leakaudit.algorithms.labels.clipping import scale_is_known
from leakaudit.algorithms.matching.batch_shape import public_tokens
from leakaudit.algorithms.matching.candidate_gradients import Candidate, CandidateGradients, Pairs, joined
from leakaudit.algorithms.matching.comparison import Comparison, Objective
from leakaudit.algorithms.matching.permutations import Permutation
from leakaudit.algorithms.matching.position_assignment import position_vectors
from leakaudit.client.observation import Observation

CHUNK_TOKENS = 1024
"""Tokens of candidates that run at once. Our choice: a core's matrix products are at full speed, and activations of a base-size
model stay below half a gigabyte."""

EXPLAINED = 1e-4
"""Distance of tokens, as a share of a zero gradient's, up to which the search is over. Measured (cosine, MiniLM, one
CoLA training sentence of 8 tokens): 1e-5 for the true one, 0.04 and more for 43 other orders of its words. Whether the
guess is right is for `prove` to decide."""

CERTAIN = 30.0
"""Logit of a class that is taken as certain: the others keep 1e-13."""

MaskPlaces = Literal["all", "opening"]

Found = TypeVar("Found")


class Matcher:
    """Compares candidate batches with the observed update."""

    def __init__(
        self,
        seen: Observation,
        lengths: Sequence[int],
        objective: Objective,
        *,
        length_weight: float = 0.0,
        exposure: Sequence[str] = ("*",),
        dropout: bool = False,
        mask_weight: float = 0.0,
        mask_places: MaskPlaces = "all",
        aware: bool = True,
        fill: bool = False,
        relative: bool = True,
        start_scale: float = 0.0,
        denoise: bool = True,
        noise_rescales: bool = False,
    ) -> None:
        """Prepare the parts; nothing of `seen` is changed, now or later.

        Args:
            seen: what to match.
            lengths: (B,) tokens of each sequence.
            objective: the distance. Whether norms are matched and entries masked is added here, from what the protocol declares.
            length_weight: alpha_reg, weight of the embedding-length regulariser (LAMP, Sec. 4.2).
            exposure: patterns of parameter names that are matched; all but the word embedding by default.
            dropout: give candidates dropout masks of their own (GRAB, Sec. 4.3).
            mask_weight: weight of learned masks' mean squared distance from their mean, in units of a drawn mask's variance. Not in GRAB.
            mask_places: learn masks of all tokens, as GRAB does, or those of opening tokens, such as `[CLS]`, and of no token only.
            aware: match norms, remove noise, mask entries and weigh parameters where the protocol declares clipping, noise or pruning.
            fill: where it declares pruning and `aware` is on, fill entries in (`low_rank_completion`) instead of masking them.
            relative: take steps in units of the root mean square of the word embedding's entries.
            start_scale: standard deviation of the entries of random candidates: 1 for N(0, I), as LAMP prints them (Algorithm 1); 0 makes rows as long
                as the word embedding's on average.
            denoise: where it declares noise and `aware` is on, remove it and weigh parameters by the rest (`singular_value_shrinkage`).
            noise_rescales: match norms where it declares noise, too, as GRAB does (Sec. 5.5.1), not only where it clips.

        Raises:
            AnatomyError: there is nothing to match.
        """
        self.lengths = tuple(lengths)
        self.length_weight = length_weight
        self.mask_weight = mask_weight
        self.halvings = 0
        """How often memory ran out and half as many candidates ran at once from then on."""
        self.gradients = CandidateGradients(seen, lengths, exposure, dropout=dropout)
        pruned = aware and seen.zeroed
        sigma = seen.noise_sigma if aware else 0.0
        rescaled = not scale_is_known(seen) or (noise_rescales and sigma > 0)
        known = not aware or objective.kind == "cosine" or not rescaled
        masked = objective.masked or (pruned and not fill)
        self.objective = replace(
            objective,
            match_norm=objective.match_norm or not known,
            whitened=objective.whitened and not masked,
            masked=masked,
            filled=objective.filled or (pruned and fill),
            sigma=objective.sigma or (sigma if denoise else 0.0),
        )
        self._comparison = Comparison(
            self.objective, self.gradients.matrices, self.gradients.vectors, seen.update, sum(self.lengths)
        )
        self._vocabulary = seen.facts.vocabulary
        self.positions = position_vectors(seen, max(self.lengths))
        """(T, D) the vectors that the model adds to embeddings at each position; None where it does not just add."""
        self.table = seen.model.get_input_embeddings().weight.detach()  # type: ignore[operator]
        """(V, D) the word embedding."""
        self.directions = functional.normalize(self.table, dim=1)
        """(V, D) its rows at norm 1, zero for tokens that stand at no free position."""
        unknown = self._vocabulary.special.get("unk", -1)
        self.directions[sorted(self._vocabulary.special_ids - {unknown})] = 0.0
        self.unit = float(self.table.square().mean().sqrt()) if relative else 1.0
        """Unit of Adam's step: the root mean square of the word embedding's entries, or 1."""
        self.mean_length = float(self.table.norm(dim=1).mean())
        """Mean norm of the word embedding's rows."""
        self.start_scale = start_scale or self.mean_length / self.table.shape[1] ** 0.5
        """Standard deviation of a start's entries."""
        self._held: dict[int, tuple[int, ...]] = {}
        self._fixed, self._public = self._public_embeddings()
        self._inside = torch.zeros(len(self.lengths), max(self.lengths), 1, device=self.table.device)
        for row, length in enumerate(self.lengths):
            self._inside[row, :length] = 1.0
        self._learned = self._learned_masks(mask_places)
        self._chunk = max(1, CHUNK_TOKENS // sum(self.lengths))

    @property
    def parameters(self) -> int:
        """Number K of parameters that are compared."""
        return len(self.gradients.matrices) + len(self.gradients.vectors)

    @property
    def at_once(self) -> int:
        """The number of candidates that run at once.

        More candidates only need more memory.
        """
        return self._chunk

    @property
    def knows_labels(self) -> bool:
        """Whether the labels are granted."""
        return self.gradients.labels is not None

    @property
    def classes(self) -> int:
        """Number C of classes."""
        return self.gradients.classes

    def random(self, candidates: int, rng: torch.Generator) -> Candidate:
        """Draw normal candidates.

        Their entries are N(0, I), as in LAMP (Sec. 5), or as large as the word embedding's rows on average.

        For a word embedding whose rows have length 1 those of N(0, I) are twenty times longer, and hide the position vectors
        that are added to them.
        """
        rows, longest = self._fixed.shape[:2]
        drawn = torch.randn(candidates, rows, longest, self.table.shape[1], generator=rng)
        logits = torch.randn(candidates, rows, self.classes, generator=rng)
        return Candidate(
            (self.start_scale * drawn).to(self.table.device), logits.to(self.table.device), self.full_masks(candidates)
        )

    def full_masks(self, candidates: int) -> Tensor:
        """Return (N, P) masks at their mean, 1 - p.

        A pass with them is one without dropout.
        """
        layout = self.gradients.masks
        rates = torch.zeros(0) if layout is None else layout.rates
        return (1 - rates).to(self.table.device).expand(candidates, -1).clone()

    def drawn_masks(self, candidates: int, rng: torch.Generator) -> Tensor:
        """Return (N, P) masks as dropout draws them (GRAB, Algorithm 1, line 1)."""
        kept = self.full_masks(candidates)
        return torch.bernoulli(kept.cpu(), generator=rng).to(kept)

    def of_tokens(
        self, batches: Sequence[Sequence[Sequence[int]]], label_logits: Tensor, masks: Tensor | None = None
    ) -> Candidate:
        """Return candidates at the embeddings of tokens.

        Args:
            batches: N batches of B sequences of token ids.
            label_logits: (N, B, C).
            masks: (P,) of dropout, the same for all; None for none.
        """
        ids = torch.zeros(len(batches), *self._fixed.shape[:2], dtype=torch.long)
        for number, batch in enumerate(batches):
            for row, sequence in enumerate(batch):
                ids[number, row, : len(sequence)] = torch.tensor(sequence)
        dropped = self.full_masks(1)[0] if masks is None else masks
        return Candidate(self.table[ids.to(self.table.device)], label_logits, dropped.expand(len(batches), -1))

    def rearranged(self, dummy: Candidate, row: int, order: Permutation) -> Candidate:
        """Return a copy with one sequence's tokens in another order.

        Dropout masks move with their tokens.

        Args:
            dummy: N candidates, or what has their shape.
            row: the sequence.
            order: the position from which the token at each position comes.
        """
        embeddings = dummy.embeddings.clone()
        embeddings[:, row, : len(order)] = dummy.embeddings[:, row, list(order)]
        layout = self.gradients.masks
        masks = dummy.masks if layout is None else layout.rearranged(dummy.masks, row, order)
        return dummy._replace(embeddings=embeddings, masks=masks)

    def hold(self, tokens: Mapping[int, tuple[int, ...]]) -> None:
        """Treat some sequences as known from now on.

        Their tokens then count like public ones, whatever a candidate's embeddings are.

        Args:
            tokens: number of a sequence -> its token ids; all others are unknown again.
        """
        self._held = dict(tokens)
        self._fixed, self._public = self._public_embeddings()

    def free_places(self, row: int) -> list[int]:
        """Return the places of a sequence whose tokens are not known."""
        known = self._known(row)
        return [place for place in range(self.lengths[row]) if place not in known]

    def _known(self, row: int) -> Mapping[int, int]:
        """Return place -> token where a sequence's tokens are public, or held."""
        held = self._held.get(row)
        return public_tokens(self._vocabulary, self.lengths[row]) if held is None else dict(enumerate(held))

    def losses(self, dummy: Candidate) -> Tensor:
        """Return (N,) float64 objective plus regulariser of each candidate."""
        return torch.cat(list(self._in_chunks(dummy, self._losses)))

    def losses_and_derivatives(self, dummy: Candidate) -> tuple[Tensor, Candidate]:
        """Return (N,) losses and the derivatives of their sum by the candidates.

        The derivatives are zero for labels that are granted.
        """
        losses, slopes = zip(*self._in_chunks(dummy, self._losses_and_derivatives), strict=True)
        return torch.cat(losses), joined(slopes)

    def explain(self, tokens: Sequence[Sequence[int]], label_logits: Tensor) -> bool:
        """Return whether a guess has the observed gradient.

        The guess is tokens with their likeliest labels. The answer is as good as the objective is.

        Args:
            tokens: (B,) sequences of token ids.
            label_logits: (B, C).
        """
        return self.explained_by(self.token_losses([tokens], label_logits)[0])

    def explained_by(self, loss: float) -> bool:
        """Return whether a distance is as small as that of the true tokens.

        The answer is as good as the objective is.
        """
        return loss <= EXPLAINED * self._comparison.of_nothing

    def token_losses(
        self, batches: Sequence[Sequence[Sequence[int]]], label_logits: Tensor, masks: Tensor | None = None
    ) -> list[float]:
        """Return the distances of N batches of tokens, without the regulariser.

        Each batch has its likeliest labels.

        Args:
            batches: N batches of B sequences of token ids.
            label_logits: (B, C).
            masks: (P,) of dropout, the same for all; None for none.
        """
        certain = self.certain(label_logits).expand(len(batches), -1, -1)
        dummy = self.placed(self.of_tokens(batches, certain, masks))
        found = self._in_chunks(dummy, lambda part: self._comparison.losses(self._first_order(part)))
        return [loss for part in found for loss in part.tolist()]

    def losses_by_dropout(
        self, tokens: Sequence[Sequence[int]], label_logits: Tensor, masks: Tensor, draws: int, rng: torch.Generator
    ) -> list[float]:
        """Return the distances between a guess and itself behind drawn masks.

        The masks that are learned are known to both. The result estimates the distance at which the true batch is to
        be expected from the observed update, once its masks are learned. It is empty without dropout, and where noise
        or pruning are accounted for as well, because nothing is known then.

        Args:
            tokens: (B,) sequences of token ids.
            label_logits: (B, C).
            masks: (P,) of which the learned ones are kept.
            draws: number of draws of the others.
            rng: draws.
        """
        damaged = self.objective.masked or self.objective.filled or self.objective.sigma > 0
        if self.gradients.masks is None or damaged:
            return []
        certain = self.certain(label_logits)[None]
        own = self._first_order(self.placed(self.of_tokens([tokens], certain, masks)))
        found = []
        for drawn in self.drawn_masks(draws, rng):
            behind = torch.where(self._learned > 0, masks, drawn)
            pairs = self._first_order(self.placed(self.of_tokens([tokens], certain, behind)))
            made = self.gradients.formed(pairs, 0)
            layers = (self.gradients.matrices, self.gradients.vectors)
            found += Comparison(self.objective, *layers, made, sum(self.lengths)).losses(own).tolist()
        return found

    def certain(self, label_logits: Tensor) -> Tensor:
        """Return (B, C) logits with all probability on the likeliest labels."""
        return functional.one_hot(label_logits.argmax(dim=1), self.classes).to(label_logits) * CERTAIN

    def _first_order(self, placed: Candidate) -> Pairs:
        return self.gradients.pairs(placed, differentiable=False)

    def tokens(self, embeddings: Tensor) -> tuple[list[tuple[int, ...]], list[float]]:
        """Return the nearest token at each position, and mean cosines.

        The nearest is by cosine (LAMP, Algorithm 1). There is one mean cosine for each sequence.

        Special tokens stand where the tokenizer puts them and nowhere else, except the unknown-word token.

        Args:
            embeddings: (B, T, D) of one candidate.
        """
        values, ids = (each.tolist() for each in self.nearest(embeddings))
        found, likeness = [], []
        for row, length in enumerate(self.lengths):
            known = self._known(row)
            found.append(tuple(known.get(place, ids[row][place]) for place in range(length)))
            free = [values[row][place] for place in range(length) if place not in known]
            likeness.append(min(1.0, max(0.0, sum(free) / len(free))) if free else 1.0)
        return found, likeness

    def nearest(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, T) cosines with the nearest words, and (B, T) their ids."""
        found = (functional.normalize(embeddings.flatten(0, 1), dim=1) @ self.directions.T).max(dim=1)
        values, ids = (each.view(embeddings.shape[:2]) for each in found)
        return values, ids

    def labels(self, label_logits: Tensor) -> list[int]:
        """Return (B,) the granted labels, or the likeliest of (B, C) logits."""
        known = self.gradients.labels
        return [int(label) for label in (label_logits.argmax(dim=1) if known is None else known)]

    def _losses(self, dummy: Candidate) -> Tensor:
        placed = self.placed(dummy.detached())
        losses = self._comparison.losses(self._first_order(placed))
        if self.length_weight:
            losses = losses + self._length_loss(placed.embeddings).double()
        return losses + self.mask_losses(dummy.masks) if self.mask_weight else losses

    def _losses_and_derivatives(self, dummy: Candidate) -> tuple[Tensor, Candidate]:
        """Return the losses of some candidates and the derivatives of their sum.

        The objective's derivatives by the pairs have a closed form; one backward pass continues from them.
        """
        live = Candidate(*(part.detach().requires_grad_() for part in dummy))
        with torch.enable_grad():
            placed = self.placed(live)
            pairs = self.gradients.pairs(placed, differentiable=True)
            losses, slopes = self._comparison.compare(pairs)
            made = [*pairs.inputs, *pairs.output_gradients, *pairs.vectors]
            by_made = [*slopes.inputs, *slopes.output_gradients, *slopes.vectors]
            chosen = [n for n, tensor in enumerate(made) if tensor.requires_grad]
            outputs = [made[n] for n in chosen]
            weights: list[Tensor | None] = [by_made[n] for n in chosen]
            if self.length_weight:
                length_loss = self._length_loss(placed.embeddings)
                losses = losses + length_loss.detach().double()
                outputs.append(length_loss.sum())
                weights.append(None)
            unknown = (True, not self.knows_labels, live.masks.shape[1] > 0)
            wanted = [part for part, open_ in zip(live, unknown, strict=True) if open_]
            if self.mask_weight and unknown[2]:
                mask_losses = self.mask_losses(live.masks)
                losses = losses + mask_losses.detach()
                outputs.append(mask_losses.sum())
                weights.append(None)
            found = iter(torch.autograd.grad(outputs, wanted, grad_outputs=weights))
        derivatives = Candidate(
            *(next(found) if open_ else torch.zeros_like(part) for part, open_ in zip(dummy, unknown, strict=True))
        )
        return losses, derivatives._replace(masks=derivatives.masks * self._learned)

    def mask_losses(self, masks: Tensor) -> Tensor:
        """Return (N,) float64 the penalty on learned masks.

        It is mask_weight times the mean of (m - (1 - p))^2 / (p (1 - p)) over learned entries m. The mean is 1 for
        masks as dropout draws them.

        Args:
            masks: (N, P).
        """
        layout = self.gradients.masks
        if layout is None or not masks.shape[1]:
            return masks.new_zeros(len(masks), dtype=torch.float64)
        rates = layout.rates.to(masks)
        off = (masks - (1 - rates)).square() / (rates * (1 - rates)) * self._learned
        return self.mask_weight * (off.sum(dim=1) / self._learned.sum()).double()

    def _learned_masks(self, places: MaskPlaces) -> Tensor:
        """Return (P,) one for mask entries that are learned, zero for the others."""
        layout = self.gradients.masks
        if layout is None:
            return torch.zeros(0, device=self.table.device)
        chosen = layout.of_places([range(len(self._vocabulary.starts_with)) for _ in self.lengths])
        everything = places == "all" or not bool(chosen.any())  # a decoder has no token before a text
        return (torch.ones(layout.entries) if everything else chosen.float()).to(self.table.device)

    def _length_loss(self, placed: Tensor) -> Tensor:
        """Return (N,) the regulariser of embedding lengths (LAMP, L_reg).

        alpha_reg (mean token norm - mean norm of the word embedding's rows)^2.
        """
        norms = placed.square().sum(dim=3).clamp_min(1e-12).sqrt() * self._inside[..., 0]  # (N, B, T)
        mean = norms.sum(dim=(1, 2)) / sum(self.lengths)
        return self.length_weight * (mean - self.mean_length).square()

    def placed(self, dummy: Candidate) -> Candidate:
        """Return the candidates with the known tokens at their places."""
        return dummy._replace(embeddings=torch.where(self._fixed, self._public, dummy.embeddings))

    def _public_embeddings(self) -> tuple[Tensor, Tensor]:
        """Return the positions of known tokens, and their embeddings.

        (B, T, 1) booleans and (B, T, D).
        """
        shape = (len(self.lengths), max(self.lengths))
        fixed = torch.zeros(*shape, 1, dtype=torch.bool, device=self.table.device)
        embeddings = torch.zeros(*shape, self.table.shape[1], device=self.table.device)
        for row in range(len(self.lengths)):
            for place, token in self._known(row).items():
                fixed[row, place] = True
                embeddings[row, place] = self.table[token]
        return fixed, embeddings

    def _in_chunks(self, dummy: Candidate, run: Callable[[Candidate], Found]) -> Iterator[Found]:
        """Run as many candidates at once as there is memory for."""
        start = 0
        while start < len(dummy.embeddings):
            part = dummy.take(slice(start, start + self._chunk))
            try:
                found = run(part)
            except RuntimeError as error:
                self._halve(error)
                continue
            yield found
            start += len(part.embeddings)

    def _halve(self, error: RuntimeError) -> None:
        """Run half as many candidates at once from now on, if memory ran out.

        Raises:
            RuntimeError: `error`, if it is about anything else.
        """
        out_of_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not out_of_memory or self._chunk == 1:
            raise error
        self._chunk //= 2
        self.halvings += 1
