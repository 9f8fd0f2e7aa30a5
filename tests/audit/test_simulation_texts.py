"""Client steps without a training loop: data, batches, frozen parts, steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner

from leakaudit.audit.audit import Audit
from leakaudit.audit.simulation.texts import Example, Simulator, batches, frozen_parameters, read_examples
from leakaudit.audit.step_record import regime_of
from leakaudit.audit.verification import verify
from leakaudit.cli import main
from leakaudit.client.snapshot import Snapshot
from leakaudit.client.step import ClientStep
from leakaudit.config.audit import AuditConfig
from leakaudit.config.simulation import Simulation
from leakaudit.errors import ConfigError, DataError, ModelError
from leakaudit.results.files import load_results
from leakaudit.results.schema import AttemptStatus, VerificationStatus
from tests.support import tiny

ROWS = [
    ("the old dog chased a red horse", 0),
    ("one bird never ate two fish today", 1),
    ("a cat found three small houses", 2),
    ("the river and the road", 1),
    ("four new trees near a big house", 0),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with a tiny encoder (dropout 0.1) and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tiny.bert(num_labels=3, seed=1, dropout=0.1).save_pretrained(folder)  # type: ignore[operator]
    tiny.bert_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Give a data file of five rows and three classes."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": t, "label": n}) + "\n" for t, n in ROWS), encoding="utf-8")
    return path


def _write(folder: Path, *lines: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


# ---------------------------------------------------------------------- data


def test_rows_are_read_in_order_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    """Other fields are ignored."""
    path = _write(tmp_path, '{"text": "a dog", "label": 1, "id": 7}', "", '{"label": 0, "text": "à chat"}', "")
    assert read_examples(path, "classification") == [Example("a dog", 1), Example("à chat", 0)]


def test_texts_for_a_language_model_need_no_label(tmp_path: Path) -> None:
    """And one that is there is not used."""
    path = _write(tmp_path, '{"text": "a dog"}', '{"text": "a cat", "label": 1}')
    assert read_examples(path, "causal-lm") == [Example("a dog", None), Example("a cat", None)]


GOOD = '{"text": "fine", "label": 0}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"sentence": "secret"}',
            r":2: looked for the field 'text' with a string, found sentence; did you mean 'sentence'\? .*--text-field sentence$",
        ),
        ('{"text": 7, "label": 0}', r":2: looked for the field 'text' with a string, found label, text$"),
        ("{}", r":2: looked for the field 'text' with a string, found no fields$"),
        ('["secret"]', r":2: is not a JSON object; found list$"),
        ("secret", r":2: is not a JSON object; each line must hold one$"),
        ('{"text": "secret"}', r":2: classification needs the field 'label' .* found nothing; use --task causal-lm"),
        ('{"text": "secret", "label": "secret"}', r":2: classification needs the field 'label' .* found str;"),
        ('{"text": "secret", "label": true}', r":2: classification needs the field 'label' .* found bool;"),
        (
            '{"text": "secret", "label": -1}',
            r":2: classification needs the field 'label' with a class from 0 to 99,999, found a negative number",
        ),
        ('{"text": "secret", "label": 1.0}', r":2: classification needs the field 'label' .* found float;"),
    ],
)
def test_a_wrong_row_is_named_by_its_line_and_never_by_its_content(tmp_path: Path, line: str, message: str) -> None:
    """The file is private."""
    with pytest.raises(DataError, match=message) as caught:
        read_examples(_write(tmp_path, GOOD, line), "classification")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_an_empty_file_is_refused(tmp_path: Path, lines: list[str]) -> None:
    """Zero steps would be a clean audit."""
    with pytest.raises(DataError, match=r"rows\.jsonl: holds no rows"):
        read_examples(_write(tmp_path, *lines), "classification")


def test_a_missing_file_and_a_binary_one_are_told_apart(tmp_path: Path) -> None:
    """What to do differs."""
    with pytest.raises(DataError, match=r"nothing\.jsonl: no such file; give a file with one JSON object per line"):
        read_examples(tmp_path / "nothing.jsonl", "classification")
    binary = tmp_path / "rows.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"rows.bin:1: is not UTF-8"):
        read_examples(binary, "classification")
    with pytest.raises(DataError, match=r"is a folder and no saved dataset"):
        read_examples(tmp_path, "classification")


# ---------------------------------------------------------------------- batches

EXAMPLES = [Example(str(n), n) for n in range(10)]


def test_batches_are_consecutive_rows_of_a_seeded_shuffle() -> None:
    """Rows occur at most once, in full batches, in an order set by the seed."""
    by_three = batches(EXAMPLES, 3, steps=100, seed=4)
    flat = [example for batch in by_three for example in batch]
    assert [len(batch) for batch in by_three] == [3, 3, 3]
    assert len(set(flat)) == 9
    singles = batches(EXAMPLES, 1, steps=100, seed=4)
    assert [example for (example,) in singles][:9] == flat
    assert flat != EXAMPLES[:9]
    assert batches(EXAMPLES, 3, steps=100, seed=4) == by_three
    assert batches(EXAMPLES, 3, steps=100, seed=5) != by_three


def test_fewer_steps_are_the_first_ones() -> None:
    """A longer run adds steps to a shorter one."""
    assert batches(EXAMPLES, 2, steps=2, seed=1) == batches(EXAMPLES, 2, steps=5, seed=1)[:2]


def test_less_than_one_batch_is_refused() -> None:
    """With both numbers."""
    with pytest.raises(DataError, match="the data has 10 rows, fewer than one batch of 11"):
        batches(EXAMPLES, 11, steps=1, seed=0)


# ---------------------------------------------------------------------- what is frozen


def test_embeddings_are_all_tables_and_nothing_else() -> None:
    """Words, positions and token types; the normalisation after them stays shared."""
    assert frozen_parameters(tiny.bert(), ["embeddings"]) == {
        f"bert.embeddings.{table}_embeddings.weight" for table in ("word", "position", "token_type")
    }


def test_patterns_of_names_are_united() -> None:
    """As shells match file names."""
    found = frozen_parameters(tiny.bert(), ["bert.pooler.*", "classifier.bias"])
    assert found == {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.bias"}
    assert frozen_parameters(tiny.bert(), []) == frozenset()


def test_a_pattern_that_matches_nothing_is_a_typo() -> None:
    """Else the audit would be of another regime than was meant."""
    with pytest.raises(ConfigError, match=r"--freeze bert\.poller\.\*: matches no parameter; write `embeddings` or"):
        frozen_parameters(tiny.bert(), ["bert.poller.*"])


def test_something_must_be_left_to_share() -> None:
    """Nothing shared, nothing to audit."""
    with pytest.raises(ConfigError, match="leaves no parameter to share"):
        frozen_parameters(tiny.bert(), ["*"])


# ---------------------------------------------------------------------- steps


def _same(one: Snapshot, two: Snapshot) -> bool:
    return one.observation.digest() == two.observation.digest()


def test_every_step_is_the_update_of_its_own_batch(model: Path, data: Path) -> None:
    """The batches cover the shuffled file, and each update is verified."""
    simulator = Simulator(Simulation(model, data, batch_size=2, steps=10, seed=3))
    snapshots = list(simulator)
    assert len(simulator) == len(snapshots) == 2
    for snapshot, rows in zip(snapshots, simulator.batches, strict=True):
        tokens = [tuple(ids) for ids in tiny.bert_tokenizer()([row.text for row in rows])["input_ids"]]
        assert snapshot.truth.sequences() == tokens
        assert snapshot.truth.labels() == [row.label for row in rows]
        stamp = verify(ClientStep.of(snapshot), snapshot.observation.update)
        assert stamp.status is VerificationStatus.VERIFIED
    assert [s.provenance.step for s in snapshots] == [0, 1]


def test_training_mode_draws_masks_that_can_be_drawn_again(model: Path, data: Path) -> None:
    """Dropout is on, each step has its own masks, and the steps are verified."""
    what = Simulation(model, data, steps=2, mode="train", seed=1)
    first, second = Simulator(what)
    assert first.observation.facts.training_mode
    assert set(first.observation.facts.dropout.values()) == {0.1}
    assert verify(ClientStep.of(first), first.observation.update).status is VerificationStatus.VERIFIED
    assert not _same(first, next(iter(Simulator(replace(what, mode="eval")))))
    state = "cpu"
    assert not torch.equal(
        first.truth.micro_batches[0].rng[state],
        second.truth.micro_batches[0].rng[state],
    )


def test_the_same_seed_gives_the_same_steps(model: Path, data: Path) -> None:
    """Whatever the global random state; another seed gives others."""
    what = Simulation(model, data, steps=2, mode="train", seed=1)
    torch.manual_seed(1)
    one = list(Simulator(what))
    torch.manual_seed(2)
    assert all(map(_same, one, Simulator(what)))
    assert not any(map(_same, one, Simulator(replace(what, seed=2))))


def test_frozen_parameters_have_no_update(model: Path, data: Path) -> None:
    """And the public facts say so."""
    (snapshot,) = Simulator(Simulation(model, data, steps=1, freeze=("embeddings",)))
    seen = snapshot.observation
    assert set(seen.update) == set(seen.facts.shared)
    assert len(seen.facts.frozen) == 3 and not set(seen.facts.frozen) & set(seen.update)


@pytest.mark.parametrize(
    ("grant", "labels", "lengths"),
    [((), None, None), (("labels",), (1, 0), None), (("labels", "lengths"), (1, 0), (9, 9))],
)
def test_only_what_is_granted_is_granted(
    model: Path, tmp_path: Path, grant: tuple[str, ...], labels: Any, lengths: Any
) -> None:
    """In the order of the batch, special tokens counted."""
    path = _write(tmp_path, *(json.dumps({"text": text, "label": label}) for text, label in (ROWS[1], ROWS[0])))
    simulator = Simulator(Simulation(model, path, num_labels=3, batch_size=2, steps=1, grant=grant))
    (snapshot,) = simulator
    in_order = [row.label for row in simulator.batches[0]]
    granted = snapshot.observation.facts.granted
    assert granted.lengths == lengths
    assert granted.labels == (None if labels is None else tuple(in_order))


def test_the_number_of_classes_is_the_largest_label_plus_one(model: Path, data: Path, tmp_path: Path) -> None:
    """Unless more are asked for; two at least."""
    assert next(iter(Simulator(Simulation(model, data)))).observation.facts.num_labels == 3
    binary = _write(tmp_path, '{"text": "a dog", "label": 0}')
    encoder = tmp_path / "encoder"
    tiny.bert(seed=1).bert.save_pretrained(encoder)  # type: ignore[operator, union-attr]
    tiny.bert_tokenizer().save_pretrained(encoder)
    assert next(iter(Simulator(Simulation(encoder, binary)))).observation.facts.num_labels == 2
    assert next(iter(Simulator(Simulation(encoder, binary, num_labels=7)))).observation.facts.num_labels == 7


def test_a_label_out_of_range_is_refused_before_the_model_is_loaded(data: Path) -> None:
    """Torch would fail in the middle of the first step."""
    with pytest.raises(DataError, match=r"has a label 2, but --num-labels is 2; give at least 3"):
        Simulator(Simulation(Path("no-such-model"), data, num_labels=2))


def test_a_stored_head_of_another_size_is_a_clear_error(model: Path, data: Path) -> None:
    """Re-initialising it in silence would audit another model."""
    with pytest.raises(ModelError, match="stored weights do not fit a head of 5 classes; the model has 3 classes"):
        Simulator(Simulation(model, data, num_labels=5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grant": ("weather",)}, r"--grant weather: an attack can be granted labels, lengths"),
        ({"batch_size": 0}, r"at least one step of one text is needed, got 10 steps of 0"),
        ({"steps": 0}, r"at least one step of one text is needed, got 0 steps of 1"),
        ({"lora_warmup": 2}, r"--lora-targets and --lora-warmup say nothing without --lora-rank"),
        ({"lora_rank": 0}, r"the rank of adapters .* at least 1"),
        ({"local_steps": 2}, r"--local-steps 2 needs --learning-rate"),
        ({"learning_rate": 0.0}, r"--learning-rate is above 0, got 0"),
    ],
)
def test_a_simulation_that_makes_no_sense_is_refused(change: dict[str, Any], message: str) -> None:
    """Before anything is read."""
    with pytest.raises(ConfigError, match=message):
        Simulation(Path("model"), Path("data"), **change)


def test_texts_longer_than_the_model_takes_are_cut(model: Path, tmp_path: Path) -> None:
    """As trainers do."""
    path = _write(tmp_path, json.dumps({"text": " ".join(["dog"] * 3 * tiny.POSITIONS), "label": 0}))
    (snapshot,) = Simulator(Simulation(model, path, num_labels=3))
    (sequence,) = snapshot.truth.sequences()
    assert len(sequence) == tiny.POSITIONS


def test_a_language_model_is_simulated_on_its_own_tokens(tmp_path: Path) -> None:
    """No labels, padding ignored in the loss, the head tied to the word table."""
    folder = tmp_path / "lm"
    tiny.gpt2_lm().save_pretrained(folder)  # type: ignore[operator]
    tiny.gpt2_tokenizer().save_pretrained(folder)
    path = _write(tmp_path, '{"text": "the old dog chased a cat"}', '{"text": "two fish"}')
    (snapshot,) = Simulator(Simulation(folder, path, task="causal-lm", batch_size=2, steps=1))
    assert snapshot.truth.labels() is None
    labels = snapshot.truth.micro_batches[0].inputs["labels"]
    assert int((labels == -100).sum()) == 4
    assert snapshot.observation.facts.tied
    assert verify(ClientStep.of(snapshot), snapshot.observation.update).status is VerificationStatus.VERIFIED


# ---------------------------------------------------------------------- adapters and local steps


def test_adapters_and_the_head_are_all_that_is_shared(model: Path, data: Path) -> None:
    """At the start A has no update; after a warm-up it has one, on the same batches."""
    pytest.importorskip("peft")
    what = Simulation(model, data, steps=2, lora_rank=2, seed=1)
    fresh, warm = list(Simulator(what)), list(Simulator(replace(what, lora_warmup=2)))
    for snapshot in (*fresh, *warm):
        shared = snapshot.observation.facts.shared
        assert {name for name in shared if ".lora_" not in name} == {"classifier.weight", "classifier.bias"}
        assert snapshot.model_recipe.lora is not None and snapshot.model_recipe.lora.rank == 2
        assert verify(ClientStep.of(snapshot), snapshot.observation.update).status is VerificationStatus.VERIFIED

    def moved(snapshot: Snapshot) -> bool:
        return any(bool(g.any()) for name, g in snapshot.observation.update.items() if ".lora_A." in name)

    assert not any(map(moved, fresh)) and all(map(moved, warm))
    assert [s.truth.sequences() for s in fresh] == [s.truth.sequences() for s in warm]


def test_local_steps_are_consecutive_batches_and_the_difference_is_verified(model: Path, data: Path) -> None:
    """Each batch is a micro-batch of the truth with its own masks.

    The protocol says how many there are, and the learning rate.
    """
    what = Simulation(model, data, steps=5, mode="train", local_steps=2, learning_rate=0.01, seed=3)
    simulator = Simulator(what)
    snapshots = list(simulator)
    assert len(simulator) == len(snapshots) == 2
    for snapshot, rows in zip(snapshots, simulator.batches, strict=True):
        facts, batches_ = snapshot.observation.facts, snapshot.truth.micro_batches
        assert (facts.view, facts.local_steps, facts.learning_rate, len(batches_)) == ("delta", 2, 0.01, 2)
        assert snapshot.truth.labels() == [row.label for row in rows]
        assert not torch.equal(batches_[0].rng["cpu"], batches_[1].rng["cpu"])
        assert verify(ClientStep.of(snapshot), snapshot.observation.update).status is VerificationStatus.VERIFIED
    (plain, *_) = Simulator(replace(what, mode="eval", local_steps=1, learning_rate=None))
    (slow, *_) = Simulator(replace(what, mode="eval", local_steps=1, learning_rate=1.0))
    for name, gradient in plain.observation.update.items():
        assert torch.allclose(slow.observation.update[name], gradient, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_client_computes_in_the_type_of_its_checkpoint(dtype: torch.dtype, data: Path, tmp_path: Path) -> None:
    """As `from_pretrained` of its training script does.

    Another type would audit another client.
    """
    folder = tmp_path / "checkpoint"
    tiny.bert(num_labels=3, seed=1).to(dtype).save_pretrained(folder)  # type: ignore[operator]
    tiny.bert_tokenizer().save_pretrained(folder)
    kept = Simulator(Simulation(folder, data, "classification", batch_size=2, steps=1)).snapshot(0)
    assert {weight.dtype for weight in kept.observation.model.parameters()} == {dtype}
    assert regime_of(kept, None).dtype == str(dtype).removeprefix("torch.")
    step = ClientStep(kept.observation.model, kept.truth, kept.recipe, kept.observation.facts)
    assert verify(step, kept.observation.update).status is VerificationStatus.VERIFIED


def test_a_model_without_a_limit_of_tokens_is_audited_to_its_end(data: Path, tmp_path: Path) -> None:
    """XLNet says -1 for its longest text and puts tokens before examples.

    An attack may not apply, and none crashes.
    """
    torch.manual_seed(0)
    tokenizer = tiny.bert_tokenizer()
    config = transformers.XLNetConfig(
        vocab_size=len(tokenizer),
        d_model=32,
        n_layer=2,
        n_head=2,
        d_inner=64,
        num_labels=3,
        pad_token_id=0,  # type: ignore[call-arg] # as every configuration
    )
    transformers.XLNetForSequenceClassification(config).save_pretrained(tmp_path / "xlnet")
    tokenizer.save_pretrained(tmp_path / "xlnet")
    simulator = Simulator(Simulation(tmp_path / "xlnet", data, batch_size=2, steps=1))
    attacks = ["embedding-rows", "span", "rare-rows", "llg", "feature-labels", "dlg(steps=2)"]
    config_of_audit = AuditConfig.model_validate({"out_dir": tmp_path, "attacks": attacks, "controls": 0})
    audit = Audit(tmp_path / "run", config_of_audit, simulator.tokenizer)
    audit.step(simulator.snapshot(0))
    found = audit.finish()
    assert found.steps[0].verification.status is VerificationStatus.VERIFIED
    assert {a.status for a in found.attempts} <= {AttemptStatus.RAN, AttemptStatus.NOT_APPLICABLE}
    assert "all_words" in next(a for a in found.attempts if a.attack == "embedding-rows").events


# ---------------------------------------------------------------------- several clients


def test_the_mean_of_several_clients_is_that_of_their_own_updates(model: Path, data: Path) -> None:
    """Each client has its own batch and masks; the truth holds the texts of all."""
    (summed,) = Simulator(Simulation(model, data, batch_size=1, steps=1, clients=4, mode="train", num_labels=3))
    alone = list(Simulator(Simulation(model, data, batch_size=1, steps=4, mode="train", num_labels=3)))
    assert summed.truth.sequences() == [ids for one in alone for ids in one.truth.sequences()]
    assert summed.observation.facts.view == "reduced"
    assert verify(ClientStep.of(summed), summed.observation.update).status is VerificationStatus.VERIFIED
    for name, mean in summed.observation.update.items():
        total = sum(one.observation.update[name] for one in alone)
        torch.testing.assert_close(4 * mean, total, rtol=1e-4, atol=1e-6)


def test_a_step_of_several_clients_is_one_step_of_evidence(model: Path, data: Path) -> None:
    """Five rows make two sums of two clients, not five steps."""
    simulator = Simulator(Simulation(model, data, batch_size=1, steps=10, clients=2, num_labels=3))
    assert len(simulator) == 2 and [len(one.truth.texts()) for one in simulator] == [2, 2]


@pytest.mark.parametrize("more", [{"learning_rate": 0.1}, {"max_grad_norm": 1.0}])
def test_clients_that_change_their_own_update_are_not_summed(model: Path, data: Path, more: dict[str, float]) -> None:
    """Clipping the mean would be another protocol than clipping each update."""
    with pytest.raises(ConfigError, match="--clients 2 and --"):
        Simulation(model, data, clients=2, **more)  # type: ignore[arg-type]


def test_a_window_is_audited_under_error_feedback_only(model: Path, data: Path, tmp_path: Path) -> None:
    """Another defence is skipped, and the reason says why.

    The words of the window come back.
    """
    command = [
        "simulate",
        "--model",
        str(model),
        "--data",
        str(data),
        "--num-labels",
        "3",
        "--window",
        "2",
        "--steps",
        "1",
    ]
    battery = [
        "--attacks",
        "embedding-rows",
        "--defenses",
        "none,top-k(share=0.5,error_feedback=true),prune(share=0.9)",
    ]
    done = CliRunner().invoke(main, [*command, *battery, "--controls", "0", "--out", str(tmp_path / "run")])
    assert done.exit_code in (0, 3, 4), done.output
    found = {one.defense: one for one in load_results(tmp_path / "run").attempts}
    assert [one.status for one in found.values()] == [AttemptStatus.RAN, AttemptStatus.RAN, AttemptStatus.SKIPPED]
    assert "has none: audit it without --window" in found["prune(share=0.9)"].reason
    with pytest.raises(ConfigError, match="--clients and --window"):
        Simulation(model, data, clients=2, window=2)
