"""Sentences out of a clean update, dropout off: a pair of token and position is in the span or it is not.

One sequence is its pairs, by position. In a batch, three steps repeat until nothing is left: the ledger says which pairs are real
(`span_ledger`), attention says which belong together (`span_assembly`), and each sequence that is put together is simulated alone
(`span_contribution`): where its part of the update agrees it is certain, and taken out, so that the next round reads a
smaller batch. Where the model's loss has no classes, sequences are believed by their attention alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from leakaudit.attacks.proof import prove
from leakaudit.attacks.reconstruction import GuessedSequence, Reconstruction
from leakaudit.attacks.span_assembly import (
    COMPLETE,
    Evidence,
    Group,
    both_sides,
    by_position,
    confidence_of,
    keys_and_queries,
    padded,
)
from leakaudit.attacks.span_balance import BALANCED, Balance
from leakaudit.attacks.span_candidates import Candidates
from leakaudit.attacks.span_climb import Climb
from leakaudit.attacks.span_context import context_of
from leakaudit.attacks.span_contribution import Contribution, contributions
from leakaudit.attacks.span_ledger import VANISHED, Entries, Ledger
from leakaudit.attacks.span_reach import clean_reach
from leakaudit.attacks.span_scene import Scene

FARTHEST_INSIDE = 0.03
"""Distance beyond which no pair counts as in the span of a clean update, however the others rank. Measured: true pairs at 1e-7
to 1e-6 in a pretrained encoder, up to 5e-4 in untrained tiny ones, whose weak directions drown in rounding; the nearest false
pair at 1e-1 and more."""

AGREES = 1e-4
"""Relative error up to which a simulated sequence agrees with the update. Measured on a train split: 1e-6 for true sequences in a
pretrained encoder; one wrong word in a sentence of forty changes the others by 5e-3."""

REDUCES = 1e-2
"""Relative error up to which taking out a simulated sequence lowers the rank of the update by its length. Measured on a train split: 1e-6 to
1e-5 for true sequences; a wrong word leaves 0.1 and more."""

NOISY = 1.3
"""Factor over the expected norm of the noise up to which a difference is no more than that. Our choice."""

HYPOTHESES = 3
"""Incomplete sequences of one seed that are simulated. Our choice: a wrong first one mostly differs from the right one in a token."""

LIKELY: tuple[float, ...] = (0.05, -1.0, 0.15)
"""Coefficients from which pairs of tokens that occur several times are considered, in the order in which they are tried: whenever
nothing more is found with one, the next is used. Measured on a train split at B = 8 to 24: nine in ten true ones are above 0.05, a
third of the false ones."""

MOST_INCOMPLETE = 4
"""Incomplete guesses that are worth their time. Our choice: beyond a few they are made of pairs that are not in the batch."""

FLOOR = 3e-6
"""Share of the first size of an entry that taking out simulated sequences leaves behind. Measured on a train split: 1e-7 to 3e-6."""

SHARE = 0.2
"""Of the budget left, what one search for balanced sequences may use. Our choice."""

UNTESTED = 5
"""Dimensions of a head that a sequence grown by attention has to leave. Our choice: what is added with fewer left is mostly of other
sequences; sequences that are longer are completed by their balance."""

GROWN = 16
"""Members up to which attention grows a sequence that its context can complete."""

EXCHANGES, EXCHANGEABLE = 3, 30
"""Members of a sequence that are exchanged by their attention, and tokens up to which it is tried. Our choice: a head of 32 dimensions
explains everything from 33 members on."""

MENDS, MOST_CHANGES = 10, 24
"""Times that a near miss is changed, and single changes simulated each time. Our choice: a change costs one short forward and backward
pass, and all that help are made at once."""


def read_clean(scene: Scene) -> Reconstruction | None:
    """Return what lies in the span, assembled to sentences, and proved where that is possible; None where nothing does."""
    # In general position a span holds no more tokens at one position than it has directions.
    scene = replace(scene, keep=max(scene.keep, scene.basis.rank + 1))
    pairs = scene.scan()
    while _crowded(pairs, scene.basis.rank, scene.keep) and scene.keep < scene.stage.vocabulary:
        scene = replace(scene, keep=4 * scene.keep)
        pairs = scene.scan()
    return read_pairs(scene, pairs, scene.basis.rank)


def _crowded(pairs: Candidates, rank: int, keep: int) -> bool:
    """Return whether at some position all of the `keep` nearest tokens lie in the span, so that there may be more."""
    inside = pairs.positions[: _inside(pairs.distance, rank)]
    return len(inside) > 0 and int(inside.bincount().max()) >= keep


def read_pairs(scene: Scene, pairs: Candidates, rank: int) -> Reconstruction | None:
    """Return what those of the ranked `pairs` that lie in a span of `rank` directions make up; None where none does."""
    inside = pairs.take(torch.arange(_inside(pairs.distance, rank), device=pairs.distance.device))
    return read_inside(scene, inside) if len(inside) else None


def read_inside(scene: Scene, inside: Candidates, noise: Mapping[str, float] | None = None) -> Reconstruction:
    """Return what these pairs make up, all of the batch's among them, and perhaps others that lie in its span as well.

    Args:
        scene: the observation.
        inside: pairs in the span, nearest first.
        noise: parameter name -> standard deviation of the errors on each entry of its update, if known.
    """
    facts = {"candidates": float(len(inside))}
    if _one_per_position(inside.positions):
        guess = [GuessedSequence(_ids(inside, inside.positions.argsort().tolist()), confidence=1.0)]
    elif scene.anatomy.heads and all(p.weight in scene.seen.update for p in scene.anatomy.projections):
        batch = _Batch(scene, _possible(inside, scene.seen.facts.vocabulary.starts_with), noise or {})
        guess = batch.read()
        facts["rounds"] = float(batch.rounds)
    else:
        guess = _guesses(by_position(inside.positions), inside)
    proved = prove(scene.seen, guess, scene.budget)
    reach = clean_reach(scene, inside, FARTHEST_INSIDE)
    facts |= proved.facts
    return Reconstruction(sequences=proved.sequences, label_counts=proved.label_counts, facts=facts, reach=reach)


@dataclass
class _Batch:
    """The sequences of one update, found one after another."""

    scene: Scene
    pairs: Candidates
    noise: Mapping[str, float] = field(default_factory=dict)
    rounds: int = 0
    found: list[GuessedSequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Open the ledger, and compute keys and queries of every pair once."""
        scene, pairs = self.scene, self.pairs
        axes = torch.linalg.svd(pairs.inputs, full_matrices=False)
        keep = axes.S > 1e-9 * axes.S[0]
        self._axes = axes.Vh[keep]  # (R, D): the basis less the directions that rounding added
        self._coordinates = pairs.inputs @ self._axes.T
        self._ledger = Ledger.of(self._coordinates, pairs.tokens, pairs.positions)
        parts = [p.by_output(scene.seen.update[p.weight]).double() @ self._axes.T for p in scene.anatomy.projections]
        self._rest = torch.cat(parts)  # (F, R): what no certain sequence explains yet
        self._scale = torch.cat([part.norm().expand(len(part)) for part in parts]).clamp_min(1e-300)[:, None]
        errors = [self.noise.get(p.weight, 0.0) ** 2 * p.out_features for p in scene.anatomy.projections]
        sizes = [float(part.norm().clamp_min(1e-300)) for part in parts]
        level = NOISY * sum(error / size**2 for error, size in zip(errors, sizes, strict=True)) ** 0.5
        self._token_noise = level * self._ledger.token_directions.norm(dim=0)  # (T,)
        self._place_noise = level * self._ledger.position_directions.norm(dim=0)  # (P,)
        self._first = self._by_token().norm(dim=0)
        self._first_places = self._by_position().norm(dim=0)
        keys, queries = keys_and_queries(scene.weights, scene.anatomy, pairs.inputs)
        self._vectors = torch.cat([keys, padded(queries)])
        ends_with = scene.seen.facts.vocabulary.ends_with
        self._end = ends_with[-1] if ends_with else None
        self._can_simulate = scene.seen.facts.task == "classification"
        self._context = context_of(scene.seen) if self._can_simulate and not self.noise else None
        self._layers = (
            scene.anatomy.projections if self._context is None else (*scene.anatomy.projections, self._context.layer)
        )
        self._width = len(self._rest)  # F
        self._row = {
            pair: row for row, pair in enumerate(zip(pairs.positions.tolist(), pairs.tokens.tolist(), strict=True))
        }

    def read(self) -> list[GuessedSequence]:
        """Return every sequence that could be put together, certain ones first."""
        left = self._search()
        while self._context is None and left and any(self._mend(group) for group in _disjoint(left)):
            left = self._search()
        return [*self.found, *_guesses(_disjoint(left), self.pairs)]

    def _search(self) -> list[Group]:
        """Take out sequences until no more are found; return what else was put together, or nothing where the batch is used up."""
        left: list[Group] = []
        for likely in LIKELY:
            while True:
                live = self._live()
                if self._used_up() or not bool(live.any()):
                    return []
                if self.scene.budget.exhausted():
                    return left
                self.rounds += 1
                before = len(self.found)
                left = self._round(live, likely)
                if len(self.found) == before:
                    break
        return left

    def _mend(self, group: Group) -> bool:
        """Exchange words of a near miss until it agrees with the update, and take it out; return whether that came to pass.

        A sequence longer than a head is wide is not tested by its attention, and comes out with words of its neighbours. But
        simulated, each word of its own says how far it is off, and a stranger is off most.
        """
        if not self._can_simulate:
            return False
        entries = self._settle(self._live())
        others: dict[int, list[int]] = {}
        in_question = (entries.open | entries.settled).nonzero().flatten().tolist()
        for row in sorted(in_question, key=lambda r: (not bool(entries.settled[r]), -float(entries.share[r]))):
            others.setdefault(int(self.pairs.positions[row]), []).append(row)
        best, members = float("inf"), group.members
        for _ in range(MENDS):
            if self.scene.budget.exhausted():
                return False
            (part,) = contributions(self.scene.seen, self._layers, [_ids(self.pairs, members)])
            misfits = self._alone(members, part)
            changes = [
                (place, row)
                for place in sorted(range(1, len(members)), key=lambda place: -misfits[place])
                for row in others.get(place, [])
                if row != members[place]
            ][:MOST_CHANGES]
            variants = [members, *((*members[:place], row, *members[place + 1 :]) for place, row in changes)]
            scores = self._scores(variants)
            for variant, (_, fit) in zip(variants, scores, strict=True):
                if fit is not None and fit[0] < AGREES:
                    self._take(Group(variant, 0.0), fit[1])
                    return True
            if scores[0][0] >= best:
                return False
            best, better = scores[0][0], list(members)
            gains = sorted(
                (scores[n + 1][0], place, row) for n, (place, row) in enumerate(changes) if scores[n + 1][0] < best
            )
            if not gains:
                return False
            changed: set[int] = set()
            for _, place, row in gains:  # all that help alone, the best at each place
                if place not in changed:
                    better[place] = row
                    changed.add(place)
            members = tuple(better)
        return False

    def _alone(self, members: tuple[int, ...], part: Contribution) -> list[float]:
        """Return how far each member of a simulated sequence is off by its own update; a half where that is not known."""
        rows = torch.tensor(members, device=self._entries.own.device)
        off = _misfit(part.gradients.transpose(0, 1) / self._scale.T, self._said(rows)).clamp_max(1.0)
        return torch.where(self._entries.settled[rows], off, 0.5).tolist()

    def _said(self, rows: Tensor) -> Tensor:
        """Return (m, F) what the update says of pairs, each layer's part at about the same norm; anything where it says nothing."""
        entries = self._entries
        return entries.gradients.T[entries.own[rows]]

    def _scores(self, variants: Sequence[tuple[int, ...]]) -> list[tuple[float, tuple[float, Tensor] | None]]:
        """Return for each variant the mean misfit of its members, and the fit of the whole as `_fit` gives it."""
        simulated = contributions(self.scene.seen, self._layers, [_ids(self.pairs, v) for v in variants])
        scores = []
        for variant, part in zip(variants, simulated, strict=True):
            off = self._alone(variant, part)[1:]
            scores.append((sum(off) / max(1, len(off)), self._fit(Group(variant, 0.0), part)))
        return scores

    def _settle(self, live: Tensor) -> Entries:
        """Settle what is left of the update, and keep what that says."""
        floors = (FLOOR * self._first + self._token_noise, FLOOR * self._first_places + self._place_noise)
        self._entries = entries = self._ledger.settle(self._rest / self._scale, live, floors)
        first = (self.pairs.positions == 0).nonzero().flatten()
        if len(first) == 1:  # in every sequence, so its update is a sum
            own, settled, sure = entries.own.clone(), entries.settled.clone(), entries.sure.clone()
            own[first], settled[first], sure[first] = -1, False, False
            self._entries = replace(entries, own=own, settled=settled, sure=sure)
        return self._entries

    def _used_up(self) -> bool:
        """Return whether every token of the batch is in a sequence that was taken out, if their number is known."""
        return self._context is not None and self._context.tokens == 0

    def _by_token(self) -> Tensor:
        return (self._rest / self._scale) @ self._ledger.token_directions

    def _by_position(self) -> Tensor:
        return (self._rest / self._scale) @ self._ledger.position_directions

    def _live(self) -> Tensor:
        """Return (N,) booleans: pairs whose token and position still have something in the update."""
        tokens = self._by_token().norm(dim=0) > VANISHED * self._first + self._token_noise
        places = self._by_position().norm(dim=0) > VANISHED * self._first_places + self._place_noise
        live: Tensor = tokens[self._ledger.tokens] & places[self._ledger.positions]
        return live

    def _round(self, live: Tensor, likely: float) -> list[Group]:
        """Put sequences together from what is left, and take out those that are certain; return the others."""
        pairs = self.pairs
        entries = self._settle(live)
        first = (pairs.positions == 0) & live
        start_row = first.nonzero().flatten().tolist() if int(first.sum()) == 1 else []
        candidates = (entries.open & (entries.share >= likely)) | entries.settled
        candidates[start_row] = True
        candidates |= _best_where_none(entries.open, candidates, entries.share, pairs.positions)
        rows = candidates.nonzero().flatten()
        where = pairs.positions[rows]
        if _one_per_position(where):
            # By elimination: nothing yet says that it explains itself.
            return self._sift([[Group(tuple(rows[where.argsort()].tolist()), residual=0.5)]])
        own = entries.own
        updates = both_sides(self._scale * entries.gradients, self.scene.anatomy)
        start = [rows.tolist().index(row) for row in start_row]
        closing = pairs.tokens[rows] == self._end if self._end is not None else None
        if closing is not None and not bool(closing.any()):
            closing = None
        evidence = Evidence(self._vectors[:, rows], updates, own[rows], where, closing=closing)
        strength = updates.square().sum((0, 2))
        seeds = [r for r in range(len(rows)) if int(own[rows[r]]) >= 0]
        seeds.sort(key=lambda r: -float(strength[own[rows[r]]]))
        longest = min(int(where.max()) + 1, self._vectors.shape[2] - UNTESTED if self._context is None else GROWN)
        everyone = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        climb = self._climber(live, candidates)
        doubtful: list[Group] = []
        # One seed a sequence first; the others of those that did not come out only where nothing did.
        tried: set[int] = set(start)
        before = len(self.found)
        while remaining := [seed for seed in seeds if seed not in tried]:
            claimed: set[int] = set()
            complete: list[list[Group]] = []
            open_: list[list[Group]] = []
            for seed in remaining:
                if seed in claimed or self._used_up() or self.scene.budget.exhausted():
                    continue
                tried.add(seed)
                grown = evidence.grow(list(dict.fromkeys([*start, seed])), everyone, self.scene.beam, longest)
                claimed |= set(grown[0].members)
                hypotheses = [Group(tuple(rows[list(g.members)].tolist()), g.residual) for g in grown[:HYPOTHESES]]
                if grown[0].residual < COMPLETE:
                    complete.append(hypotheses[:1])
                    tried |= set(grown[0].members)
                elif climb is None:
                    open_.append(hypotheses)
                else:
                    doubtful += self._sift(complete) + self._climb(climb, hypotheses[0], unlikely_too=False)
                    complete = []
                    if len(self.found) > before and doubtful:
                        return doubtful  # with what was found gone, the rest is easier
            doubtful += self._sift(complete)
            if len(self.found) > before:
                return doubtful + [hypotheses[0] for hypotheses in open_]
            doubtful += self._sift(open_)
            if len(self.found) > before or self.scene.budget.exhausted():
                return doubtful
        if climb is not None:
            for group in _disjoint(doubtful):
                self._climb(climb, group, unlikely_too=True)
                if len(self.found) > before or self.scene.budget.exhausted():
                    break
            return doubtful
        rows = live.nonzero().flatten()
        evidence = Evidence(self._vectors[:, rows], updates, own[rows], pairs.positions[rows])
        place = {row: n for n, row in enumerate(rows.tolist())}
        better = []
        for group in _disjoint(doubtful):
            if len(group.members) <= EXCHANGEABLE:
                members = tuple(place[row] for row in group.members)
                changed = evidence.exchanged(Group(members, group.residual), EXCHANGES)
                better.append([Group(tuple(rows[list(changed.members)].tolist()), changed.residual)])
        before = len(self.found)
        doubtful = self._sift(better) + [g for g in _disjoint(doubtful) if len(g.members) > EXCHANGEABLE]
        if len(self.found) > before or self.scene.budget.exhausted():
            return doubtful
        return self._sift(self._balanced(doubtful, live)) or doubtful

    def _climber(self, live: Tensor, candidates: Tensor) -> Climb | None:
        """Return the search among the pairs that are left, if contexts can be told."""
        if self._context is None:
            return None
        pairs = self.pairs
        closing = live & (pairs.tokens == self._end) if self._end is not None else torch.zeros_like(live)
        inner = live & ~closing & (pairs.positions > 0)
        ends = pairs.positions[closing if self._end is not None else inner].unique().tolist()
        return Climb(self._context, pairs.tokens[inner], pairs.positions[inner], candidates[inner], ends, self._end)

    def _climb(self, climb: Climb, group: Group, *, unlikely_too: bool) -> list[Group]:
        """Complete a sequence by its context, and take it out if it fits; return what becomes of it if not."""
        pairs = self.pairs
        known = dict(zip(pairs.positions[list(group.members)].tolist(), _ids(pairs, group.members), strict=True))
        reached = climb.complete(known, self.scene.budget, unlikely_too=unlikely_too)
        if reached is None:
            return [group]
        members = tuple(self._row[place, token] for place, token in enumerate(reached.ids))
        return self._sift([[Group(members, reached.off)]])

    def _balanced(self, groups: Sequence[Group], live: Tensor) -> list[list[Group]]:
        """Return what becomes of sequences that attention did not explain when their marks are balanced, by place."""
        options = self._options(live)
        budget = self.scene.budget.part(SHARE)
        better: list[list[Group]] = []
        ends = set(options.ends)
        done: set[int] = set()
        for group in groups:
            if len(done & set(group.members)) > len(group.members) / 2:
                continue
            starts = [options.start(group, end) for end in ends or options.last_of(group)]
            first = [options.balance.improve(start, options.inner, budget) for start in starts]
            tries: list[Group] = []
            for choice in sorted(first, key=lambda choice: choice.imbalance)[:HYPOTHESES]:
                found = options.balance.search(choice.options, options.inner, budget)
                if -1 not in found.options:
                    tries.append(Group(tuple(options.rows[list(found.options)].tolist()), found.imbalance))
                    if found.imbalance < BALANCED:
                        ends.discard(found.options[-1])
                        done |= set(tries[-1].members)
                        break
            better.append(sorted(tries, key=lambda group: group.residual))
        return [hypotheses for hypotheses in better if hypotheses]

    def _options(self, live: Tensor) -> _Options:
        """Return what may stand at each place, for all that the ledger says."""
        ledger, pairs, entries = self._ledger, self.pairs, self._entries
        at = ledger.positions
        # A token that is entered at a place where something is wrong, or not quite surely, may stand elsewhere as well.
        elsewhere = torch.zeros(int(ledger.tokens.max()) + 1, dtype=torch.bool, device=at.device)
        elsewhere[ledger.tokens[entries.settled & (entries.doubtful[at] | ~entries.sure)]] = True
        possible = entries.open | entries.settled | (live & elsewhere[ledger.tokens] & ~entries.closed[at])
        if int((pairs.positions == 0).sum()) == 1:
            possible |= pairs.positions == 0
        rows = possible.nonzero().flatten()
        # What is entered there may be wrong by another's part, or that of several: then its place is known, and its update is not.
        again = rows[entries.settled[rows] & (entries.doubtful | entries.shared)[at[rows]]]
        settled = torch.cat([entries.settled[rows], torch.zeros_like(again, dtype=torch.bool)])
        rows = torch.cat([rows, again])
        single = entries.single[at[rows]] & ~settled & entries.open[rows]
        gradients = torch.where(single, entries.left[:, at[rows]] / ledger.along_position[rows], self._said(rows).T)
        updates = both_sides(self._scale * gradients, self.scene.anatomy)
        is_end = torch.zeros_like(settled) if self._end is None else pairs.tokens[rows] == self._end
        return _Options(
            rows=rows,
            places=pairs.positions[rows].tolist(),
            balance=Balance(self._vectors[:, rows], updates, settled | single, pairs.positions[rows]),
            inner=~is_end,
            ends=(is_end & entries.last[at[rows]]).nonzero().flatten().tolist(),
        )

    def _sift(self, grown: list[list[Group]]) -> list[Group]:
        """Take out the sequences that agree with the update; return the best hypothesis of every seed that has none."""
        groups = list(dict.fromkeys(group for hypotheses in grown for group in hypotheses))
        if not groups or not self._can_simulate:
            return [hypotheses[0] for hypotheses in grown]
        simulated = contributions(self.scene.seen, self._layers, [_ids(self.pairs, g.members) for g in groups])
        if self._context is not None:
            taken = {group for group, part in zip(groups, simulated, strict=True) if self._reduces(group, part)}
            return [hypotheses[0] for hypotheses in grown if not taken & set(hypotheses)]
        fits = {
            group: fit
            for group, part in zip(groups, simulated, strict=True)
            if (fit := self._fit(group, part)) is not None and fit[0] < AGREES
        }
        done: set[int] = set()  # settled pairs of sequences that were taken out
        for group in sorted(fits, key=lambda g: fits[g][0]):
            mine = {row for row in group.members if bool(self._entries.settled[row])}
            if not mine & done:
                done |= mine
                self._take(group, fits[group][1])
        return [hypotheses[0] for hypotheses in grown if not any(group in fits for group in hypotheses)]

    def _reduces(self, group: Group, part: Contribution) -> bool:
        """Take a simulated sequence out if the rank of the update falls by its length then; return whether it does."""
        assert self._context is not None
        of_layer = part.gradients[:, :, self._width :]
        misfit, weights = self._context.fit(part.inputs, of_layer)
        if misfit >= REDUCES:
            return False
        self._context.take(part.inputs, torch.einsum("c,clo->lo", weights, of_layer))
        self._take(group, torch.einsum("c,clf->lf", weights, part.gradients[:, :, : self._width]))
        return True

    def _fit(self, group: Group, part: Contribution) -> tuple[float, Tensor] | None:
        """Return how far a simulated sequence is off, and its gradients (L, F), by the tokens that only it can have.

        A token may still occur several times at its one place, so each is asked alone, and a third have to agree: each one
        is a thousand equations for one unknown a class.
        """
        places = [n for n, row in enumerate(group.members) if int(self._entries.own[row]) >= 0]
        if not places:
            return None
        rows = torch.tensor([group.members[n] for n in places], device=part.gradients.device)
        seen, claimed = self._said(rows), part.gradients[:, places] / self._scale.T
        alone = _misfit(claimed.transpose(0, 1), seen)  # (m,)
        noise = self._token_noise[self._ledger.tokens[rows]] / self._ledger.along_token[rows].abs()
        agree = alone < AGREES + noise / seen.norm(dim=1)
        if int(agree.sum()) * 3 < len(places):
            return None
        chosen = claimed[:, agree]
        weights = torch.linalg.lstsq(chosen.flatten(1).T, seen[agree].flatten()[:, None]).solution[:, 0]  # (C',)
        missed = (seen[agree] - torch.einsum("c,cmf->mf", weights, chosen)).norm() - noise[agree].norm()
        return float(missed / seen[agree].norm()), torch.einsum("c,clf->lf", weights, part.gradients)

    def _take(self, group: Group, gradients: Tensor) -> None:
        """Book a sequence as found, and take its part out of the update."""
        self.found.append(GuessedSequence(_ids(self.pairs, group.members), confidence=1.0))
        self._rest = self._rest - gradients.T @ self._coordinates[list(group.members)]


@dataclass(frozen=True)
class _Options:
    """What may stand at each place of a sequence, and the search among that."""

    rows: Tensor
    """(n,) pairs; one may be there twice, with and without a known update."""
    places: list[int]
    """Position of each."""
    balance: Balance
    inner: Tensor
    """(n,) booleans: options that do not end a sequence."""
    ends: list[int]
    """Options that may be the last of one."""

    def start(self, group: Group, end: int) -> list[int]:
        """Return by place the options of a group's members before an end, -1 where it has none."""
        start = [-1] * self.places[end] + [end]
        members = set(group.members)
        for option, row in reversed(list(enumerate(self.rows.tolist()))):
            if row in members and self.places[option] < self.places[end] and bool(self.inner[option]):
                start[self.places[option]] = option
        return start

    def last_of(self, group: Group) -> list[int]:
        """Return the option of a group's last member, where sequences end with nothing in particular."""
        return (self.rows == group.members[-1]).nonzero().flatten().tolist()[:1]


def _misfit(claimed: Tensor, seen: Tensor) -> Tensor:
    """Return (m,): the share of each row of `seen` (m, F) that its own claims (m, C', F) leave unexplained."""
    solved = torch.linalg.lstsq(claimed.transpose(1, 2), seen[..., None]).solution  # (m, C', 1)
    left = seen - (claimed.transpose(1, 2) @ solved)[..., 0]
    share: Tensor = left.norm(dim=1) / seen.norm(dim=1).clamp_min(1e-300)
    return share


def _best_where_none(open_: Tensor, live: Tensor, share: Tensor, positions: Tensor) -> Tensor:
    """Return (N,) booleans: at every position where no pair is live, the open one with the largest coefficient."""
    chosen = torch.zeros_like(live)
    for position in set(positions[open_].tolist()) - set(positions[live].tolist()):
        here = (open_ & (positions == position)).nonzero().flatten()
        chosen[here[share[here].argmax()]] = True
    return chosen


def _possible(inside: Candidates, starts_with: tuple[int, ...]) -> Candidates:
    """Return the pairs that the tokenizer allows: what it puts before every text stands there, and nothing else does."""
    keep = torch.ones(len(inside), dtype=torch.bool, device=inside.tokens.device)
    for position, token in enumerate(starts_with):
        here, is_token = inside.positions == position, inside.tokens == token
        if bool((here & is_token).any()):
            keep &= ~here | is_token
    return inside.take(keep.nonzero().flatten())


def _disjoint(groups: Sequence[Group]) -> list[Group]:
    """Return the best of the sequences that no proof settled: those whose seeds say they are complete, and a few more.

    Several seeds of one sequence end on the same hypothesis, or on ones that differ in a token.
    """
    chosen: list[Group] = []
    for group in sorted(groups, key=lambda g: g.residual):
        near = any(len(set(group.members) & set(c.members)) > len(group.members) / 2 for c in chosen)
        if not near and (group.residual < COMPLETE or len(chosen) < MOST_INCOMPLETE):
            chosen.append(group)
    return chosen


def _ids(pairs: Candidates, members: Sequence[int]) -> tuple[int, ...]:
    return tuple(pairs.tokens[list(members)].tolist())


def _guesses(groups: Sequence[Group], pairs: Candidates) -> list[GuessedSequence]:
    return [GuessedSequence(_ids(pairs, group.members), confidence=confidence_of(group)) for group in groups]


def _inside(distance: Tensor, rank: int) -> int:
    """Return how many of the ranked pairs lie in the span: up to the widest gap, from as many pairs as directions on.

    There are at least as many true pairs as directions, and more where equal tokens stand at equal positions.

    Args:
        distance: (N,) ascending.
        rank: directions of the span.
    """
    near = int((distance < FARTHEST_INSIDE).sum())
    if near < rank or near == 0:
        return near
    steps = (distance[1:].clamp_min(1e-9) / distance[:-1].clamp_min(1e-9)).tolist()
    cuts = range(rank, min(near, len(steps)) + 1)
    return max(cuts, key=lambda cut: steps[cut - 1] if cut <= len(steps) else 0.0)


def _one_per_position(positions: Tensor) -> bool:
    """Return whether there is exactly one pair at every position from 0: then it is one sentence, and ordered."""
    ordered = positions.sort().values
    return bool(torch.equal(ordered, torch.arange(len(ordered), device=ordered.device)))
