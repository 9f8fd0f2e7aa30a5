"""Texts that an update made more likely to a causal language model.

The differential score of a text s is DS(s) = sum_t log p_after(s_t | s_<t) - log p_before(s_t | s_<t) (Zanella-Beguelin et al., CCS 2020,
Sec. 4.1). Texts with a high score are found with beams (Sec. 4.2). Four things are ours. The update may be taken several times, so that a
small one counts, too. The score of a beam is DS(s) + w log p_before(s), because with DS alone beams fill with rare words. Each beam begins
with another first word, and avoids words that earlier beams have at the same place, as in diverse beam search (Vijayakumar et al., AAAI
2018). A text without an end-of-text token ends where its score DS is largest, because many clients train without that token.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakaudit.algorithms.gradient_estimate import divisor_of
from leakaudit.client.observation import Observation
from leakaudit.models.vocabulary import Vocabulary
from leakaudit.plugins.budget import Budget
from leakaudit.plugins.prior_protocol import frame_of

GRADIENT_STEP = 0.01
"""Length of the step against a gradient, as a share of the length of the weights that it moves.
Our choice, not tuned."""

FIRST_WORDS = 512
"""Likely first words that are compared where no token begins a text.
Our choice: their next-token probabilities take 60 MB with 30,000 tokens."""

AVOIDED = 1.0
"""Nats by which a word is worse for each earlier beam that has it at the same place.
Our choice, not tuned."""


@dataclass(frozen=True)
class Searched:
    """A text that a search found."""

    token_ids: tuple[int, ...]
    """(T,) without the tokens around a text."""
    ratio: float
    """DS of the text, in nats; 0 if no update was used."""
    prior: float
    """log p_before of the text, in nats."""

    def score(self, prior_weight: float) -> float:
        """Return what a beam maximises, in nats for each token."""
        return (self.ratio + prior_weight * self.prior) / max(1, len(self.token_ids))


@dataclass(frozen=True)
class Search:
    """Size and score of a search with beams."""

    starts: int
    """G beams, each with a first word of its own."""
    beam: int
    """Texts kept in each beam."""
    length: int
    """Most tokens of a text."""
    prior_weight: float
    """Factor of log p_before; log p_before alone counts if there is no model after the update."""


@dataclass
class _Beams:
    """G beams of b texts that grow together, as rows; G * b = N."""

    ids: Tensor
    """(N, T) int64."""
    ratio: Tensor
    """(N, T) log p_after - log p_before of each token."""
    prior: Tensor
    """(N, T) log p_before of each token."""
    total: Tensor
    """(N,) score of each text."""


def model_after(seen: Observation, amplification: float, update: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Return a float32 copy of the public model, moved by the update.

    A difference of weights moves it by `amplification` times the client's own movement. A gradient moves it by as many steps against it,
    each `GRADIENT_STEP` of the weights' length. With 0 the copy has the weights before the update.

    Args:
        seen: the observation.
        amplification: how many times the update is taken.
        update: taken in place of the observed one, in the same units.
    """
    moves = seen.update if update is None else update
    model = copy.deepcopy(seen.model).float()
    weights = {name: weight for name, weight in model.named_parameters() if name in seen.update}
    size = divisor_of(seen.facts) if seen.facts.view == "delta" else _gradient_step(seen, weights)
    with torch.no_grad():
        for name, weight in weights.items():
            weight.sub_(amplification * size * moves[name].to(weight))
    return model.eval()


def likely_texts(
    before: nn.Module, after: nn.Module | None, vocabulary: Vocabulary, search: Search, budget: Budget
) -> list[Searched]:
    """Return the best text of each beam, the best first.

    Args:
        before: causal language model before the update.
        after: the same after the update; None searches for texts that are likely before it.
        vocabulary: of both.
        search: size and score of the search.
        budget: checked between tokens.
    """
    weight = search.prior_weight if after is not None else 1.0
    pair = _Pair(before, after, vocabulary, weight)
    beams = _first_words(pair, search.starts)
    end = _end_of(vocabulary)
    while beams.ids.shape[1] < min(search.length, vocabulary.max_length - len(frame_of(vocabulary)[0])):
        if budget.exhausted():
            break
        beams = _longer(beams, pair, search.starts, search.beam, end)
    texts = [_cut(beams, row, end, after is not None) for row in range(len(beams.ids))]
    width = len(texts) // min(search.starts, len(texts))
    best = [max(texts[at : at + width], key=lambda one: one.score(weight)) for at in range(0, len(texts), width)]
    return sorted(best, key=lambda one: one.score(weight), reverse=True)


@dataclass(frozen=True)
class _Pair:
    """A language model before an update, and after it."""

    before: nn.Module
    after: nn.Module | None
    vocabulary: Vocabulary
    weight: float

    def next_token(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return (N, V) log ratios and (N, V) log p_before of next tokens."""
        prior = _log_probabilities(self.before, ids)
        return (torch.zeros_like(prior) if self.after is None else _log_probabilities(self.after, ids) - prior), prior

    def after_start(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same for texts behind the tokens that begin a text."""
        start = torch.tensor(frame_of(self.vocabulary)[0], dtype=torch.long, device=ids.device)
        return self.next_token(torch.cat([start.expand(len(ids), -1), ids], dim=1))

    def allowed(self, scores: Tensor, end: int | None) -> Tensor:
        """Return (N, V) scores without special tokens; the end of a text stays."""
        banned = [token for token in self.vocabulary.wordless_ids if token != end and token < scores.shape[1]]
        scores[:, banned] = -torch.inf
        return scores


@torch.no_grad()
def _log_probabilities(model: nn.Module, ids: Tensor) -> Tensor:
    """Return (N, V) log probabilities of the token after (N, T) ids."""
    given = inspect.signature(model.forward).parameters
    more = {name: value for name, value in (("logits_to_keep", 1), ("use_cache", False)) if name in given}
    logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits
    return logits[:, -1].float().log_softmax(dim=1)


def _gradient_step(seen: Observation, weights: Mapping[str, Tensor]) -> float:
    """Return the learning rate of one step against a gradient."""
    long = torch.stack([weight.detach().norm() for weight in weights.values()]).norm()
    return GRADIENT_STEP * float(long / torch.stack([seen.update[name].norm() for name in weights]).norm())


def _end_of(vocabulary: Vocabulary) -> int | None:
    """Return the token that ends a text, if the tokenizer has one."""
    return vocabulary.ends_with[0] if vocabulary.ends_with else vocabulary.special.get("eos")


def _first_words(pair: _Pair, starts: int) -> _Beams:
    """Return G beams of one first word each."""
    device = next(pair.before.parameters()).device
    start = frame_of(pair.vocabulary)[0]
    if start:
        ratio, prior = pair.after_start(torch.zeros(1, 0, dtype=torch.long, device=device))
    else:
        ratio, prior = _unseen_first_words(pair, device)
    score = pair.allowed(ratio + pair.weight * prior, None)
    kept = score[0].topk(min(starts, int(score.isfinite().sum()))).indices
    of = (ratio[0, kept, None], prior[0, kept, None])
    return _Beams(kept[:, None], *of, of[0][:, 0] + pair.weight * of[1][:, 0])


def _unseen_first_words(pair: _Pair, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (1, V) scores of first words where no token begins a text.

    No model predicts the first word then. A word that the client's texts begin with changes what follows it: its score is the divergence
    of the next token, E_after log p_after / p_before. Only the words that are likely behind an end-of-text token are tried.
    """
    vocabulary = pair.vocabulary
    end = vocabulary.special.get("eos", vocabulary.special.get("pad", 0))
    ratio, prior = pair.next_token(torch.tensor([[end]], device=device))
    likely = pair.allowed(ratio + prior, None)[0].topk(min(FIRST_WORDS, ratio.shape[1] - 1)).indices
    change, following = pair.next_token(likely[:, None])
    found = torch.full_like(ratio, -torch.inf)
    found[0, likely] = ((change + following).exp() * change).sum(dim=1)
    return found, prior if pair.after is None else torch.zeros_like(prior)


def _longer(beams: _Beams, pair: _Pair, starts: int, width: int, end: int | None) -> _Beams:
    """Return the beams with one more token."""
    ratio, prior = pair.after_start(beams.ids)
    score = _without_repeats(pair.allowed(ratio + pair.weight * prior, end), beams.ids)
    ended = torch.zeros(len(score), dtype=torch.bool, device=score.device)
    if end is not None:
        ended = (beams.ids == end).any(dim=1)
        score[ended] = -torch.inf
        score[ended, end] = 0.0
    total = (beams.total[:, None] + score).view(min(starts, len(score)), -1, score.shape[1])
    row, token = _different(total, width)
    still = (~ended[row]).float()
    return _Beams(
        torch.cat([beams.ids[row], token[:, None]], dim=1),
        torch.cat([beams.ratio[row], (still * ratio[row, token])[:, None]], dim=1),
        torch.cat([beams.prior[row], (still * prior[row, token])[:, None]], dim=1),
        beams.total[row] + score[row, token],
    )


def _different(total: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return (N,) rows and tokens of the best texts of each beam.

    Args:
        total: (G, b, V) scores.
        width: texts of a beam that are kept.
    """
    used = torch.zeros_like(total[0, 0])
    rows, tokens = [], []
    for number, scores in enumerate(total):
        kept = (scores - AVOIDED * used).flatten().topk(width).indices
        rows.append(number * len(scores) + kept // len(used))
        tokens.append(kept % len(used))
        used[tokens[-1][0]] += 1
    return torch.cat(rows), torch.cat(tokens)


def _without_repeats(scores: Tensor, ids: Tensor) -> Tensor:
    """Return (N, V) scores in which no pair of tokens comes twice in a text."""
    again = ids[:, :-1] == ids[:, -1:]
    row, place = again.nonzero(as_tuple=True)
    scores[row, ids[row, place + 1]] = -torch.inf
    return scores


def _cut(beams: _Beams, row: int, end: int | None, updated: bool) -> Searched:
    """Return one text up to its end.

    Without an end-of-text token it ends where the sum of its ratios is largest; without an update, nowhere.
    """
    ids: Sequence[int] = beams.ids[row].tolist()
    long = list(ids).index(end) if end is not None and end in ids else len(ids)
    if long == len(ids) and updated:
        long = 1 + int(beams.ratio[row].cumsum(dim=0).argmax())
    return Searched(tuple(ids[:long]), float(beams.ratio[row, :long].sum()), float(beams.prior[row, :long].sum()))
