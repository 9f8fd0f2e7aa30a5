"""A shipped defence in the user's own code is never a mismatch.

The configuration declares it by name and parameters.

The code here stands for the user's: it is written without the project's defences.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from leakaudit.audit.applied_defenses import defenses_found
from leakaudit.callbacks.torch_loop import watch
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.config.audit import PluginSpec
from leakaudit.results.schema import VerificationStatus
from tests.support import stacks, tiny
from tests.support.tiny_trainer import audit_config, kept, stamp, train, without_side_process

VERIFIED, SCALED, NOISED = VerificationStatus.VERIFIED, VerificationStatus.SCALED, VerificationStatus.NOISED

Apply = Callable[[nn.Module], None]


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _rms(gradients: list[Tensor]) -> float:
    return float(torch.cat([g.flatten() for g in gradients]).square().mean().sqrt())


def _gaussian(model: nn.Module) -> None:
    sigma = _rms(_gradients(model))
    for g in _gradients(model):
        g.add_(torch.randn_like(g), alpha=sigma)


def _laplace(model: nn.Module) -> None:
    sigma = _rms(_gradients(model))
    for g in _gradients(model):
        g.add_(torch.distributions.Laplace(0.0, sigma / 2**0.5).sample(g.shape))


def _round(model: nn.Module) -> None:
    for g in _gradients(model):
        g.copy_(g.bfloat16().float())


def _sign(model: nn.Module) -> None:
    for g in _gradients(model):
        g.sign_()


def _quantize(model: nn.Module) -> None:
    for g in _gradients(model):
        level = g.abs().max() / 7  # four bits: -7 to 7
        if float(level) > 0:
            lower = (g / level).floor()
            g.copy_((lower + torch.bernoulli(g / level - lower)) * level)


def _prune(model: nn.Module) -> None:
    gradients = _gradients(model)
    cut = torch.cat([g.abs().flatten() for g in gradients]).quantile(0.9)
    for g in gradients:
        g.mul_(g.abs() > cut)


def _tables(model: nn.Module) -> list[Tensor]:
    return [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]


def _zero_tables(model: nn.Module) -> None:
    for table in _tables(model):
        if table.grad is not None:
            table.grad.zero_()


def _drop_tables(model: nn.Module) -> None:
    for table in _tables(model):
        table.grad = None


SHIPPED: dict[str, tuple[PluginSpec, Apply, VerificationStatus]] = {
    "gaussian": (PluginSpec(name="gaussian-noise", options={"scale": 1.0}), _gaussian, NOISED),
    "laplace": (PluginSpec(name="laplace-noise", options={"scale": 1.0}), _laplace, NOISED),
    "round": (PluginSpec(name="round"), _round, VERIFIED),
    "sign": (PluginSpec(name="sign"), _sign, VERIFIED),
    "quantize": (PluginSpec(name="quantize", options={"bits": 4}), _quantize, VERIFIED),
    "prune": (PluginSpec(name="prune", options={"share": 0.9}), _prune, VERIFIED),
    "tables set to zero": (PluginSpec(name="freeze-embeddings"), _zero_tables, VERIFIED),
    "tables without a gradient": (PluginSpec(name="freeze-embeddings"), _drop_tables, VERIFIED),
    "none": (PluginSpec(name="none"), lambda model: None, VERIFIED),
    "undefended": (PluginSpec(name="undefended"), lambda model: None, VERIFIED),
}
"""What a user's code does -> what the configuration declares, the code, the stamp it gets."""


class _Defend(TrainerCallback):
    """Changes the gradients after clipping and before the optimizer moves."""

    def __init__(self, apply: Apply) -> None:
        self.apply = apply

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.manual_seed(state.global_step)
        self.apply(kwargs["model"])


def _loop(folder: Path, shipped: PluginSpec, apply: Apply, model: nn.Module | None = None, **options: Any) -> Any:
    """Train in a loop of one's own, and return the audit."""
    model = (model or tiny.bert()).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    config = audit_config(folder, shipped_defense=shipped, max_snapshots=50)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=config, **options)
    torch.manual_seed(0)
    with without_side_process(), watched:
        for batch in stacks.classes(count=2):
            model(**batch).loss.backward()
            apply(model)
            optimizer.step()
            optimizer.zero_grad()
    return watched


def _stands(snapshots: dict[int, Snapshot], status: VerificationStatus, shipped: PluginSpec) -> None:
    """Check stamps, and that the defence is still declared to attacks where it is one."""
    assert snapshots
    for snapshot in snapshots.values():
        found = stamp(snapshot)
        assert found.status is status, found
        left = defenses_found(ClientStep.of(snapshot), found, snapshot.observation.update)
        assert [d.name for d in left] == [d.name for d in snapshot.observation.facts.defenses]
        assert [d.name for d in left] == ([] if shipped.name in ("none", "undefended") else [shipped.name])


@pytest.mark.parametrize("what", SHIPPED)
def test_a_shipped_defence_in_a_loop_of_ones_own_is_no_mismatch(what: str, tmp_path: Path) -> None:
    """The recorder reads the gradients when the optimizer steps.

    So it sees what the loop did to them.
    """
    shipped, apply, status = SHIPPED[what]
    _stands(kept(_loop(tmp_path, shipped, apply)), status, shipped)


@pytest.mark.parametrize("what", SHIPPED)
def test_a_shipped_defence_in_a_trainer_is_no_mismatch(what: str, tmp_path: Path) -> None:
    """With the trainer's own clipping before it."""
    shipped, apply, status = SHIPPED[what]
    config = audit_config(tmp_path, shipped_defense=shipped)
    _stands(train(tmp_path, _Defend(apply), config=config, max_grad_norm=0.5), status, shipped)


def test_tables_that_do_not_train_are_frozen_as_declared(tmp_path: Path) -> None:
    """The plainest way to ship `freeze-embeddings`."""
    model = tiny.bert()
    for table in _tables(model):
        table.requires_grad_(False)
    shipped = PluginSpec(name="freeze-embeddings")
    _stands(kept(_loop(tmp_path, shipped, lambda _: None, model)), VERIFIED, shipped)


@pytest.mark.parametrize(("given", "noise"), [({}, 0.01), ({"expected_batch_size": 2}, 0.01), ({}, 4.0)])
def test_private_sgd_by_hand_is_what_it_declares(tmp_path: Path, given: dict[str, Any], noise: float) -> None:
    """The loop clips a gradient per example, adds noise and divides.

    There is one backward pass an example; noise is added to the sum, which is divided by the batch.
    """
    bound = 0.05
    model = tiny.bert().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shipped = PluginSpec(name="dp-sgd", options={"noise_multiplier": noise, "max_grad_norm": bound, **given})
    config = audit_config(tmp_path, shipped_defense=shipped)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=config)
    torch.manual_seed(0)
    with without_side_process(), watched:
        for batch in stacks.classes(count=2):
            total = {p: torch.zeros_like(p) for p in model.parameters()}
            for row in range(2):
                model.zero_grad()
                model(**{name: value[row : row + 1] for name, value in batch.items()}).loss.backward()
                norm = float(torch.cat([g.flatten() for g in _gradients(model)]).norm())
                assert norm > bound
                for p in model.parameters():
                    total[p] += min(1.0, bound / norm) * (0 if p.grad is None else p.grad)
            for p in model.parameters():
                p.grad = (total[p] + noise * bound * torch.randn_like(p)) / 2
            optimizer.step()
            optimizer.zero_grad()
    snapshots = kept(watched)
    _stands(snapshots, NOISED, shipped)
    for snapshot in snapshots.values():
        assert len(snapshot.truth.sequences()) == 2
        step, found = ClientStep.of(snapshot), stamp(snapshot)
        (left,) = defenses_found(step, found, snapshot.observation.update)
        assert left.parameters["expected_batch_size"] == 2.0
        assert found.sigma == pytest.approx(noise * bound / 2, rel=0.05)


def test_the_wrong_strength_is_a_mismatch(tmp_path: Path) -> None:
    """The noise is ten times the declared one.

    An attack that believes the declaration would be judged unfairly.
    """
    shipped = PluginSpec(name="gaussian-noise", options={"scale": 0.1})
    for snapshot in kept(_loop(tmp_path, shipped, _gaussian)).values():
        assert stamp(snapshot).status is VerificationStatus.MISMATCH


@pytest.mark.parametrize("what", ["gaussian", "laplace", "round", "quantize"])
def test_a_loop_that_clips_first_and_does_not_say_so_is_a_factor(what: str, tmp_path: Path) -> None:
    """Without `watch(max_grad_norm=...)` the factor is named.

    It is the same without a defence.
    """
    shipped, apply, _ = SHIPPED[what]

    def clip_and_apply(model: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        apply(model)

    for snapshot in kept(_loop(tmp_path, shipped, clip_and_apply)).values():
        found = stamp(snapshot)
        if what in ("gaussian", "laplace"):
            assert found.status is VerificationStatus.MISMATCH and "give `max_grad_norm`" in found.note
        else:
            assert found.status is SCALED, found
