"""`rare-rows` on language models: sentences grown along the head's rows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.algorithms.padding import padded_batch
from leakaudit.algorithms.position_rows import longest_length
from leakaudit.algorithms.rare_rows.decoder_background import fitted_background
from leakaudit.algorithms.rare_rows.decoder_reader import decoder_applies
from leakaudit.algorithms.rare_rows.decoder_rest import Rest
from leakaudit.algorithms.rare_rows.next_token_rows import NextTokenRows
from leakaudit.algorithms.rare_rows.sentence_choice import TakenStates
from leakaudit.algorithms.rare_rows.sentence_rows import find_tables, rows_of
from leakaudit.algorithms.rare_rows.sentence_scores import SentenceScores
from leakaudit.algorithms.rare_rows.sentence_simulations import Simulations
from leakaudit.algorithms.rare_rows.update_pull import UpdatePull
from leakaudit.attacks.rare_rows import RareRows
from leakaudit.client.facts import PublicFacts
from leakaudit.client.observation import Observation
from leakaudit.models.vocabulary import Vocabulary
from leakaudit.plugins import Budget, Reconstruction
from tests.support.tiny import generator, hf

WORDS, LARGE, HIDDEN, LONGEST = 400, 6000, 64, 12
Sentences = tuple[tuple[int, ...], ...]


def _gpt2(tied: bool, size: int = WORDS) -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=size, n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=32, tie_word_embeddings=tied,
        initializer_range=0.15, attn_implementation="eager", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = hf.GPT2LMHeadModel(config).eval()
    return model


@cache
def _sentences(count: int = 24) -> Sentences:
    """Return sentences of 4 to LONGEST tokens; few tokens are frequent, as words are."""
    rng = generator(1)
    often = 1.0 / torch.arange(1, WORDS, dtype=torch.float64)
    lengths = torch.randint(4, LONGEST + 1, (count,), generator=rng).tolist()
    return tuple(tuple((torch.multinomial(often, n, True, generator=rng) + 1).tolist()) for n in lengths)


def _size(model: nn.Module) -> int:
    return len(model.get_input_embeddings().weight)  # type: ignore[operator]


def _observe(model: nn.Module, sentences: Sentences, frozen: tuple[str, ...] = (), **facts: Any) -> Observation:
    """Return what a client sends for sentences, the mean loss's gradient."""
    names = [name for name, _ in model.named_parameters() if name not in frozen]
    public = PublicFacts(
        task="causal-lm", training_mode=False, shared=tuple(names), frozen=frozen,
        vocabulary=Vocabulary(size=_size(model), special={"pad": 0}, max_length=32),
    )  # fmt: skip
    seen = Observation({}, model, public.model_copy(update=facts))
    ids, mask = padded_batch(seen, sentences)
    loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    gradients = torch.autograd.grad(loss, [model.get_parameter(name) for name in names])
    return replace(seen, update=dict(zip(names, gradients, strict=True)))


def _softmaxs_share(seen: Observation, sentences: Sentences) -> Tensor:
    """Return (V, D) what the softmax adds to the head's rows; the tables are not tied."""
    made = rows_of(seen, sentences, find_tables(seen))
    targets = torch.tensor([token for one in sentences for token in one[1:]])
    states = torch.cat([rows_of(seen, [one], find_tables(seen)).states for one in sentences])
    return torch.zeros_like(made.head).index_add(0, targets, states) - made.head


def _scores(seen: Observation) -> SentenceScores:
    return SentenceScores(Rest(seen, find_tables(seen), generator(0)), Simulations(seen))


def _recover(seen: Observation, seconds: float = 300.0) -> Reconstruction:
    return RareRows()(seen, generator(0), Budget(seconds))


def _exact(found: Reconstruction, sentences: Sentences) -> int:
    guessed = [guess.token_ids for guess in found.sequences or ()]
    return sum(min(guessed.count(one), sentences.count(one)) for one in set(sentences))


@pytest.mark.parametrize("tied", [False, True])
def test_the_rows_of_all_sentences_are_the_clients_update(tied: bool) -> None:
    seen = _observe(_gpt2(tied), _sentences())
    tables = find_tables(seen)
    made = rows_of(seen, _sentences(), tables)
    assert made.targets == sum(map(len, _sentences())) - len(_sentences())
    torch.testing.assert_close(made.head / -made.targets, seen.update[tables.head], atol=1e-5, rtol=1e-4)


def test_untied_tables_give_back_most_sentences_of_two_and_a_half_hidden_sizes() -> None:
    sentences = _sentences()
    assert sum(map(len, sentences)) > 2.5 * HIDDEN
    found = _recover(_observe(_gpt2(False), sentences))
    assert _exact(found, sentences) >= 0.9 * len(sentences)
    assert found.stop == "done"
    assert all(guess.token_ids in sentences for guess in found.sequences or () if guess.proved)


def test_tied_tables_give_back_most_of_them() -> None:
    """The rows of absent tokens tell what the softmax adds."""
    sentences = _sentences()
    found = _recover(_observe(_gpt2(True, LARGE), sentences))
    assert _exact(found, sentences) >= 0.8 * len(sentences)
    assert found.diagnostics["targets"] == pytest.approx(sum(map(len, sentences)) - len(sentences), rel=0.02)


def test_a_sentence_is_proved_by_its_own_rows_where_tables_are_not_tied() -> None:
    sentences = _sentences()
    scores = _scores(_observe(_gpt2(False), sentences))
    right = scores.score(sentences)
    wrong = scores.score([(*one[:-1], one[-1] % (WORDS - 1) + 1) for one in sentences])
    assert sum(one.proved for one in right) >= 0.8 * len(sentences)
    assert not any(one.proved for one in wrong)
    told = [one.targets for one in right if one.proved]
    assert told == pytest.approx([sum(map(len, sentences)) - len(sentences)] * len(told), rel=1e-4)


def test_what_agrees_without_its_end_is_no_proof() -> None:
    sentences = _sentences()
    seen = _observe(_gpt2(False), sentences)
    scores = _scores(seen)
    assert not any(one.found for one in scores.score([one[:-1] for one in sentences]))


def test_found_sentences_take_states_and_give_way_to_better_continuations() -> None:
    sentences = _sentences()
    seen = _observe(_gpt2(False), sentences)
    scores = _scores(seen)
    right = next(one for one in scores.score(sentences) if one.found and scores.count(one.tokens[-2]) == 1)
    shorter = replace(right, tokens=right.tokens[:-1], left=2 * right.left)
    taken = TakenStates(scores)
    taken.add(shorter)
    assert taken.leave(right.tokens)
    assert not taken.leave((*right.tokens[::-1][:-1], right.tokens[0]))
    taken.add(replace(right, left=3 * right.left))  # agrees less than its beginning
    assert taken.leave((*right.tokens[:-1], right.tokens[0]))
    taken.add(right)
    assert not taken.leave((*right.tokens[:-1], right.tokens[0]))


def _first_among(pull: UpdatePull, prefixes: list[tuple[int, ...]], among: Tensor) -> float:
    """Return the share of prefixes whose own last token is the most likely one."""
    right = [int((among == one[-1]).nonzero()) for one in prefixes]
    best = [int(pull.start(torch.tensor([one[:-1]]), among).argmax()) for one in prefixes]
    return sum(one == other for one, other in zip(best, right, strict=True)) / len(right)


def _prefixes(sentences: Sentences) -> list[tuple[int, ...]]:
    return [one[:end] for one in sentences for end in range(2, len(one) + 1)]


@pytest.mark.parametrize("tied", [False, True])
def test_the_attentions_update_pulls_at_the_next_tokens_of_the_batch(tied: bool) -> None:
    """No row of a word table is used, so the tables may be frozen."""
    sentences = _sentences()
    model = _gpt2(tied)
    seen = _observe(model, sentences, frozen=("transformer.wte.weight", "lm_head.weight"))
    drawn = torch.randint(1, WORDS, (256, LONGEST), generator=generator(2))
    among = torch.tensor(sorted({token for one in sentences for token in one}))
    pull = UpdatePull(seen, drawn)
    pull.learn(float(sum(map(len, sentences)) - len(sentences)), [])
    batch, other = _prefixes(sentences), _prefixes(tuple(one[::-1] for one in sentences))
    assert _first_among(pull, batch, among) > 0.3
    assert _first_among(pull, other, among) < 0.15


def test_the_update_no_longer_pulls_at_sentences_that_were_taken_out() -> None:
    sentences = _sentences()
    seen = _observe(_gpt2(False), sentences)
    rest = Rest(seen, find_tables(seen), generator(0))
    among = torch.tensor(sorted({token for one in sentences for token in one}))
    rest.take(list(sentences[:12]), float(sum(map(len, sentences)) - len(sentences)))
    taken, left = (_first_among(rest.pull, _prefixes(part), among) for part in (sentences[:12], sentences[12:]))
    assert taken < 0.1
    assert left > 0.3


def test_without_the_attentions_update_the_rows_search_alone() -> None:
    sentences = _sentences()
    model = _gpt2(False)
    frozen = tuple(name for name, _ in model.named_parameters() if "attn" in name)
    seen = _observe(model, sentences, frozen)
    assert not Rest(seen, find_tables(seen), generator(0)).pull.known
    assert _exact(_recover(seen), sentences) >= 0.9 * len(sentences)


def test_sentences_are_simulated_once_for_a_round_and_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = _sentences()
    simulations = Simulations(_observe(_gpt2(False), sentences))
    first = simulations.of(sentences)
    monkeypatch.setattr(Simulations, "_simulated", lambda *_: pytest.fail("a known sentence was simulated again"))
    simulations.next_round()
    again = simulations.of(sentences[::-1])
    assert all(one is other for pair in zip(first, again[::-1], strict=True) for one, other in zip(*pair, strict=True))
    simulations.next_round()
    simulations.next_round()
    with pytest.raises(pytest.fail.Exception, match="simulated again"):
        simulations.of(sentences)


def test_the_softmaxs_share_is_fitted_to_the_rows_of_absent_tokens() -> None:
    """Known states are not those of the batch, so the fit is rough."""
    seen = _observe(_gpt2(False, LARGE), _sentences())
    rest = Rest(seen, find_tables(seen), generator(0))
    true = _softmaxs_share(seen, _sentences())
    observed = true.clone()
    present = torch.tensor(sorted({token for one in _sentences() for token in one}))
    observed[present] += torch.randn(len(present), HIDDEN, generator=generator(3))
    made_up = tuple(tuple(range(start, start + 8)) for start in range(1, 320, 4))
    drawn = rows_of(seen, made_up, rest.tables)
    fitted, left = fitted_background(observed, drawn.states, rest.states.head, rest.map)

    def error(values: Tensor) -> float:
        return float((values - true)[present].square().sum() / true[present].square().sum())

    even = _softmaxs_share(seen, made_up)
    even = even * ((even * true).sum() / even.square().sum())
    assert error(fitted) < 0.5 * error(even)
    assert left < 0.3


def test_a_used_up_budget_gives_what_was_found_so_far() -> None:
    found = _recover(_observe(_gpt2(False), _sentences()), seconds=1e-9)
    assert found.stop == "budget"
    assert not any(guess.proved for guess in found.sequences or ())


def test_a_row_of_one_state_is_evidence_for_that_state_alone() -> None:
    state, other = torch.randn(2, HIDDEN, generator=generator(2))
    rows = NextTokenRows(
        tokens=torch.tensor([7]), rows=state[None], counts=torch.ones(1), mean=torch.zeros(HIDDEN), spread=torch.ones(HIDDEN),
        noise=torch.full((1,), 0.02), slopes=torch.zeros(HIDDEN), directions=torch.zeros(1, HIDDEN),
    )  # fmt: skip
    right, wrong = rows.evidence(torch.stack([state, other]))[:, 0].tolist()
    assert right > 20.0
    assert wrong < -20.0


def test_the_longest_sentence_is_read_from_the_position_rows() -> None:
    seen = _observe(_gpt2(True), _sentences())
    assert longest_length(seen) == max(map(len, _sentences()))


def test_what_it_cannot_read_is_said() -> None:
    seen = _observe(_gpt2(False), _sentences()[:2], frozen=("lm_head.weight",))
    assert "lm_head.weight" in decoder_applies(seen).reason
    dropped = _observe(_gpt2(False), _sentences()[:2], training_mode=True, dropout={"transformer.drop": 0.1})
    assert "dropout" in decoder_applies(dropped).reason
    silent = replace(seen, update={name: torch.zeros_like(value) for name, value in dropped.update.items()})
    assert "is zero" in decoder_applies(silent).reason
    classifier = _observe(_gpt2(False), _sentences()[:2], task="classification")
    assert "classification" in decoder_applies(classifier).reason
