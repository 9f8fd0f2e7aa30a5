"""FILM from an observation to its guesses.

Source: FILM (Gupta et al. 2022), Sec. 4. What its published code does differently stands in docs/methods/film.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from leakaudit.algorithms.bag.word_bag import can_read_bag
from leakaudit.algorithms.embedding_rows import holds_earlier_rounds
from leakaudit.algorithms.film.bag import Bag, granted_bag, read_bag, starts_of, with_granted_counts
from leakaudit.algorithms.film.beam import Found, Rules, beam_search, grams_of
from leakaudit.algorithms.film.candidate_scores import CandidateScores, middle_gain
from leakaudit.algorithms.film.continuations import CachedModel, Continuations, ScorerModel
from leakaudit.algorithms.film.reordering import Reordering, Text, cut_at_stop, reordered
from leakaudit.algorithms.language_models.token_scorer import TokenScorer
from leakaudit.client.observation import Observation
from leakaudit.errors import ConfigError, PriorError
from leakaudit.models.token_marks import Mark
from leakaudit.models.vocabulary import Vocabulary
from leakaudit.plugins.attack_protocol import (
    APPLIES,
    Applicability,
    GuessedSequence,
    Reconstruction,
    not_applicable,
)
from leakaudit.plugins.budget import Budget
from leakaudit.plugins.prior_loading import load_prior
from leakaudit.plugins.prior_protocol import Scorer, frame_of

USED = 0.9
"""Share of the bag's tokens in the guessed sentences after which the search ends, where nothing says how many there are. Our choice."""

ROUNDS = 3
"""Most beam searches where nobody said how many sentences to find; each finds one for every first word. Our choice."""


@dataclass(frozen=True)
class Settings:
    """The settings that a preset decides."""

    bag: Literal["update", "granted"]
    sentences: int
    beam: int
    groups: int
    diversity: float
    gram: int
    penalty: float
    said_penalty: float
    length: int
    apart: bool
    stops: bool
    coverage: float
    doubt_weight: float
    ppl_weight: float
    norm_weight: float
    norm_of: Literal["all", "middle gain"]
    cosine_weight: float
    phrase_steps: int
    token_steps: int
    candidates: int
    patience: int
    prior: str


@dataclass(frozen=True)
class Language:
    """A loaded language model over the victim's tokens."""

    scorer: Scorer
    module: nn.Module | None
    """The causal language model itself, if it reads the victim's tokens."""
    start: tuple[int, ...]
    """Tokens before every text."""

    def continuations(self) -> Continuations:
        """Return what grows texts with it."""
        return ScorerModel(self.scorer) if self.module is None else CachedModel(self.module, self.start)


def can_recover(seen: Observation, chosen: Settings) -> Applicability:
    """Say whether there are a bag and a language model."""
    if chosen.bag == "granted" and granted_bag(seen) is None:
        return not_applicable(
            "preset=released takes the set of tokens and the longest length from the true texts, as the published code does; grant "
            "`words` and `lengths` (or `longest`), or take preset=paper or preset=honest"
        )
    try:
        language_of(seen, chosen.prior)
    except (ConfigError, PriorError) as error:
        return not_applicable(
            f"FILM needs a causal language model over the client's tokens; name one with prior=FOLDER: {error}"
        )
    return APPLIES if chosen.bag == "granted" else can_read_bag(seen)


def language_of(seen: Observation, prior: str) -> Language:
    """Return the language model that a setting names.

    Raises:
        ConfigError, PriorError: there is none, or it speaks other tokens.
    """
    vocabulary = seen.facts.vocabulary
    scorer = load_prior(prior, vocabulary=vocabulary, victim=seen.model)
    start = frame_of(vocabulary)[0]
    if isinstance(scorer, TokenScorer):
        return Language(scorer, scorer.model, frame_of(scorer.frame or vocabulary)[0])
    if scorer.next_token_nll([(0,)]) is None:
        raise PriorError(
            "this prior reads whole texts in tokens of its own, and cannot say which token of the client comes next"
        )
    return Language(scorer, None, start)


def recover(seen: Observation, chosen: Settings, rng: torch.Generator, budget: Budget) -> Reconstruction:
    """Return the guessed sentences, the best first.

    Args:
        seen: `can_recover` applies to it.
        chosen: the settings.
        rng: source of all random numbers.
        budget: in seconds; the best guess so far is kept.
    """
    bag = _bag_of(seen, chosen)
    if not bag.tokens:
        return Reconstruction(sequences=(), diagnostics={"bag": 0.0})
    search = _Search(seen, chosen, bag, language_of(seen, chosen.prior))
    guesses = search.sentences(rng, budget)
    return Reconstruction(
        sequences=tuple(_guess(text, score, seen.facts.vocabulary) for text, score in guesses),
        stop="budget" if budget.exhausted() else "done",
        diagnostics=search.diagnostics(),
    )


def _bag_of(seen: Observation, chosen: Settings) -> Bag:
    """Return the bag that a preset reads; granted words count only where it says so.

    Granted counts count in every preset.
    """
    granted = granted_bag(seen) if chosen.bag == "granted" else None
    return with_granted_counts(read_bag(seen) if granted is None else granted, seen)


class _Search:
    """The search for the sentences of one bag."""

    def __init__(self, seen: Observation, chosen: Settings, bag: Bag, language: Language) -> None:
        vocabulary = seen.facts.vocabulary
        self._seen, self._chosen, self._bag, self._language = seen, chosen, bag, language
        self._ends = vocabulary.marked(Mark.ENDS_SENTENCE)
        self._starts = starts_of(bag, vocabulary)
        ends = self._ends if chosen.stops else frozenset[int]()
        self._tokens = (
            *bag.tokens,
            *sorted(ends - set(bag.tokens)),
        )  # the last token of a text is no input, so it may be missing
        self._scores = _scores_of(seen, language, chosen)
        around = len(vocabulary.starts_with) + len(vocabulary.ends_with)
        longest = chosen.length if bag.longest is None else max(2, min(chosen.length, bag.longest - around))
        self._length = min(longest, vocabulary.max_length - around)
        self._steps = 0

    def diagnostics(self) -> dict[str, float]:
        """Return numbers about the search."""
        return {
            "bag": float(len(self._bag.tokens)),
            "doubtful": float(len(self._bag.doubt)),
            "counted": float(len(self._bag.counts)),
            "starts": float(len(self._starts)),
            "starts_known": float(len(self._starts) < len(self._bag.tokens)),
            "stops_known": float(bool(self._ends)),
            "length": float(self._length),
            "length_known": float(self._bag.longest is not None),
            "reordering_steps": float(self._steps),
            "earlier_rounds": float(holds_earlier_rounds(self._seen)),
        }

    def sentences(self, rng: torch.Generator, budget: Budget) -> list[tuple[Text, float]]:
        """Return the sentences with their scores, the best first."""
        beams = budget.part(0.5) if self._reorders else budget
        found: list[Text] = []
        for _ in range(self._chosen.sentences or ROUNDS):
            new = self._beam(found, beams)
            found += new
            if not new or beams.exhausted() or self._covered(found):
                break
        kept = self._kept(found)
        better = [self._improved(text, rng, budget.part(1 / (len(kept) - at))) for at, text in enumerate(kept)]
        return sorted(dict(better).items(), key=lambda pair: pair[1])

    @property
    def _reorders(self) -> bool:
        return self._chosen.phrase_steps + self._chosen.token_steps > 0

    def _covered(self, found: Sequence[Text]) -> bool:
        """Return whether the sentences hold the bag's words, if nobody said how many."""
        words = set(self._bag.tokens) - set(self._bag.doubt)
        used = {token for text in found for token in text} & words
        return not self._chosen.sentences and len(used) >= USED * len(words)

    def _kept(self, found: Sequence[Text]) -> list[Text]:
        """Return the best sentences: as many as were asked for, or that bring new words."""
        if self._chosen.sentences or not found:
            return list(found[: self._chosen.sentences])
        score = dict(zip(found, self._score(found), strict=True))
        bound = self._seen.facts.batch_size_bound
        kept: list[Text] = []
        used: set[int] = set()
        for text in sorted(score, key=score.__getitem__):
            if len(kept) < bound * self._seen.facts.local_steps if bound else set(text) - used:
                kept.append(text)
                used |= set(text)
        return kept

    def _beam(self, before: Sequence[Text], budget: Budget) -> list[Text]:
        """Return the best new text of each group of one beam search."""
        chosen = self._chosen
        said = sum((grams_of(text, chosen.gram) for text in before), Counter()) if chosen.gram else Counter()
        rules = Rules(
            tokens=self._tokens,
            starts=self._starts,
            ends=self._ends if chosen.stops else frozenset(),
            length=self._length,
            width=chosen.beam,
            groups=chosen.groups,
            diversity=chosen.diversity,
            apart=chosen.apart,
            gram=chosen.gram,
            penalty=chosen.penalty,
            said=said,
            said_penalty=chosen.said_penalty,
            most=self._bag.counts,
            doubt={token: chosen.doubt_weight * nats for token, nats in self._bag.doubt.items()},
            use=dict.fromkeys(self._bag.tokens, chosen.coverage) if chosen.coverage else {},
        )
        known = set(before)
        new = [one for one in beam_search(self._language.continuations(), rules, budget) if one.token_ids not in known]
        return self._best_of_groups(new) if chosen.apart else [one.token_ids for one in new[:1]]

    def _best_of_groups(self, found: Sequence[Found]) -> list[Text]:
        """Return the text of each group with the best score among its likeliest."""
        by_group: dict[int, list[Text]] = {}
        for one in found:
            by_group.setdefault(one.group, []).append(one.token_ids)
        each = max(4, self._chosen.beam // max(1, len(by_group)))
        tried = [text for texts in by_group.values() for text in texts[:each]]
        score = dict(zip(tried, self._score(tried), strict=True)) if tried else {}
        return [min(texts[:each], key=score.__getitem__) for texts in by_group.values()]

    def _improved(self, text: Text, rng: torch.Generator, budget: Budget) -> tuple[Text, float]:
        """Return a text after reordering, and its score."""
        if budget.exhausted():
            return text, math.inf
        text = cut_at_stop(text, self._ends, self._score)
        how = Reordering(
            self._chosen.phrase_steps, self._chosen.token_steps, self._chosen.candidates, self._chosen.patience
        )
        done = reordered(text, self._tokens, how, self._score, rng, budget)
        self._steps += done.steps
        return done.token_ids, done.score

    def _score(self, texts: Sequence[Text]) -> list[float]:
        """Return perplexity and gradient norm, weighted (FILM, Eq. 4)."""
        chosen = self._chosen
        if self._scores is None:
            return [chosen.ppl_weight * math.exp(min(nats, 50.0)) for nats in self._language.scorer.nll(texts)]
        found = self._scores(texts, norms=chosen.norm_weight > 0 or chosen.cosine_weight > 0)
        if chosen.cosine_weight:
            return list((found.nats - chosen.cosine_weight * found.cosines).tolist())
        total = chosen.ppl_weight * found.nats.clamp_max(50.0).exp() + chosen.norm_weight * found.norms
        return list(total.tolist())


def _scores_of(seen: Observation, language: Language, chosen: Settings) -> CandidateScores | None:
    """Return what scores candidates; None if the prior has no gradient."""
    if language.module is None:
        return None
    update = seen.update if chosen.cosine_weight and language.module is seen.model else None
    gain = middle_gain(language.module) if chosen.norm_of == "middle gain" else None
    return CandidateScores(language.module, language.start, None if gain is None else [gain], update)


def _guess(text: Text, score: float, vocabulary: Vocabulary) -> GuessedSequence:
    """Return a text with the tokens around it; the own score falls with perplexity."""
    ids = (*vocabulary.starts_with, *text, *vocabulary.ends_with)
    return GuessedSequence(ids, own_score=1.0 / (1.0 + math.exp(min(score, 50.0))))
