"""Reader for adapters of a decoder after one step of Adam from zero moments.

The step is inverted (`gradient_estimate`), which leaves entries with very unequal errors, so the rows of A's gradient are repaired first
(`row_denoising`). Their row space gives the words (`adapter_words`), and a pursuit of prefixes the sentences (`adapter_sentences`). If these
are not proved, sentences grow from the words by the inputs of all layers and by their own gradients (`adapter_search`), one after the other, until one more does not explain more. The step is computed again from them
(`resimulation`); only a guess that agrees is proved. (Own derivation.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leakaudit.algorithms.adam_step import AdamStep, known_rows
from leakaudit.algorithms.gradient_estimate import as_gradient
from leakaudit.algorithms.resimulation import Proof, prove
from leakaudit.algorithms.span.adapter_gradients import AdapterAgreement
from leakaudit.algorithms.span.adapter_inputs import AdapterInputs
from leakaudit.algorithms.span.adapter_search import NEARLY, Found, SentenceSearch
from leakaudit.algorithms.span.adapter_sentences import AdapterSentences, guessed, proved
from leakaudit.algorithms.span.adapter_words import BatchWords, words_of
from leakaudit.algorithms.span.matching_pursuit import word_weights
from leakaudit.algorithms.span.prefix_ends import SURE
from leakaudit.algorithms.span.problem import SpanProblem, only_adapters
from leakaudit.algorithms.span.reachability import PairReach, prefixes_of_words
from leakaudit.algorithms.span.row_denoising import RepairedRows, repaired_rows
from leakaudit.algorithms.span.row_evidence import Explained, RowEvidence
from leakaudit.client.observation import Observation
from leakaudit.errors import AnatomyError
from leakaudit.models.structure import Adapter, adapter_groups
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction

TYPICAL, LENGTH = 128, 24
"""Random texts, and tokens of each, whose inputs tell what inputs look like. Our choice: some thousand inputs."""

MORE_WORDS = 12
"""Most tokens of a sentence beyond the number of distinct words. Our choice: words repeat, and some positions must stay unused."""

GROWS = 0.01
"""Least rise of the cosine by which one more sentence is believed. Our choice."""

MORE_POSITIONS = 24
"""Most positions of one sentence beyond the number of its distinct words. Our choice: words repeat."""

PRESENT = 8.0
"""Weight of a word or position that is present, as a multiple of the weight of unused positions.
Chosen on training texts: present ones weigh ten times as much and more."""

PURSUIT = 0.5
"""Share of the time for the pursuit of prefixes; the rest is for the search by gradients. Our choice."""

SHARE = 0.9
"""Share of the time for the search; the rest is for the proof. Our choice."""

ROUNDING = 1e-6
"""Error of a gradient's entries as a share of their usual size, if none is known. Our choice: sums of float32."""


def fits(problem: SpanProblem) -> bool:
    """Say whether a decoder's adapters are shared after a first step of Adam."""
    facts = problem.seen.facts
    masked = facts.training_mode and any(rate > 0 for rate in facts.dropout.values())
    return (
        AdamStep.of(problem.seen) is not None
        and facts.task == "causal-lm"
        and problem.anatomy.causal
        and problem.seen.whole
        and not masked
        and only_adapters(problem.seen.update, problem.anatomy)
    )


def read(problem: SpanProblem) -> Reconstruction | None:
    """Return the sentences, or the words if no sentence was found, or None.

    None if A has no update, as before the first step; no sequences if no words were found.
    """
    estimate, _ = as_gradient(problem.seen)
    try:
        every = (_shared(estimate, group) for group in adapter_groups(estimate.model))
        groups = [group for group in every if group]
    except AnatomyError:
        return None
    if not groups or not all(bool(estimate.update[a.down.weight].any()) for a in groups[0]):
        return None
    inputs = AdapterInputs(estimate.model, groups)
    typical = _typical_inputs(problem, inputs)
    rows = [_rows(estimate, group, given) for group, given in zip(inputs.groups, typical, strict=True)]
    words = words_of(problem.stage, rows[0], problem.budget.part(SHARE / 2))
    if not words.certain:
        return Reconstruction(sequences=())
    likely = _by_prefixes(problem, words)
    if likely is not None and _all_proved(likely):
        return likely
    layers = [RowEvidence(found, given) for found, given in zip(rows, typical, strict=True)]
    search = SentenceSearch(
        seen=estimate,
        inputs=inputs,
        agreement=AdapterAgreement(estimate, [adapter for group in groups for adapter in group]),
        start=Explained.nothing(layers),
        words=torch.tensor([*words.certain, *words.spare], device=problem.stage.device),
        longest=min(problem.stage.max_length, len(words.certain) + MORE_WORDS),
        rng=problem.rng,
        budget=problem.budget.part(SHARE),
        is_right=lambda sentences: _proved(problem, sentences),
    )
    alone = _by_positions(problem, words.certain, search)
    found = _reconstruction(problem, words, [alone] if alone is not None else _sentences(search))
    return found if likely is None or _all_proved(found) else likely


def _all_proved(found: Reconstruction) -> bool:
    return bool(found.sequences) and all(sequence.proved for sequence in found.sequences or ())


def _by_prefixes(problem: SpanProblem, words: BatchWords) -> Reconstruction | None:
    """Return the sentences that the pursuit of prefixes finds, or None.

    If not all of them are likely, only the likely ones are returned.
    """
    parts = AdapterSentences.of(problem)
    known = torch.tensor(words.certain, device=problem.stage.device)
    ends = None if parts is None else parts.found(problem, known, problem.budget.part(PURSUIT))
    if ends is None:
        return None
    proof = proved(problem, ends) if ends.cosine > NEARLY else Proof(tuple(guessed(ends, SURE)))
    if not proof.sequences:
        return None
    return Reconstruction(
        sequences=proof.sequences,
        tokens=None if proof.complete else words.certain,
        diagnostics={"words": float(len(words.certain)), "cosine": ends.cosine} | proof.diagnostics,
        reach=_reach(problem, words),
    )


def _reach(problem: SpanProblem, words: BatchWords) -> PairReach:
    return prefixes_of_words((*words.certain, *words.spare), problem.stage.vocabulary)


def _by_positions(problem: SpanProblem, words: Sequence[int], search: SentenceSearch) -> Found | None:
    """Return the one sentence of a batch, in the order that positions give, or None.

    None if inputs carry no position, or if the words form no single sentence. All inputs of these words lie in a space of about as many
    dimensions as there are words and positions, so one regression a row removes nearly all rounding (`adam_step.known_rows`).
    """
    stage, step = problem.stage, AdamStep.of(problem.seen)
    if stage.position_free or not stage.additive or step is None:
        return None
    tokens = torch.tensor(words, device=stage.device)
    count = min(len(words) + MORE_POSITIONS, stage.max_length)
    where = torch.arange(count, device=stage.device).repeat(len(words))
    axes = torch.linalg.svd(stage.inputs(tokens.repeat_interleave(count), where).double(), full_matrices=False)
    basis = axes.Vh[1e-9 * axes.S[0] < axes.S]
    rows = []
    for adapter in search.inputs.groups[0]:
        moved, off = (adapter.down.by_output(part).double() for part in step.moved(adapter.down.weight))
        rows.append(known_rows(moved, off, step.eps(adapter.down.weight), basis)[0])
    kept, used = word_weights(stage, tokens, torch.cat(rows), count).above(PRESENT)
    order = kept.order(used)
    found = None if order is None else search.ended(tuple(order))
    return found if found is not None and search.right(found) else None


def _shared(estimate: Observation, group: tuple[Adapter, ...]) -> tuple[Adapter, ...]:
    return tuple(a for a in group if a.down.weight in estimate.update and a.up.weight in estimate.update)


def _typical_inputs(problem: SpanProblem, inputs: AdapterInputs) -> list[Tensor]:
    """Return for each group (M, D): its inputs on random token ids."""
    length = min(LENGTH, problem.stage.max_length)
    ids = torch.randint(problem.stage.vocabulary, (TYPICAL, length), generator=problem.rng)
    return [given.flatten(0, 1).double() for given in inputs.run(ids.to(problem.stage.device))]


def _rows(estimate: Observation, group: Sequence[Adapter], typical: Tensor) -> RepairedRows:
    gradients = [a.down.by_output(estimate.update[a.down.weight]).double() for a in group]
    errors = [
        a.down.by_output(estimate.error[a.down.weight]).double()
        if a.down.weight in estimate.error
        else torch.full_like(g, ROUNDING * float(g.square().mean().sqrt()))
        for a, g in zip(group, gradients, strict=True)
    ]
    scale = typical.square().mean(dim=0).sqrt()
    return repaired_rows(torch.cat(gradients), torch.cat(errors), scale.clamp_min(1e-6 * float(scale.max())))


def _sentences(search: SentenceSearch) -> list[Found]:
    """Return the sentences, one after the other, as long as one more explains more."""
    found: list[Found] = []
    while not search.budget.exhausted():
        now = search.beside([each.tokens for each in found])
        more = now.sentence()
        if more is None or (found and more.cosine < found[-1].cosine + GROWS):
            break
        found.append(more)
        if now.right(more):
            break
    return found


def _proved(problem: SpanProblem, sentences: Sequence[tuple[int, ...]]) -> bool:
    """Return whether the step of these sentences is the observed one."""
    guess = [GuessedSequence(tokens, own_score=0.5) for tokens in sentences]
    return prove(problem.seen, guess, problem.budget).complete


def _reconstruction(problem: SpanProblem, words: BatchWords, found: list[Found]) -> Reconstruction:
    reach = _reach(problem, words)
    diagnostics = {"words": float(len(words.certain))}
    if not found:
        return Reconstruction(tokens=words.certain, diagnostics=diagnostics, reach=reach)
    cosine = found[-1].cosine
    guess = [GuessedSequence(each.tokens, own_score=max(0.0, min(cosine, 0.99))) for each in found]
    proof = prove(problem.seen, guess, problem.budget)
    return Reconstruction(
        sequences=proof.sequences,
        tokens=None if proof.complete else words.certain,
        diagnostics=diagnostics | {"cosine": cosine} | proof.diagnostics,
        reach=reach,
    )
