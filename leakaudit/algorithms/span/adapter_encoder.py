"""The sentences of an encoder's batch from its adapters, if the words are known.

The weight of a word in the rows of the first layer's adapters is the gradient at A's outputs at its place (`adapter_places`), and this
gradient depends on the whole sentence. So sentences are found as `rare_rows` finds them from the rows of the word embedding: words with a known
place are grouped, the words between them are filled in and exchanged, and a sentence whose weights agree to rounding is right, whatever else
is in the batch. It is taken out of all weights, which settles more places, and the search goes on. The last sentence is read off as
that of a batch of one. (Own derivation.)

Letters: N drafts, T places, F rows of all adapters, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from leakaudit.algorithms.rare_rows.agreement import Agreement
from leakaudit.algorithms.rare_rows.exchange import Exchanged, exchange
from leakaudit.algorithms.rare_rows.filling import Candidates, Filling
from leakaudit.algorithms.rare_rows.grouping import SimulatedGroups
from leakaudit.algorithms.rare_rows.rows import Rows
from leakaudit.algorithms.rare_rows.sentences import Draft, Laid, SentenceSimulator
from leakaudit.algorithms.span.adapter_divisions import divided
from leakaudit.algorithms.span.adapter_places import WordSums, once
from leakaudit.algorithms.span.matching_pursuit import word_weights
from leakaudit.algorithms.span.problem import SpanProblem
from leakaudit.models.structure import Adapter
from leakaudit.models.structure.trace import hooked

RIGHT = 1e-3
"""Largest relative error of a right sentence's weight at a word that occurs once. Our choice: float32 leaves 1e-5."""

AGREEING = 1 / 3
"""Least share of a sentence's words whose weights must agree. Our choice: the others also occur elsewhere in the batch."""

ENDS = 6
"""Lengths that are tried behind the last known word. Our choice: as `rare_rows` does, and one more."""

FIRST_STEPS, STEPS = 10, 30
"""Steps of the filling for all lengths, and for the best two. As in `rare_rows`."""

SHARE = 0.9
"""Share of the time for the search; the rest is for the proof. Our choice."""

Tokens = tuple[int, ...]


def adapters_read(problem: SpanProblem) -> list[Adapter]:
    """Return the adapters of the first layer whose A has an update."""
    update = problem.seen.update
    return [a for a in problem.anatomy.adapters if a.down.weight in update and bool(update[a.down.weight].any())]


def raw_rows(problem: SpanProblem) -> Tensor:
    """Return (F, D) float64: the updates of these adapters' A, unscaled."""
    return torch.cat([a.down.by_output(problem.seen.update[a.down.weight]).double() for a in adapters_read(problem)])


class AdapterSimulator(SentenceSimulator):
    """Gradients at the outputs of the first layer's A, for sentences simulated alone."""

    def __init__(self, problem: SpanProblem, scale: Tensor) -> None:
        """Keep the model and its adapters.

        Args:
            problem: of a text classifier.
            scale: (F,) size of each row.
        """
        super().__init__(problem.seen, problem.stage)
        self._maps = [problem.seen.model.get_submodule(a.down.module) for a in adapters_read(problem)]
        self._scale = scale.float()
        assert problem.stage.norm is not None
        self._eps = problem.stage.norm.eps

    def gradients(self, inputs: Tensor, laid: Laid, *, differentiable: bool = False) -> Tensor:
        """Return the weights of all tokens, up to a factor for each sentence.

        Args:
            inputs: (N, T, D) inputs of the normalisation.
            laid: the drafts.
            differentiable: keep the graph, so that the result can be differentiated again.

        Returns:
            (K, N, T, F), with K as in `SentenceSimulator`: the gradient at A's outputs, over the deviation of the normalisation's input.
        """
        made: list[Tensor] = []

        def keep(_module: nn.Module, _given: tuple[Tensor, ...], output: Tensor) -> None:
            made.append(output)

        with hooked(module.register_forward_hook(keep) for module in self._maps), torch.enable_grad():
            given = inputs if inputs.requires_grad else inputs.detach().requires_grad_()
            spread = (given.var(dim=2, unbiased=False, keepdim=True) + self._eps).sqrt()
            parts = self._losses(self._logits(given, laid))
            found = [
                torch.cat(torch.autograd.grad(part, made, create_graph=differentiable, retain_graph=True), dim=2)
                for part in parts
            ]
        return torch.stack(found) / self._scale / spread


class WordFilling(Filling):
    """The filling of `rare_rows`, in which the words at holes count, too.

    A word counts as its weight agrees, times the share that it has of the hole.
    """

    def _agreements(self, gradients: Tensor, shares: Tensor) -> Tensor:
        known = self.agreement.each(gradients, self.numbers)  # (K', N, T)
        holes = self.agreement.at_holes(gradients[:, self.rows, self.columns], self.candidates.words)
        every = torch.arange(len(known), device=known.device)[:, None]
        each = known.index_put((every, self.rows[None], self.columns[None]), (holes * shares).sum(dim=2))
        best = each.sum(dim=2).argmax(dim=0)
        return each[best, torch.arange(len(best), device=best.device)]


@dataclass(frozen=True)
class PlacedCandidates(Candidates):
    """Words that may stand at a hole; settled places hold their own words only."""

    settled: frozenset[int] = frozenset()

    def allowed(self, places: Tensor) -> Tensor:
        """Return (H, C) bool for places (H,)."""
        settled = [place in self.settled for place in places.tolist()]
        taken = torch.tensor(settled, dtype=torch.bool, device=places.device)  # no place makes no floats
        return (self.places == places[:, None]) | ((self.places < 0) & ~taken[:, None])


@dataclass
class AdapterEncoder:
    """The search for sentences."""

    problem: SpanProblem
    sums: WordSums
    found: list[Tokens] = field(default_factory=list)
    """Sentences whose weights agree to rounding."""
    drafts: list[Tokens] = field(default_factory=list)
    """The best guesses of the last pass that do not agree."""

    def __post_init__(self) -> None:
        """Prepare the simulation."""
        self.simulator = AdapterSimulator(self.problem, self.sums.scale)
        self._special = {*self.simulator.before, *self.simulator.after}

    @property
    def complete(self) -> bool:
        """Whether the sentences that were found explain all weights."""
        return not self.sums.tokens

    def run(self) -> None:
        """Find sentences until no more are found, or the budget is used up."""
        while self.sums.tokens and not self.problem.budget.exhausted():
            before = len(self.found)
            if not self._last():
                self._pass()
            if len(self.found) == before:
                return

    def _last(self) -> bool:
        """Find the sentence if there is only one left."""
        words, used = self.sums.as_words()
        order = words.order(used) if used else None
        return order is not None and self._take_out(tuple(order))

    def _pass(self) -> None:
        """Group the words with known places and complete the best groups once."""
        budget = self.problem.budget
        settled = self.sums.settled()
        sums = {word: row for word, row in self.sums.table.items() if word not in self._special}
        places = {word: place for word, place in once(settled).items() if word in sums}
        if not places:
            return
        agreement = Agreement(self.simulator, Rows(sums, places, {}), sorted(sums))
        longest = len(self.sums.places) - len(self.simulator.after)
        grouping = SimulatedGroups(agreement, longest)
        every = Candidates.of(agreement)
        candidates = PlacedCandidates(every.words, every.places, frozenset(settled))
        self.drafts = []
        for group in divided(grouping, places, budget):
            starts = [d for d in grouping.draft(group).lengths(ENDS, longest) if all(map(candidates.at, d.holes))]
            if budget.exhausted():
                return
            if not starts:
                continue
            best = self._completed(starts, agreement, candidates)
            sentence = (*self.simulator.before, *best.draft.in_order(), *self.simulator.after)
            if self._take_out(sentence):
                return
            self.drafts.append(sentence)

    def _completed(self, starts: Sequence[Draft], agreement: Agreement, candidates: Candidates) -> Exchanged:
        """Return the best sentence of a draft, which is given with several lengths."""
        begun = WordFilling(starts, agreement, candidates).run(FIRST_STEPS)
        ranked = sorted(zip(starts, begun, strict=True), key=lambda pair: pair[1].agreement, reverse=True)
        better = [draft.without(one.weak) for draft, one in ranked[:2]]
        filled = WordFilling(better, agreement, candidates).run(STEPS)
        tried = [Exchanged(one.draft, one.choices) for one in filled]
        for one in tried:
            exchange([one], agreement, candidates, self.problem.budget)
            if one.exact:
                return one
        return max(tried, key=lambda one: one.agreement)

    # ------------------------------------------------------------------ right sentences
    def _take_out(self, sentence: Tokens) -> bool:
        """Take a sentence out of the weights if it agrees, and return whether it does."""
        first, last = len(self.simulator.before), len(sentence) - len(self.simulator.after)
        if sentence[:first] != self.simulator.before or sentence[last:] != self.simulator.after or last <= first:
            return False
        laid = self.simulator.lay([Draft(dict(enumerate(sentence[first:last], first)), first, last)])
        simulated = self.simulator.gradients(self.simulator.inputs(laid), laid).detach().double()[:, 0]
        for weights in simulated:
            factor = self._factor(sentence, weights)
            if factor is not None:
                written = [(token, place, factor * weights[place]) for place, token in enumerate(sentence)]
                self.sums = self.sums.without(written)
                self.found.append(sentence)
                return True
        return False

    def _factor(self, sentence: Tokens, weights: Tensor) -> float | None:
        """Return the factor of a sentence's weights (T, F), or None if it is wrong."""
        table, first = self.sums.table, len(self.simulator.before)
        words = range(first, len(sentence) - len(self.simulator.after))
        rows = torch.stack([table.get(sentence[place], torch.zeros_like(weights[0])) for place in words])
        own = weights[first : first + len(rows)]
        factors = (own * rows).sum(dim=1) / own.square().sum(dim=1).clamp_min(1e-300)
        off = (rows - factors[:, None] * own).norm(dim=1)
        agree = off <= RIGHT * rows.norm(dim=1) + self.sums.zero
        agree &= rows.norm(dim=1) > self.sums.zero / RIGHT
        return float(factors[agree].median()) if float(agree.double().mean()) >= AGREEING else None


def can_search(problem: SpanProblem) -> bool:
    """Say whether the sentences of a batch can be simulated one by one."""
    facts, stage = problem.seen.facts, problem.stage
    masked = facts.training_mode and any(rate > 0 for rate in facts.dropout.values())
    normalised = stage.additive and stage.norm is not None and stage.norm.centred and stage.norm_module is not None
    whole = problem.seen.whole and facts.task == "classification" and not problem.anatomy.causal
    return whole and normalised and not masked and bool(adapters_read(problem))


def encoder_sentences(problem: SpanProblem, tokens: Tensor, positions: int) -> AdapterEncoder | None:
    """Return the search after its end, or None if it cannot be made.

    Args:
        problem: of a batch of several sentences.
        tokens: (M,) all words of the batch.
        positions: number of places whose weights are told apart, twice as many as a text has.
    """
    if not can_search(problem):
        return None
    sums = WordSums.of(word_weights(problem.stage, tokens, raw_rows(problem), positions))
    if sums is None:
        return None
    search = AdapterEncoder(replace(problem, budget=problem.budget.part(SHARE)), sums)
    search.run()
    return search
