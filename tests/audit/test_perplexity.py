"""Perplexity of guessed texts, by a model that the attacker has."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from leakaudit.audit.perplexity import NO_JUDGE, guess_perplexity
from leakaudit.client.observation import Observation
from leakaudit.plugins.attack_protocol import GuessedSequence, Reconstruction
from leakaudit.plugins.testing import language_model_step
from leakaudit.priors.ngram import build_ngram, write_ngram
from leakaudit.results.schema import Missing
from tests.support import tiny

TEXT = "the old dog chased a cat"


def _guess(*texts: tuple[int, ...]) -> Reconstruction:
    return Reconstruction(sequences=tuple(GuessedSequence(ids) for ids in texts))


def test_the_clients_own_language_model_judges() -> None:
    """Computed by hand for one text: the exponential of the mean loss of its tokens."""
    seen = language_model_step().observe()
    ids = tuple(range(5, 12))
    given = torch.tensor([ids])
    start = seen.facts.vocabulary.special.get("bos")
    found = guess_perplexity(_guess(ids), None, seen)
    framed = given if start is None else torch.cat([torch.tensor([[start]]), given], dim=1)
    with torch.no_grad():
        logits = seen.model(input_ids=framed).logits.log_softmax(-1)  # (1, T, V)
    nats = -logits[0, :-1].gather(1, framed[0, 1:, None]).mean()
    assert found == pytest.approx(math.exp(float(nats)), rel=1e-4)


def _classifier() -> Observation:
    return tiny.observe([TEXT], [0])


def test_a_classifier_does_not_judge_texts() -> None:
    """There is no number unless the attack has a prior.

    A guess of nothing has no perplexity at all.
    """
    seen = _classifier()
    assert guess_perplexity(_guess(tiny.ids_of(TEXT)), None, seen) is NO_JUDGE
    assert guess_perplexity(_guess(tiny.ids_of(TEXT)), "none", seen) is NO_JUDGE
    assert guess_perplexity(Reconstruction(tokens=(5, 6)), None, seen) is None
    assert guess_perplexity(_guess(()), None, seen) is None


def test_the_prior_of_the_attack_judges_where_the_model_cannot(tmp_path: Path) -> None:
    """N-grams of one text prefer it to the same words in another order."""
    tokenizer = tiny.bert_tokenizer()
    write_ngram(tmp_path / "ngram", build_ngram([TEXT], tokenizer, 3), tokenizer)
    (prior,) = tmp_path.iterdir()
    seen, ids = _classifier(), tiny.ids_of(TEXT)[1:-1]
    right, wrong = (guess_perplexity(_guess(text), str(prior), seen) for text in (ids, ids[::-1]))
    assert isinstance(right, float) and isinstance(wrong, float) and 1 < right < wrong


def test_a_judge_that_fails_leaves_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names the type of the exception, and not its message."""

    class Broken:
        def nll(self, sequences: object) -> list[float]:
            raise RuntimeError("the secret text")

    monkeypatch.setattr("leakaudit.audit.perplexity.load_prior", lambda *args, **more: Broken())
    found = guess_perplexity(_guess((5, 6)), None, _classifier())
    assert isinstance(found, Missing) and "RuntimeError" in found.missing and "secret" not in found.missing
