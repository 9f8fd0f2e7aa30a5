"""Gradient matching under a causal language model's loss."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from leakaudit.algorithms.matching.batch_shape import guess_shape
from leakaudit.algorithms.matching.candidates import Candidate
from leakaudit.algorithms.matching.guessed_labels import NextTokenLabels
from leakaudit.algorithms.matching.matcher import Matcher
from leakaudit.algorithms.matching.objective import Matching, Objective
from leakaudit.algorithms.matching.starts import Start, draw_starts
from leakaudit.algorithms.matching.word_table import tokens_without_update
from leakaudit.client.facts import DeclaredDefense, Granted
from leakaudit.client.observation import Observation
from leakaudit.plugins.budget import Budget
from leakaudit.registry import attacks
from tests.support import tiny

TEXTS = ["the old dog chased a cat near the river", "one bird saw two fish"]
WAYS: tuple[NextTokenLabels, ...] = ("similar", "joint", "nearest")


def _llama(*, tied: bool) -> nn.Module:
    """Return a LLaMA of two layers, D = 32, two query heads and one key-value head."""
    config = tiny.hf.LlamaConfig(
        vocab_size=len(tiny.VOCABULARY), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=tiny.POSITIONS, tie_word_embeddings=tied,
        pad_token_id=0, bos_token_id=3, eos_token_id=3, initializer_range=0.2, attn_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = tiny.hf.LlamaForCausalLM(config).eval()
    return model


def _gpt2(*, tied: bool) -> nn.Module:
    """Return a GPT-2 of two layers and D = 32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = tiny.gpt2_config(tie_word_embeddings=tied, initializer_range=0.2)
        model: nn.Module = tiny.hf.GPT2LMHeadModel(config).eval()
    return model


MODELS = {"GPT-2": _gpt2, "LLaMA": _llama}


def _seen(model: nn.Module, texts: list[str], **more: Any) -> tuple[Observation, list[tuple[int, ...]]]:
    """Return what is seen of a step with granted lengths, and the true sequences."""
    step = tiny.client_step(model, tiny.gpt2_tokenizer(), texts, task="causal-lm", **more)
    true = list(step.truth.sequences())
    return step.observe().granting(Granted(lengths=tuple(map(len, true)))), true


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", MODELS)
def test_the_true_tokens_have_the_clients_gradient_in_factors(family: str, tied: bool) -> None:
    """The client's own loss and autograd made it; only the word embedding is left out."""
    model = MODELS[family](tied=tied)
    seen, true = _seen(model, TEXTS)
    matcher = Matcher(seen, tuple(map(len, true)), Objective())
    pairs = matcher.token_pairs([true, [true[0], true[1][::-1]]], torch.zeros(2, 0))
    formed = matcher.gradients.formed(pairs, 0)
    assert set(seen.update) - set(formed) == {tiny.word_table(model)}
    assert ("lm_head.weight" in formed) == (not tied)
    for name, gradient in formed.items():
        assert float((gradient - seen.update[name]).norm()) <= 1e-5 * float(seen.update[name].norm()), name
    right, wrong = matcher.token_losses([true, [true[0], true[1][::-1]]], torch.zeros(2, 0))
    assert right < 1e-5 * wrong


@pytest.mark.parametrize("how", WAYS)
def test_derivatives_of_embeddings_and_labels_are_finite_differences(how: NextTokenLabels) -> None:
    """Nearest tokens stay what they are over so small a step."""
    seen, true = _seen(_gpt2(tied=False), TEXTS)
    seen.model.double()
    seen = replace(seen, update={name: update.double() for name, update in seen.update.items()})
    matcher = Matcher(seen, tuple(map(len, true)), Objective("cosine"), Matching(length_weight=0.3, next_tokens=how))
    dummy = Candidate(*(part.double() for part in matcher.candidates.random(2, tiny.generator(2))))
    _, slopes = matcher.losses_and_derivatives(dummy)
    step = 1e-6
    for part in ("embeddings", "label_logits"):
        direction = torch.randn(getattr(dummy, part).shape, generator=tiny.generator(3), dtype=torch.float64)
        ahead, behind = (
            matcher.losses(dummy._replace(**{part: getattr(dummy, part) + sign * step * direction})) for sign in (1, -1)
        )
        expected = float((ahead - behind).sum()) / (2 * step)
        assert float((getattr(slopes, part) * direction).sum()) == pytest.approx(expected, rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("how", WAYS)
def test_the_last_token_has_a_gradient_only_through_its_label(how: NextTokenLabels) -> None:
    """So labels that follow embeddings or have logits tell it; nearest tokens do not."""
    seen, true = _seen(_gpt2(tied=True), TEXTS[:1])
    matcher = Matcher(seen, (len(true[0]),), Objective("cosine"), Matching(next_tokens=how))
    dummy = matcher.candidates.random(1, tiny.generator())
    _, slopes = matcher.losses_and_derivatives(dummy)
    assert bool(slopes.embeddings[0, 0, -1].any()) == (how == "similar")
    assert bool(slopes.label_logits.any()) == (how == "joint")
    if how == "joint":
        told = dummy.label_logits.clone()
        told[0, 0, -1, tiny.VOCABULARY["fish"]] = 100.0
        told[0, 0, -1, tiny.VOCABULARY["[PAD]"]] = 200.0
        assert matcher.tokens(dummy.embeddings[0], told[0])[0][0][-1] == tiny.VOCABULARY["fish"]


def test_optimised_labels_move_with_their_tokens() -> None:
    """In a round's orders, in a run's, and in the orders of a start."""
    seen, true = _seen(_gpt2(tied=True), TEXTS[1:])
    matcher = Matcher(seen, (len(true[0]),), Objective("cosine"), Matching(next_tokens="joint"))
    one = matcher.candidates.of_tokens([true], torch.zeros(1, *matcher.labels.shape))
    logits = 50.0 * nn.functional.one_hot(torch.tensor([true]), len(matcher.table)).float()
    one = one._replace(label_logits=logits)
    order = (1, 0, 2, 4, 3)
    swapped = one._replace(embeddings=one.embeddings[:, :, list(order)], label_logits=logits[:, :, list(order)])
    expected = float(matcher.losses(swapped))
    assert float(matcher.losses(one)) < 1e-4 * expected
    assert float(matcher.losses(one.in_orders(0, torch.tensor([order])))) == pytest.approx(expected, rel=1e-4)
    assert float(matcher.losses(matcher.candidates.rearranged(one, 0, order))) == pytest.approx(expected, rel=1e-4)


def test_labels_are_not_enumerated_and_not_counted_as_classes() -> None:
    """LAMP tries all classes of a classifier; a text has too many labels for that."""
    seen, true = _seen(_gpt2(tied=True), TEXTS)
    matcher = Matcher(seen, tuple(map(len, true)), Objective("cosine"), Matching(next_tokens="joint"))
    start = Start(restarts=2, samples=2, labels="enumerate")
    assert len(draw_starts(matcher, start, tiny.generator(), Budget(600)).embeddings) == 2
    guess = attacks.create("lamp-cos", {"steps": 2, "n_init": 1, "n_permutations": 2})(
        seen, tiny.generator(), Budget(600)
    )
    assert guess.label_counts is None and guess.sequences is not None and len(guess.sequences) == 2


@pytest.mark.parametrize(("family", "evidence"), [("GPT-2", "positions"), ("LLaMA", "rank")])
def test_the_length_counts_the_last_token_which_has_no_gradient(family: str, evidence: str) -> None:
    """A word that stands twice counts twice, with rotary positions as well."""
    seen, true = _seen(MODELS[family](tied=True), ["the dog saw the cat"])
    assert guess_shape(seen.granting(Granted())) == ((len(true[0]),), evidence)


def test_other_tasks_are_refused_in_plain_words() -> None:
    """The labels of masked words are unknown places, too."""
    seen, _ = _seen(_gpt2(tied=True), TEXTS)
    masked = replace(seen, facts=seen.facts.model_copy(update={"task": "masked-lm"}))
    for name in ("dlg", "tag", "lamp-cos", "lamp-l1l2", "grab"):
        attack = attacks.create(name, {})
        assert attack.applies(seen)
        assert "this task is masked-lm" in attack.applies(masked).reason


@pytest.mark.parametrize("how", ["similar", "nearest"])
def test_only_words_with_an_updated_row_stand_in_a_text_but_at_its_end(how: NextTokenLabels) -> None:
    """The last token is a label only, so its row does not tell it."""
    seen, true = _seen(_gpt2(tied=False), TEXTS)
    matcher = Matcher(seen, tuple(map(len, true)), Objective("cosine"), Matching(next_tokens=how, bag=True))
    dummy = matcher.candidates.random(1, tiny.generator())
    for row, other in enumerate(matcher.tokens(dummy.embeddings[0])[0]):
        assert set(other[:-1]) <= {token for text in true for token in text[:-1]}, row
    unseen = tiny.VOCABULARY["tree"]
    dummy.embeddings[0, :, :] = matcher.table[unseen]
    assert [text.index(unseen) for text in matcher.tokens(dummy.embeddings[0])[0]] == [len(text) - 1 for text in true]
    free = Matcher(seen, tuple(map(len, true)), Objective("cosine"), Matching(next_tokens=how))
    assert all(set(text) == {unseen} for text in free.tokens(dummy.embeddings[0])[0])
    losses, slopes = matcher.losses_and_derivatives(dummy)
    assert bool(losses.isfinite().all()) and bool(slopes.embeddings.isfinite().all())


def test_rows_tell_no_words_where_the_table_is_tied_or_a_defence_is_declared() -> None:
    """The head touches every row, and a defence may remove rows."""
    tied, _ = _seen(_gpt2(tied=True), TEXTS)
    untied, true = _seen(_gpt2(tied=False), TEXTS)
    pruned = DeclaredDefense(name="prune", parameters={"share": 0.5})
    defended = replace(untied, facts=untied.facts.model_copy(update={"defenses": (pruned,)}))
    assert tokens_without_update(tied) is None and tokens_without_update(defended) is None
    outside = tokens_without_update(untied)
    assert outside is not None
    assert set((~outside).nonzero().flatten().tolist()) == {token for text in true for token in text[:-1]}


KNOWN = [
    "the old dog chased a cat",
    "one bird saw two fish today",
    "a horse ate in the house",
    "never found the small red tree",
]


@pytest.fixture(scope="module")
def taught() -> nn.Module:
    """Return a GPT-2 that knows four sentences by heart."""
    model = _gpt2(tied=True)
    ids = torch.tensor([tiny.gpt2_tokenizer()(text)["input_ids"] for text in KNOWN])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dlg", {"steps": 300, "n_init": 4}),
        ("tag", {"steps": 300, "n_init": 4}),
        ("lamp-cos", {"preset": "fast"}),
        ("lamp-l1l2", {"preset": "fast"}),
    ],
)
def test_a_text_that_the_model_does_not_expect_comes_back(
    taught: nn.Module, name: str, options: dict[str, Any]
) -> None:
    """With its last token; the model by itself would guess one word of six."""
    seen, true = _seen(taught, ["the small horse chased one bird"])
    found = attacks.create(name, options)(seen, tiny.generator(), Budget(600))
    with torch.no_grad():
        expected = taught(input_ids=torch.tensor(true)).logits[0, :-1].argmax(dim=1).tolist()
    assert sum((Counter(expected) & Counter(true[0])).values()) == 1
    assert [(guess.token_ids, guess.proved) for guess in found.sequences or ()] == [(true[0], True)]
