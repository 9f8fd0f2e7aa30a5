"""Attacks that know it say which parameters told them what they read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from leakaudit.algorithms.span.subspace import span_of, stacked_update, told_by
from leakaudit.attacks.embedding_rows import EmbeddingRows
from leakaudit.attacks.idlg import Idlg
from leakaudit.attacks.llg import Llg
from leakaudit.attacks.llg_star import LlgStar
from leakaudit.attacks.random_labels import RandomLabels
from leakaudit.attacks.span import Span
from leakaudit.client.observation import Observation
from leakaudit.defenses.gaussian_noise import GaussianNoise
from leakaudit.models.structure import anatomy_of
from leakaudit.plugins.budget import Budget
from tests.support import tiny

HEAD = "classifier"
PROJECTIONS = {f"bert.encoder.layer.0.attention.self.{name}.weight" for name in ("query", "key", "value")}


def run(attack: Any, seen: Observation, seconds: float = 60.0) -> dict[str, float]:
    """Return what an attack says of its sources."""
    return dict(attack(seen, torch.Generator().manual_seed(0), Budget(seconds)).told_by)


def test_span_shares_its_directions_among_the_layers_that_read_the_input() -> None:
    """The shares sum to 1; a layer that is withheld has none."""
    seen = tiny.observe(["the dog saw a bird"], [1])
    found = run(Span(), seen)
    assert set(found) == PROJECTIONS and sum(found.values()) == pytest.approx(1.0)
    less = {name: part for name, part in seen.update.items() if "key" not in name}
    assert set(run(Span(), seen.sent_as(less, ()))) == {name for name in PROJECTIONS if "key" not in name}


def test_a_layer_with_all_of_a_direction_has_all_of_its_share() -> None:
    """Own shares of two directions, one of which two layers have."""
    seen = tiny.observe(["a dog"])
    anatomy = anatomy_of(seen.model)
    query, _, value = sorted(PROJECTIONS, key=lambda name: "qkv".index(name.split(".")[-2][0]))
    parts = {name: torch.zeros(tiny.HIDDEN, tiny.HIDDEN, dtype=torch.float64) for name in (query, value)}
    parts[query][0, 0] = parts[query][1, 1] = parts[value][0, 1] = 1.0
    parts[query][1, 1] = 1.0
    basis = span_of(stacked_update(parts, anatomy))
    # at norm 1 the query has 1/2 of the energy of each direction, and the value has 1 of the second one
    assert told_by(parts, anatomy, basis) == pytest.approx({query: (1 + 1 / 3) / 2, value: (2 / 3) / 2})


def test_span_does_not_say_it_under_noise() -> None:
    """Noise fills every direction, and what it fills told nothing."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["the dog saw a bird"], [1])
    noisy = GaussianNoise(scale=1e-3)(step, step.observe(), torch.Generator().manual_seed(0))
    assert run(Span(), noisy, seconds=0.5) == {}


def test_words_are_told_by_the_table_that_names_them() -> None:
    """Every word by the word embedding; without a word there is no share."""
    seen = tiny.observe(["the dog saw a bird"], [1])
    table = tiny.word_table(seen.model)
    assert run(EmbeddingRows(), seen) == {table: 1.0}
    empty = seen.sent_as({**seen.update, table: torch.zeros_like(seen.update[table])}, ())
    assert run(EmbeddingRows(), empty) == {}


@pytest.mark.parametrize("attack", [Idlg(), Llg(), LlgStar()], ids=lambda attack: attack.name)
def test_labels_are_told_by_the_bias_or_else_by_the_weight(attack: Any) -> None:
    """The bias is read where it is shared."""
    seen = tiny.observe(["the dog saw a bird"], [1])
    assert run(attack, seen) == {f"{HEAD}.bias": 1.0}
    silent = seen.sent_as({**seen.update, f"{HEAD}.bias": torch.zeros_like(seen.update[f"{HEAD}.bias"])}, ())
    assert run(attack, silent) == {f"{HEAD}.weight": 1.0}


def test_an_attack_that_reads_nothing_says_nothing() -> None:
    """This one reads nothing."""
    assert run(RandomLabels(), tiny.observe(["the dog saw a bird"], [1])) == {}
