"""Reader of causal language models' batches, without a limit at the hidden size.

The head's rows say which token follows a prefix (`next_token_rows`), so sentences are grown from their starts (`decoder_prefixes`). What a
found sentence adds to the rows is computed and taken out (`decoder_rest`), which makes the rest clearer; that is repeated until nothing
new is found. The ends of sentences are mostly frequent words, whose rows say little at first; they are grown again at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakaudit.algorithms.position_rows import longest_length
from leakaudit.algorithms.rare_rows.decoder_prefixes import TAIL_WIDTH, Path, grow
from leakaudit.algorithms.rare_rows.decoder_rest import Rest
from leakaudit.algorithms.rare_rows.next_token_rows import RARE, NextTokenRows
from leakaudit.algorithms.rare_rows.sentence_rows import find_tables
from leakaudit.algorithms.resimulation import prove
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.plugins.attack_protocol import APPLIES, Applicability, GuessedSequence, Reconstruction, not_applicable
from leakaudit.plugins.budget import Budget

ACCEPTED = (15.0, 7.0, 3.0)
"""Evidence in nats of a sentence that is taken out, in the order in which they are tried. Chosen on training texts: what is taken out
wrongly costs more than what is taken out later."""

KEPT = 0.6
"""Part of its evidence that a sentence must keep when those before it are taken out. Our choice."""

TAIL = 5.0
"""Evidence in nats that a path may owe to frequent words at its end. Our choice."""

MOST_ROUNDS = 12
"""Most times that sentences are grown from their starts. Our choice: on training texts nothing new comes after eight."""

MOST_TRIED = 500
"""Most paths of one search that are tested again. Our choice: several times as many as there are sentences."""

FREQUENT = 2.5
"""Number of states from which a row counts as frequent. Our choice: half-way between two and three."""


def decoder_applies(seen: Observation) -> Applicability:
    """Say whether the rows of a causal language model's head can be read."""
    facts = seen.facts
    if facts.task != "causal-lm":
        return not_applicable(f"the head's rows name next tokens in causal language models; the task is {facts.task!r}")
    if not seen.whole:
        return not_applicable("sentences are simulated to the head, and only the first blocks of the model were kept")
    try:
        tables = find_tables(seen)
    except AnatomyError as error:
        return not_applicable(str(error))
    if tables.head not in seen.update:
        return not_applicable(f"the head's table {tables.head!r} is frozen or its update is not shared")
    if facts.training_mode and any(rate > 0 for rate in facts.dropout.values()):
        return not_applicable("dropout was active, so that the states of a prefix differ from the public model's")
    if seen.only_a_direction:
        return not_applicable(
            "the update is a difference of weights whose entries tell no sizes, and rows are sums of states"
        )
    if seen.noise_sigma > 0.0 or seen.zeroed:
        return not_applicable(
            "a declared defence adds noise to the update or sets entries to zero; rows are read exactly"
        )
    return APPLIES


def recover_decoder(seen: Observation, rng: torch.Generator, budget: Budget) -> Reconstruction:
    """Recover the sentences of a causal language model's batch.

    Args:
        seen: `decoder_applies` to it.
        rng: draws sentences from the client's model, to learn what its states look like.
        budget: when it is used up, what was found so far is returned.
    """
    found = Pursuit(seen, rng, budget)
    found.run()
    return found.reconstruction()


@dataclass
class Found:
    """A sentence that was taken out."""

    tokens: tuple[int, ...]
    sure: int
    """Number of its first tokens that a rare row confirms."""


class Pursuit:
    """The search for all sentences of a batch."""

    def __init__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> None:
        """Prepare the rows; see `recover_decoder`."""
        self._seen, self._budget = seen, budget
        self.rest = Rest(seen, find_tables(seen), rng)
        bound = seen.facts.vocabulary.max_length
        self._longest = min(longest_length(seen) or bound, bound)
        self._begin = len(seen.facts.vocabulary.starts_with) + 1
        self.found: list[Found] = []
        self.watch: Callable[[str], None] = lambda _: None

    def run(self) -> None:
        """Find sentences until nothing new comes or the budget is used up."""
        level = 0
        best = (self.rest.unexplained(), list[Found]())
        for _ in range(MOST_ROUNDS):
            new = self._new_sentences(ACCEPTED[level])
            self._take()
            self._grow_tails(new)
            self._take()
            self.watch(f"new {new}")
            changed = self._renew()
            self._take()
            self.watch(f"renewed {changed}")
            best = min(best, (self.rest.unexplained(), [replace(one) for one in self.found]), key=lambda pair: pair[0])
            level += not new
            if level == len(ACCEPTED) or self._budget.exhausted():
                break
        self.found = best[1]
        self._take()
        self.watch("best")

    def _new_sentences(self, least: float) -> int:
        """Grow sentences from their starts, and keep those with enough evidence."""
        rows, rest = self.rest.rows(), self.rest
        if not len(rows.tokens):
            return 0
        paths = grow(rest.states, rows, rest.typical, rest.starts(), self._longest, self._budget)
        rare = set(rows.tokens[rows.counts < RARE].tolist())
        often = set(rows.tokens[rows.counts > FREQUENT].tolist())
        before = len(self.found)
        used: set[int] = set()
        tried = 0
        for path in paths:
            if path.evidence <= least or tried == MOST_TRIED or self._budget.exhausted():
                break
            mine = [token for token in path.tokens[path.begin :] if token in rare]
            if len(set(mine)) < len(mine) or used & set(mine):
                continue
            tried += 1
            tokens = path.tokens
            while len(tokens) > path.begin + 1 and tokens[-1] in often:
                tokens = tokens[:-1]
            if self._accept(rows, Path(tokens, path.begin, path.evidence), least):
                used |= set(mine)
                self.found.append(Found(tokens, len(tokens)))
        return len(self.found) - before

    def _accept(self, rows: NextTokenRows, path: Path, least: float) -> bool:
        """Take a path out of rows if enough of its evidence is left."""
        tokens, places = path.tokens, range(path.begin, len(path.tokens))
        numbers = [rows.index_of(tokens[place]) for place in places]
        if not numbers or min(numbers) < 0:
            return not numbers
        states = self.rest.states.along(tokens)[path.begin - 1 : -1]
        last = [torch.tensor([tokens[place - 1]], device=states.device) for place in places]
        usual = torch.cat([self.rest.typical(place, token) for place, token in zip(places, last, strict=True)])
        total = float(rows.gains(torch.tensor(numbers, device=states.device), states, usual).sum())
        if total <= max(least, KEPT * path.evidence - TAIL):
            return False
        for number, state in zip(numbers, states, strict=True):
            rows.take(number, state)
        return True

    def _take(self) -> None:
        self.rest.take([one.tokens for one in self.found])

    def _grow_tails(self, new: int) -> None:
        """Grow the ends of the last `new` sentences, those of one length together."""
        rows = self.rest.rows()
        by_length: dict[int, list[Found]] = {}
        for one in self.found[len(self.found) - new :]:
            by_length.setdefault(len(one.tokens), []).append(one)
        for _, group in sorted(by_length.items()):
            paths = self._continued(rows, sorted({one.tokens for one in group}))
            for one in group:
                fitting = (path for path in paths if path.tokens[: path.begin] == one.tokens)
                path = next((path for path in fitting if self._accept(rows, path, 0.0)), None)
                one.tokens = path.tokens if path is not None else one.tokens

    def _renew(self) -> int:
        """Look at each sentence again while all others are taken out.

        A sentence without evidence is dropped, and the end of every other one is grown anew.

        Returns:
            How many sentences have changed.
        """
        rows, before = self.rest.rows(), [one.tokens for one in self.found]
        for one in list(self.found):
            if self._budget.exhausted():
                break
            self._give_back(rows, one.tokens)
            sure = one.tokens[: one.sure]
            if not self._accept(rows, Path(sure, self._begin, 0.0), ACCEPTED[-1]):
                self.found.remove(one)
                continue
            paths = self._continued(rows, [sure])
            one.tokens = paths[0].tokens if paths and self._accept(rows, paths[0], 0.0) else sure
        after = {one.tokens for one in self.found}
        return sum(tokens not in after for tokens in before)

    def _give_back(self, rows: NextTokenRows, tokens: tuple[int, ...]) -> None:
        """Put the states of a sentence back into the rows of the tokens that follow."""
        states = self.rest.states.along(tokens)
        for place in range(self._begin, len(tokens)):
            if (row := rows.index_of(tokens[place])) >= 0:
                rows.give_back(row, states[place - 1])

    def _continued(self, rows: NextTokenRows, starts: Sequence[tuple[int, ...]]) -> list[Path]:
        rest, width = self.rest, max(TAIL_WIDTH, 4 * len(starts))
        given = torch.tensor(starts, device=rest.head.device)
        return (
            grow(rest.states, rows, rest.typical, given, self._longest, self._budget, width) if len(rows.tokens) else []
        )

    def reconstruction(self) -> Reconstruction:
        """Return what was found, with what is proved."""
        error = self.rest.agreement()
        guess = [GuessedSequence(one.tokens, confidence=_confidence(error[list(one.tokens)])) for one in self.found]
        guess.sort(key=lambda one: -one.confidence)
        proof = prove(self._seen, guess, self._budget)
        diagnostics = {"targets": self.rest.targets, "targets_found": float(self.rest.taken.targets)}
        return Reconstruction(
            sequences=proof.sequences,
            stop="budget" if self._budget.exhausted() else "done",
            diagnostics=diagnostics | proof.diagnostics,
        )


def _confidence(errors: Tensor) -> float:
    """Return 1 if a sentence's best half of rows is explained, towards 0 if not."""
    return float((1 - errors.median()).clamp(0.0, 0.99))
