"""Completion of a sequence word by word, by the inputs of a feed-forward layer.

The measure is that of `rank_reduction`: the share of the layer's inputs at a sequence's tokens that lies outside the
span of its update, averaged over the tokens. A wrong word has a large share mostly at its own place, whatever words
stand around it. So many wrong words are exchanged at a time, and in the better context the other wrong words show. Two
neighbours that are both wrong are changed together, and other lengths are tried. (Own search.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakaudit.algorithms.span.rank_reduction import FeedForwardSpan
from leakaudit.plugins.budget import Budget

FITS = 1.5e-3
"""Mean share outside the span below which a sequence is complete.
Chosen on training sentences; see docs/decisions/span_constants.md."""

TOGETHER: tuple[float, ...] = (0.15, 0.4, 0.75, 1.0)
"""Shares of the largest gain: all places whose gain is above such a share are changed together.
Our choice; the best of the four results is taken."""

WORTH_A_LOOK = 0.2
"""A place is not changed if its token's distance is below this share of the worst token's distance.
Our choice."""

CLOSE, FEW = 0.12, 1.5
"""Mean share outside the span (CLOSE) or sum of shares (FEW) below which single changes are tried.
Chosen on training sentences; see docs/decisions/span_constants.md."""

NEAR = 3
"""Most places by which an end is moved at a time.
Our choice; all ends are tried if nothing else helps."""

PATIENCE = 3
"""Steps without improvement before changes are tried one by one. Our choice."""

WORST, BEST = 4, 4
"""Places where single words and pairs are tried (WORST), and words tried at each (BEST).
Our choice."""

NEIGHBOURS = 32
"""Words at each of two neighbouring places of which all pairs are tried.
Our choice: a right piece of a word is hardly nearer than other words as long as the other piece is wrong."""

Ranking = Mapping[int, Sequence[tuple[float, int]]]
"""Place -> (share outside the span, token id) of each word, nearest first."""


@dataclass(frozen=True)
class Completed:
    """The best sequence that a completion found."""

    ids: tuple[int, ...]
    off: float
    """Mean share outside the span over its tokens; the first token does not count."""


class Completion:
    """The search among the words that may stand at each place."""

    def __init__(
        self,
        feed_forward: FeedForwardSpan,
        tokens: Tensor,
        places: Tensor,
        likely: Tensor,
        ends: Sequence[int],
        end: int | None,
    ) -> None:
        """Sort the options.

        Args:
            feed_forward: the measure.
            tokens: (n,) int64: words that may stand inside a sequence.
            places: (n,) int64: the place of each word.
            likely: (n,) booleans: options that are tried first.
            ends: places at which a sequence may end.
            end: the token that ends a sequence; None if sequences end with any token.
        """
        self._feed_forward = feed_forward
        self._tokens, self._places, self._likely = tokens, places, likely
        self._ends, self._end = sorted(ends), end
        self._measured: dict[tuple[int, ...], tuple[float, list[float]]] = {}

    def complete(self, known: Mapping[int, int], budget: Budget, *, unlikely_too: bool) -> Completed | None:
        """Return the best sequence found from some known words.

        Args:
            known: place -> token id. The sequence may end at any place that keeps at least half of them.
            budget: checked between steps.
            unlikely_too: try all words from the beginning, and not only after likely words gave a nearly right sequence.

        Returns:
            The sequence, or None if some place has no option.
        """
        self._measured.clear()
        ends = [end for end in self._ends if 2 * sum(place < end for place in known) >= len(known)]
        everything = torch.ones_like(self._likely)
        options = everything if unlikely_too else self._likely
        ranked = self._ranked(known, options)
        best = self._best(self._filled(known, ranked, end) for end in ends)
        if best is None:
            return None
        best = self._improve(best, options, ends, budget)
        if not unlikely_too and self._off(best) >= FITS and self._is_close(best):
            best = self._improve(best, everything, ends, budget)
        return Completed(best, self._off(best))

    def _improve(self, state: tuple[int, ...], options: Tensor, ends: Sequence[int], budget: Budget) -> tuple[int, ...]:
        """Return the best sequence that is found by exchanges among some options (n,)."""
        best, stale = state, 0
        seen = {state}
        while self._off(best) >= FITS and not budget.exhausted():
            ranked = self._ranked(dict(enumerate(state)), options & self._worth_a_look(state, ends))
            following = self._best(s for s in self._together(state, ranked, ends) if s not in seen)
            if following is None or (self._off(following) >= self._off(best) and stale >= PATIENCE):
                if not self._is_close(best):
                    break
                # Nothing else helps: change one or two words of the best sequence.
                following = self._best(s for s in self._closely(best, options, ends) if s not in seen)
                if following is None or self._off(following) >= self._off(best):
                    break
            seen.add(following)
            state = following
            stale = stale + 1 if self._off(state) >= self._off(best) * (1.0 - 1e-4) else 0
            best = min(best, state, key=self._off)
        return best

    def _worth_a_look(self, state: tuple[int, ...], ends: Sequence[int]) -> Tensor:
        """Return (n,) booleans: options that are tried next.

        These are options at places whose word is probably wrong, and options behind the end, because the end may move.
        """
        distance = torch.tensor(self._measured[state][1], device=self._places.device)
        bad = distance >= WORTH_A_LOOK * distance.max()
        last = len(state) - 1
        furthest = max([last, *self._near(last, ends)])
        inside: Tensor = (self._places <= last) & bad[self._places.clamp_max(last)]
        return inside | ((self._places >= last) & (self._places < furthest))

    def _near(self, last: int, ends: Sequence[int]) -> list[int]:
        """Return the other ends that are tried next to the present one."""
        return [end for end in ends if end != last and abs(end - last) <= NEAR]

    def _ranked(self, known: Mapping[int, int], looked: Tensor) -> Ranking:
        """Return the share outside the span of some options (n,) beside known words."""
        rows = looked.nonzero().flatten()
        found: dict[int, list[tuple[float, int]]] = {}
        if len(rows):
            tokens, places = self._tokens[rows], self._places[rows]
            off = self._feed_forward.of_options(known, tokens[:, None], places[:, None])[:, 0]
            for distance, token, place in sorted(zip(off.tolist(), tokens.tolist(), places.tolist(), strict=True)):
                found.setdefault(place, []).append((distance, token))
        return found

    def _filled(self, known: Mapping[int, int], ranked: Ranking, end: int) -> tuple[int, ...] | None:
        """Return the sequence up to an end: known words, and the nearest word elsewhere.

        The result is None if a place has neither.
        """
        made = []
        for place in range(end + 1):
            if place == end and self._end is not None:
                made.append(self._end)
            elif place in known and known[place] != self._end:
                made.append(known[place])
            elif ranked.get(place):
                made.append(ranked[place][0][1])
            else:
                return None
        return tuple(made)

    def _off(self, state: tuple[int, ...]) -> float:
        return self._measured[state][0]

    def _is_close(self, state: tuple[int, ...]) -> bool:
        return self._off(state) < max(CLOSE, FEW / len(state))

    def _best(self, states: Iterable[tuple[int, ...] | None]) -> tuple[int, ...] | None:
        """Measure sequences and return the best one."""
        all_ = list(dict.fromkeys(state for state in states if state is not None))
        new = [state for state in all_ if state not in self._measured]
        if new:
            for state, off in zip(new, self._feed_forward.of_members(new), strict=True):
                # The first token is in every sequence, and so always in the span.
                self._measured[state] = (float(off[1:].mean()), off.tolist())
        return min(all_, key=self._off, default=None)

    def _together(self, state: tuple[int, ...], ranked: Ranking, ends: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield a sequence with the most helpful words changed together, and other ends."""
        gains = []
        for place in self._inner(state, ranked):
            distance, token = next(((d, t) for d, t in ranked[place] if t != state[place]), (1.0, -1))
            gains.append((self._measured[state][1][place] - distance, place, token))
        most = max(gains, default=(0.0, 0, 0))[0]
        for share in TOGETHER if most > 0 else ():
            changed = list(state)
            for gain, place, token in gains:
                if gain >= share * most:
                    changed[place] = token
            yield tuple(changed)
        for end in self._near(len(state) - 1, ends):
            if (other := self._filled(dict(enumerate(state)), ranked, end)) is not None:
                yield other

    def _closely(self, state: tuple[int, ...], options: Tensor, ends: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield a sequence with one word, two neighbours or the end changed."""
        known, distance = dict(enumerate(state)), self._measured[state][1]
        ranked = self._ranked(known, options)
        inner = self._inner(state, ranked)
        for place in sorted(inner, key=lambda place: -distance[place])[:WORST]:
            for _, token in ranked[place][:BEST]:
                yield (*state[:place], token, *state[place + 1 :])
        pairs = [(place, place + 1) for place in inner if place + 1 in inner]
        for pair in sorted(pairs, key=lambda pair: -distance[pair[0]] - distance[pair[1]])[:WORST]:
            choices = torch.cartesian_prod(
                *(torch.tensor([t for _, t in ranked[place][:NEIGHBOURS]], device=options.device) for place in pair)
            )
            places = torch.tensor(pair, device=options.device).expand_as(choices)
            off = self._feed_forward.of_options(known, choices, places).sum(1)
            for both in choices[off.topk(min(BEST, len(off)), largest=False).indices].tolist():
                yield (*state[: pair[0]], *both, *state[pair[1] + 1 :])
        for end in ends:
            if (other := self._filled(known, ranked, end)) is not None:
                yield other

    def _inner(self, state: tuple[int, ...], ranked: Ranking) -> list[int]:
        """Return the places that have options.

        The first place has none, nor has the last one where a fixed token ends every sequence.
        """
        last = len(state) - (self._end is not None)
        return [place for place in range(1, last) if place in ranked]
