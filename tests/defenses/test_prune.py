"""`prune` keeps the largest entries of the whole update."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from leakaudit.audit.verification import verify
from leakaudit.client.facts import DeclaredDefense
from leakaudit.defenses.prune import Choice, Prune
from leakaudit.results.schema import VerificationStatus
from tests.support import tiny


def test_the_smallest_entries_of_all_parameters_together_are_zeroed() -> None:
    """Four of nine entries, wherever they stand."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["a dog"], [1])
    update = {"a": torch.tensor([1.0, -8.0, 2.0]), "b": torch.tensor([[-3.0, 7.0], [4.0, 6.0], [0.5, -5.0]])}
    seen = dataclasses.replace(step.observe(), update=update)
    pruned = Prune(share=0.5)(step, seen, torch.Generator())
    assert pruned.update["a"].tolist() == [0.0, -8.0, 0.0]
    assert pruned.update["b"].tolist() == [[0.0, 7.0], [4.0, 6.0], [0.0, -5.0]]
    (declared,) = pruned.facts.defenses
    assert declared == DeclaredDefense(name="prune", parameters={"share": 0.5, "choose": "magnitude", "per": "update"})


@pytest.mark.parametrize("choose", ["magnitude", "random"])
def test_a_pruned_step_is_verified_on_what_is_left(choose: Choice) -> None:
    """The stamp compares non-zero entries only."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["the dog saw a cat"], [1])
    pruned = Prune(share=0.9, choose=choose)(step, step.observe(), torch.Generator())
    declared = dataclasses.replace(step, facts=pruned.facts)
    assert verify(declared, pruned.update).status is VerificationStatus.VERIFIED


def test_random_entries_are_zeroed_whatever_their_size() -> None:
    """A share of large and small entries alike, drawn by the seed.

    As the code of LAMP does it (App. C.2).
    """
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["a dog"], [1])
    update = {"large": torch.full((100, 100), 9.0), "small": torch.full((10_000,), 1e-3)}
    seen = dataclasses.replace(step.observe(), update=update)
    defense = Prune(share=0.75, choose="random")
    one, other = (defense(step, seen, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    for name, tensor in one.update.items():
        assert float((tensor == 0).double().mean()) == pytest.approx(0.75, abs=0.03)
        assert torch.equal(tensor[tensor != 0], update[name][tensor != 0])
        assert not torch.equal(tensor, other.update[name])
    assert one.zeroed
    assert one.facts.defenses == (
        DeclaredDefense(name="prune", parameters={"share": 0.75, "choose": "random", "per": "update"}),
    )


def test_a_choice_that_does_not_exist_is_refused() -> None:
    """The message lists those that do."""
    with pytest.raises(ValueError, match="magnitude, random, got 'largest'"):
        Prune(choose="largest")  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5])
def test_a_share_outside_zero_to_one_is_refused(share: float) -> None:
    """Pruning everything would leave no update at all."""
    with pytest.raises(ValueError, match="share must be at least 0 and below 1"):
        Prune(share=share)
