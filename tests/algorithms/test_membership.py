"""Who was in a round: members are told from others on a tiny model."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from leakaudit.algorithms.membership.alignment import RIDGE, SMALLEST, align, slope
from leakaudit.algorithms.membership.candidates import Candidate
from leakaudit.algorithms.membership.readings import FEWEST, read_texts
from leakaudit.algorithms.membership.scores import MembershipScores, membership_scores, scores_of
from leakaudit.client.batches import make_batch, public_facts
from leakaudit.client.observation import Observation
from leakaudit.client.optimizer import ClientOptimizer, ParameterGroup
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.errors import AnatomyError, ConfigError, SnapshotError
from leakaudit.results.ranking import auc
from tests.support import tiny

MEMBERS, OTHERS, CALIBRATION = 6, 30, 40


@cache
def _texts() -> list[tuple[str, int]]:
    """Return different texts of the tiny vocabulary, with labels."""
    draw = random.Random(0)
    words = tiny.TEXT_WORDS.split()
    found = {" ".join(draw.choices(words, k=draw.randint(4, 9))) for _ in range(200)}
    return [(text, draw.randint(0, 1)) for text in sorted(found)]


def _part(start: int, count: int) -> list[tuple[str, int]]:
    return _texts()[start : start + count]


def _candidates(rows: list[tuple[str, int]], task: str, labelled: bool = True) -> list[Candidate]:
    tokenizer = tiny.bert_tokenizer() if task == "classification" else tiny.gpt2_tokenizer()
    known = labelled and task == "classification"
    return [Candidate(tuple(tokenizer(text)["input_ids"]), label if known else None) for text, label in rows]


def _seen(rows: list[tuple[str, int]], task: Any = "classification", steps: int = 1, **facts: Any) -> Observation:
    """Return the observation of a round of `steps` batches of `rows`."""
    bert = task == "classification"
    model = tiny.bert(num_labels=2, initializer_range=0.2) if bert else tiny.gpt2_lm()
    tokenizer = tiny.bert_tokenizer() if bert else tiny.gpt2_tokenizer()
    size = len(rows) // steps
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    made = [make_batch(tokenizer, [t for t, _ in p], [y for _, y in p], task, tiny.POSITIONS) for p in parts]
    if "optimizer" in facts:
        names = tuple(name for name, _ in model.named_parameters())
        group = ParameterGroup(parameters=names, learning_rates=(facts["learning_rate"],) * steps)
        facts["optimizer"] = ClientOptimizer(algorithm=facts["optimizer"], groups=(group,))
    public = public_facts(model, tokenizer, task=task, training=False, **facts)
    return ClientStep(model, Truth(tuple(made)), StepRecipe(training=False), public).observe()


def _score(seen: Observation, task: str = "classification", labelled: bool = True) -> MembershipScores:
    """Return scores of six members and thirty others."""
    rows = _part(0, MEMBERS + OTHERS)
    calibration = _part(MEMBERS + OTHERS, CALIBRATION)
    return membership_scores(seen, _candidates(rows, task, labelled), _candidates(calibration, task, labelled))


def _auc(scores: MembershipScores) -> float:
    values = scores.candidates.tolist()
    return auc(values[:MEMBERS], values[MEMBERS:])


CLIENTS: dict[str, dict[str, Any]] = {
    "gradient": {},
    "sgd, three steps": {"view": "delta", "learning_rate": 0.01, "local_steps": 3, "steps": 3},
    "AdamW": {"view": "delta", "learning_rate": 1e-3, "optimizer": "AdamW"},
    "AdamW, three steps": {
        "view": "delta", "learning_rate": 1e-3, "local_steps": 3, "steps": 3, "optimizer": "AdamW",
    },
}  # fmt: skip


@pytest.mark.parametrize("client", CLIENTS)
def test_members_are_told_from_others(client: str) -> None:
    """Six members of a round, thirty texts that were not in it."""
    assert _auc(_score(_seen(_part(0, MEMBERS), **CLIENTS[client]))) > 0.9


@pytest.mark.parametrize("client", CLIENTS)
def test_another_rounds_update_says_nothing(client: str) -> None:
    """The same texts are compared with the update of texts that are nowhere else."""
    seen = _seen(_part(120, MEMBERS), **CLIENTS[client])
    scores = _score(seen)
    assert 0.2 < _auc(scores) < 0.8
    above = (scores.candidates > scores.threshold(0.01)).double().mean()
    assert above <= 0.1


def test_labels_need_not_be_known() -> None:
    """Every class is tried; so are those of calibration texts."""
    assert _auc(_score(_seen(_part(0, MEMBERS)), labelled=False)) > 0.9


def test_a_language_model_needs_no_labels() -> None:
    """The tokens are the labels."""
    assert _auc(_score(_seen(_part(0, MEMBERS), "causal-lm"), "causal-lm")) > 0.9


def test_calibration_scores_are_standard() -> None:
    """They are residuals of fits to the other texts, divided by the residuals' spread."""
    scores = _score(_seen(_part(0, MEMBERS))).calibration
    assert float(scores.mean()) == pytest.approx(0.0, abs=0.05)
    assert float(scores.std()) == pytest.approx(1.0, abs=0.1)


def test_the_size_of_the_update_does_not_count() -> None:
    """Clipping scales an update by an unknown factor."""
    seen = _seen(_part(0, MEMBERS))
    small = replace(seen, update={name: g / 1024 for name, g in seen.update.items()})
    assert torch.allclose(_score(seen).candidates, _score(small).candidates, rtol=1e-3, atol=1e-3)


def test_one_reading_serves_rounds_of_the_same_weights() -> None:
    """`scores_of` gives what `membership_scores` gives."""
    first, second = _seen(_part(0, MEMBERS)), _seen(_part(120, MEMBERS))
    mine = _candidates(_part(0, MEMBERS + OTHERS), "classification")
    others = _candidates(_part(MEMBERS + OTHERS, CALIBRATION), "classification")
    read = read_texts(first, mine), read_texts(first, others)
    assert torch.equal(scores_of(second, *read).candidates, membership_scores(second, mine, others).candidates)


def test_the_model_stays_as_it_was() -> None:
    """Weights, gradients and what is trained."""
    seen = _seen(_part(0, MEMBERS))
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in seen.model.named_parameters()}
    _score(seen)
    for name, p in seen.model.named_parameters():
        assert torch.equal(p, before[name][0]) and p.requires_grad == before[name][1] and p.grad is None


def test_a_text_is_compared_with_the_others_only() -> None:
    """The block inverse gives what leaving out both rows of a text by hand gives."""
    rng = tiny.generator()
    rows, update = torch.randn(8, 40, generator=rng), torch.randn(40, generator=rng)
    found = align(update, rows, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
    size = rows.square().mean(dim=0).sqrt()
    scale = size + SMALLEST * size.median()
    even, u = (rows / scale).double(), (update / scale ** slope(update, scale)).double()
    ridge = RIDGE * float((even @ even.T).diagonal().mean())
    own, rest = even[4], even[[0, 1, 2, 3, 6, 7]]
    solved = torch.linalg.solve(rest @ rest.T + ridge * torch.eye(6).double(), rest)  # (6, 40)
    left = own - (rest @ own) @ solved
    expected = float(left @ u) / float(own @ own + ridge - (rest @ own) @ (solved @ own)) ** 0.5
    assert float(found[4]) == pytest.approx(expected, rel=1e-4)


def test_the_slope_tells_a_sum_of_gradients_from_their_signs() -> None:
    """Entries of different sizes, with noise of their own."""
    rng = tiny.generator()
    scale = torch.exp(2 * torch.randn(5000, generator=rng))
    drawn = torch.randn(5000, generator=rng)
    assert slope(drawn * scale, scale) == pytest.approx(1.0, abs=0.05)
    assert slope(drawn.sign(), scale) == 0.0


def test_a_zero_update_is_an_error_and_no_score() -> None:
    """It says nothing, which is not the same as one half."""
    seen = _seen(_part(0, MEMBERS))
    with pytest.raises(SnapshotError, match="the update is zero"):
        _score(replace(seen, update={name: torch.zeros_like(g) for name, g in seen.update.items()}))


def test_bad_texts_are_refused_with_their_number() -> None:
    """And never with their words."""
    seen = _seen(_part(0, MEMBERS))
    rows = _candidates(_part(0, 40), "classification")
    with pytest.raises(ConfigError, match=f"at least {FEWEST} .* got 3"):
        membership_scores(seen, rows[:2], rows[2:5])
    with pytest.raises(ConfigError, match="2 of 4 candidates are also calibration texts"):
        membership_scores(seen, rows[:4], rows[2:])
    with pytest.raises(ConfigError, match="candidate texts, and got none"):
        membership_scores(seen, [], rows)
    with pytest.raises(ConfigError, match="1 of 2 candidate texts have no token"):
        read_texts(seen, [rows[0], Candidate(())])
    with pytest.raises(ConfigError, match="classes go from 0 to 1"):
        read_texts(seen, [replace(rows[0], label=7)])


def test_an_update_of_tables_only_is_refused() -> None:
    """Nothing else is read yet."""
    seen = _seen(_part(0, MEMBERS))
    tables = {name: g for name, g in seen.update.items() if "word_embeddings" in name}
    with pytest.raises(AnatomyError, match="embedding tables only"):
        _score(replace(seen, update=tables))
