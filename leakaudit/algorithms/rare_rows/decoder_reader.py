"""Reader of causal language models' batches, without a limit at the hidden size.

The head's rows say which token follows a prefix (`next_token_rows`), so sentences are grown from their starts (`decoder_prefixes`). What a
found sentence adds to the rows is computed and taken out (`decoder_rest`), which makes the rest clearer; that is repeated until nothing
new is found. The ends of sentences are mostly frequent words, whose rows say little at first; they are grown again at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from leakaudit.algorithms.rare_rows.decoder_prefixes import TAIL_WIDTH, Path, grow
from leakaudit.algorithms.rare_rows.decoder_rest import Rest
from leakaudit.algorithms.rare_rows.next_token_rows import RARE, NextTokenRows
from leakaudit.algorithms.rare_rows.sentence_rows import find_tables
from leakaudit.algorithms.resimulation import AGREES, prove
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure.embeddings import other_tables
from leakaudit.plugins.attack_protocol import APPLIES, Applicability, GuessedSequence, Reconstruction, not_applicable
from leakaudit.plugins.budget import Budget

ACCEPTED = (15.0, 7.0, 3.0)
"""Evidence in nats of a sentence that is taken out, in the order in which they are tried. Chosen on training texts: what is taken out
wrongly costs more than what is taken out later."""

KEPT = 0.6
"""Part of its evidence that a sentence must keep when those before it are taken out. Our choice."""

MOST_ROUNDS = 12
"""Most times that sentences are grown from their starts. Our choice: on training texts nothing new comes after eight."""

TAIL_ROUNDS = 2
"""Times that all ends are grown anew. Our choice: the second time changes few of them."""

MOST_TRIED = 3000
"""Most paths of one search that are looked at. Our choice."""

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
        return not_applicable("the update is a difference of weights whose entries tell no sizes, and rows are sums of states")
    if seen.noise_sigma > 0.0 or seen.zeroed:
        return not_applicable("a declared defence adds noise to the update or sets entries to zero; rows are read exactly")
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
        self._longest = longest_sentence(seen)
        self.found: list[Found] = []
        self.watch: Callable[[str], None] = lambda _: None

    def run(self) -> None:
        """Find sentences until nothing new comes or the budget is used up."""
        level = 0
        for _ in range(MOST_ROUNDS):
            new = self._new_sentences(ACCEPTED[level])
            self.watch(f"new {new}")
            self._take()
            self._regrow_tails(only_new=new)
            self.watch("tails")
            level += not new
            if level == len(ACCEPTED) or self._budget.exhausted():
                break
        for _ in range(TAIL_ROUNDS):
            if not self._budget.exhausted():
                self._cut_tails()
                self._regrow_tails(only_new=len(self.found))
                self.watch("all tails")

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
        for path in [path for path in paths if path.evidence > least][:MOST_TRIED]:
            mine = [token for token in path.tokens[path.begin :] if token in rare]
            if len(set(mine)) < len(mine) or used & set(mine):
                continue
            tokens = path.tokens
            while len(tokens) > path.begin + 1 and tokens[-1] in often:
                tokens = tokens[:-1]
            if self._accept(rows, Path(tokens, path.begin, path.evidence), least):
                used |= set(mine)
                self.found.append(Found(tokens, len(tokens)))
        return len(self.found) - before

    def _accept(self, rows: NextTokenRows, path: Path, least: float) -> bool:
        """Take a path out of rows if enough of its evidence is left."""
        states = self.rest.states.along(path.tokens)
        done: list[tuple[int, Tensor]] = []
        total = 0.0
        for place in range(path.begin, len(path.tokens)):
            row, state = rows.index_of(path.tokens[place]), states[place - 1]
            if row < 0:
                total = -torch.inf
                break
            usual = self.rest.typical(place, torch.tensor([path.tokens[place - 1]], device=state.device))[0]
            total += rows.evidence_of(row, state, usual) + float(rows.prior(state[None])[0, row])
            rows.take(row, state)
            done.append((row, state))
        if total > max(least, KEPT * path.evidence - DROP_OF_TAIL):
            return True
        for row, state in done:
            rows.give_back(row, state)
        return False

    def _take(self) -> None:
        self.rest.take([one.tokens for one in self.found])

    def _cut_tails(self) -> None:
        for one in self.found:
            one.tokens = one.tokens[: one.sure]
        self._take()

    def _regrow_tails(self, only_new: int) -> None:
        """Grow the ends of the last sentences, those of one length together."""
        open_ones = self.found[len(self.found) - only_new :]
        if not open_ones:
            return
        rows, rest = self.rest.rows(), self.rest
        by_length: dict[int, list[Found]] = {}
        for one in open_ones:
            by_length.setdefault(len(one.tokens), []).append(one)
        grown: list[tuple[Path, Found]] = []
        for length, group in by_length.items():
            starts = torch.tensor(sorted({one.tokens for one in group}), device=rest.head.device)
            for path in grow(rest.states, rows, rest.typical, starts, self._longest, self._budget, TAIL_WIDTH):
                grown.extend((path, one) for one in group if one.tokens == path.tokens[:length])
        done: set[int] = set()
        for path, one in sorted(grown, key=lambda pair: -pair[0].evidence):
            if id(one) not in done and self._accept(rows, path, 0.0):
                one.tokens = path.tokens
                done.add(id(one))
        self._take()

    def reconstruction(self) -> Reconstruction:
        """Return what was found, with what is proved."""
        error = self.rest.agreement()
        guess = [
            GuessedSequence(one.tokens, confidence=_confidence(error[list(one.tokens)])) for one in self.found
        ]
        guess.sort(key=lambda one: -one.confidence)
        proof = prove(self._seen, guess, self._budget)
        diagnostics = {"targets": self.rest.targets, "targets_found": float(self.rest.taken.targets)}
        return Reconstruction(
            sequences=proof.sequences,
            stop="budget" if self._budget.exhausted() else "done",
            diagnostics=diagnostics | proof.diagnostics,
        )


DROP_OF_TAIL = 5.0


def _confidence(errors: Tensor) -> float:
    """Return 1 if a sentence's best half of rows is explained, towards 0 if not."""
    return float((1 - errors.median()).clamp(0.0, 0.99))


def longest_sentence(seen: Observation) -> int:
    """Return the largest number of tokens that a sentence may have.

    Where position vectors are trained, the rows of places behind all sentences are zero.
    """
    bound = seen.facts.vocabulary.max_length
    tables = find_tables(seen)
    used = {id(module) for module in seen.model.modules()}
    for name in other_tables(seen.model, tables.words, used):
        update = seen.update.get(name)
        if update is not None and len(update) >= bound and name != tables.head:
            touched = update.any(dim=1).nonzero().flatten()
            if len(touched):  # the last token of a sentence has no target, so its place has no gradient
                bound = min(bound, int(touched[-1]) + 2)
    return bound
