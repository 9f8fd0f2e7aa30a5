"""Batches of an encoder, sentence by sentence, in any batch size.

Words that occur once show their place and their gradient (`rows`). They are grouped by sentence (`grouping`), the words between them are
found (`filling`, `exchange`), and a sentence whose rows agree to rounding is proved, whatever else is in the batch. Its gradients are then
taken out of all rows, which makes other words rare, and the search goes on. (Own derivation.)

Letters: N drafts, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from leakaudit.algorithms.embedding_rows import FALSE_ROWS, can_read_rows, rows_of_tokens, tokens_of, touched_rows
from leakaudit.algorithms.position_rows import longest_length
from leakaudit.algorithms.rare_rows.agreement import Agreement
from leakaudit.algorithms.rare_rows.dropped_inputs import kept_inputs
from leakaudit.algorithms.rare_rows.exchange import Exchanged, exchange
from leakaudit.algorithms.rare_rows.filling import Candidates, Filled, Filling
from leakaudit.algorithms.rare_rows.grouping import Group, Grouping
from leakaudit.algorithms.rare_rows.insertion import with_frequent_words
from leakaudit.algorithms.rare_rows.rows import ACCOUNTED, Rows
from leakaudit.algorithms.rare_rows.same_sentence import SameSentence, learn
from leakaudit.algorithms.rare_rows.sentences import Draft, SentenceSimulator
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import input_stage_of
from leakaudit.plugins.attack_protocol import (
    APPLIES,
    Applicability,
    GuessedSequence,
    Reconstruction,
    not_applicable,
)
from leakaudit.plugins.budget import Budget

T = TypeVar("T")

ENDS = 5
"""Lengths that are tried for a sentence: so many places after its last rare word.
Chosen on training sentences: nine of ten sentences end within 4 places after their last rare word."""

FIRST_STEPS, STEPS = 10, 30
"""Steps of the filling for all lengths, and for the best two. Chosen on training sentences; see docs/decisions/rare_rows.md."""

LEARNING = 0.2
"""Largest share of the budget in which sentences are invented. Our choice: the search needs more time than the learning."""

POOR = 1.0
"""Quality of a group that is worth completing only if no other group is left. Chosen on training sentences."""

AT_ONCE = 8
"""Sentences that are completed together. Our choice: the passes are then large enough for two processor cores."""


def can_read_sentences(seen: Observation) -> Applicability:
    """Say whether rare words show their places and sentences can be simulated."""
    rows = can_read_rows(seen)
    if not rows:
        return rows
    if seen.facts.task != "classification" or not seen.whole:
        return not_applicable(f"only whole classifiers can be simulated; the task is {seen.facts.task}")
    try:
        stage = input_stage_of(seen.model, seen.facts.vocabulary.max_length)
    except AnatomyError as problem:
        return not_applicable(str(problem))
    if not stage.additive or stage.norm is None or not stage.norm.centred:
        return not_applicable(
            "the model does not normalise the sum of word and position vectors by a LayerNorm, so rows do not show places"
        )
    return APPLIES


@dataclass
class EncoderSearch:
    """The sentences of a batch: proved ones, and drafts of others."""

    seen: Observation
    rng: torch.Generator
    budget: Budget
    proved: list[Draft] = field(default_factory=list)
    drafts: dict[Group, Exchanged] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the rows."""
        self.stage = input_stage_of(self.seen.model, self.seen.facts.vocabulary.max_length)
        self.longest = min(longest_length(self.seen) or self.stage.max_length, self.stage.max_length)
        touched, _ = touched_rows(self.seen, FALSE_ROWS)
        table = rows_of_tokens(self.seen)
        sums = {word: table[word].double() for word in tokens_of(touched, self.seen)}
        self.rows = Rows.of(sums, {}, self.stage, self.longest)
        self.simulator = SentenceSimulator(self.seen, self.stage, kept_inputs(self.seen, self.rows, self.stage))
        self.distinct = len(sums)
        self._known: dict[Group, float] = {}

    def run(self) -> None:
        """Find sentences until none is proved any more, or the budget is used up.

        With dropout no sentence can be proved, and drafts are all that is found.
        """
        drawn = self.seen.facts.training_mode and bool(self.seen.facts.dropout)
        share = self.budget.part(LEARNING)
        alike = learn(self.simulator, self.rows, self.longest, drawn, self.rng, share)
        if alike is not None and drawn:
            self._draft(alike)
        elif alike is not None:
            self._prove(alike)

    def _draft(self, alike: SameSentence) -> None:
        """Keep each group as a draft, with the frequent words that probably belong to it."""
        grouping = self._grouping(alike)
        groups = grouping.groups(self.budget.part(0.5))
        for group, draft in with_frequent_words(groups, grouping, self.budget).items():
            self.drafts[group] = Exchanged(draft, agreement=grouping.known[group])

    def _prove(self, alike: SameSentence) -> None:
        while self.rows.places and not self.budget.exhausted():
            before = len(self.proved)
            self._pass(alike)
            if len(self.proved) == before:
                return

    def _grouping(self, alike: SameSentence) -> Grouping:
        """Return the grouping of the words that are rare now."""
        agreement = Agreement(self.simulator, self.rows)
        return Grouping(agreement, self.longest - len(self.simulator.after), alike, known=self._known)

    def _pass(self, alike: SameSentence) -> None:
        """Group the rare words and complete every group once."""
        grouping = self._grouping(alike)
        groups = grouping.groups(self.budget)
        groups.sort(key=grouping.quality, reverse=True)
        self.drafts, before = _plain(grouping, groups), len(self.proved)
        while groups and not self.budget.exhausted():
            turn, groups = groups[:AT_ONCE], groups[AT_ONCE:]
            if len(self.proved) > before and grouping.quality(turn[-1]) < POOR:
                return  # the proved sentences make other words rare, and these groups better
            self._complete([group for group in turn if group <= set(self.rows.places)], grouping)

    def _complete(self, groups: Sequence[Group], grouping: Grouping) -> None:
        """Find the sentences of some groups, and take the proved ones out of the rows."""
        if not groups:
            return
        agreement = Agreement(self.simulator, self.rows)
        candidates = Candidates.of(agreement)
        starts = [grouping.draft(group).lengths(ENDS, grouping.end) for group in groups]
        likely = _best_of(
            starts, Filling([d for many in starts for d in many], agreement, candidates).run(FIRST_STEPS), 2
        )
        filled = Filling([d for many in likely for d in many], agreement, candidates).run(STEPS)
        begun = [Exchanged(one.draft, one.choices) for one in filled]
        pairs = _split(begun, [len(many) for many in likely])
        exchange([some[0] for some in pairs], agreement, candidates, self.budget)
        exchange([one for some in pairs if not some[0].exact for one in some[1:]], agreement, candidates, self.budget)
        for group, some in zip(groups, pairs, strict=True):
            best = max(some, key=lambda one: one.agreement)
            if not self._take_out(best.draft):
                self.drafts[group] = best

    def _take_out(self, draft: Draft) -> bool:
        """Take a sentence out of the rows if it is proved, and return whether it is."""
        written = self.gradients(draft)
        if written is None:
            return False
        self.proved.append(draft)
        self.rows = self.rows.without(written, self.stage, self.longest)
        return True

    def gradients(self, draft: Draft) -> dict[int, Tensor] | None:
        """Return token id -> (D,) float64: what a sentence wrote into the rows.

        None if no rare row agrees to rounding.

        The gradient at a place depends on every word of the sentence, so one row that agrees proves all of them.
        """
        own = {place: word for place, word in draft.words.items() if self.rows.places.get(word) == place}
        laid = self.simulator.lay([draft])
        for gradients in self.simulator.gradients(self.simulator.inputs(laid), laid).detach().double()[:, 0]:
            for place, word in own.items():
                row = self.rows.sums[word]
                scale = float(gradients[place] @ row) / max(float(gradients[place].square().sum()), 1e-300)
                if float((row - scale * gradients[place]).norm()) <= ACCOUNTED * float(row.norm()):
                    return _sums(draft, scale * gradients)
        return None


def recover_encoder(seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
    """Recover the sentences that have a word which occurs once.

    Args:
        seen: `can_read_sentences` applies to it.
        rng: draws the invented sentences.
        budget: the search ends when it is used up.

    Raises:
        AnatomyError: no row shows a place, so a search that finds nothing would say nothing about the batch.
    """
    search = EncoderSearch(seen, rng, budget)
    rare = len(search.rows.places)
    if not rare:
        raise AnatomyError(
            f"looked for words that occur once and found none among {search.distinct}: every word occurs several times, or noise, "
            "pruning or rounding changed the rows of the word embedding"
        )
    search.run()
    guesses = list(_guesses(search))
    return Reconstruction(
        sequences=tuple(guesses),
        stop="budget" if budget.exhausted() else "done",
        diagnostics={
            "words": float(search.distinct),
            "rare_words": float(rare),
            "proved_sentences": float(len(search.proved)),
            "words_left": float(len(search.rows.sums)),
        },
    )


def _guesses(search: EncoderSearch) -> Iterator[GuessedSequence]:
    """Yield the proved sentences, then the drafts of groups that were not proved."""
    before, after = search.simulator.before, search.simulator.after
    for draft in search.proved:
        yield GuessedSequence((*before, *draft.in_order(), *after), own_score=1.0, proved=True)
    for group, one in search.drafts.items():
        if group <= set(search.rows.places):
            share = 1.0 - float(torch.tensor(-one.agreement / max(len(group), 1)).exp())
            yield GuessedSequence((*before, *one.draft.in_order(), *after), own_score=max(0.0, min(share, 0.99)))


def _best_of(starts: Sequence[Sequence[Draft]], filled: Sequence[Filled], count: int) -> list[list[Draft]]:
    """Return each group's drafts that agree best, without their weak words."""
    groups = _split(
        list(zip(filled, [draft for many in starts for draft in many], strict=True)), [len(m) for m in starts]
    )
    ranked = (sorted(group, key=lambda pair: pair[0].agreement, reverse=True)[:count] for group in groups)
    return [[draft.without(one.weak) for one, draft in group] for group in ranked]


def _split(items: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    found, start = [], 0
    for size in sizes:
        found.append(list(items[start : start + size]))
        start += size
    return found


def _plain(grouping: Grouping, groups: Sequence[Group]) -> dict[Group, Exchanged]:
    """Return drafts that hold the words of groups and nothing else."""
    return {group: Exchanged(grouping.draft(group), agreement=grouping.known[group]) for group in groups}


def _sums(draft: Draft, gradients: Tensor) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    for place, word in draft.words.items():
        found[word] = found.get(word, torch.zeros_like(gradients[place])) + gradients[place]
    return found
