"""The public facts of a kept step agree with what the test put into the training."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import DataCollatorForLanguageModeling, DataCollatorWithFlattening, Trainer

from leakaudit.attacks.llg import Llg
from leakaudit.attacks.target_tokens import TargetTokens
from leakaudit.audit.audit import Audit
from leakaudit.audit.verification import verify
from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.describe import precision_of
from leakaudit.capture.recording.step_facts import loader_bound
from leakaudit.client.snapshot import Snapshot
from leakaudit.config.audit import PluginSpec
from leakaudit.metrics.label_accuracy import LabelAccuracy
from leakaudit.plugins.budget import Budget
from leakaudit.plugins.metric_protocol import LabelCounts
from leakaudit.reports.cells import cell_for
from leakaudit.results.schema import Score, VerificationStatus
from tests.support import tiny
from tests.support.tiny_trainer import Rows, audit_config, kept, make_trainer, stamp, train, without_side_process

TOKENIZER = tiny.bert_tokenizer()
ROWS = Rows(TOKENIZER).rows


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return a padded batch."""
    return dict(TOKENIZER.pad(rows, return_tensors="pt"))


def weights_after(folder: Path, **more: Any) -> dict[str, Tensor]:
    """Return the weights after the same training without an audit."""
    trainer = make_trainer(folder / "plain", **more)
    trainer.train()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_undisturbed(folder: Path, make: Any, **more: Any) -> dict[int, Snapshot]:
    """Train with and without the audit, compare the weights, and return what was kept."""
    torch.manual_seed(7)
    plain = weights_after(folder, model=make(), **more)
    model = make()
    torch.manual_seed(7)
    found = train(folder, model=model, **more)
    assert all(torch.equal(plain[name], p.detach()) for name, p in model.named_parameters())
    return found


# ---------------------------------------------------------------------- the bound on the batch size


class OwnLoader(Trainer):
    """Draws four examples at once, whatever the arguments say."""

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(DataLoader(ROWS, batch_size=4, collate_fn=collate))  # type: ignore[arg-type]


def test_the_bound_on_the_batch_is_that_of_the_loader_in_use(tmp_path: Path) -> None:
    """The arguments say two and the loader four: a wrong bound weakens an attack."""
    found = assert_undisturbed(tmp_path, tiny.bert, kind=OwnLoader, max_steps=2)
    for snapshot in found.values():
        seen = snapshot.observation
        assert seen.facts.batch_size_bound == 4 == len(snapshot.truth.sequences())
        accuracy = {}
        for bound in (4, 2):
            facts = seen.facts.model_copy(update={"batch_size_bound": bound})
            guess = Llg()(
                type(seen)(seen.update, seen.model, facts), torch.Generator().manual_seed(0), Budget(60)
            ).label_counts
            true = snapshot.truth.labels() or []
            counts = LabelCounts((true.count(0), true.count(1)), tuple(guess or ()))
            accuracy[bound] = LabelAccuracy()(counts)
        assert accuracy == {4: 1.0, 2: 0.5}


def test_a_loader_that_does_not_say_its_size_gives_no_bound() -> None:
    """A user's own batch sampler; else size, windows and processes are multiplied."""

    class ByLength:
        def __iter__(self) -> Any:
            yield [0, 1, 2]

    assert loader_bound(DataLoader(ROWS, batch_size=3), 2, 4) == 24  # type: ignore[arg-type]
    assert loader_bound(DataLoader(ROWS, batch_sampler=ByLength()), 2, 4) is None  # type: ignore[arg-type]
    assert loader_bound(DataLoader(ROWS, batch_size=None), 2, 4) is None  # type: ignore[arg-type]
    batches = BatchSampler(SequentialSampler(ROWS), 5, drop_last=False)
    assert loader_bound(DataLoader(ROWS, sampler=batches, batch_size=None), 1, 2) == 10  # type: ignore[arg-type]


def test_two_sequences_a_row_are_more_than_the_loader_says(tmp_path: Path) -> None:
    """Reward models and DPO: the stated bound is wrong, so there is none, and a note."""

    def both(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return collate([*rows, *rows])

    found = train(tmp_path, collator=both, max_steps=1)[0]
    assert found.observation.facts.batch_size_bound is None and len(found.truth.sequences()) == 4
    assert "the batch held more sequences" in found.recipe.note


def test_packed_texts_are_counted_by_their_positions(tmp_path: Path) -> None:
    """One row of a flattening collator holds the two texts of a batch of two."""
    rows = Rows(tiny.gpt2_tokenizer(), classes=0)
    rows.rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows.rows]
    more: dict[str, Any] = {"rows": rows, "tokenizer": tiny.gpt2_tokenizer(), "collator": DataCollatorWithFlattening()}
    found = train(tmp_path, model=tiny.gpt2_lm(), max_steps=1, **more)[0]
    assert found.observation.facts.batch_size_bound == 2 == len(found.truth.sequences())


# ---------------------------------------------------------------------- what was in the batch


def masked_lm() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = hf.BertForMaskedLM(copy.deepcopy(tiny.bert().config))  # type: ignore[arg-type]
    return model


def test_the_truth_of_a_masked_language_model_is_the_text_before_it_was_masked(tmp_path: Path) -> None:
    """The masked words stand in it, and are named on their own."""
    rows = Rows(TOKENIZER, classes=0)
    true = {tuple(row["input_ids"]) for row in rows.rows}
    collator = DataCollatorForLanguageModeling(TOKENIZER, mlm=True, mlm_probability=0.5)
    found = assert_undisturbed(tmp_path, masked_lm, rows=rows, collator=collator)
    assert len(found) == 3
    for snapshot in found.values():
        assert snapshot.observation.facts.task == "masked-lm" and set(snapshot.truth.sequences()) <= true
        (batch,) = snapshot.truth.micro_batches
        hidden = (batch.inputs["labels"] != -100) & (batch.inputs["labels"] != batch.inputs["input_ids"])
        words = [token for text in snapshot.truth.texts() for token in text.masked]
        assert words == batch.inputs["labels"][hidden].tolist() and words
        assert stamp(snapshot).status is VerificationStatus.VERIFIED


def test_masked_words_that_are_not_known_cost_the_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Label smoothing withholds the labels from the model, and nobody called `attach`."""
    collator = DataCollatorForLanguageModeling(TOKENIZER, mlm=True, mlm_probability=0.5)
    more: dict[str, Any] = {"rows": Rows(TOKENIZER, classes=0), "collator": collator, "label_smoothing_factor": 0.1}
    with caplog.at_level(logging.WARNING):
        assert train(tmp_path / "without", model=masked_lm(), attach=False, **more) == {}
    assert "its masked words were not seen" in caplog.text and "attach(trainer)" in caplog.text
    found = train(tmp_path / "with", model=masked_lm(), **more)
    assert all(text.masked for snapshot in found.values() for text in snapshot.truth.texts()[:1]) and len(found) == 3


def encoder_decoder() -> nn.Module:
    config = hf.T5Config(  # type: ignore[call-arg]  # what every configuration takes
        vocab_size=len(tiny.VOCABULARY),
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = hf.T5ForConditionalGeneration(config)
    return model


def test_the_targets_of_an_encoder_decoder_are_in_the_truth(tmp_path: Path) -> None:
    """Source and target of both examples; the bound counts examples."""
    rows = Rows(TOKENIZER, classes=0)
    rows.rows = [
        {
            "input_ids": row["input_ids"],
            "attention_mask": row["attention_mask"],
            "labels": rows.rows[i - 1]["input_ids"],
        }
        for i, row in enumerate(rows.rows)
    ]
    collator = hf.DataCollatorForSeq2Seq(TOKENIZER)
    found = assert_undisturbed(tmp_path, encoder_decoder, rows=rows, collator=collator)
    for snapshot in found.values():
        texts, facts = snapshot.truth.sequences(), snapshot.observation.facts
        sources, targets = texts[:2], texts[2:]
        index = {tuple(row["input_ids"]): tuple(row["labels"]) for row in rows.rows}
        assert [index[source] for source in sources] == targets
        assert facts.task == "encoder-decoder" and facts.batch_size_bound == 2
        assert stamp(snapshot).status is VerificationStatus.VERIFIED


class FixMatch(Trainer):
    """Labelled texts, and a further pass over others that nobody labelled."""

    unlabelled_first = False

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        other = {name: value.flip(-1) for name, value in inputs.items()}
        passes = [other, inputs] if self.unlabelled_first else [inputs, other]
        logits = [model(**given).logits for given in passes]
        own, more = logits[::-1] if self.unlabelled_first else logits
        return nn.functional.cross_entropy(own, labels) + 0.1 * more.logsumexp(-1).mean()


class UnlabelledFirst(FixMatch):
    unlabelled_first = True


@pytest.mark.parametrize("kind", [FixMatch, UnlabelledFirst])
def test_labels_kept_outside_belong_to_the_pass_over_the_labelled_texts(kind: type[Trainer], tmp_path: Path) -> None:
    """Two labels, once, whichever pass comes first."""
    found = assert_undisturbed(tmp_path, tiny.bert, kind=kind)
    for snapshot in found.values():
        assert len(snapshot.truth.sequences()) == 4
        owner = [b for b in snapshot.truth.micro_batches if not b.unlabelled]
        assert len(owner) == 1 and owner[0].labels is not None
        assert snapshot.truth.labels() == owner[0].labels.tolist() and len(owner[0].labels) == 2
        first = owner[0].inputs["input_ids"][:, 0]
        assert (first == TOKENIZER.cls_token_id).all()  # the others are read backwards
        assert stamp(snapshot).status is VerificationStatus.VERIFIED


def test_texts_packed_by_hand_are_kept_and_told_apart(tmp_path: Path) -> None:
    """A mask of four dimensions says what attends to what."""
    model = tiny.gpt2_lm().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one, two = (tiny.gpt2_tokenizer()(text)["input_ids"] for text in ("the old dog", "a small bird saw"))
    ids = torch.tensor([one + two])
    blocks = torch.block_diag(torch.ones(len(one), len(one)), torch.ones(len(two), len(two))).tril().bool()
    mask = torch.zeros(1, 1, *blocks.shape).masked_fill(~blocks, torch.finfo(torch.float32).min)
    positions = torch.tensor([[*range(len(one)), *range(len(two))]])
    watched = watch(model, optimizer, tokenizer=tiny.gpt2_tokenizer(), config=audit_config(tmp_path), batch_size=1)
    with without_side_process(), watched:
        model(input_ids=ids, attention_mask=mask, position_ids=positions, labels=ids).loss.backward()
        optimizer.step()
    (snapshot,) = kept(watched).values()
    assert snapshot.truth.sequences() == [tuple(one), tuple(two)]
    assert snapshot.observation.facts.batch_size_bound is None and stamp(snapshot).status is VerificationStatus.VERIFIED


# ---------------------------------------------------------------------- the divisor of the loss


class Saliency(Trainer):
    """Asks for the gradient at the embeddings before the backward pass of training."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = model(**inputs).loss
        torch.autograd.grad(loss, list(model.parameters())[:1], retain_graph=True)
        return loss


@pytest.mark.parametrize("windows", [1, 2])
def test_a_saliency_map_before_the_backward_pass_changes_no_fact(windows: int, tmp_path: Path) -> None:
    """`autograd.grad` starts from the loss as well, and adds to no gradient."""
    more: dict[str, Any] = {"kind": Saliency, "gradient_accumulation_steps": windows, "per_device_train_batch_size": 1}
    for snapshot in assert_undisturbed(tmp_path, tiny.bert, **more).values():
        found = stamp(snapshot)
        assert snapshot.observation.facts.loss_divisor == 1.0
        assert found.status is VerificationStatus.VERIFIED and found.relative_error is not None
        assert found.relative_error < 1e-5


def test_losses_of_different_weights_have_no_divisor(tmp_path: Path) -> None:
    """The second micro-batch counts three times as much."""

    class Weighted(Trainer):
        calls = 0

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return model(**inputs).loss * (1.0 if self.calls % 2 else 3.0)

    more: dict[str, Any] = {"kind": Weighted, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    for snapshot in train(tmp_path, **more).values():
        assert snapshot.observation.facts.loss_divisor is None and "divided the loss" in snapshot.recipe.note
        assert stamp(snapshot).status is VerificationStatus.VERIFIED


# ---------------------------------------------------------------------- a model inside another module


class Sentences(nn.Sequential):
    """Holds a model of transformers and its tokenizer, as a SentenceTransformer does."""

    tokenizer: Any = None

    def __init__(self) -> None:
        encoder = hf.BertModel(copy.deepcopy(tiny.bert().config))  # type: ignore[arg-type]
        super().__init__(encoder, nn.Linear(tiny.HIDDEN, 2))
        self.tokenizer = TOKENIZER

    def forward(self, labels: Tensor, **inputs: Tensor) -> Any:  # type: ignore[override]
        """Return the loss first, as the Trainer takes it."""
        logits = self[1](self[0](**inputs).last_hidden_state.mean(dim=1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Processor:
    """Stands where a tokenizer is asked for, and holds one."""

    tokenizer = TOKENIZER


@pytest.mark.parametrize("given", [None, "processor"])
def test_a_trainer_of_a_module_around_a_model_is_audited_by_that_model(given: str | None, tmp_path: Path) -> None:
    """The head counts as unaudited; the tokenizer is found where there is one."""

    class Own(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "processing_class": None})
            self.callback_handler.processing_class = None if given is None else Processor()

    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Sentences()

    for step, snapshot in assert_undisturbed(tmp_path, make, kind=Own, remove_unused_columns=False).items():
        assert snapshot.model_recipe.class_name == "BertModel" and snapshot.recipe.unaudited_parameters == 2
        assert len(snapshot.truth.sequences()) == 2 and snapshot.provenance.step == step
        assert stamp(snapshot).status is VerificationStatus.VERIFIED


def test_a_trainer_of_a_module_around_two_models_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which of the two would be a guess."""
    two = Sentences()
    two.append(hf.BertModel(copy.deepcopy(tiny.bert().config)))  # type: ignore[arg-type]
    audit = LeakAuditCallback(audit_config(tmp_path))
    trainer = make_trainer(tmp_path, audit, model=two, remove_unused_columns=False)
    trainer.train()
    assert "inside it 2 were found" in caplog.text and "rebuilt_by" in caplog.text


def test_the_report_has_the_masked_words_of_a_masked_language_model(tmp_path: Path) -> None:
    """The head names the words, no text is exact, and the control is recovered."""
    rows = Rows(TOKENIZER, classes=0)
    collator = DataCollatorForLanguageModeling(TOKENIZER, mlm=True, mlm_probability=0.3)
    torch.manual_seed(11)
    snapshot = train(tmp_path, model=masked_lm(), rows=rows, collator=collator, max_steps=1)[0]
    masked = {token for text in snapshot.truth.texts() for token in text.masked}
    visible = {token for text in snapshot.truth.texts() for token in text.ids} - masked
    assert masked - visible
    attacks = (PluginSpec(name="target-tokens"), PluginSpec(name="span"))
    config = audit_config(tmp_path / "report", attacks=attacks, min_tokens=3)
    audit = Audit(tmp_path / "report", config, TOKENIZER)
    audit.step(snapshot)
    results = audit.finish()
    named, spanned = (a for a in results.attempts if a.defense == "none")
    guess = TargetTokens()(snapshot.observation, torch.Generator().manual_seed(0), Budget(60))
    expected = len((masked - visible) & set(guess.tokens or ())) / len(masked - visible)
    assert named.scores["masked_token_recall"] == Score(value=expected, n=2) and expected > 0.9
    assert not {"exact_sequence", "exact_sentence"} & {*named.events, *spanned.events}
    assert results.controls.positive.k == 1
    assert any("recall of masked words" in line for line in cell_for(results, "target-tokens", "none").lines)


# ---------------------------------------------------------------------- the precision


@pytest.mark.parametrize(
    ("device", "products", "dtype", "expected"),
    [
        ("cuda:0", "high", torch.float32, "tf32"),
        ("cuda:0", "highest", torch.float32, "float32"),
        ("cuda:0", "high", torch.bfloat16, "bfloat16"),
        ("cpu", "high", torch.float32, "float32"),
    ],
)
def test_products_rounded_to_tf32_are_a_precision_of_their_own(
    device: str, products: str, dtype: torch.dtype, expected: str
) -> None:
    """A step of a GPU that rounds them is no mismatch where nothing does."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(products)
    try:
        assert precision_of(dtype, torch.device(device)) == expected
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("precision", "expected"), [("tf32", "verified"), ("float32", "mismatch")])
def test_a_step_in_tf32_may_be_off_by_its_rounding(precision: str, expected: str) -> None:
    """Here by up to 2^-8 of each entry, which is more than float32 explains."""
    step = tiny.client_step(tiny.bert(initializer_range=0.2), TOKENIZER, ["the old dog chased a cat ."], [1])
    step = replace(step, facts=step.facts.model_copy(update={"dtype": precision}))
    observed = {name: update.clone() for name, update in step.update().items()}
    random = torch.Generator().manual_seed(0)
    for update in observed.values():
        update.mul_(1 + 2.0**-8 * (2 * torch.rand(update.shape, generator=random) - 1))
    found = verify(step, observed)
    assert found.relative_error is not None and 1e-3 < found.relative_error < 1e-2
    assert str(found.status.value) == expected
