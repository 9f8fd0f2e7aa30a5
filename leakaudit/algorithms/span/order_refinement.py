"""Correction of guessed sequences by simulation.

If noise makes the tests uncertain, assembled sequences have small errors. For example, two sequences have a token
exchanged, or a token is missing, so that all later tokens stand one place too early. Each correction is simulated and
kept if it lowers the simulation's error. (Own derivation.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from leakaudit.algorithms.resimulation import largest_error, prove, simulation_error
from leakaudit.client.observation import Observation
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction
from leakaudit.plugins.budget import Budget

LESS = 0.98
"""Factor by which a change must lower the error.
Our choice: changes that matter lower it by tenths."""

ROUNDS = 3
"""Passes over all positions. Our choice: most small errors are corrected in the first."""

MOST_CHANGES = 400
"""Most changes that are simulated.
Our choice: with two sentences and a six-layer encoder a change takes 0.03 s, and some hundred changes are needed."""

Sequences = list[tuple[int, ...]]


def refined(
    seen: Observation,
    found: Reconstruction,
    options: Mapping[int, Sequence[int]],
    own_score: float,
    budget: Budget,
    proof: Budget,
) -> Reconstruction:
    """Return a reconstruction with refined sequences, proved where possible.

    Args:
        seen: the observation.
        found: a reconstruction with sequences.
        options: position -> token ids that may stand there.
        own_score: of sequences that are not proved.
        budget: of the changes.
        proof: of the proof.
    """
    better = refine_sequences(seen, [sequence.token_ids for sequence in found.sequences or ()], options, budget)
    again = prove(seen, [GuessedSequence(ids, own_score=own_score) for ids in better], proof)
    return replace(
        found,
        sequences=again.sequences,
        label_counts=again.label_counts,
        diagnostics=dict(found.diagnostics) | again.diagnostics,
    )


def refine_sequences(
    seen: Observation, guess: Sequence[tuple[int, ...]], options: Mapping[int, Sequence[int]], budget: Budget
) -> Sequences:
    """Return the guess with every change that lowers the simulation's error.

    Args:
        seen: the observation; its step must be one that can be simulated.
        guess: token ids of every sequence.
        options: position -> token ids that may stand there.
        budget: checked between changes.
    """
    best = [tuple(sequence) for sequence in guess]
    error, enough = simulation_error(seen, best), largest_error(seen)
    tried = 0
    for _ in range(ROUNDS):
        before = error
        for position in range(max(map(len, best)) + 1):
            for changed in _changes(best, position, options.get(position, ())):
                if budget.exhausted() or error <= enough or tried >= MOST_CHANGES:
                    return best
                tried += 1
                new = simulation_error(seen, changed)
                if new < LESS * error:
                    best, error = changed, new
        if error >= before:
            break
    return best


def _changes(best: Sequences, position: int, tokens: Sequence[int]) -> Iterator[Sequences]:
    """Yield the guess with one change at a position.

    A token is inserted, replaced, removed, or exchanged between two sequences.
    """
    for row, sequence in enumerate(best):
        if position > len(sequence):
            continue
        before, here, after = sequence[:position], sequence[position : position + 1], sequence[position + 1 :]
        ways = [(*before, token, *here, *after) for token in tokens if here != (token,)]  # a token was missed
        ways += [(*before, token, *after) for token in tokens if here and here != (token,)]
        if here and len(sequence) > 1:
            ways.append((*before, *after))
        yield from ([*best[:row], way, *best[row + 1 :]] for way in ways)
        for second in range(row + 1, len(best)):
            pair = (sequence, best[second])
            if min(map(len, pair)) > position and pair[0][position] != pair[1][position]:
                changed = list(best)
                changed[row] = (*pair[0][:position], pair[1][position], *pair[0][position + 1 :])
                changed[second] = (*pair[1][:position], pair[0][position], *pair[1][position + 1 :])
                yield changed
