"""Rows of the word embedding's update: the tokens of the batch.

A row without a gradient is zero in a gradient and after steps of SGD. Other optimizers move it by their weight decay alone, and every
optimizer moves it alike: the client's own one, run with gradients of zero, says by how much. So the rows are told apart after any number of
local steps, if the optimizer began afresh. Moments of earlier rounds move the rows of earlier tokens, too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leakaudit.algorithms.above_noise import rows_above_noise
from leakaudit.algorithms.gradient_estimate import divisor_of
from leakaudit.client.facts import PublicFacts
from leakaudit.client.observation import Observation
from leakaudit.client.optimizer import UNKNOWN
from leakaudit.models.structure import word_embedding
from leakaudit.plugins.attack_protocol import APPLIES, Applicability, not_applicable

FALSE_ROWS = 1.0
"""Rows that may be named by chance under noise.
Our choice: one word too many. With noise alone, 99 tables of 100 name no row."""


def can_read_rows(seen: Observation) -> Applicability:
    """Say whether the word embedding's update is shared and depends on inputs alone."""
    name = word_embedding(seen.model)
    if name is None or name not in seen.update:
        return not_applicable(
            f"the word embedding {name!r} is frozen or its update is not shared"
            if name
            else "the model has no word embedding among its parameters"
        )
    if any(name in pair for pair in seen.facts.tied):
        return not_applicable(f"the word embedding {name!r} is tied to an output head, which touches every row of it")
    facts = (seen.sent or seen).facts
    if _moves_by_unknown_rule(facts, name):
        if _decayed_alike(seen.sent or seen, name) is not None:
            return APPLIES
        return not_applicable(
            "the optimizer decays weights by a rule that is not known here, and its rows do not shrink by one common share, so every row moves "
            "by an unknown amount"
        )
    if holds_earlier_rounds(seen) and _moves_without_gradient(facts, name) == "by its moments":
        return not_applicable(
            "the optimizer adds weight decay to the gradient and kept moments of earlier rounds, so every row moves by an unknown amount"
        )
    return APPLIES


def holds_earlier_rounds(seen: Observation) -> bool:
    """Return whether rows of earlier rounds' tokens may have moved as well."""
    optimizer = (seen.sent or seen).facts.optimizer
    return optimizer is not None and not optimizer.fresh and optimizer.kind != "sgd"


def rows_of_tokens(seen: Observation) -> Tensor:
    """Return the word embedding's update (V, D) without what moves every row.

    Rows without a gradient are exactly zero if there is no noise.

    Args:
        seen: `can_read_rows` applies to it.
    """
    sent, name = seen.sent or seen, str(word_embedding(seen.model))
    rows = sent.update[name]
    if _moves_without_gradient(sent.facts, name) is None:
        return rows
    weight = dict(sent.model.named_parameters())[name].detach()
    still = _decayed_alike(sent, name) if _moves_by_unknown_rule(sent.facts, name) else None
    if still is None:
        still = _without_gradient(sent.facts, name, weight)
    return torch.where((rows - still).abs() <= _rounding(sent, weight), torch.zeros_like(rows), rows - still)


def _rounding(sent: Observation, weight: Tensor) -> Tensor:
    """Return by how much rounding of the weights (V, D) may move their update."""
    unit = (torch.nextafter(weight.abs(), torch.full_like(weight, torch.inf)) - weight.abs()).float()
    return unit * ((sent.facts.local_steps + 1) / divisor_of(sent.facts))


def _moves_without_gradient(facts: PublicFacts, name: str) -> str | None:
    """Return by what the optimizer moves a row that has no gradient.

    None if it does not move it.
    """
    optimizer = facts.optimizer
    group = None if optimizer is None else optimizer.group_of(name)
    if optimizer is None or group is None or not group.options.get("weight_decay"):
        return None
    apart = optimizer.algorithm in ("AdamW", "Adafactor") or bool(group.options.get("decoupled_weight_decay"))
    return "by its decay" if apart or optimizer.kind == "sgd" else "by its moments"


def _moves_by_unknown_rule(facts: PublicFacts, name: str) -> bool:
    """Return whether an optimizer that is not known here decays a table."""
    unknown = facts.optimizer is not None and facts.optimizer.algorithm == UNKNOWN
    return unknown and _moves_without_gradient(facts, name) is not None


def _decayed_alike(sent: Observation, name: str) -> Tensor | None:
    """Return the update (V, D) of rows that only shrink, by one common share.

    Own derivation: decay beside the gradient multiplies every row without a gradient by the same number, whatever the rest of the rule
    is. The share is in the middle of the densest quarter of the rows' shares. None unless it explains a quarter of the rows in all entries, up to
    rounding: our choice, because a batch may hold most words of a small vocabulary.
    """
    weight = dict(sent.model.named_parameters())[name].detach()
    rows, table = sent.update[name].float(), weight.float()
    size = table.square().sum(dim=1)
    shares = ((rows * table).sum(dim=1) / size.clamp_min(1e-30))[size > 0].sort().values
    quarter = (len(rows) + 3) // 4
    if len(shares) <= quarter:
        return None
    first = int((shares[quarter:] - shares[:-quarter]).argmin())
    share = shares[first : first + quarter].median()
    still = share * table
    # The share itself is known up to rounding, so twice the room of one row.
    alike = ((rows - still).abs() <= 2 * _rounding(sent, weight)).all(dim=1)
    return torch.where(alike[:, None], rows, still) if int(alike.sum()) >= quarter else None


def _without_gradient(facts: PublicFacts, name: str, weight: Tensor) -> Tensor:
    """Return the update (V, D) that the client's optimizer makes of gradients of zero."""
    optimizer = facts.optimizer
    group = None if optimizer is None else optimizer.group_of(name)
    if optimizer is None or group is None:
        return torch.zeros_like(weight, dtype=torch.float32)
    moved = nn.Parameter(weight.clone())
    alone = optimizer.model_copy(update={"groups": (group.model_copy(update={"parameters": (name,)}),)})
    stepper = alone.make({name: moved})
    moved.grad = torch.zeros_like(moved)
    for rate in group.learning_rates:
        stepper.param_groups[0]["lr"] = rate
        stepper.step()
    return (weight.float() - moved.detach().float()) / divisor_of(facts)


def touched_rows(seen: Observation, false_rows: float) -> tuple[Tensor, float]:
    """Return the rows of the word embedding (V, D) that hold more than noise.

    Args:
        seen: `can_read_rows` applies to it.
        false_rows: how many of the V rows may be named by chance, under noise.

    Returns:
        (V,) bool, and the noise's standard deviation in the update's units, 0 without noise.
    """
    key = f"touched rows {false_rows}"
    if key not in seen.memo:
        seen.memo[key] = _touched_rows(seen, false_rows)
    touched, noise = seen.memo[key]
    return touched.clone(), noise


def _touched_rows(seen: Observation, false_rows: float) -> tuple[Tensor, float]:
    rows = rows_of_tokens(seen)  # (V, D)
    sigma = (seen.sent or seen).noise_level.of(word_embedding(seen.model))
    touched = (rows != 0).any(dim=1)  # (V,)
    if sigma > 0.0 or bool(touched.all()):
        return rows_above_noise(rows, sigma, false_rows)
    return touched, 0.0


def tokens_of(touched: Tensor, seen: Observation) -> tuple[int, ...]:
    """Return the tokens of touched rows (V,) in ascending order, without special ones."""
    around = seen.facts.vocabulary.wordless_ids
    return tuple(token for token in touched.nonzero().flatten().tolist() if token not in around)
