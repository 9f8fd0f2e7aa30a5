"""What a feed-forward layer reads, against the model itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from leakaudit.algorithms.span.completion import FITS, Completion
from leakaudit.algorithms.span.rank_reduction import FeedForwardSpan, feed_forward_span_of
from leakaudit.algorithms.span.sequence_gradient import SequenceGradient, sequence_gradients
from leakaudit.client.observation import Observation
from leakaudit.client.step import ClientStep
from leakaudit.models.structure import find_anatomy
from leakaudit.plugins.budget import Budget
from tests.support import tiny

TEXTS = ["the old dog chased a red cat", "one bird saw two fish today", "a cat ate the small fish under a tree"]
LABELS = [2, 0, 1]


def _step(**more: object) -> ClientStep:
    return tiny.client_step(tiny.wide_bert(), tiny.bert_tokenizer(), TEXTS, LABELS, **more)  # type: ignore[arg-type]


def _feed_forward(seen: Observation) -> FeedForwardSpan:
    feed_forward = feed_forward_span_of(seen)
    assert feed_forward is not None
    return feed_forward


def _simulated(seen: Observation, feed_forward: FeedForwardSpan, sequence: tuple[int, ...]) -> SequenceGradient:
    (part,) = sequence_gradients(seen, [feed_forward.layer], [sequence])
    return part


def test_the_rank_is_the_number_of_tokens() -> None:
    """Also of tokens that stand at the same place in several sequences."""
    step = _step()
    assert _feed_forward(step.observe()).tokens == sum(map(len, step.truth.sequences()))


def test_true_sequences_are_in_the_span_and_one_wrong_word_shows_at_its_place() -> None:
    """The wrong word stands at that place in another sequence of the batch."""
    step = _step()
    feed_forward = _feed_forward(step.observe())
    true = step.truth.sequences()
    assert all(float(off.max()) < FITS for off in feed_forward.of_members(true))
    wrong = (*true[0][:3], true[1][3], *true[0][4:])
    (off,) = feed_forward.of_members([wrong])
    assert int(off.argmax()) == 3 and float(off.max()) > 0.02


def test_a_word_tried_beside_a_sequence_is_read_as_in_it() -> None:
    """One word at each place, and two at once; unknown places are no context."""
    seen = _step().observe()
    feed_forward = _feed_forward(seen)
    sequence = tuple(tiny.bert_tokenizer()("two fish saw a big house and a dog")["input_ids"])
    words = torch.tensor(tiny.bert_tokenizer()("never one on river blue")["input_ids"][1:-1])
    places = torch.tensor([1, 2, 3, 5, 8])
    known = dict(enumerate(sequence))
    tried = feed_forward.of_options(known, words[:, None], places[:, None])[:, 0]
    inside = [(*sequence[:p], t, *sequence[p + 1 :]) for p, t in zip(places.tolist(), words.tolist(), strict=True)]
    in_place = [float(off[p]) for off, p in zip(feed_forward.of_members(inside), places.tolist(), strict=True)]
    torch.testing.assert_close(tried, torch.tensor(in_place), atol=1e-4, rtol=1e-3)
    both = feed_forward.of_options(known, words[None, :2], torch.tensor([[4, 5]]))
    (off,) = feed_forward.of_members([(*sequence[:4], *words[:2].tolist(), *sequence[6:])])
    torch.testing.assert_close(both[0], off[4:6], atol=1e-4, rtol=1e-3)


def test_a_true_sequence_lowers_the_rank_by_its_length() -> None:
    """With the weights of its own loss gradient; the other sequences do not change."""
    step = _step()
    seen = step.observe()
    feed_forward = _feed_forward(seen)
    true = step.truth.sequences()
    part = _simulated(seen, feed_forward, true[0])
    misfit, weights = feed_forward.fit(part.inputs, part.gradients)
    assert misfit < 1e-3
    with torch.no_grad():
        logits = seen.model(input_ids=torch.tensor([true[0]])).logits.double()[0]
    loss_gradient = (logits.softmax(0) - torch.nn.functional.one_hot(torch.tensor(LABELS[0]), 3)) / len(TEXTS)
    torch.testing.assert_close(weights, loss_gradient[1:], atol=1e-4, rtol=1e-3)
    feed_forward.take(part.inputs, torch.einsum("c,clo->lo", weights, part.gradients))
    assert feed_forward.tokens == sum(map(len, true[1:]))
    assert all(float(off.max()) < FITS for off in feed_forward.of_members(true[1:]))
    (gone,) = feed_forward.of_members(true[:1])
    assert float(gone[1:].min()) > 0.02
    other = _simulated(seen, feed_forward, true[1])
    assert feed_forward.fit(other.inputs, other.gradients)[0] < 1e-3


def test_a_sequence_with_a_wrong_word_does_not_lower_the_rank() -> None:
    """Whatever its weights are."""
    step = _step()
    seen = step.observe()
    feed_forward = _feed_forward(seen)
    first, second = step.truth.sequences()[:2]
    part = _simulated(seen, feed_forward, (*first[:3], second[3], *first[4:]))
    assert feed_forward.fit(part.inputs, part.gradients)[0] > 0.05


def test_there_is_no_feed_forward_span_where_it_gives_no_information(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer is withheld, the update noisy, or the batch too large, for instance."""
    seen = _step().observe()
    layer = _feed_forward(seen).layer.weight
    assert feed_forward_span_of(replace(seen, update={n: g for n, g in seen.update.items() if n != layer})) is None
    forward = seen.model.forward
    monkeypatch.setattr(seen.model, "forward", lambda input_ids, attention_mask: forward(input_ids, attention_mask))
    assert feed_forward_span_of(seen) is None
    monkeypatch.undo()
    noisy = {n: g + 1e-2 * g.std() * _noise(g) for n, g in seen.update.items()}
    assert feed_forward_span_of(replace(seen, update=noisy)) is None
    longer = [f"{one} and {other}" for one in TEXTS for other in TEXTS]
    many = tiny.client_step(tiny.wide_bert(), tiny.bert_tokenizer(), longer, 3 * LABELS)
    assert sum(map(len, many.truth.sequences())) > tiny.WIDE
    assert feed_forward_span_of(many.observe()) is None


def _noise(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("kind", "extra"), [("Roberta", {}), ("Electra", {"embedding_size": 16})])
def test_position_ids_may_begin_elsewhere(kind: str, extra: dict[str, int]) -> None:
    """RoBERTa counts them from the padding token's id on; ELECTRA as BERT does."""
    config = getattr(tiny.hf, f"{kind}Config")(
        vocab_size=len(tiny.VOCABULARY),
        hidden_size=tiny.WIDE,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=2 * tiny.WIDE,
        max_position_embeddings=tiny.POSITIONS + 2,
        pad_token_id=0,
        num_labels=3,
        initializer_range=0.2,
        attn_implementation="eager",
        **extra,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(tiny.hf, f"{kind}ForSequenceClassification")(config).eval()
    step = tiny.client_step(model, tiny.bert_tokenizer(), TEXTS, LABELS)
    feed_forward = _feed_forward(step.observe())
    assert all(float(off.max()) < FITS for off in feed_forward.of_members(step.truth.sequences()))


def _improve(feed_forward: FeedForwardSpan, step: ClientStep) -> tuple[Completion, tuple[int, ...], Tensor, Tensor]:
    """Return a completion among all words, its first sequence, words and places."""
    sequences = step.truth.sequences()
    end = sequences[0][-1]
    words = sorted({token for sequence in sequences for token in sequence[1:-1]})
    longest = max(map(len, sequences))
    tokens = torch.tensor(words).repeat(longest - 2)
    places = torch.arange(1, longest - 1).repeat_interleave(len(words))
    ends = [len(sequence) - 1 for sequence in sequences]
    likely = torch.ones(len(tokens), dtype=torch.bool)
    return Completion(feed_forward, tokens, places, likely, ends, end), sequences[0], tokens, places


def test_a_sequence_is_completed_from_half_of_its_words() -> None:
    """One of them is wrong; the end is found as well."""
    step = _step()
    completion, true, *_ = _improve(_feed_forward(step.observe()), step)
    known = {0: true[0], 1: true[1], 3: true[3], 4: true[2], 6: true[6]}
    reached = completion.complete(known, Budget(600), unlikely_too=False)
    assert reached is not None and reached.ids == true and reached.off < FITS


def test_two_neighbours_that_are_wrong_together_are_changed_together() -> None:
    """All other words are right."""
    step = _step()
    completion, true, *_ = _improve(_feed_forward(step.observe()), step)
    known = dict(enumerate(true[:-1])) | {3: true[5], 4: true[6]}
    reached = completion.complete(known, Budget(600), unlikely_too=False)
    assert reached is not None and reached.ids == true


def test_words_that_are_not_likely_are_tried_once_the_others_come_close() -> None:
    """A true word may be among them."""
    step = _step()
    feed_forward = _feed_forward(step.observe())
    _, true, tokens, places = _improve(feed_forward, step)
    likely = ~((places == 4) & (tokens == true[4]))
    ends = [len(sequence) - 1 for sequence in step.truth.sequences()]
    completion = Completion(feed_forward, tokens, places, likely, ends, true[-1])
    known = {place: token for place, token in enumerate(true[:-1]) if place != 4}
    reached = completion.complete(known, Budget(600), unlikely_too=False)
    assert reached is not None and reached.ids == true


def test_a_spent_budget_returns_the_first_sequence() -> None:
    """There is always a result, and the search ends."""
    step = _step()
    completion, true, *_ = _improve(_feed_forward(step.observe()), step)
    reached = completion.complete({0: true[0], 1: true[1]}, Budget(1e-9), unlikely_too=True)
    assert reached is not None and len(reached.ids) > 2


def test_the_layer_is_the_second_of_the_feed_forward_part() -> None:
    """By its width, not its name."""
    seen = _step().observe()
    assert _feed_forward(seen).layer.module == "bert.encoder.layer.0.output.dense"
    assert find_anatomy(seen.model).output != _feed_forward(seen).layer.module
