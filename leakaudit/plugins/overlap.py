"""Overlap of a guess with the truth, for metrics and scoring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import cache
from typing import Any, Literal

from rouge_score import rouge_scorer, tokenizers

from leakaudit.plugins.metric_protocol import LabelCounts
from leakaudit.results.recovery import FOUND

ROUGE_SOURCE = "Lin 2004, by rouge_score without stemmer; F as in TAG and LAMP (Balunovic et al. 2022, Sec. 5)"

Rouge = Literal["rouge1", "rouge2", "rougeL"]

_SHORTEST: dict[Rouge, int] = {"rouge1": 1, "rouge2": 2, "rougeL": 1}
"""Least number of words of a true text that has an n-gram."""


def rouge_f(kind: Rouge, true_text: str, guess_text: str) -> float | None:
    """Return the ROUGE F-measure of a guess, from 0 to 1.

    Return None if the true text has no n-gram: otherwise a one-word text would score a ROUGE-2 of 0 even if it was recovered exactly.
    For ROUGE, words are runs of Latin letters and digits, so a text in another script has no words.

    Args:
        kind: `rouge1` for words, `rouge2` for pairs of neighbouring words, `rougeL` for the longest common subsequence of words.
        true_text: the reference.
        guess_text: what was recovered.

    >>> rouge_f("rouge2", "good", "good") is None
    True
    >>> rouge_f("rouge1", "a good film", "film good a")
    1.0
    """
    words, scorer = _scorer()
    if len(words.tokenize(true_text)) < _SHORTEST[kind]:
        return None
    return float(scorer.score(true_text, guess_text)[kind].fmeasure)


def is_found(true_text: str, guess_text: str) -> bool | None:
    """Return whether a guess found a text: its ROUGE-L is above `FOUND`.

    None if the true text has no word.

    >>> is_found("a b c d", "a b"), is_found("a b c d", "x")
    (True, False)
    """
    overlap = rouge_f("rougeL", true_text, guess_text)
    return None if overlap is None else overlap > FOUND


@cache
def _scorer() -> tuple[Any, Any]:
    words = tokenizers.DefaultTokenizer(use_stemmer=False)
    return words, rouge_scorer.RougeScorer(list(_SHORTEST), use_stemmer=False, tokenizer=words)


def clipped_overlap(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the size of the intersection of two multisets.

    >>> clipped_overlap([5, 5, 7], [5, 7, 7])
    2
    """
    return (Counter(first) & Counter(second)).total()


def longest_common_run(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest run of tokens that both sequences have.

    >>> longest_common_run([1, 2, 3, 4], [9, 2, 3, 8, 4])
    2
    """
    matcher = SequenceMatcher(a=first, b=second, autojunk=False)
    return matcher.find_longest_match().size


def label_success_rate(counts: LabelCounts) -> float | None:
    """Return the share of the labels that were recovered.

    None if the batch has no labels.

    sum_c min(true_c, guess_c) / max(number true, number guessed): LLG's attack success rate (Wainakh et al. 2022, Sec. 6.1).
    The paper divides by the number of extracted labels, which equals the batch size there. If the two numbers differ, we divide by the
    larger one, so that a guess gains nothing from too few or too many labels.

    >>> label_success_rate(LabelCounts(true=(2, 1), guess=(1, 2)))
    0.6666666666666666
    """
    if not sum(counts.true):
        return None
    correct = sum(min(true, guess) for true, guess in zip(counts.true, counts.guess, strict=True))
    return correct / max(sum(counts.true), sum(counts.guess))
