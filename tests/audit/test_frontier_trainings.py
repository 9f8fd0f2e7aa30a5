"""Trainings of a frontier: pairs, plans and prices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from leakaudit.audit.frontier.plan import Candidate, Trial, dropped, leaks_no_more, strengths
from leakaudit.audit.frontier.training import Trainer
from leakaudit.config.audit import PluginSpec
from leakaudit.config.frontier import Trainings
from leakaudit.config.simulation import Simulation
from leakaudit.defenses.dp_sgd import DpSgd
from leakaudit.defenses.freeze_embeddings import FreezeEmbeddings
from leakaudit.defenses.gaussian_noise import GaussianNoise
from leakaudit.defenses.prune import Prune
from leakaudit.defenses.quantize import Quantize
from leakaudit.defenses.rounding import Round
from leakaudit.defenses.sign import Sign
from leakaudit.plugins.defense_protocol import Defense
from leakaudit.results.schema import Catalogue, MetricEntry, Results, Summary
from tests.support import tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Give a trainer of the tiny BERT on 30 rows."""
    folder = tmp_path_factory.mktemp("trainings")
    tiny.bert(seed=1, dropout=0.1).save_pretrained(folder / "model")  # type: ignore[operator]
    tiny.bert_tokenizer().save_pretrained(folder / "model")
    rows = [{"text": "the dog sat", "label": 0}, {"text": "a cat ran to the park", "label": 1}] * 15
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    what = Simulation(folder / "model", folder / "rows.jsonl", mode="train")
    return Trainer(what, Trainings(train_batch_size=4, train_optimizer="sgd"), CPU)


def _weights(trainer: Trainer, defense: Defense | None, seed: int, steps: int = 3) -> dict[str, torch.Tensor]:
    run, batches = trainer.start(seed), trainer.batches_of(seed)
    optimizer, rng = run.optimizer(0.1), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        run.advance(next(batches), defense, rng, optimizer)
    return {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}


def _by_hand(trainer: Trainer, seed: int, steps: int = 3) -> dict[str, torch.Tensor]:
    """Train as a plain loop of torch does."""
    run, batches = trainer.start(seed), trainer.batches_of(seed)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    run.model.train()
    for _ in range(steps):
        batch = next(batches)
        torch.set_rng_state(batch.rng["cpu"])
        optimizer.zero_grad()
        run.model(**batch.inputs).loss.backward()
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}


def test_the_training_without_a_defence_is_a_plain_loop(trainer: Trainer) -> None:
    """Forbids a baseline that trains differently from a loop of torch, with dropout."""
    own, plain = _weights(trainer, None, 2), _by_hand(trainer, 2)
    for name, weights in plain.items():
        assert torch.allclose(own[name], weights, atol=1e-6), name


def test_a_defence_that_changes_nothing_gives_the_same_model(trainer: Trainer) -> None:
    """Forbids another start, order or dropout under a defence."""
    nearly = GaussianNoise(scale=1e-12)
    own, plain = _weights(trainer, nearly, 1), _weights(trainer, None, 1)
    assert all(torch.allclose(own[name], plain[name], atol=1e-7) for name in plain)
    assert any(not torch.equal(weights, plain[name]) for name, weights in _weights(trainer, None, 2).items())


def test_dp_sgd_with_a_huge_bound_and_no_noise_trains_as_without_it(trainer: Trainer) -> None:
    """Forbids per-example gradients that do not add up to that of the batch."""
    own, plain = _weights(trainer, DpSgd(noise_multiplier=0.0, max_grad_norm=1e6), 1), _weights(trainer, None, 1)
    assert all(torch.allclose(own[name], plain[name], atol=1e-5) for name in plain)


def test_a_withheld_table_keeps_its_weights(trainer: Trainer) -> None:
    """Forbids that a frozen parameter moves in training."""
    start = {name: p.detach().clone() for name, p in trainer.start(1).model.named_parameters()}
    own = _weights(trainer, FreezeEmbeddings(), 1)
    moved = {name for name in own if not torch.equal(own[name], start[name])}
    table = tiny.word_table(trainer.start(1).model)
    assert table not in moved
    assert any("classifier" in name for name in moved)


@pytest.mark.parametrize(
    ("defense", "expected"),
    [
        (GaussianNoise(), 4 * 110),
        (Prune(share=0.9), 8 * 11),
        (Prune(share=0.1), 4 * 110),
        (Quantize(bits=4), 110 / 2 + 2 * 4),
        (Quantize(bits=32), 4 * 110),
        (Round(dtype="bf16"), 2 * 110),
        (Sign(), 110 / 8),
    ],
)
def test_traffic_is_the_smallest_usual_form(defense: Defense, expected: float) -> None:
    """Forbids the size of another form than is sent; counted for 110 entries."""
    update = {"a": torch.randn(10, 10, generator=tiny.generator()), "b": torch.randn(10, generator=tiny.generator(1))}
    assert defense.sent_bytes(defense.changed(update, tiny.generator())) == expected


def test_zero_signs_need_a_second_bit() -> None:
    """Forbids one bit for three signs."""
    assert Sign().sent_bytes({"a": torch.tensor([1.0, 0.0, -1.0, 1.0])}) == 1.0


def test_every_combination_of_strengths_is_a_defence_once() -> None:
    """Forbids a strength that is left out, and a `none` that is trained twice."""
    specs = [PluginSpec.parse(text) for text in ("none", "prune(share=0.9|0.99, choose=random|magnitude)", "sign")]
    found = strengths([*specs, PluginSpec.parse("prune(share=0.9, choose=random)")])
    assert [family for _, family in found] == [0, 1, 1, 1, 1, 2]
    assert found[1][0].label == "prune(share=0.9, choose=random)"


def _results(scores: dict[str, dict[str, float]]) -> Results:
    summaries = tuple(
        Summary(
            attack="span",
            defense=defense,
            steps=3,
            sequences=3,
            scores=own,
            seconds_per_step=1.0,
            status_counts={},
        )
        for defense, own in scores.items()
    )
    entry = MetricEntry(label="r", meaning="r", source="r", level="sequence", higher_is_better=True)
    return Results.model_construct(summaries=summaries, catalogue=Catalogue(metrics={"rouge1": entry}))


def test_a_strength_is_dropped_only_if_another_hides_as_much_and_learns_better() -> None:
    """Forbids dropping a strength that hides more, or is worse by noise only."""
    good, bad = np.full(50, 1.0) + np.linspace(0, 0.1, 50), np.full(50, 2.0)
    weak, strong = (Candidate(label, Sign(), 1) for label in ("weak", "strong"))
    trials = [Trial(weak, good), Trial(strong, bad)]
    equal = _results({"weak": {"rouge1": 0.1}, "strong": {"rouge1": 0.1}})
    assert list(dropped(trials, equal)) == ["strong"]
    assert not dropped(trials, _results({"weak": {"rouge1": 0.2}, "strong": {"rouge1": 0.1}}))
    assert not dropped([Trial(weak, good), Trial(strong, good + 0.001 * np.cos(np.arange(50) * 3.0))], equal)
    assert not dropped([Trial(weak, good), Trial(replace(strong, family=2), bad)], equal)
    assert "diverged" in dropped([Trial(weak, good), Trial(strong, None)], equal)["strong"]


def test_nothing_is_compared_where_a_metric_is_missing() -> None:
    """Forbids a missing score that counts as no leak."""
    found = _results({"one": {}, "other": {"rouge1": 0.1}})
    assert not leaks_no_more(found, "one", "other")
    assert not leaks_no_more(_results({}), "one", "other")


def test_the_parts_of_the_data_do_not_overlap(trainer: Trainer) -> None:
    """Forbids an evaluation on rows that were trained on."""
    rows = trainer.rows
    parts = [{id(row) for row in part} for part in (rows.train, rows.choice, rows.evaluation)]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 30


def test_a_file_without_labels_is_refused_with_its_line(tmp_path: Path) -> None:
    """Forbids a training on classes that the data does not have."""
    from leakaudit.errors import DataError

    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:1: classification needs the field 'label'"):
        Trainer(Simulation(tmp_path, tmp_path / "rows.jsonl"), Trainings(), CPU)
