"""The parts of FILM against brute force and automatic differentiation."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.algorithms.film.beam import Rules, beam_search, grams_of
from leakaudit.algorithms.film.candidate_scores import CandidateScores, middle_gain
from leakaudit.algorithms.film.continuations import CachedModel
from leakaudit.algorithms.film.reordering import Reordering, cut_at_stop, reordered
from leakaudit.plugins.budget import Budget
from tests.support import memorised, tiny

TEXTS = [(5, 9, 7, 9, 12), (8, 6), (11, 10, 9, 8, 7, 6, 5)]


def _gradients(model: nn.Module, text: tuple[int, ...]) -> dict[str, Tensor]:
    ids = torch.tensor([text])
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _llama() -> nn.Module:
    config = tiny.hf.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, tie_word_embeddings=False, attn_implementation="eager", pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = tiny.hf.LlamaForCausalLM(config).eval()
    return model


MODELS: dict[str, Any] = {
    "tied": tiny.gpt2_lm,
    "untied": lambda: tiny.gpt2_lm(tied=False),
    "rotary": _llama,
}


@pytest.mark.parametrize("kind", MODELS)
def test_norms_and_perplexities_are_those_of_automatic_differentiation(kind: str) -> None:
    """Texts of different lengths, of a repeated token, in one pass."""
    model = MODELS[kind]()
    scores = CandidateScores(model, ())
    assert scores.counted == {name for name, _ in model.named_parameters()}
    found = scores(TEXTS)
    for text, norm, nats in zip(TEXTS, found.norms, found.nats, strict=True):
        gradients = _gradients(model, text)
        true = torch.stack([each.norm() for each in gradients.values()]).norm()
        assert float(norm) == pytest.approx(float(true), rel=1e-4)
        ids = torch.tensor([text])
        assert float(nats) == pytest.approx(float(model(input_ids=ids, labels=ids).loss.detach()), rel=1e-4)


def test_one_layer_s_norm_can_be_asked_for() -> None:
    """That of the gain in the middle, as FILM's code takes it."""
    model = tiny.gpt2_lm()
    name = middle_gain(model)
    assert name == "transformer.h.0.ln_2.weight"
    (found,) = CandidateScores(model, (), [str(name)])(TEXTS[:1]).norms
    assert float(found) == pytest.approx(float(_gradients(model, TEXTS[0])[str(name)].norm()), rel=1e-4)


def test_the_published_code_s_layer_is_found_in_gpt_2() -> None:
    """Twelve blocks of it have `h.5.ln_2.weight` in the middle."""
    with torch.device("meta"):
        model = tiny.hf.GPT2LMHeadModel(tiny.hf.GPT2Config(n_embd=8, n_layer=12, n_head=2, vocab_size=9))
    assert middle_gain(model) == "transformer.h.5.ln_2.weight"


def test_the_cosine_is_one_for_the_text_of_the_update_alone() -> None:
    """It compares the linear layers below the head."""
    model = tiny.gpt2_lm()
    found = CandidateScores(model, (), update=_gradients(model, TEXTS[0]))(TEXTS).cosines
    assert float(found[0]) == pytest.approx(1.0, abs=1e-4)
    other = _gradients(model, TEXTS[2])
    linear = [name for name, each in other.items() if each.dim() == 2 and ".h." in name]
    own = _gradients(model, TEXTS[0])
    one, two = (torch.cat([each[name].flatten() for name in linear]) for each in (own, other))
    assert float(found[2]) == pytest.approx(tiny.cosine(one, two), abs=1e-4)


@pytest.mark.parametrize("start", [(), (3,)])
def test_kept_keys_and_values_change_no_probability(start: tuple[int, ...]) -> None:
    """Rows are chosen, repeated and dropped while they grow."""
    model = tiny.gpt2_lm()
    grown = CachedModel(model, start)
    grown.begin([(5,), (6,), (7,)])
    grown.extend(torch.tensor([2, 0, 0]), torch.tensor([8, 9, 10]))
    found = grown.extend(torch.tensor([1, 2]), torch.tensor([11, 5]))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*start, 5, 9, 11], [*start, 5, 10, 5]])).logits
    assert torch.allclose(found, logits[:, -1].log_softmax(dim=1), atol=1e-5)


def _log_probability(model: nn.Module, text: tuple[int, ...]) -> float:
    ids = torch.tensor([text])
    with torch.no_grad():
        logs = model(input_ids=ids).logits.log_softmax(dim=2)
    return float(sum(logs[0, at - 1, text[at]] for at in range(1, len(text))))


@pytest.mark.parametrize("groups", [1, 2])
def test_a_wide_beam_finds_the_likeliest_text(groups: int) -> None:
    """Among all texts of a bag of four tokens in which no pair comes twice."""
    model, bag = memorised.language_model(), (10, 20, 30, 40)
    rules = Rules(bag, (10, 20), frozenset(), length=4, width=400, groups=groups)
    found = beam_search(CachedModel(model, ()), rules, Budget(60))
    every = [(first, *rest) for first in (10, 20) for rest in itertools.product(bag, repeat=3)]
    allowed = [text for text in every if max(grams_of(text, 2).values()) == 1]
    best = max(allowed, key=lambda text: _log_probability(model, text))
    assert found[0].token_ids == best
    assert found[0].score == pytest.approx(_log_probability(model, best), abs=1e-3)
    assert {one.token_ids for one in found} == set(allowed)


def test_each_repeat_of_a_pair_costs_the_same() -> None:
    """Five equal tokens are four equal pairs, of which three are repeats."""
    rules = Rules((10,), (10,), frozenset(), length=5, width=1, penalty=2.0)
    model = memorised.language_model()
    (found,) = beam_search(CachedModel(model, ()), rules, Budget(60))
    assert found.score == pytest.approx(_log_probability(model, (10,) * 5) - 3 * 2.0, abs=1e-3)


def test_known_counts_bound_how_often_a_token_comes() -> None:
    """Also without any penalty on n-grams."""
    rules = Rules((10, 20), (10,), frozenset(), length=4, width=8, gram=0, most={10: 1})
    found = beam_search(CachedModel(memorised.language_model(), ()), rules, Budget(60))
    assert [one.token_ids for one in found] == [(10, 20, 20, 20)]


def test_doubtful_tokens_cost_nats() -> None:
    """Enough of them, and the likeliest token is not taken."""
    plain = Rules((10, 20, 30), (10,), frozenset(), length=2, width=3)
    model = memorised.language_model()
    (first, *_) = beam_search(CachedModel(model, ()), plain, Budget(60))
    doubting = Rules((10, 20, 30), (10,), frozenset(), length=2, width=3, doubt={first.token_ids[1]: 100.0})
    found = {one.token_ids: one.score for one in beam_search(CachedModel(model, ()), doubting, Budget(60))}
    assert found[first.token_ids] == pytest.approx(first.score - 100.0, abs=1e-3)
    assert max(found, key=found.__getitem__) != first.token_ids


def test_each_first_word_has_beams_of_its_own() -> None:
    """However unlikely it is."""
    rules = Rules((10, 20, 30), (10, 20, 30), frozenset(), length=3, width=8, apart=True)
    found = beam_search(CachedModel(memorised.language_model(), ()), rules, Budget(60))
    assert {one.group: one.token_ids[0] for one in found} == {0: 10, 1: 20, 2: 30}


def test_groups_avoid_each_other_s_tokens() -> None:
    """The second of two groups of one text each takes another second token."""
    texts = {}
    for diversity in (0.0, 1e3):
        rules = Rules((10, 20, 30), (10,), frozenset(), length=2, width=2, groups=2, diversity=diversity)
        texts[diversity] = {
            one.token_ids for one in beam_search(CachedModel(memorised.language_model(), ()), rules, Budget(60))
        }
    assert len(texts[0.0]) == 1 and len(texts[1e3]) == 2


def test_reordering_reaches_the_order_that_the_score_wants() -> None:
    """From a reversed text with one token too many."""
    true = (1, 2, 3, 4, 5)

    def far(texts: Any) -> list[float]:
        return [sum(a != b for a, b in itertools.zip_longest(text, true)) for text in texts]

    how = Reordering(phrase_steps=100, token_steps=400, candidates=20, patience=0)
    found = reordered((5, 4, 3, 2, 1, 9), true, how, far, torch.Generator().manual_seed(0), Budget(60))
    assert found.token_ids == true and found.score == 0


@pytest.mark.parametrize(("wanted", "kept"), [(3, 3), (5, 5)])
def test_a_text_is_cut_at_its_first_stop_if_the_score_falls(wanted: int, kept: int) -> None:
    """And is left as it is otherwise."""
    text = (1, 2, 9, 4, 9)
    assert len(cut_at_stop(text, frozenset({9}), lambda texts: [abs(len(each) - wanted) for each in texts])) == kept
