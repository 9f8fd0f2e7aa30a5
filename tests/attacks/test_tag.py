"""`tag` finds sentences by matching gradients, and says what it had to assume."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.attacks.tag import Dummy, GradientMatcher, Tag, guess_shape
from leakaudit.budget import Budget
from leakaudit.defenses.freeze_embeddings import FreezeEmbeddings
from leakaudit.defenses.gaussian_noise import GaussianNoise
from leakaudit.defenses.prune import Prune
from leakaudit.errors import AnatomyError
from leakaudit.snapshot import Granted, Observation
from tests import tiny

TABLES = frozenset(f"bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type"))
TEXT = "birds saw the river"
TWO = ["a bird saw the river.", "the old dog chased a cat."]


def _model() -> nn.Module:
    """Return a model whose tokens matter: at BERT's usual 0.02 an untrained one hardly tells them apart."""
    return tiny.bert(initializer_range=0.1)


def _ids(text: str) -> tuple[int, ...]:
    return tuple(tiny.bert_tokenizer()(text)["input_ids"])


def _rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_sentence_comes_back_without_granted_labels_or_lengths() -> None:
    """Label and length are found on the way, and the re-simulated guess proves itself."""
    seen = tiny.observe([TEXT], [1], model=_model(), batch_size_bound=1)
    guess = Tag(steps=300)(seen, _rng(), Budget(60))
    assert [(g.token_ids, g.proved, g.confidence) for g in guess.sequences or ()] == [(_ids(TEXT), True, 1.0)]
    assert guess.label_counts == (0, 1)
    assert guess.facts["lengths_granted"] == 0


def test_two_sentences_of_different_length_are_guessed_at_their_lengths() -> None:
    """Granted labels are not returned as if they had been found."""
    lengths = tuple(len(_ids(text)) for text in TWO)
    seen = tiny.observe(TWO, [0, 1], model=_model()).granting(Granted(labels=(0, 1), lengths=lengths))
    guess = Tag(steps=5, trial_steps=2)(seen, _rng(), Budget(60))
    assert sorted(len(g.token_ids) for g in guess.sequences or ()) == sorted(lengths)
    assert all(g.token_ids[0] == tiny.VOCABULARY["[CLS]"] and g.token_ids[-1] == 3 for g in guess.sequences or ())
    assert guess.label_counts is None


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_the_true_embeddings_have_distance_zero(family: str) -> None:
    """The dummy's gradient is the client's, padding and all, for encoders and decoders."""
    if family == "bert":
        model, tokenizer = _model(), tiny.bert_tokenizer()
    else:
        model, tokenizer = tiny.gpt2_classifier(), tiny.gpt2_tokenizer()
    step = tiny.client_step(model, tokenizer, TWO, [1, 0])
    sequences = step.truth.sequences()
    lengths = tuple(len(ids) for ids in sequences)
    seen = step.observe().granting(Granted(labels=(1, 0), lengths=lengths))
    matcher = GradientMatcher(seen, lengths, alpha=0.01)
    table = model.get_parameter(tiny.word_table(model)).detach()
    embeddings = torch.zeros(2, max(lengths), tiny.HIDDEN)
    for row, ids in enumerate(sequences):
        embeddings[row, : len(ids)] = table[list(ids)]
    random = matcher.random_dummy(_rng())
    assert matcher.loss(Dummy(embeddings, random.label_logits)) < 1e-3 * matcher.loss(random)
    assert matcher.reproduces(sequences, [1, 0])


def _distance_by_autograd(seen: Observation, dummy: Dummy, alpha: float) -> Tensor:
    """Return TAG's distance as one differentiable expression, straight from its definition, for one sequence."""
    vocabulary, model = seen.facts.vocabulary, seen.model
    table = model.get_parameter(tiny.word_table(model)).detach()
    inner = dummy.embeddings[:, 1:-1]
    ends = [table[list(ids)][None] for ids in (vocabulary.starts_with, vocabulary.ends_with)]
    logits = model(inputs_embeds=torch.cat([ends[0], inner, ends[1]], dim=1)).logits
    loss = -(dummy.label_logits.softmax(1) * logits.log_softmax(1)).sum()
    names = [n for n, _ in model.named_parameters() if n in seen.update and "word_embeddings" not in n]
    live = dict(model.named_parameters())
    gradients = list(torch.autograd.grad(loss, [live[n] for n in names], create_graph=True))
    if seen.facts.declared("prune"):
        gradients = [g * (seen.update[n] != 0) for g, n in zip(gradients, names, strict=True)]
    if seen.facts.max_grad_norm:
        norms = [torch.cat([t.flatten() for t in ts]).norm() for ts in ([seen.update[n] for n in names], gradients)]
        gradients = [g * norms[0] / norms[1] for g in gradients]
    differences = [g - seen.update[n] for g, n in zip(gradients, names, strict=True)]
    return sum((d.square().sum() + alpha * d.abs().sum() for d in differences), torch.zeros(()))


@pytest.mark.parametrize("case", ["plain", "clipped", "pruned"])
def test_distance_and_derivative_equal_autograds(case: str) -> None:
    """The closed form, with rescaling and masking, is the derivative of the definition."""
    bound = 1e-2 if case == "clipped" else None
    step = tiny.client_step(_model(), tiny.bert_tokenizer(), [TEXT], [1], max_grad_norm=bound)
    seen = step.observe()
    if case == "pruned":
        seen = Prune(share=0.5)(step, seen, _rng())
    matcher = GradientMatcher(seen, [len(_ids(TEXT))], alpha=0.3)
    dummy = Dummy(*(part.requires_grad_() for part in matcher.random_dummy(_rng(1))))
    loss, (by_embeddings, by_labels) = matcher.loss_and_derivative(dummy)
    expected = _distance_by_autograd(seen, dummy, alpha=0.3)
    expected_derivatives = torch.autograd.grad(expected, list(dummy))
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    assert torch.allclose(
        by_embeddings, expected_derivatives[0], rtol=1e-3, atol=1e-4 * float(by_embeddings.abs().max())
    )
    assert torch.allclose(by_labels, expected_derivatives[1], rtol=1e-3, atol=1e-5)


def test_a_guess_with_one_wrong_token_is_not_proved() -> None:
    """Even in an untrained model, where one word moves the update as a whole by less than a thousandth."""
    model = tiny.bert()
    seen = tiny.observe(["the old dog chased a cat"], [1], model=model)
    matcher = GradientMatcher(seen, [8], alpha=0.01)
    assert matcher.reproduces([_ids("the old dog chased a cat")], [1])
    assert not matcher.reproduces([_ids("the old cat chased a cat")], [1])
    assert not matcher.reproduces([_ids("old the dog chased a cat")], [1])
    assert not matcher.reproduces([_ids("the old dog chased a cat")], [0])


@pytest.mark.parametrize(
    ("frozen", "evidence"),
    [(frozenset(), "positions"), (TABLES, "rank")],
    ids=["position table shared", "tables frozen"],
)
def test_the_length_of_one_sequence_is_found(frozen: frozenset[str], evidence: str) -> None:
    """From the rows of the position table, or from the rank of the first block's attention update."""
    shape = guess_shape(tiny.observe(["the old dog chased a cat."], [1], frozen=frozen))
    assert shape == ((len(_ids("the old dog chased a cat.")),), evidence)


def test_a_bound_says_how_many_sequences_to_guess() -> None:
    """Each of them is taken to be as long as the longest."""
    longest = max(len(_ids(text)) for text in TWO)
    assert guess_shape(tiny.observe(TWO, [0, 1], batch_size_bound=2)).lengths == (longest, longest)


def test_under_noise_lengths_must_be_granted() -> None:
    """The reason says what to do."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), [TEXT], [1])
    noisy = GaussianNoise(scale=1.0)(step, step.observe(), _rng())
    with pytest.raises(AnatomyError, match="grant `lengths`"):
        guess_shape(noisy)
    assert not Tag().applies(noisy)
    assert Tag().applies(noisy.granting(Granted(lengths=(6,))))


def test_without_position_table_and_attention_updates_lengths_must_be_granted() -> None:
    """With most of the model frozen nothing tells the length."""
    frozen = frozenset(name for name, _ in tiny.bert().named_parameters() if "classifier" not in name)
    verdict = Tag().applies(tiny.observe([TEXT], [1], frozen=frozen))
    assert not verdict and "grant `lengths`" in verdict.reason


def test_it_does_not_apply_to_language_models_nor_to_word_tables_alone() -> None:
    """Both reasons name what is missing."""
    language = tiny.client_step(tiny.gpt2_lm(), tiny.gpt2_tokenizer(), [TEXT], task="causal-lm").observe()
    assert "this task is causal-lm" in Tag().applies(language).reason
    words = tiny.word_table(tiny.bert())
    frozen = frozenset(name for name, _ in tiny.bert().named_parameters() if name != words)
    assert "beyond the word embedding" in Tag().applies(tiny.observe([TEXT], [1], frozen=frozen)).reason


def test_frozen_tables_do_not_stop_it() -> None:
    """The rest of the update is enough."""
    step = tiny.client_step(_model(), tiny.bert_tokenizer(), [TEXT], [1], batch_size_bound=1)
    seen = FreezeEmbeddings()(step, step.observe(), _rng())
    guess = Tag(steps=5, trial_steps=1)(seen, _rng(), Budget(60))
    assert [len(g.token_ids) for g in guess.sequences or ()] == [len(_ids(TEXT))]


def test_it_stops_when_nothing_improves() -> None:
    """A step too small to change anything is noticed after `patience` steps."""
    seen = tiny.observe([TEXT], [1], model=_model(), batch_size_bound=1)
    guess = Tag(steps=50, learning_rate=1e-12, patience=3, restarts=1)(
        seen.granting(Granted(labels=(1,), lengths=(6,))), _rng(), Budget(60)
    )
    assert guess.stop == "converged"
    assert guess.facts["steps"] < 10


def test_it_stops_in_the_middle_when_the_budget_is_used_up() -> None:
    """The clock strikes after some steps, and the best guess so far is returned."""
    ticks = iter(range(10**6))
    seen = tiny.observe([TEXT], [1], model=_model(), batch_size_bound=1)
    guess = Tag(restarts=1)(seen, _rng(), Budget(30, clock=lambda: float(next(ticks))))
    assert guess.stop == "budget"
    assert 0 < guess.facts["steps"] < 30
    assert guess.sequences is not None and len(guess.sequences) == 1


@pytest.mark.parametrize("knob", [{"steps": 0}, {"restarts": 0}, {"learning_rate": 0.0}, {"alpha": -1.0}])
def test_knobs_that_leave_nothing_to_do_are_refused(knob: dict[str, Any]) -> None:
    """The message names the knob."""
    with pytest.raises(ValueError, match=next(iter(knob))):
        dataclasses.replace(Tag(), **knob)
