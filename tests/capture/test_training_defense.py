"""A defence that the callback applies to the update which training uses (`defense`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.callbacks.torch_loop import watch
from leakaudit.client.snapshot import Snapshot
from leakaudit.plugins import Defense
from leakaudit.registry import defenses
from leakaudit.results.schema import VerificationStatus
from tests.support import stacks, tiny
from tests.support.stacks import STACKS, Case
from tests.support.tiny_trainer import audit_config, stamp, without_side_process

SEED = 7
CLIP = 0.5
ON_UPDATE = sorted(name for name, kind in defenses if kind().on_update)
"""Every registered defence that is a function of the update, at its default knobs."""
IN_STACKS = ("Trainer", "Lightning, automatic", "Lightning, manual", "Accelerate", "plain torch")
NOISE = "gaussian-noise(scale=0.5)"


def _raw(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the clipped gradient of one batch, by plain autograd."""
    model.zero_grad()
    model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def _by_hand(defense: Defense, batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return the updates of a defended training, without any callback."""
    model, rng, updates = tiny.bert().train(), torch.Generator().manual_seed(SEED), []
    for batch in batches:
        raw = _raw(model, batch)
        updates.append(dict(defense.prepared(raw, 1.0).changed(raw, rng)))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in updates[-1]:
                    parameter.add_(updates[-1][name], alpha=-stacks.RATE)
    return updates


def _loop(folder: Path, *, kind: Any = torch.optim.SGD, batches: Any = None, **audit: Any) -> Any:
    """Train in a plain loop with clipping and dropout; return the audit and the model."""
    torch.manual_seed(0)
    model = tiny.bert(dropout=0.1).train()
    optimizer = kind(model.parameters(), lr=stacks.RATE)
    config = audit.pop("config", None) or audit_config(folder, max_snapshots=50)
    watched = watch(model, optimizer, tokenizer=tiny.bert_tokenizer(), config=config, **audit)
    with without_side_process(), watched:
        for batch in batches or stacks.classes(count=2):
            _raw(model, batch)
            optimizer.step()
    return watched, model


def _same_weights(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("name", ON_UPDATE)
@pytest.mark.parametrize("stack", IN_STACKS)
def test_what_training_uses_is_what_the_defence_makes_of_the_gradient(stack: str, name: str, tmp_path: Path) -> None:
    """Forbids an optimizer that gets other numbers than the defence returns, a second application, and a kept update that is not shipped."""
    case = Case(batches=stacks.classes(count=3), clip=CLIP, audit={"defense": name, "defense_seed": SEED})
    found = STACKS[stack](tmp_path, case)
    assert list(found) == [0, 1, 2]
    for step, wanted in enumerate(_by_hand(defenses.create(name), case.batches)):
        snapshot = found[step]
        assert snapshot.observation.update.keys() == wanted.keys()
        assert all(torch.equal(snapshot.observation.update[n], wanted[n]) for n in wanted)
        if step:
            assert _moved(found[step - 1], snapshot), "the optimizer moved the weights by the kept update"
        assert [declared.name for declared in snapshot.observation.facts.defenses] == [name]
        verified = stamp(snapshot)
        clipped = verified.status is VerificationStatus.SCALED and stack == "Lightning, manual"  # nobody told the bound
        assert clipped or verified.status in (VerificationStatus.VERIFIED, VerificationStatus.NOISED), verified


def _moved(before: Snapshot, after: Snapshot) -> bool:
    now, then = before.observation.model.state_dict(), after.observation.model.state_dict()
    return all(torch.equal(now[n].add(g, alpha=-stacks.RATE), then[n]) for n, g in before.observation.update.items())


def test_at_least_half_of_the_defences_change_an_update_at_their_default_knobs() -> None:
    """Forbids that the test above compares undefended updates only."""
    raw = _raw(tiny.bert().train(), stacks.classes(count=1)[0])
    made = {n: kind().prepared(raw, 1.0).changed(raw, torch.Generator()) for n, kind in defenses if n in ON_UPDATE}
    changed = [name for name, sent in made.items() if any(not torch.equal(sent[n], raw[n]) for n in raw)]
    assert len(changed) >= len(ON_UPDATE) / 2
