"""`rouge1`, `rouge2`, `rougeL`: F-measures of words, word pairs and the longest common subsequence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rouge_score import rouge_scorer, tokenizers

from leakaudit.registry import metric

if TYPE_CHECKING:
    from leakaudit.plugins.metric_protocol import Pair

Kind = Literal["rouge1", "rouge2", "rougeL"]

SHORTEST = {"rouge1": 1, "rouge2": 2, "rougeL": 1}
"""Words that the true text needs to have at least one n-gram."""

SOURCE = "Lin 2004, by rouge_score without stemmer; F as in TAG and LAMP (Balunovic et al. 2022, Sec. 5)"


@cache
def _scorer() -> tuple[Any, Any]:
    words = tokenizers.DefaultTokenizer(use_stemmer=False)
    return words, rouge_scorer.RougeScorer(list(SHORTEST), use_stemmer=False, tokenizer=words)


def rouge_f(kind: Kind, true_text: str, guess_text: str) -> float | None:
    """Return the F-measure of a guess, 0 to 1.

    None where the true text is too short to have a single n-gram: a one-word text would score a ROUGE-2 of 0 even if it
    came back exactly. ROUGE's words are runs of Latin letters and digits, so a text in another script has none.

    >>> rouge_f("rouge2", "good", "good") is None
    True
    >>> rouge_f("rouge1", "a good film", "film good a")
    1.0
    """
    words, scorer = _scorer()
    if len(words.tokenize(true_text)) < SHORTEST[kind]:
        return None
    return float(scorer.score(true_text, guess_text)[kind].fmeasure)


@metric("rouge1")
@dataclass(frozen=True)
class Rouge1:
    """F-measure of words, in any order."""

    label: ClassVar[str] = "ROUGE-1"
    meaning: ClassVar[str] = "Overlap of recovered and true text in words; 1 is all."
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Literal["sequence", "step"]] = "sequence"
    source: ClassVar[str] = SOURCE

    def __call__(self, pair: Pair) -> float | None:
        """Return ROUGE-1 F, None if the true text has no word."""
        return rouge_f("rouge1", pair.true_text, pair.guess_text)


@metric("rouge2")
@dataclass(frozen=True)
class Rouge2:
    """F-measure of pairs of neighbouring words."""

    label: ClassVar[str] = "ROUGE-2"
    meaning: ClassVar[str] = "Overlap of recovered and true text in pairs of neighbouring words; 1 is all."
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Literal["sequence", "step"]] = "sequence"
    source: ClassVar[str] = SOURCE

    def __call__(self, pair: Pair) -> float | None:
        """Return ROUGE-2 F, None if the true text has fewer than two words."""
        return rouge_f("rouge2", pair.true_text, pair.guess_text)


@metric("rougeL")
@dataclass(frozen=True)
class RougeL:
    """F-measure of the longest common subsequence of words."""

    label: ClassVar[str] = "ROUGE-L"
    meaning: ClassVar[str] = "Overlap of recovered and true text in the longest common sequence of words; 1 is all."
    higher_is_better: ClassVar[bool] = True
    level: ClassVar[Literal["sequence", "step"]] = "sequence"
    source: ClassVar[str] = SOURCE

    def __call__(self, pair: Pair) -> float | None:
        """Return ROUGE-L F, None if the true text has no word."""
        return rouge_f("rougeL", pair.true_text, pair.guess_text)
