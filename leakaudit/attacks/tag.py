"""`tag`: gradient matching on input embeddings with an L2 and an L1 term.

Letters: B sequences, T tokens, D hidden size, V vocabulary, C classes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from leakaudit.anatomy import find_anatomy
from leakaudit.attacks.clipping import scale_is_known
from leakaudit.attacks.embedding_rows import word_embedding
from leakaudit.attacks.output_layer import check_gradient, number_of_classes
from leakaudit.attacks.reconstruction import APPLIES, Applicability, GuessedSequence, Reconstruction, not_applicable
from leakaudit.attacks.span_basis import span_of, stacked_update
from leakaudit.budget import Budget
from leakaudit.errors import AnatomyError
from leakaudit.registry import attack
from leakaudit.snapshot import Observation

PROOF_TOLERANCE = 1e-3
"""Relative error of a typical weight matrix up to which a re-simulated guess reproduces the update. Our choice: the bound that
snapshots are verified with (`client.TOLERANCE`). Right guesses were measured at 1e-6, ones with a single wrong token at 1e-2
and more; over the whole update as one vector an untrained model's wrong token may hide below 1e-3."""

IMPROVEMENT = 1e-3
"""Relative fall of the loss that counts as progress. Our choice."""

LABEL_STEP = 0.1
"""Adam's step for unknown label logits. Our choice: a label can change sides within twenty steps."""


@attack("tag")
@dataclass(frozen=True)
class Tag:
    """Find embeddings x whose gradient is the observed one, then take the nearest tokens.

    Minimises sum_i ||G_i - g_i(x)||_2^2 + alpha ||G_i - g_i(x)||_1 over the shared parameters i by Adam. The paper prints the
    L2 norm without the square; the square is DLG's (Zhu et al. 2019) and did better in our tuning on training sentences.
    The word embedding's own update is left out: it says nothing about a dummy that is given as embeddings.

    What the update has to be shaped like is guessed, unless it is granted:

    - B: number of granted lengths or labels, else `batch_size_bound` (protocols fill their batches), else 1.
    - Lengths: where the position table is shared, its non-zero rows are the positions of the longest sequence, and all
      sequences are taken to be that long. Otherwise the rank of the first block's attention updates is the number of
      distinct tokens, and all sequences are taken to be equally long.
    - Labels: soft labels, optimised together with the embeddings (DLG).
    - The tokens that the tokenizer puts around every text are public and stay fixed.

    If the protocol prunes, only non-zero entries are matched (GRAB, Sec. 5.5.2). If it clips, both gradients are compared at
    the same length. Dropout is not modelled: against a step in training mode the gradient is only similar.
    """

    steps: int = 2500
    """Adam steps (LAMP, Sec. 5: TAG runs for 2500)."""
    learning_rate: float = 0.5
    """Adam's step, relative to the root mean square of the word embedding's entries, without decay. LAMP, App. D, gives 0.1 in
    absolute terms for TAG and 0.01 for its own L2+L1 variant, which for BERT are about 2 and 0.2 of that unit; 0.5 did best
    in our tuning on training sentences."""
    alpha: float = 0.01
    """Weight of the L1 term (LAMP, App. D)."""
    n_init: int = 10
    """Normal samples that are scored before the start. LAMP, Sec. 5, takes 500 and finds the number to matter little (App. D);
    our choice of 10 costs as much as five steps."""
    restarts: int = 2
    """Best samples that get `trial_steps` steps each; the one with the lowest loss then goes on. Our choice."""
    trial_steps: int = 50
    """Steps in which restarts compete. Our choice: in that time the loss falls to about half."""
    patience: int = 200
    """Steps without a lower loss after which the attack stops as converged. Our choice."""

    goal: ClassVar[Literal["text", "words", "labels"]] = "text"
    source: ClassVar[str] = "TAG (Deng et al. 2021) as in LAMP (Balunovic et al. 2022), Sec. 4.2 and 5, App. D"
    threat_model: ClassVar[str] = (
        "Sees one client's update and knows the weights; the client takes one gradient step without dropout on few sequences."
    )

    def __post_init__(self) -> None:
        """Refuse knobs that leave nothing to do."""
        for knob in ("steps", "n_init", "restarts", "trial_steps", "patience"):
            if getattr(self, knob) < 1:
                raise ValueError(f"{knob} must be at least 1, got {getattr(self, knob)}")
        if self.learning_rate <= 0 or self.alpha < 0:
            raise ValueError(
                f"learning_rate must be above 0 and alpha not below, got {self.learning_rate}, {self.alpha}"
            )

    def applies(self, seen: Observation) -> Applicability:
        """Say whether there is a gradient to match and a shape to match it with."""
        if "inputs_embeds" not in inspect.signature(seen.model.forward).parameters:
            return not_applicable(f"{type(seen.model).__name__} takes no `inputs_embeds`, so no dummy can be optimised")
        if not set(seen.update) - {word_embedding(seen)}:
            return not_applicable("no parameter beyond the word embedding has a shared update")
        try:
            number_of_classes(seen)
            check_gradient(seen.facts)
            guess_shape(seen)
        except AnatomyError as error:
            return not_applicable(str(error))
        return APPLIES

    def __call__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
        """Match gradients until nothing improves, the steps are used up or the budget is.

        Raises:
            AnatomyError: the batch's shape cannot be guessed.
        """
        shape = guess_shape(seen)
        matcher = GradientMatcher(seen, shape.lengths, self.alpha)
        runs = [_Run(dummy, self.learning_rate * matcher.unit) for dummy in self._starts(matcher, rng, budget)]
        if len(runs) > 1:
            for run in runs:
                self._advance(run, matcher, min(self.trial_steps, self.steps), budget)
        run = min(runs, key=lambda each: each.best_loss)
        stop = self._advance(run, matcher, self.steps, budget)
        return _reconstruct(matcher, run, shape, stop)

    def _starts(self, matcher: GradientMatcher, rng: torch.Generator, budget: Budget) -> list[Dummy]:
        """Return the `restarts` best of `n_init` random dummies, best first; at least one, however small the budget."""
        scored: list[tuple[float, Dummy]] = []
        for _ in range(self.n_init):
            dummy = matcher.random_dummy(rng)
            if self.n_init == 1 or budget.exhausted():
                return [found for _, found in scored[: self.restarts]] or [dummy]
            scored.append((matcher.loss(dummy), dummy))
            scored.sort(key=lambda pair: pair[0])
        return [dummy for _, dummy in scored[: self.restarts]]

    def _advance(
        self, run: _Run, matcher: GradientMatcher, steps: int, budget: Budget
    ) -> Literal["done", "converged", "budget"]:
        """Continue a run until it has taken `steps` steps in all, and say why it stopped."""
        while run.taken < steps:
            if budget.exhausted():
                return "budget"
            if run.taken - run.last_progress > self.patience:
                return "converged"
            run.step(matcher)
        return "done"


class BatchShape(NamedTuple):
    """What a batch is taken to look like."""

    lengths: tuple[int, ...]
    """(B,) tokens of each sequence, special ones included."""
    evidence: Literal["granted", "positions", "rank"]


def guess_shape(seen: Observation) -> BatchShape:
    """Say how many sequences there are and how long they are, from what an adversary has.

    Raises:
        AnatomyError: nothing says so.
    """
    facts = seen.facts
    if facts.granted.lengths is not None:
        return BatchShape(facts.granted.lengths, "granted")
    labels = facts.granted.labels
    sequences = len(labels) if labels is not None else facts.batch_size_bound or 1
    if facts.declared("gaussian-noise"):
        raise AnatomyError("under noise neither position rows nor ranks tell how long the texts are; grant `lengths`")
    positions = _touched_positions(seen)
    if positions:
        return BatchShape((positions,) * sequences, "positions")
    stacked = stacked_update(seen.update, find_anatomy(seen.model))
    basis = span_of(stacked) if bool(stacked.any()) else None
    if basis is None or basis.noisy:
        raise AnatomyError(
            "the lengths are unknown: no position table is shared, and the first block's attention update is missing or has "
            "no clear rank; grant `lengths`"
        )
    around = len(facts.vocabulary.starts_with)  # the same at the same place in every sequence, so they count once
    length = math.ceil((basis.rank + (sequences - 1) * around) / sequences)
    return BatchShape((min(length, facts.vocabulary.max_length),) * sequences, "rank")


def _touched_positions(seen: Observation) -> int:
    """Return the number of positions that got any update, 0 where no position table is shared.

    A position table is an embedding with at least one row for each position and no row for each token.
    """
    words = seen.model.get_input_embeddings()  # type: ignore[operator]
    names = {id(parameter): name for name, parameter in seen.model.named_parameters()}
    for module in seen.model.modules():
        if not isinstance(module, nn.Embedding) or module is words:
            continue
        name = names.get(id(module.weight), "")
        if name in seen.update and module.num_embeddings >= seen.facts.vocabulary.max_length:
            return int((seen.update[name] != 0).any(dim=1).sum())
    return 0


class Dummy(NamedTuple):
    """What is optimised."""

    embeddings: Tensor
    """(B, T, D), T the longest length."""
    label_logits: Tensor
    """(B, C); one-hot at infinity where labels are granted."""


class GradientMatcher:
    """Compares the gradient of a dummy batch with the observed update."""

    def __init__(self, seen: Observation, lengths: Sequence[int], alpha: float) -> None:
        """Prepare buffers; nothing of `seen` is changed, now or later.

        Args:
            seen: what to match.
            lengths: (B,) tokens of each sequence.
            alpha: weight of the L1 term.
        """
        self.lengths = tuple(lengths)
        self.alpha = alpha
        self._model = seen.model
        self._vocabulary = seen.facts.vocabulary
        self._table = seen.model.get_input_embeddings().weight.detach()  # type: ignore[operator]  # (V, D)
        self.unit = float(self._table.square().mean().sqrt())
        """Root mean square of the word embedding's entries."""
        self._classes = int(seen.facts.num_labels or 0)
        labels = seen.facts.granted.labels
        self._labels = None if labels is None else torch.tensor(labels, device=self._table.device)
        self._fixed, self._around = self._special_embeddings()
        # Detached tensors share memory with the live parameters but keep their own `requires_grad`.
        self._parameters = {
            name: parameter.detach().requires_grad_(name in seen.update)
            for name, parameter in seen.model.named_parameters()
        }
        self._names = self._reached(set(seen.update))
        self._target = [seen.update[name] for name in self._names]
        self._masks = [target != 0 for target in self._target] if seen.facts.declared("prune") else []
        self._rescale = not scale_is_known(seen)
        self._target_norm = _norm(self._target)
        self._residual = [torch.empty_like(target) for target in self._target]
        self._sign = [torch.empty_like(target) for target in self._target]

    @property
    def knows_labels(self) -> bool:
        """Whether the labels are granted."""
        return self._labels is not None

    def random_dummy(self, rng: torch.Generator) -> Dummy:
        """Draw a normal dummy with entries as large as the word embedding's.

        LAMP, Sec. 5, draws from a standard normal; at a deviation of 1 a dummy would drown the positions that are added to
        it, which are as small as the words.
        """
        rows, longest = self._fixed.shape[:2]
        embeddings = self.unit * torch.randn(rows, longest, self._table.shape[1], generator=rng)
        logits = torch.randn(rows, self._classes, generator=rng)
        return Dummy(embeddings.to(self._table.device), logits.to(self._table.device))

    def loss(self, dummy: Dummy) -> float:
        """Return the distance between the gradients."""
        return self._compare(self._gradients(dummy, for_derivative=False))

    def loss_and_derivative(self, dummy: Dummy) -> tuple[float, list[Tensor]]:
        """Return the distance and its derivative by the dummy's embeddings (B, T, D) and, if unknown, label logits (B, C).

        The derivative of the distance by the gradients has a closed form, and is handed to one backward pass through them;
        nothing is differentiated by the model's parameters a second time.
        """
        gradients = self._gradients(dummy, for_derivative=True)
        loss = self._compare([gradient.detach() for gradient in gradients])
        unknown = [dummy.embeddings] if self.knows_labels else list(dummy)
        return loss, list(torch.autograd.grad(gradients, unknown, grad_outputs=self._residual))

    def tokens(self, dummy: Dummy) -> tuple[list[tuple[int, ...]], list[float]]:
        """Return the nearest token at each place by cosine (LAMP, Alg. 1), and their mean cosine for each sequence.

        Special tokens are fixed at both ends and occur nowhere else; the unknown-word token may.
        """
        table = functional.normalize(self._table, dim=1)  # (V, D)
        elsewhere = sorted(self._vocabulary.special_ids - {self._vocabulary.special.get("unk", -1)})
        found, likeness = [], []
        for row, length in enumerate(self.lengths):
            cosine = functional.normalize(dummy.embeddings[row, :length], dim=1) @ table.T  # (T, V)
            cosine[:, elsewhere] = -2.0
            best = cosine.max(dim=1)
            around = _around(self._vocabulary.starts_with, self._vocabulary.ends_with, length)
            found.append(tuple(around.get(place, int(token)) for place, token in enumerate(best.indices)))
            free = [float(value) for place, value in enumerate(best.values) if place not in around]
            likeness.append(min(1.0, max(0.0, sum(free) / len(free)))) if free else likeness.append(1.0)
        return found, likeness

    def labels(self, dummy: Dummy) -> list[int]:
        """Return (B,) the granted labels or the likeliest ones."""
        return [int(c) for c in (dummy.label_logits.argmax(dim=1) if self._labels is None else self._labels)]

    def reproduces(self, sequences: Sequence[Sequence[int]], labels: Sequence[int]) -> bool:
        """Re-simulate a guess and say whether its gradient is the observed one, to rounding."""
        longest = max(self.lengths)
        ids = torch.zeros(len(sequences), longest, dtype=torch.long, device=self._table.device)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence, device=ids.device)
        certain = functional.one_hot(torch.tensor(labels, device=ids.device), self._classes).float().log()  # 0 or -inf
        self._compare(self._gradients(Dummy(self._table[ids], certain), for_derivative=False), derivative=False)
        errors = [
            float(residual.norm() / target.norm().clamp_min(1e-30))
            for residual, target in zip(self._residual, self._target, strict=True)
            if target.dim() == 2
        ]
        return bool(errors) and median(errors) <= PROOF_TOLERANCE

    def _special_embeddings(self) -> tuple[Tensor, Tensor]:
        """Return (B, T, 1) booleans for the places of special tokens, and (B, T, D) their embeddings."""
        shape = (len(self.lengths), max(self.lengths))
        fixed = torch.zeros(*shape, 1, dtype=torch.bool, device=self._table.device)
        embeddings = torch.zeros(*shape, self._table.shape[1], device=self._table.device)
        for row, length in enumerate(self.lengths):
            for place, token in _around(self._vocabulary.starts_with, self._vocabulary.ends_with, length).items():
                fixed[row, place] = True
                embeddings[row, place] = self._table[token]
        return fixed, embeddings

    def _reached(self, shared: set[str]) -> list[str]:
        """Return the shared parameters that a dummy given as embeddings has a gradient for: not the word embedding."""
        names = [name for name in self._parameters if name in shared]
        dummy = self.random_dummy(torch.Generator().manual_seed(0))
        gradients = torch.autograd.grad(
            self._client_loss(dummy), [self._parameters[name] for name in names], allow_unused=True
        )
        return [name for name, gradient in zip(names, gradients, strict=True) if gradient is not None]

    def _client_loss(self, dummy: Dummy) -> Tensor:
        """Return the mean cross-entropy of the dummy batch, a scalar.

        Sequences of equal length run together and without padding, because some classifiers find their last token by
        looking for padding ids, which a dummy given as embeddings does not have.
        """
        embeddings = torch.where(self._fixed, self._around, dummy.embeddings)  # (B, T, D)
        losses = []
        for rows, length in _equal_lengths(self.lengths):
            some = embeddings[rows, :length]
            inputs = {"inputs_embeds": some, "attention_mask": torch.ones(some.shape[:2], device=some.device)}
            logits = torch.func.functional_call(self._model, self._parameters, kwargs=inputs).logits  # (rows, C)
            if self._labels is not None:
                losses.append(functional.cross_entropy(logits, self._labels[rows], reduction="sum"))
            else:
                target = dummy.label_logits[rows].softmax(dim=1)
                losses.append(functional.cross_entropy(logits, target, reduction="sum"))
        return torch.stack(losses).sum() / len(self.lengths)

    def _gradients(self, dummy: Dummy, *, for_derivative: bool) -> Sequence[Tensor]:
        with torch.enable_grad():
            parameters = [self._parameters[name] for name in self._names]
            return torch.autograd.grad(self._client_loss(dummy), parameters, create_graph=for_derivative)

    @torch.no_grad()
    def _compare(self, gradients: Sequence[Tensor], *, derivative: bool = True) -> float:
        """Return the distance and leave its derivative by the gradients in `self._residual`, or else the differences.

        With r = g - G and the distance sum_i |r_i|^2 + alpha |r_i|_1 the derivative is 2 r + alpha sign(r). Where only
        the direction of the update is known, r = s g - G with s = |G| / |g|, and the chain rule takes from s times that
        derivative its part along g.
        """
        if self._masks:
            gradients = [gradient * mask for gradient, mask in zip(gradients, self._masks, strict=True)]
        norm = _norm(gradients)
        scale = self._target_norm / norm if self._rescale and norm > 0 else 1.0
        loss = along = 0.0
        for gradient, target, residual, sign in zip(gradients, self._target, self._residual, self._sign, strict=True):
            torch.sub(gradient * scale if scale != 1.0 else gradient, target, out=residual)
            loss += float(residual.norm()) ** 2 + self.alpha * float(torch.linalg.vector_norm(residual, 1))
            if derivative:
                torch.sign(residual, out=sign)
                residual.mul_(2.0).add_(sign, alpha=self.alpha)
                along += float((residual * gradient).sum()) if self._rescale else 0.0
        if derivative and self._rescale and norm > 0:
            for gradient, residual in zip(gradients, self._residual, strict=True):
                residual.add_(gradient, alpha=-along / norm**2).mul_(scale)
        return loss


class _Run:
    """One restart: a dummy, its optimizer and the best it has seen."""

    def __init__(self, start: Dummy, learning_rate: float) -> None:
        """Start from `start`, with Adam's step `learning_rate` for its embeddings."""
        self._now = Dummy(*(part.clone().requires_grad_() for part in start))
        self._optimizer = torch.optim.Adam(
            [
                {"params": [self._now.embeddings], "lr": learning_rate},
                {"params": [self._now.label_logits], "lr": LABEL_STEP},
            ]
        )
        self.best = start
        self.best_loss = math.inf
        self.taken = 0
        self.last_progress = 0
        self._mark = math.inf

    def step(self, matcher: GradientMatcher) -> None:
        """Take one step, and keep the dummy from before it if that was the best so far."""
        loss, derivatives = matcher.loss_and_derivative(self._now)
        if loss < self.best_loss:
            self.best = Dummy(*(part.detach().clone() for part in self._now))
            self.best_loss = loss
        if loss < self._mark * (1 - IMPROVEMENT):
            self._mark, self.last_progress = loss, self.taken
        for part, derivative in zip(self._now, derivatives, strict=False):  # granted labels have no derivative
            part.grad = derivative
        self._optimizer.step()
        self.taken += 1


def _reconstruct(
    matcher: GradientMatcher, run: _Run, shape: BatchShape, stop: Literal["done", "converged", "budget"]
) -> Reconstruction:
    """Turn the best dummy of a run into tokens and class counts."""
    sequences, likeness = matcher.tokens(run.best)
    labels = matcher.labels(run.best)
    finished = math.isfinite(run.best_loss)
    proved = finished and matcher.reproduces(sequences, labels)
    facts: dict[str, float] = {
        "steps": float(run.taken),
        "sequences": float(len(sequences)),
        "longest": float(max(shape.lengths)),
        "lengths_granted": float(shape.evidence == "granted"),
    }
    if finished:
        facts["loss"] = run.best_loss
    guesses = [
        GuessedSequence(token_ids=tokens, confidence=1.0 if proved else confidence, proved=proved)
        for tokens, confidence in zip(sequences, likeness, strict=True)
    ]
    classes = run.best.label_logits.shape[1]
    return Reconstruction(
        sequences=tuple(sorted(guesses, key=lambda guess: -guess.confidence)),
        label_counts=None if matcher.knows_labels else tuple(labels.count(c) for c in range(classes)),
        stop=stop,
        facts=facts,
    )


def _around(starts_with: Sequence[int], ends_with: Sequence[int], length: int) -> Mapping[int, int]:
    """Return place -> token id for the tokens that the tokenizer puts around a text of `length` tokens in all."""
    start = {place: token for place, token in enumerate(starts_with[:length])}
    room = length - len(start)
    end = ends_with[max(0, len(ends_with) - room) :] if room else ()
    return start | {length - len(end) + place: token for place, token in enumerate(end)}


def _equal_lengths(lengths: Sequence[int]) -> Iterator[tuple[list[int], int]]:
    """Yield (rows, length) for every length that occurs."""
    for length in sorted(set(lengths)):
        yield [row for row, each in enumerate(lengths) if each == length], length


def _norm(tensors: Sequence[Tensor]) -> float:
    """Return the L2 norm of all tensors as one vector."""
    return math.sqrt(sum(float(tensor.norm()) ** 2 for tensor in tensors))
