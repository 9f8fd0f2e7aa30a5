"""The bag of words of a step, for every kind of client.

Letters: V tokens of the vocabulary, D hidden size, K named tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from leakaudit.algorithms.above_noise import standing_out
from leakaudit.algorithms.bag.noisy_head import target_surprise
from leakaudit.algorithms.bag.pruned_head import left_over
from leakaudit.algorithms.bag.softmax_background import (
    ROWS_PER_ENTRY,
    Outliers,
    long_enough,
    points_backwards,
    unlike_the_softmax,
)
from leakaudit.algorithms.bag.target_counts import TargetCounts, target_counts
from leakaudit.algorithms.bag.token_head import find_token_head, sampled_features
from leakaudit.algorithms.embedding_rows import FALSE_ROWS, can_read_rows, rows_of_tokens, touched_rows
from leakaudit.algorithms.gradient_estimate import as_gradient
from leakaudit.algorithms.position_rows import longest_length
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import word_embedding
from leakaudit.plugins.attack_protocol import APPLIES, Applicability, not_applicable

Decided = Literal["touched rows", "above noise", "unlike the softmax"]
"""How the tokens of a bag were told from the others: their rows moved and all others did not; their rows hold more than noise; or their rows are
not the softmax's share (`softmax_background`)."""


@dataclass(frozen=True)
class Bag:
    """Tokens of a batch, without order."""

    tokens: Tensor
    """(K,) int64, ascending, on the CPU: the named tokens, without special ones."""
    evidence: Tensor
    """(K,) float64, for each token how far its statistic is above the cut (under noise: above the least of the named tokens), as a natural logarithm.
    Infinite where the row moved and those of other tokens did not, so that there is no doubt."""
    longest: int | None
    """Tokens of the longest text, with special tokens; None if no table of positions tells it."""
    decided: Decided
    noise: float = 0.0
    """Standard deviation of the noise that was assumed, in the update's units; 0 without noise."""
    counts: Mapping[int, int] = field(default_factory=dict)
    """Named token -> how often the batch predicts it, for those whose number shows. A text's first token is not predicted, so a token occurs once more
    for each text that it begins. Empty where no number shows, as in tied heads without a bias (`target_counts`)."""
    targets: int | None = None
    """Tokens that the batch predicts, all together; None if this does not show."""

    def __len__(self) -> int:
        """Return K."""
        return len(self.tokens)


def can_read_bag(seen: Observation) -> Applicability:
    """Say whether the update tells the words of the batch by its tables' rows."""
    if not _is_tied(seen):
        return can_read_rows(seen)
    problem = _problem_with_tied(seen, str(word_embedding(seen.model)))
    if not problem:
        return APPLIES
    name = word_embedding(seen.model)
    return not_applicable(
        f"the word embedding {name!r} is tied to an output head, which touches every row of it, and {problem}"
    )


def _problem_with_tied(seen: Observation, name: str) -> str:
    """Return why a tied table does not tell the words; empty if it does."""
    table = seen.update[name]
    if not long_enough(table):
        return (
            f"with {len(table)} rows of {table.shape[1]} entries, fewer than {ROWS_PER_ENTRY} for each entry, "
            "the words' rows cannot be told from the others"
        )
    if as_gradient(seen.sent or seen)[1].quality != "exact":
        return "the optimizer's steps hide the sizes of its rows"
    changed = seen.noise_level.of(name) > 0.0 or seen.zeroed
    if changed and not seen.whole:
        return (
            "a declared defence changed the rows; the head's inputs, which would tell them apart, need the whole model"
        )
    if changed and not _has_head(seen):
        return "a declared defence changed the rows; the head over the vocabulary, which would tell them apart, was not found"
    return ""


def word_bag(seen: Observation, false_rows: float = FALSE_ROWS) -> Bag:
    """Return the tokens that the update shows to be in the batch.

    - Word embedding not tied: tokens whose row moved; under noise, those whose row holds more than noise. If the head of a language model is
      shared, the tokens that were only predicted (such as the last ones of texts) are added where their rows stand out. In a pruned update a
      word is named by either table, because pruning leaves more of the head's rows. An untied head may also tell how often each token is
      predicted.
    - Word embedding tied to the head: tokens whose row does not look like the softmax's share. Under noise, tokens whose row points against
      that share by more than noise does; in a pruned update, tokens with more left than that share explains.

    If nothing stands out, the bag is empty. If half of a pruned table stands out, the public model's share is not that of the batch, as in
    untrained models; then the rows are compared with each other.

    Args:
        seen: `can_read_bag` applies to it.
        false_rows: how many of the V tokens may be named by chance, where the update cannot exclude chance.
    """
    longest = longest_length(seen.sent or seen)
    if not _is_tied(seen):
        return _of_untied(seen, false_rows, longest)
    name = str(word_embedding(seen.model))
    sigma = (seen.sent or seen).noise_level.of(name)
    if sigma > 0.0:
        surprise = _head_surprise(seen, sigma)
        named = standing_out(surprise, exponential_cut, false_rows)
        return _bag(seen, named, _over_cut(surprise, named), longest, "above noise", sigma)
    evidence = _more_than_the_softmax(seen) if seen.zeroed else None
    if evidence is not None:
        return _bag(seen, evidence > 0, evidence, longest, "unlike the softmax")
    found = _unlike_the_softmax(seen, name, false_rows)
    return _with_counts(_bag(seen, found.named, found.evidence, longest, "unlike the softmax"), target_counts(seen))


def told_by(seen: Observation, bag: Bag, false_rows: float = FALSE_ROWS) -> dict[str, float]:
    """Return parameter name -> share of the named tokens that its rows told.

    A token is told by the word embedding if its row moved, else by the head, whose rows also name tokens that were only predicted.

    Args:
        seen: what the bag was read from.
        bag: the named tokens.
        false_rows: as for `word_bag`.
    """
    table = str(word_embedding(seen.model))
    if not len(bag):
        return {}
    if _is_tied(seen):
        return {table: 1.0}
    touched, _ = touched_rows(seen, false_rows)
    share = float(touched.cpu()[bag.tokens].double().mean())
    return {table: 1.0} if share == 1.0 else {table: share, find_token_head(seen)[1]: 1.0 - share}


def _of_untied(seen: Observation, false_rows: float, longest: int | None) -> Bag:
    """Return the bag of a word embedding that is not shared with a head."""
    touched, noise = touched_rows(seen, false_rows)
    if noise > 0.0 or (seen.sent or seen).noise_level.of(word_embedding(seen.model)) > 0.0:
        energy = rows_of_tokens(seen).double().square().sum(dim=1)  # (V,)
        return _bag(seen, touched, _over_cut(energy.log(), touched), longest, "above noise", noise)
    sure = touched.cpu()
    if _head_is_noisy(seen):
        return _bag(seen, touched, torch.where(sure, math.inf, -math.inf).double(), longest, "touched rows")
    counted = target_counts(seen)
    if counted is not None:
        sure = sure | (counted.known & (counted.counts > 0))
    predicted = _predicted(seen, touched, false_rows)
    evidence = torch.full((len(sure),), -math.inf, dtype=torch.float64) if predicted is None else predicted.cpu()
    evidence = torch.where(sure, math.inf, evidence)
    return _with_counts(_bag(seen, evidence > 0, evidence, longest, "touched rows"), counted)


def _with_counts(bag: Bag, counted: TargetCounts | None) -> Bag:
    """Return a bag with the numbers of its tokens."""
    if counted is None:
        return bag
    known = [token for token in bag.tokens.tolist() if counted.known[token]]
    return replace(bag, counts={token: int(counted.counts[token]) for token in known}, targets=counted.total)


def _bag(
    seen: Observation, named: Tensor, evidence: Tensor, longest: int | None, decided: Decided, noise: float = 0.0
) -> Bag:
    """Return the bag of named rows (V,), without special tokens."""
    around = seen.facts.vocabulary.wordless_ids
    tokens = torch.tensor([t for t in named.nonzero().flatten().tolist() if t not in around], dtype=torch.long)
    return Bag(tokens, evidence.cpu()[tokens], longest, decided, noise)


def _is_tied(seen: Observation) -> bool:
    """Return whether the word embedding is sent and shared with a head."""
    name = word_embedding(seen.model)
    return name is not None and name in seen.update and any(name in pair for pair in seen.facts.tied)


def _unlike_the_softmax(seen: Observation, name: str, false_rows: float, known: Tensor | None = None) -> Outliers:
    """Return which rows of a head's update are not the softmax's share."""
    seen, _ = as_gradient(seen.sent or seen)
    error = seen.error.get(name)
    return unlike_the_softmax(
        seen.update[name],
        0.0 if error is None else error.double().square().mean(dim=1).sqrt(),
        false_rows,
        known,
    )


def _predicted(seen: Observation, inputs: Tensor, false_rows: float) -> Tensor | None:
    """Return (V,) evidence for target tokens from the rows of an untied head.

    The tokens (V,) that are inputs are given. None if the head tells nothing.
    """
    try:
        _, name = find_token_head(seen)
    except AnatomyError:
        return None
    if seen.zeroed:
        return _more_than_the_softmax(seen) if seen.whole else None
    exact = as_gradient(seen.sent or seen)[1].quality == "exact"
    if not exact or not long_enough(seen.update[name]):
        return None
    found = _unlike_the_softmax(seen, name, false_rows, inputs)
    backwards = points_backwards(as_gradient(seen.sent or seen)[0].update[name], found.evidence)
    return torch.where(backwards, found.evidence, -math.inf)


def exponential_cut(tail: float) -> float:
    """Return what an exponential variable of mean 1 exceeds at a chance.

    >>> round(exponential_cut(0.5), 3)
    0.693
    """
    return -math.log(tail)


def _over_cut(surprise: Tensor, named: Tensor) -> Tensor:
    """Return (V,) how far each value is above the smallest named one."""
    if not bool(named.any()):
        return torch.full_like(surprise, -math.inf)
    return surprise - float(surprise[named].min())


def _has_head(seen: Observation) -> bool:
    """Return whether a head over the vocabulary is shared."""
    try:
        find_token_head(seen)
    except AnatomyError:
        return False
    return True


def _head_is_noisy(seen: Observation) -> bool:
    """Return whether noise is declared on a head over the vocabulary.

    The rows of such a head name no words exactly.
    """
    try:
        head, name = find_token_head(seen)
    except AnatomyError:
        return False
    bias = next((name for name, parameter in seen.model.named_parameters() if parameter is head.bias), None)
    return (seen.sent or seen).noise_level.of(name, bias) > 0.0


def _head_surprise(seen: Observation, sigma: float) -> Tensor:
    """Return (V,) minus the logarithms of chance for the head's noisy rows."""
    head, name = find_token_head(seen)
    features, probabilities = sampled_features(seen, head)
    return target_surprise((seen.sent or seen).update[name], sigma, features, probabilities)


def _more_than_the_softmax(seen: Observation) -> Tensor | None:
    """Return (V,) evidence that a pruned row holds more than the softmax's share.

    None if half of the table does, because the public model's share is then not that of the batch.
    """
    head, name = find_token_head(seen)
    features, probabilities = sampled_features(seen, head)
    evidence = left_over((seen.sent or seen).update[name], features, probabilities)
    return evidence if int((evidence > 0).sum()) < len(evidence) / 2 else None
