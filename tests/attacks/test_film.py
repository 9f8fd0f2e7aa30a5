"""`film` writes the sentences of a batch with its words and a language model."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leakaudit.algorithms.film.bag import read_bag, with_granted_counts
from leakaudit.attacks.film import Film
from leakaudit.client.facts import Granted
from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep
from leakaudit.plugins.attack_protocol import Reconstruction
from leakaudit.plugins.budget import Budget
from leakaudit.plugins.testing import check_attack
from tests.support import memorised, tiny

SMALL: dict[str, Any] = {"phrase_steps": 5, "token_steps": 5, "candidates": 6}


def _run(seen: Observation, seconds: float = 600.0, **knobs: Any) -> Reconstruction:
    return Film(**SMALL | knobs)(seen, torch.Generator().manual_seed(0), Budget(seconds))


def _granting(step: ClientStep, *names: str) -> Observation:
    return step.observe().granting(Granted.of(step.truth.sequences(), (), names))


def _texts(guess: Reconstruction) -> list[str]:
    return [memorised.tokenizer().decode(one.token_ids) for one in guess.sequences or ()]


def _blank(seen: Observation, **facts: Any) -> Observation:
    """Return the observation with other facts about the vocabulary."""
    vocabulary = seen.facts.vocabulary.model_copy(update=facts)
    return replace(seen, facts=seen.facts.model_copy(update={"vocabulary": vocabulary}))


def _save(folder: Path, tokenizer: Any) -> None:
    """Write a small language model with a tokenizer."""
    model: Any = tiny.gpt2_lm()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_it_keeps_what_every_attack_promises() -> None:
    """The same seed, the same guess; nothing is changed."""
    check_attack(Film(**SMALL | {"beam": 4}), {"a language model": lambda: memorised.step(0).observe()})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("number", range(2))
def test_a_sentence_that_the_model_knows_is_found(number: int, tied: bool) -> None:
    """Nothing is granted."""
    guess = _run(memorised.step(number, tied=tied).observe())
    assert memorised.SENTENCES[number] in _texts(guess)


def test_every_sentence_of_a_batch_is_found() -> None:
    """Each first word has beams of its own."""
    guess = _run(memorised.step(*range(6)).observe())
    assert set(memorised.SENTENCES[:6]) <= set(_texts(guess))


def test_the_paper_s_preset_finds_one_sentence() -> None:
    """Its beams run to the longest length, and the text is cut at the first stop."""
    guess = _run(memorised.step(0, 1).observe(), preset="paper")
    assert len(guess.sequences or ()) == 1 and _texts(guess)[0] in memorised.SENTENCES[:2]


def test_repetition_finds_other_sentences() -> None:
    """As in Sec. 4.5: the n-grams of earlier results do not come again."""
    guess = _run(memorised.step(0, 1).observe(), preset="paper", sentences=2)
    beginnings = {sentence[:12] for sentence in memorised.SENTENCES[:2]}
    assert {text[:12] for text in _texts(guess)} == beginnings


def test_the_released_preset_asks_for_its_oracle() -> None:
    """It says what has to be granted, and the grants are named with its scores."""
    step = memorised.step(0, 1)
    for grants in ((), ("words",), ("lengths",)):
        verdict = Film(preset="released").applies(_granting(step, *grants))
        assert not verdict and "`words` and `lengths`" in verdict.reason
    seen = _granting(step, "words", "lengths")
    assert Film(preset="released").applies(seen)
    assert seen.facts.granted.names() == ("lengths", "words")
    assert _texts(_run(seen, preset="released"))[0] in memorised.SENTENCES[:2]


@pytest.mark.parametrize("preset", ["honest", "paper"])
def test_granted_words_are_used_by_the_released_preset_alone(preset: Any) -> None:
    """The others guess the same with and without them."""
    step = memorised.step(0)
    assert _run(step.observe(), preset=preset) == _run(_granting(step, "words", "lengths"), preset=preset)


def test_granted_counts_are_the_most_that_a_text_may_have_of_a_word() -> None:
    """The oracle of Fig. 5; the beam search obeys the bag's counts in every preset."""
    step = memorised.step(0, 1)
    counts = Counter(token for ids in step.truth.sequences() for token in ids)
    granted = Granted.of(step.truth.sequences(), (), ("counts",))
    seen = step.observe()
    assert granted.names() == ("counts",) and with_granted_counts(read_bag(seen), seen) == read_bag(seen)
    bag = with_granted_counts(read_bag(seen), seen.granting(granted))
    assert bag.tokens == read_bag(seen).tokens
    assert max(counts.values()) > 1 and {token: bag.counts[token] for token in counts} == counts


def test_a_classifier_needs_a_language_model(tmp_path: Path) -> None:
    """Its own predicts no next token; any prior over its tokens does."""
    seen = tiny.observe(["a dog saw the cat ."])
    verdict = Film().applies(seen)
    assert not verdict and "prior=FOLDER" in verdict.reason
    _save(tmp_path, tiny.bert_tokenizer())
    assert Film(prior=str(tmp_path)).applies(seen)
    guess = _run(seen, prior=str(tmp_path))
    words = set(tiny.ids_of("a dog saw the cat . ! ?"))
    assert guess.sequences and all(set(one.token_ids) <= words for one in guess.sequences)


def test_a_prior_of_another_language_is_refused(tmp_path: Path) -> None:
    """Its tokens are not the client's."""
    _save(tmp_path, tiny.gpt2_tokenizer())
    verdict = Film(prior=str(tmp_path)).applies(memorised.step(0).observe())
    assert not verdict and "tokens" in verdict.reason


def test_a_frozen_word_embedding_is_refused() -> None:
    """There is no bag (FILM, Sec. 5)."""
    seen = memorised.step(0, frozen=frozenset({"transformer.wte.weight"})).observe()
    verdict = Film().applies(seen)
    assert not verdict and "frozen" in verdict.reason


@pytest.mark.parametrize("tied", [False, True])
def test_an_empty_bag_gives_no_guess(tied: bool) -> None:
    """A table that shows no word: an update of zeros, or a tied one without outliers."""
    seen = memorised.step(0, tied=tied).observe()
    update = {
        name: torch.full_like(each, 0.1) if tied else torch.zeros_like(each) for name, each in seen.update.items()
    }
    guess = _run(replace(seen, update=update))
    assert guess.sequences == () and guess.diagnostics["bag"] == 0


def test_a_vocabulary_without_strings_still_gives_a_guess() -> None:
    """Every word may then begin a text, and no token is known to end it."""
    guess = _run(_blank(memorised.step(0).observe(), marks=""))
    assert guess.diagnostics["starts_known"] == guess.diagnostics["stops_known"] == 0
    assert any(text.startswith("The ferry leaves") for text in _texts(guess))


def test_tokens_that_do_not_tell_where_words_begin_all_may_begin_a_text() -> None:
    """Their marks name punctuation and capitals only."""
    seen = memorised.step(0).observe()
    marks = "".join(f"{int(digit, 16) & 12:x}" for digit in seen.facts.vocabulary.marks)
    guess = _run(_blank(seen, marks=marks))
    assert guess.diagnostics["starts_known"] == 0 and guess.diagnostics["stops_known"] == 1
    assert guess.sequences


@pytest.mark.parametrize("ticks", [1, 4, 12])
def test_the_best_guess_is_kept_when_the_budget_ends(ticks: int) -> None:
    """Beams and reordering look at the clock at every step."""
    clock = itertools.count()
    budget = Budget(ticks, clock=lambda: float(next(clock)))
    guess = Film()(memorised.step(0, 1).observe(), torch.Generator(), budget)
    assert guess.stop == "budget" and guess.sequences


@pytest.mark.parametrize("knob", [{"beam": 0}, {"groups": 0}, {"candidates": 0}, {"length": 1}])
def test_knobs_that_search_nothing_are_refused(knob: dict[str, int]) -> None:
    """With what was given."""
    with pytest.raises(ValueError, match="at least"):
        Film(**knob)  # type: ignore[arg-type]
