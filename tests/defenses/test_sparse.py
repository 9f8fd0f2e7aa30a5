"""`prune`, `random-mask` and `top-k` send the entries that their papers say."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from leakaudit.audit.verification import verify
from leakaudit.client.observation import Update
from leakaudit.client.truth import Truth
from leakaudit.defenses.prune import Prune
from leakaudit.defenses.random_mask import RandomMask
from leakaudit.defenses.top_k import TopK
from leakaudit.errors import SnapshotError
from leakaudit.plugins.error_feedback import SentInOrder, mean_of_window
from leakaudit.plugins.testing import check_defense
from leakaudit.results.schema import VerificationStatus
from tests.support import tiny


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _gradients(steps: int) -> list[dict[str, Tensor]]:
    rng = _generator()
    return [
        {"large": 100 * torch.randn(40, 5, generator=rng), "small": torch.randn(30, generator=rng)}
        for _ in range(steps)
    ]


def _by_torch(g: Tensor, kept: int) -> Tensor:
    flat = torch.zeros(g.numel())
    places = g.flatten().abs().topk(kept).indices
    flat[places] = g.flatten()[places]
    return flat.reshape(g.shape)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_top_k_sends_what_torch_calls_the_largest_of_each_tensor(share: float) -> None:
    """ceil(share n) entries, at least one; not the largest of the whole update."""
    (update,) = _gradients(1)
    sent = TopK(share=share).changed(update, _generator())
    for name, g in update.items():
        assert torch.equal(sent[name], _by_torch(g, math.ceil(share * g.numel())))


def test_of_two_entries_of_equal_size_one_is_sent() -> None:
    """The bias of two classes has the gradient (d, -d); neither both nor none."""
    assert TopK(share=0.5).changed({"bias": torch.tensor([0.3, -0.3])}, _generator())["bias"].tolist() == [
        pytest.approx(0.3),
        0.0,
    ]


def test_top_k_is_pruning_of_each_layer_by_another_share() -> None:
    """The two names stand for one computation; pruning the update is another one."""
    (update,) = _gradients(1)
    top = TopK(share=0.25).changed(update, _generator())
    layers = Prune(share=0.75, per="layer").changed(update, _generator())
    whole = Prune(share=0.75).changed(update, _generator())
    assert all(torch.equal(top[name], layers[name]) for name in update)
    assert not whole["small"].any() and top["small"].any()


def test_a_random_mask_is_random_pruning_that_keeps_the_mean() -> None:
    """The same entries, divided by the probability with which they are sent."""
    (update,) = _gradients(1)
    pruned = Prune(share=0.75, choose="random").changed(update, _generator())
    masked = RandomMask(share=0.75).changed(update, _generator())
    plain = RandomMask(share=0.75, rescale=False).changed(update, _generator())
    for name in update:
        torch.testing.assert_close(masked[name], 4 * pruned[name])
        assert torch.equal(plain[name], pruned[name])
    many = torch.stack([RandomMask(share=0.75).changed(update, _generator(i))["small"] for i in range(4000)])
    error = update["small"].abs() * (3 / 4000) ** 0.5  # variance of v B / q is v^2 (1 - q) / q, with q = 1/4
    assert bool(((many.mean(dim=0) - update["small"]).abs() <= 5 * error).all())


def test_only_an_enlarged_mask_hides_the_length_of_the_update() -> None:
    """An attack may match lengths where what is left has its own size."""
    assert RandomMask().resized and not RandomMask(rescale=False).resized


@pytest.mark.parametrize(
    "defense", [RandomMask(share=0.5), RandomMask(share=0.99, rescale=False), TopK(share=0.001), Prune(per="layer")]
)
def test_the_contract_holds(defense: RandomMask | TopK | Prune) -> None:
    """No step that declares it would be called a mismatch."""
    check_defense(defense)


@pytest.mark.parametrize(
    ("kind", "knobs"), [(RandomMask, {"share": 1.0}), (TopK, {"share": 0.0}), (Prune, {"per": "row"})]
)
def test_impossible_knobs_are_refused(kind: type, knobs: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        kind(**knobs)


def _sent(defense: TopK, gradients: list[dict[str, Tensor]]) -> tuple[list[Update], SentInOrder]:
    run = SentInOrder(defense)
    return [run.send(g, _generator()) for g in gradients], run


def test_with_error_feedback_a_window_sends_the_sum_of_its_gradients() -> None:
    """But for what is left in the memory; without feedback most is never sent."""
    gradients = _gradients(30)
    sent, run = _sent(TopK(share=0.1, error_feedback=True), gradients)
    bare, forgetful = _sent(TopK(share=0.1), gradients)
    for name in gradients[0]:
        total = torch.stack([g[name] for g in gradients]).sum(dim=0)
        added = torch.stack([update[name] for update in sent]).sum(dim=0)
        torch.testing.assert_close(added + run.left[name], total, rtol=1e-5, atol=1e-3)
        forgotten = torch.stack([update[name] for update in bare]).sum(dim=0)
        assert (added - total).norm() < (forgotten - total).norm()
        assert all(int((update[name] != 0).sum()) == math.ceil(0.1 * total.numel()) for update in sent)
    assert not forgetful.left


def test_a_step_with_error_feedback_is_never_called_another_batch() -> None:
    """It is unverifiable, because its memory is not known; raw steps are recognised."""
    step = tiny.client_step(tiny.bert(), tiny.bert_tokenizer(), ["the dog saw a cat"], [1])
    defense = TopK(share=0.1, error_feedback=True)
    declared = dataclasses.replace(step, facts=step.facts.model_copy(update={"defenses": (defense.declared(),)}))
    raw = step.update()
    sent = defense.changed({name: g + 1e-3 for name, g in raw.items()}, _generator())
    found = verify(declared, sent)
    assert found.status is VerificationStatus.UNVERIFIABLE and "error feedback" in found.note
    assert verify(declared, raw).absent == ("top-k",)
    with pytest.raises(SnapshotError, match="error_feedback=false"):
        defense(step, step.observe(), _generator())


def test_a_window_shows_the_mean_of_what_was_sent_in_order() -> None:
    """Without a defence it is the mean of the updates.

    A defence without feedback is not tried on it.
    """
    tokenizer, model = tiny.bert_tokenizer(), tiny.bert()
    steps = [tiny.client_step(model, tokenizer, [text], [1]) for text in ("the dog saw a cat", "a cat saw the old dog")]
    batches = tuple(step.truth.micro_batches[0] for step in steps)
    recipe = steps[0].recipe.model_copy(update={"window": 2})
    window = dataclasses.replace(steps[0], truth=Truth(batches), recipe=recipe)
    clean = [step.update() for step in steps]
    defense = TopK(share=0.1, error_feedback=True)
    sent, _ = _sent(defense, clean)
    seen = mean_of_window(defense, window, window.observe(), _generator())
    assert seen.facts.defenses == (defense.declared(),)
    for name, raw in window.observe().update.items():
        torch.testing.assert_close(raw, (clean[0][name] + clean[1][name]) / 2, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(seen.update[name], (sent[0][name] + sent[1][name]) / 2, rtol=1e-4, atol=1e-6)
