"""Trainings of an outside tester: other models, tasks, losses and loops.

Each is what somebody would write who does not know how the audit works. `test_other_runs.py` asks three things of all of them:
nothing kept is wrong without a word, training is the same to the bit, and hardly any is refused.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.support import stacks, tiny
from tests.support.spy import Batch, Configuration, Seen, Sequences, Training
from tests.support.tiny_trainer import TEXTS, Rows, settings

Run = Callable[[Training], Any]

SIZES: dict[str, Any] = {
    "vocab_size": len(tiny.VOCABULARY),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 3,
    "eos_token_id": 3,
}

SOURCES, TARGETS = TEXTS[:4], TEXTS[4:]


# ---------------------------------------------------------------------- models


def model_of(name: str, head: str, *, dropout: float = 0.0, **more: Any) -> nn.Module:
    """Return a tiny model of an architecture and a head, such as `Roberta`."""
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "attention_dropout": dropout}
    rates |= dict.fromkeys(("dropout", "activation_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = getattr(tiny.hf, f"{name}Config")(**(SIZES | rates | more))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(tiny.hf, f"{name}{head}")(config)  # type: ignore[no-any-return]


def classifier_of(name: str, **more: Any) -> Callable[[], nn.Module]:
    """Return a maker of a classifier of two classes."""
    return lambda: model_of(name, "ForSequenceClassification", **more)


def language_model_of(name: str, head: str = "ForCausalLM", **more: Any) -> Callable[[], nn.Module]:
    """Return a maker of a causal language model."""
    return lambda: model_of(name, head, **more)


def t5() -> nn.Module:
    """Return a tiny encoder-decoder."""
    return model_of(
        "T5", "ForConditionalGeneration", d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.1,
        decoder_start_token_id=0,
    )  # fmt: skip


class Sampler:
    """A helper with a state of its own, as people write them."""

    def __init__(self) -> None:
        self.calls = 0
        self.history: list[int] = []

    def share(self) -> float:
        """Return what share of the words is left out: more from call to call."""
        self.calls += 1
        self.history.append(self.calls)
        return min(0.5, 0.1 * self.calls)


def drawn(source: Any, count: int) -> list[float]:
    """Return a one for every word that stays."""
    if isinstance(source, torch.Generator):
        return (torch.rand(count, generator=source) > 0.3).float().tolist()
    if isinstance(source, random.Random):
        return [float(source.random() > 0.3) for _ in range(count)]
    if isinstance(source, numpy.random.Generator):
        return [float(x > 0.3) for x in source.random(count)]
    if isinstance(source, Sampler):
        left_out = round(source.share() * count)
        return [0.0] * left_out + [1.0] * (count - left_out)
    return [float(next(source) % 3 > 0) for _ in range(count)]


def leaving_out(make: Callable[[], Any]) -> Callable[[Any, Any], None]:
    """Return a change that makes a classifier leave out words.

    No module holds its randomness or its schedule.
    """

    def hook(model: Any, optimizer: Any) -> None:
        source = make()

        def leave_out(module: nn.Module, args: tuple[Tensor, ...], outputs: Tensor) -> Tensor:
            keep = torch.tensor(drawn(source, args[0].numel())).reshape(args[0].shape)
            return outputs * keep[..., None]

        model.bert.embeddings.word_embeddings.register_forward_hook(leave_out)

    return hook


def counted_calls(model: Any, optimizer: Any) -> None:
    """Scale the head's output by the number of calls, kept in a closure."""
    calls = iter(range(1, 1000))

    def warm(module: nn.Module, args: Any, outputs: Tensor) -> Tensor:
        return outputs * min(1.0, 0.2 * next(calls))

    model.classifier.register_forward_hook(warm)


def module_in_a_hook(model: Any, optimizer: Any) -> None:
    """Normalise the head's output by a batch norm that only a hook holds."""
    norm = nn.BatchNorm1d(2, affine=False)
    model.classifier.register_forward_hook(lambda module, args, outputs: norm(outputs) + outputs)


CALLS = 0


def globally_counted(model: Any, optimizer: Any) -> None:
    """The same with the number of calls in a global."""
    global CALLS
    CALLS = 0

    def warm(module: nn.Module, args: Any, outputs: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return outputs * min(1.0, 0.2 * CALLS)

    model.classifier.register_forward_hook(warm)


def generated(model: Any, optimizer: Any) -> None:
    """The same with a generator, which nobody can put back."""

    def factors() -> Iterator[float]:
        for i in range(1, 1000):
            yield min(1.0, 0.2 * i)

    source = factors()
    model.classifier.register_forward_hook(lambda module, args, outputs: outputs * next(source))


class Judge(nn.Module):
    """An encoder with heads of its owner's making."""

    def __init__(self, heads: int = 1) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.encoder = tiny.hf.BertModel(tiny.bert(dropout=0.1).config)
            self.heads = nn.ModuleList(nn.Linear(32, 2) for _ in range(heads))

    def forward(self, batch: Batch, head: int = 0) -> Tensor:
        """Return the logits of one head."""
        inputs = {n: v for n, v in batch.items() if n != "labels"}
        logits: Tensor = self.heads[head](self.encoder(**inputs).last_hidden_state[:, 0])
        return logits


# ---------------------------------------------------------------------- trainings


def plain_sgd(model: nn.Module) -> Any:
    """Return plain SGD over what is to be trained."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def trained(
    make: Callable[[], nn.Module],
    *,
    kind: type[Trainer] = Trainer,
    tokenizer: Callable[[], Any] = tiny.bert_tokenizer,
    rows: Callable[[Any], Any] = lambda tokenizer: Rows(tokenizer),
    collator: Callable[[Any], Any] = DataCollatorWithPadding,
    callbacks: Callable[[], list[TrainerCallback]] = list,
    more: Callable[[nn.Module], dict[str, Any]] = lambda model: {},
    attach: bool = True,
    **arguments: Any,
) -> Run:
    """Return a training with a `Trainer`."""

    def train(run: Training) -> None:
        words, model = tokenizer(), make()
        data = rows(words)
        trainer = kind(
            model=model,
            args=(Seq2SeqTrainingArguments if issubclass(kind, Seq2SeqTrainer) else TrainingArguments)(
                **settings(run.folder, **arguments)
            ),
            train_dataset=data,
            eval_dataset=data if arguments.get("eval_strategy") else None,
            data_collator=collator(words),
            processing_class=words,
            callbacks=callbacks(),
            **more(model),
        )
        run.trainer(trainer, attach=attach)
        trainer.train()

    return train


def language_rows(tokenizer: Any) -> Any:
    """Return texts for a language model."""
    return Rows(tokenizer, classes=0)


def language_model(make: Callable[[], nn.Module], **more: Any) -> Run:
    """Return a training of a causal language model with a `Trainer`."""
    return trained(
        make,
        tokenizer=tiny.gpt2_tokenizer,
        rows=language_rows,
        collator=lambda words: DataCollatorForLanguageModeling(words, mlm=False),
        **more,
    )


Step = Callable[[nn.Module, Batch], Tensor]


def logits_of(model: Any, batch: Batch) -> Tensor:
    """Return a model's logits, its labels kept back."""
    logits: Tensor = model(**{n: v for n, v in batch.items() if n != "labels"}).logits
    return logits


def own_loss(model: Any, batch: Batch) -> Tensor:
    """Return the loss that the model computes."""
    loss: Tensor = model(**batch).loss
    return loss


def looped(
    loss: Callable[[], Step] = lambda: own_loss,
    *,
    make: Callable[[], nn.Module] = lambda: tiny.bert(dropout=0.1),
    batches: Callable[[], list[Batch]] = stacks.classes,
    tokenizer: Callable[[], Any] = tiny.bert_tokenizer,
    optimizer: Callable[[nn.Module], Any] = plain_sgd,
    core: Callable[[Any], nn.Module] = lambda model: model,
    before: Callable[[nn.Module, Any], Any] = lambda model, optimizer: None,
    then: Callable[[nn.Module, Any, int], Any] = lambda model, optimizer, step: None,
    between: Callable[[], Callable[[nn.Module, Any, int], Any]] = lambda: lambda model, optimizer, step: None,
    **options: Any,
) -> Run:
    """Return a training in a loop of one's own.

    Args:
        loss: makes the loss of one batch.
        make: makes the model.
        batches: of the run, a step each.
        tokenizer: makes the tokenizer.
        optimizer: makes the optimizer.
        core: finds the model that is audited.
        before: called with model and optimizer before the audit begins.
        then: called between backward and step.
        between: makes what is called after each step.
        options: of `watch`.
    """

    def train(run: Training) -> None:
        model = make().train()
        moving = optimizer(model)
        before(model, moving)
        loss_of, after = loss(), between()
        with run.loop(model, moving, core=core(model), tokenizer=tokenizer(), **options):
            for step, batch in enumerate(batches()):
                run.batch(batch)
                loss_of(model, batch).backward()
                then(model, moving, step)
                moving.step()
                moving.zero_grad()
                after(model, moving, step)

    return train


def texts_loop(**more: Any) -> Run:
    """Return a loop over a GPT-2 language model."""
    return looped(make=tiny.gpt2_lm, batches=stacks.texts, tokenizer=tiny.gpt2_tokenizer, **more)


# ---------------------------------------------------------------------- losses


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the focal loss with exponent 2."""
    entropy = functional.cross_entropy(logits, labels, reduction="none")
    return ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()


class Focal(Trainer):
    """A trainer with a loss of its own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
        """Return the focal loss."""
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = focal(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


class Weighted(Trainer):
    """A trainer that counts one class three times."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
        """Return the weighted cross-entropy."""
        outputs = model(**inputs)
        loss = functional.cross_entropy(outputs.logits, inputs["labels"], weight=torch.tensor([1.0, 3.0]))
        return (loss, outputs) if return_outputs else loss


class Distilled(Trainer):
    """A trainer that learns from labels, a teacher's logits and its hidden states."""

    teacher: Any = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
        """Return half the model's own loss and half the distance from the teacher."""
        type(self).teacher = self.teacher or tiny.bert(seed=7).eval()
        outputs = model(**inputs, output_hidden_states=True)
        with torch.no_grad():
            taught = self.teacher(**inputs, output_hidden_states=True)
        soft = functional.kl_div(
            functional.log_softmax(outputs.logits / 2, -1),
            functional.softmax(taught.logits / 2, -1),
            reduction="batchmean",
        )
        near = functional.mse_loss(outputs.hidden_states[-1], taught.hidden_states[-1])
        loss = 0.5 * outputs.loss + 0.5 * soft + 0.1 * near
        return (loss, outputs) if return_outputs else loss


def pooled(model: Any, batch: Batch) -> Tensor:
    """Return the mean of a classifier's last hidden states, (B, D)."""
    inputs = {n: v for n, v in batch.items() if n != "labels"}
    hidden = model(**inputs, output_hidden_states=True).hidden_states[-1]
    return hidden.mean(1)  # type: ignore[no-any-return]


def simcse(model: nn.Module, batch: Batch) -> Tensor:
    """Return the contrastive loss of two dropout masks over one batch."""
    one, two = pooled(model, batch), pooled(model, batch)
    alike = functional.cosine_similarity(one[:, None], two[None], dim=-1) / 0.05
    return functional.cross_entropy(alike, torch.arange(len(one)))


def triplet(model: nn.Module, batch: Batch) -> Tensor:
    """Return the triplet loss of a batch of four: anchor, positive, two negatives."""
    points = pooled(model, batch)
    return functional.triplet_margin_loss(points[:1], points[1:2], points[2:3]) + points[3].square().mean()


def mixed_up(model: Any, batch: Batch) -> Tensor:
    """Return the loss of embeddings mixed with those of the next text (mixup)."""
    words = model.get_input_embeddings()(batch["input_ids"])
    mixed = 0.7 * words + 0.3 * words.flip(0)
    logits = model(inputs_embeds=mixed, attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"]
    return 0.7 * functional.cross_entropy(logits, labels) + 0.3 * functional.cross_entropy(logits, labels.flip(0))


def with_l1(model: Any, batch: Batch) -> Tensor:
    """Return the model's loss with a penalty on the head's weights."""
    loss: Tensor = model(**batch).loss + 0.01 * model.classifier.weight.abs().sum()
    return loss


def penalised_confidence(model: Any, batch: Batch) -> Tensor:
    """Return the model's loss less an entropy bonus."""
    outputs = model(**batch)
    entropy = torch.distributions.Categorical(logits=outputs.logits).entropy().mean()
    return outputs.loss - 0.1 * entropy  # type: ignore[no-any-return]


def adversarial(model: Any, batch: Batch) -> Tensor:
    """Return the loss on the batch and on adversarial embeddings.

    The embeddings are moved to raise the loss (virtual adversarial training).
    """
    outputs = model(**batch)
    words = model.get_input_embeddings()(batch["input_ids"]).detach()
    moved = words + 0.01 * torch.randn_like(words)
    beside = model(inputs_embeds=moved, attention_mask=batch["attention_mask"]).logits
    return outputs.loss + functional.mse_loss(beside, outputs.logits.detach())  # type: ignore[no-any-return]


class Reversed(torch.autograd.Function):
    """Turns a gradient around (domain-adversarial training)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the input."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, pull: Tensor) -> Tensor:
        """Return the gradient, turned around."""
        return -0.3 * pull


def domain(model: Any, batch: Batch) -> Tensor:
    """Return the loss of a head that learns and of one that is unlearnt."""
    states = model.encoder(**{n: v for n, v in batch.items() if n != "labels"}).last_hidden_state[:, 0]
    labels = batch["labels"]
    return functional.cross_entropy(model.heads[0](states), labels) + functional.cross_entropy(
        model.heads[1](Reversed.apply(states)),  # type: ignore[no-untyped-call]
        1 - labels,
    )


def two_tasks() -> Step:
    """Return a loss that changes heads from step to step."""
    turn = iter(range(100))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch, head=next(turn) % 2), batch["labels"])

    return loss


# ---------------------------------------------------------------------- events in the middle


def thaw(model: Any, optimizer: Any, step: int) -> None:
    """Add the embeddings to the optimizer after the second step."""
    if step == 1:
        table = model.bert.embeddings.word_embeddings.weight
        table.requires_grad_(True)
        optimizer.add_param_group({"params": [table], "lr": 0.02})


def frozen_table() -> nn.Module:
    """Return a classifier whose word embeddings are not trained."""
    model: Any = tiny.bert()
    model.bert.embeddings.word_embeddings.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def freeze(model: Any, optimizer: Any, step: int) -> None:
    """Freeze the first layer after the second step."""
    if step == 1:
        model.bert.encoder.layer[0].requires_grad_(False)


def evaluate(model: Any, optimizer: Any, step: int) -> None:
    """Evaluate with a gradient-free pass in eval mode, then train on."""
    model.eval()
    with torch.no_grad():
        model(**stacks.classes()[0])
    model.train()


def generate(model: Any, optimizer: Any, step: int) -> None:
    """Sample a text."""
    model.eval()
    model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=True, pad_token_id=0)
    model.train()


def saliency(model: Any, optimizer: Any, step: int) -> None:
    """Take the gradient of another loss in between, and throw it away."""
    model(**stacks.classes()[1]).loss.backward()
    optimizer.zero_grad()


class Averaged:
    """Keeps a moving average of the weights and evaluates with it."""

    def __init__(self) -> None:
        self.average: Any = None

    def __call__(self, model: Any, optimizer: Any, step: int) -> None:
        """Update the average; put it in for an evaluation and take it out again."""
        from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

        self.average = self.average or AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.average.update_parameters(model)
        own = {n: p.detach().clone() for n, p in model.named_parameters()}
        with torch.no_grad():
            for p, q in zip(model.parameters(), self.average.module.parameters(), strict=True):
                p.copy_(q)
            evaluate(model, optimizer, step)
            for name, p in model.named_parameters():
                p.copy_(own[name])


class Best:
    """Keeps whole copies of the model, as loops do that go back to the best one."""

    def __init__(self) -> None:
        self.copies: list[nn.Module] = []

    def __call__(self, model: Any, optimizer: Any, step: int) -> None:
        """Copy the model, and see that the copy can be used."""
        self.copies.append(copy.deepcopy(model))
        evaluate(self.copies[-1], optimizer, step)
        self.copies[-1](**stacks.classes()[0]).loss.backward()


def saved_whole(model: Any, optimizer: Any, step: int) -> None:
    """Save the whole model, not its weights alone, and load it again."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded(**stacks.classes()[0]).loss.backward()


def in_float64(model: Any, optimizer: Any, step: int) -> None:
    """Look at the model in double precision and come back."""
    model.double()
    evaluate(model, optimizer, step)
    model.float()


def grown(model: Any, optimizer: Any, step: int) -> None:
    """Give the model a new head in the middle, as continual learning does."""
    if step == 1:
        torch.manual_seed(3)
        model.classifier = nn.Linear(32, 2)
        optimizer.add_param_group({"params": list(model.classifier.parameters())})


class Scheduled:
    """Steps a schedule of learning rates."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make, self.schedule = make, None

    def __call__(self, model: Any, optimizer: Any, step: int) -> None:
        """Step it."""
        self.schedule = self.schedule or self.make(optimizer)
        self.schedule.step()  # type: ignore[attr-defined]


def clip_by_hand(model: nn.Module, optimizer: Any, step: int) -> None:
    """Clip to a norm that nobody told the audit."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_values(model: nn.Module, optimizer: Any, step: int) -> None:
    """Clip every entry."""
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.001)


def centralise(model: nn.Module, optimizer: Any, step: int) -> None:
    """Take the mean out of every row of a matrix's gradient."""
    for p in model.parameters():
        if p.grad is not None and p.dim() > 1:
            p.grad -= p.grad.mean(dim=1, keepdim=True)


def noise(model: nn.Module, optimizer: Any, step: int) -> None:
    """Add noise that nobody told the audit."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad += 0.01 * torch.randn_like(p.grad)


def halve(model: Any, optimizer: Any) -> None:
    """Halve the gradients of the first layer in hooks of its parameters."""
    for p in model.bert.encoder.layer[0].parameters():
        p.register_hook(lambda gradient: 0.5 * gradient)


# ---------------------------------------------------------------------- loops of their own


def uneven(run: Training) -> None:
    """Accumulate one, three and two batches, each window divided by four."""
    model = tiny.bert(dropout=0.1).train()
    optimizer = plain_sgd(model)
    batches = iter(stacks.classes(count=6))
    with run.loop(model, optimizer, tokenizer=tiny.bert_tokenizer()):
        for size in (1, 3, 2):
            for _ in range(size):
                batch = next(batches)
                run.batch(batch)
                (model(**batch).loss / 4).backward()
            optimizer.step()
            optimizer.zero_grad()


def by_autograd(run: Training) -> None:
    """Set the gradients from `torch.autograd.grad`, not by `backward`."""
    model = tiny.bert().train()
    optimizer = plain_sgd(model)
    named = dict(model.named_parameters())
    with run.loop(model, optimizer, tokenizer=tiny.bert_tokenizer()):
        for batch in stacks.classes():
            run.batch(batch)
            found = torch.autograd.grad(model(**batch).loss, list(named.values()))
            for p, gradient in zip(named.values(), found, strict=True):
                p.grad = gradient
            optimizer.step()


def twice_backward(run: Training) -> None:
    """Send two losses back through one forward pass, one after the other."""
    model = tiny.bert(dropout=0.1).train()
    optimizer = plain_sgd(model)
    with run.loop(model, optimizer, tokenizer=tiny.bert_tokenizer()):
        for batch in stacks.classes():
            run.batch(batch)
            outputs = model(**batch)
            outputs.loss.backward(retain_graph=True)
            (0.01 * outputs.logits.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()


def kept_gradients(run: Training) -> None:
    """Forget to empty the gradients, as beginners do."""
    model = tiny.bert().train()
    optimizer = plain_sgd(model)
    with run.loop(model, optimizer, tokenizer=tiny.bert_tokenizer()):
        for batch in stacks.classes():
            run.batch(batch)
            model(**batch).loss.backward()
            optimizer.step()


def zero_in_place(run: Training) -> None:
    """Zero the gradients in place, after the forward pass."""
    model = tiny.bert(dropout=0.1).train()
    optimizer = plain_sgd(model)
    with run.loop(model, optimizer, tokenizer=tiny.bert_tokenizer()):
        for batch in stacks.classes():
            run.batch(batch)
            loss = model(**batch).loss
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()


def skipped_batches(run: Training) -> None:
    """Skip batches whose forward or backward pass fails.

    Loops do so when they run out of memory.
    """
    model = tiny.bert(dropout=0.1).train()
    optimizer = plain_sgd(model)

    def fails(pull: Tensor) -> None:
        raise RuntimeError("out of memory")

    with run.loop(model, optimizer, tokenizer=tiny.bert_tokenizer()):
        for step, batch in enumerate(stacks.classes(count=6)):
            try:
                if step == 1:
                    model(**{**batch, "input_ids": batch["input_ids"] + 10_000})
                outputs = model(**batch)
                if step == 3:
                    outputs.logits.register_hook(fails)
                outputs.loss.backward()
            except (RuntimeError, IndexError):
                optimizer.zero_grad()
                continue
            run.batch(batch)
            optimizer.step()
            optimizer.zero_grad()


def halved_batches(run: Training) -> None:
    """Halve a batch and try again after its backward pass failed halfway."""
    model: Any = tiny.bert(dropout=0.1).train()
    optimizer = plain_sgd(model)

    def fails(pull: Tensor) -> None:
        raise RuntimeError("out of memory")

    with run.loop(model, optimizer, tokenizer=tiny.bert_tokenizer()):
        for batch in stacks.classes(size=4):
            try:
                outputs = model(**batch, output_hidden_states=True)
                outputs.hidden_states[1].register_hook(fails)
                outputs.loss.backward()
            except RuntimeError:
                optimizer.zero_grad()
            for half in ({n: v[:2] for n, v in batch.items()}, {n: v[2:] for n, v in batch.items()}):
                run.batch(half)
                (model(**half).loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()


def new_storage(run: Training) -> None:
    """Replace the parameters' tensors at every step (`p.data = ...`).

    Weight averaging by hand does so.
    """
    model = tiny.bert().train()
    optimizer = plain_sgd(model)
    with run.loop(model, optimizer, tokenizer=tiny.bert_tokenizer()):
        for batch in stacks.classes():
            run.batch(batch)
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for p in model.parameters():
                p.data = 0.999 * p.data.clone()


def in_eval_mode(run: Training) -> None:
    """Fine-tune in eval mode: no dropout."""
    model = tiny.bert(dropout=0.1).eval()
    optimizer = plain_sgd(model)
    with run.loop(model, optimizer, tokenizer=tiny.bert_tokenizer()):
        for batch in stacks.classes():
            run.batch(batch)
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def eval_for_a_batch(run: Training) -> None:
    """Accumulate two batches, the second of them in eval mode."""
    model = tiny.bert(dropout=0.3).train()
    optimizer = plain_sgd(model)
    batches = stacks.classes()
    with run.loop(model, optimizer, tokenizer=tiny.bert_tokenizer()):
        for one, two in ((batches[0], batches[1]), (batches[2], batches[3])):
            for batch, mode in ((one, True), (two, False)):
                run.batch(batch)
                model.train(mode)
                model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def dropped_layers(run: Training) -> None:
    """Leave out a layer by Python's own random numbers, as in LayerDrop."""
    model: Any = tiny.bert(num_hidden_layers=3).train()
    optimizer = plain_sgd(model)
    layer = model.bert.encoder.layer[1]
    whole = layer.forward

    def sometimes(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return hidden if random.random() < 0.5 else whole(hidden, *args, **kwargs)

    layer.forward = sometimes
    with run.loop(model, optimizer, tokenizer=tiny.bert_tokenizer()):
        for batch in stacks.classes(count=6):
            run.batch(batch)
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def alternating(run: Training) -> None:
    """Train the encoder in every second step, with its own optimizer.

    The audit is told of the head's optimizer only.
    """
    model: Any = tiny.bert().train()
    body = torch.optim.SGD(model.bert.parameters(), lr=0.05)
    head = torch.optim.SGD(model.classifier.parameters(), lr=0.1)
    with run.loop(model, head, tokenizer=tiny.bert_tokenizer()):
        for step, batch in enumerate(stacks.classes()):
            run.batch(batch)
            model(**batch).loss.backward()
            head.step()
            if step % 2:
                body.step()
            model.zero_grad()


def two_loaders(run: Training) -> None:
    """Draw from two loaders in turn with Accelerate, a step from both."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    plain = tiny.bert(dropout=0.1).train()
    one, two = (_loader(stacks.classes(size=size)) for size in (1, 3))
    model, optimizer, one, two = accelerator.prepare(plain, plain_sgd(plain), one, two)
    with run.loop(model, optimizer, core=plain, tokenizer=tiny.bert_tokenizer()):
        for first, second in zip(one, two, strict=True):
            for batch in (first, second):
                run.batch(batch)
                accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    AcceleratorState._reset_state(reset_partial_state=True)


def _loader(batches: list[Batch]) -> Any:
    return torch.utils.data.DataLoader(batches, batch_size=1, collate_fn=lambda rows: dict(rows[0]))  # type: ignore[arg-type]


def fabric(precision: Any = "32-true") -> Run:
    """Return a loop in Lightning Fabric, two batches a step, clipped."""

    def train(run: Training) -> None:
        from lightning.fabric import Fabric

        lightning = Fabric(accelerator="cpu", devices=1, precision=precision)
        plain = tiny.bert(dropout=0.1).train()
        model, optimizer = lightning.setup(plain, plain_sgd(plain))
        with run.loop(model, optimizer, core=plain, tokenizer=tiny.bert_tokenizer(), max_grad_norm=0.1):
            for step, batch in enumerate(stacks.classes()):
                run.batch(batch)
                with lightning.no_backward_sync(model, enabled=step % 2 == 0):
                    lightning.backward(model(**batch).loss)
                if step % 2:
                    lightning.clip_gradients(model, optimizer, max_norm=0.1)
                    optimizer.step()
                    optimizer.zero_grad()

    return train


def lightning(schedule: bool = False, **options: Any) -> Run:
    """Return a Lightning training with validation, AdamW and a schedule."""

    def train(run: Training) -> None:
        import lightning.pytorch as pl
        from lightning.pytorch.callbacks import GradientAccumulationScheduler

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = tiny.bert(dropout=0.1).train()

            def training_step(self, batch: Batch, index: int) -> Tensor:
                run.batch(batch)
                loss: Tensor = self.model(**batch).loss
                return loss

            def validation_step(self, batch: Batch, index: int) -> None:
                self.model(**batch)

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
                return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        module = Module()
        growing = [GradientAccumulationScheduler({0: 1, 1: 3})] if schedule else []
        audit = run.lightning(module.model, tokenizer=tiny.bert_tokenizer())
        with stacks._quiet_lightning():
            trainer = pl.Trainer(
                max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False, default_root_dir=run.folder,
                callbacks=[*growing, *audit], **options,
            )  # fmt: skip
            trainer.fit(module, _loader(stacks.classes()), _loader(stacks.classes(count=1)))

    return train


def resumed(run: Training) -> None:
    """Train two steps, save, and go on in a new trainer from the checkpoint."""
    for steps, checkpoint in ((2, None), (4, str(run.folder / "trainer" / "checkpoint-2"))):
        trainer = Trainer(
            model=tiny.bert(dropout=0.1),
            args=TrainingArguments(
                **settings(
                    run.folder,
                    max_steps=steps,
                    save_strategy="steps",
                    save_steps=2,
                    optim="adamw_torch",
                    learning_rate=1e-3,
                )
            ),
            train_dataset=Rows(tiny.bert_tokenizer()),
            data_collator=DataCollatorWithPadding(tiny.bert_tokenizer()),
            processing_class=tiny.bert_tokenizer(),
        )
        run.trainer(trainer)
        trainer.train(resume_from_checkpoint=checkpoint)


def private(make: Callable[[], nn.Module], sigma: float) -> Run:
    """Return a private training with Opacus, AdamW."""

    def train(run: Training) -> None:
        from opacus import PrivacyEngine

        plain = make().train()
        adam = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-3)
        pad = DataCollatorWithPadding(tiny.bert_tokenizer(), padding="max_length", max_length=20)
        loader: Any = torch.utils.data.DataLoader(
            Rows(tiny.bert_tokenizer()).rows,  # type: ignore[arg-type]
            batch_size=4,
            collate_fn=lambda rows: dict(pad(rows)),
        )
        model, optimizer, loader = PrivacyEngine().make_private(
            module=plain,
            optimizer=adam,
            data_loader=loader,
            noise_multiplier=sigma,
            max_grad_norm=0.1,
            poisson_sampling=False,
        )
        with run.loop(model, optimizer, core=plain, tokenizer=tiny.bert_tokenizer()):
            for batch in loader:
                run.batch(batch)
                optimizer.zero_grad()
                model(**batch).loss.backward()
                optimizer.step()

    return train


def head_only() -> nn.Module:
    """Return a classifier of which the last layer alone is trained."""
    model: Any = tiny.bert()
    model.bert.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def mixed_lora() -> nn.Module:
    """Return a classifier with trained adapters and trained layer norms."""
    import peft

    torch.manual_seed(0)
    model = peft.get_peft_model(
        tiny.bert(dropout=0.1),
        peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], init_lora_weights=False),
    )
    for name, p in model.named_parameters():
        if "LayerNorm" in name:
            p.requires_grad_(True)
    return model


class Merging(TrainerCallback):
    """Merges the adapters for a look at the model and takes them apart again."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Merge and unmerge."""
        model = kwargs["model"]
        model.merge_adapter()
        model.unmerge_adapter()


class Copying(TrainerCallback):
    """Copies the model between the batches of a step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Copy."""
        copy.deepcopy(kwargs["model"])


class Generating(TrainerCallback):
    """Samples a text at every step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sample."""
        generate(kwargs["model"], None, state.global_step)


# ---------------------------------------------------------------------- data


def tagged(tokenizer: Any) -> Any:
    """Return texts with a class for every token."""
    found = [dict(tokenizer(text)) for text in TEXTS]
    return [{**row, "labels": [i % 3 for i in range(len(row["input_ids"]))]} for row in found]


def answered(tokenizer: Any) -> Any:
    """Return texts with the place of an answer."""
    return [{**tokenizer(text), "start_positions": 1, "end_positions": 2} for text in TEXTS]


def rated(tokenizer: Any) -> Any:
    """Return texts with a number."""
    return [{**tokenizer(text), "labels": float(i) / 4} for i, text in enumerate(TEXTS)]


def many_labels(tokenizer: Any) -> Any:
    """Return texts with a flag for each of three classes."""
    return [{**tokenizer(text), "labels": [float(i % 2), 1.0, 0.0]} for i, text in enumerate(TEXTS)]


def translated(tokenizer: Any) -> Any:
    """Return texts with the texts they become."""
    return [
        {**tokenizer(one), "labels": tokenizer(two)["input_ids"]} for one, two in zip(SOURCES, TARGETS, strict=True)
    ]


def choices(tokenizer: Any) -> Any:
    """Return questions with three endings each."""
    return [
        {"input_ids": [tokenizer(TEXTS[(i + j) % 8])["input_ids"] for j in range(3)], "labels": i % 3} for i in range(6)
    ]


def together(rows: list[dict[str, Any]]) -> Batch:
    """Pad questions with their endings: (B, choices, T)."""
    longest = max(len(ids) for row in rows for ids in row["input_ids"])
    padded = torch.tensor([[ids + [0] * (longest - len(ids)) for ids in row["input_ids"]] for row in rows])
    return {
        "input_ids": padded,
        "attention_mask": (padded != 0).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def unmasked(seen: Seen) -> Sequences:
    """Return the texts before words were masked: what was masked stands in the labels."""
    found: Sequences = []
    for batch in seen.batches:
        ids = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
        found += [tuple(row[m.bool()].tolist()) for row, m in zip(ids, batch["attention_mask"], strict=True)]
    return found


def targets(seen: Seen) -> Sequences:
    """Return what the decoder is taught."""
    return [tuple(t for t in row.tolist() if t != -100) for batch in seen.batches for row in batch["labels"]]


def mean_over_batches(model: Any, batches: Iterable[Batch]) -> Tensor:
    """Return the sum of the batches' mean cross-entropies, as in the Trainer."""
    losses = [functional.cross_entropy(logits_of(model, batch), batch["labels"]) for batch in batches]
    return torch.stack(losses).sum()


def focal_over_batches(model: Any, batches: Iterable[Batch]) -> Tensor:
    """Return the focal loss of a step."""
    return torch.stack([focal(logits_of(model, b), b["labels"]) for b in batches]).sum()


def next_words(model: Any, batches: list[Batch]) -> Tensor:
    """Return the mean cross-entropy of the next words over all labels of a step."""
    total, items = torch.zeros(()), 0
    for batch in batches:
        labels = batch["labels"][:, 1:]
        logits = logits_of(model, batch)[:, :-1].float()
        total = total + functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        items += int((labels != -100).sum())
    return total / items


def _language(name: str, model: str, head: str = "ForCausalLM", formula: bool = True, **more: Any) -> Configuration:
    arguments = {key: more.pop(key) for key in ("gradient_accumulation_steps", "gradient_checkpointing") if key in more}
    make = language_model_of(model, head, **more)
    own = {"loss": next_words, "fresh": make} if formula else {}
    return Configuration(name, language_model(make, **arguments), **own)  # type: ignore[arg-type]


def _classes(name: str, model: str, **more: Any) -> Configuration:
    make = classifier_of(model, **more)
    formula = {} if more.get("dropout") else {"loss": mean_over_batches, "fresh": make}
    return Configuration(name, trained(make), **formula)  # type: ignore[arg-type]


MODELS = (
    _classes("RoBERTa, dropout", "Roberta", dropout=0.1),
    _classes("DistilBERT", "DistilBert", dim=32, n_layers=2, n_heads=2, hidden_dim=64, seq_classif_dropout=0.0),
    _classes("ALBERT, one layer used twice", "Albert", embedding_size=16, classifier_dropout_prob=0.0),
    _classes("DeBERTa v2, relative positions", "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    _classes("MPNet", "MPNet"),
    _classes("FNet, Fourier in place of attention", "FNet"),
    _classes("RoFormer, rotary", "RoFormer", embedding_size=32),
    _classes("ConvBERT, convolutions", "ConvBert", embedding_size=32),
    _language("OPT", "OPT", ffn_dim=64, word_embed_proj_dim=32),
    _language("Qwen2, accumulation", "Qwen2", num_key_value_heads=1, gradient_accumulation_steps=2),
    _language("Qwen3", "Qwen3", num_key_value_heads=1, head_dim=16),
    _language("Gemma", "Gemma", num_key_value_heads=1, head_dim=16),
    _language("Phi, checkpointing", "Phi", gradient_checkpointing=True),
    _language("GPT-NeoX", "GPTNeoX"),
    _language("Falcon, ALiBi", "Falcon", alibi=True, formula=False),
    _language("Mamba, a state-space model", "Mamba", state_size=4, formula=False),
    _language("GPT-J", "GPTJ", n_embd=32, n_layer=2, n_head=2, n_positions=40, rotary_dim=8),
)  # fmt: skip

TASKS = (
    Configuration(
        "ELECTRA, a class for every token",
        trained(
            lambda: model_of("Electra", "ForTokenClassification", num_labels=3, embedding_size=32),
            rows=tagged,
            collator=DataCollatorForTokenClassification,
        ),
    ),
    Configuration(
        "XLM-RoBERTa, question answering",
        trained(lambda: model_of("XLMRoberta", "ForQuestionAnswering", dropout=0.1), rows=answered),
    ),
    Configuration(
        "RoBERTa, multiple choice",
        trained(lambda: model_of("Roberta", "ForMultipleChoice"), rows=choices, collator=lambda words: together),
    ),
    Configuration(
        "DistilBERT, regression",
        trained(classifier_of("DistilBert", dim=32, n_layers=2, n_heads=2, hidden_dim=64, num_labels=1), rows=rated),
    ),
    Configuration(
        "ALBERT, several labels, accumulation",
        trained(
            classifier_of("Albert", embedding_size=16, num_labels=3, problem_type="multi_label_classification"),
            rows=many_labels,
            gradient_accumulation_steps=2,
        ),
    ),
    Configuration(
        "BERT, masked words",
        trained(
            lambda: model_of("Bert", "ForMaskedLM"),
            rows=language_rows,
            collator=lambda words: DataCollatorForLanguageModeling(words, mlm_probability=0.3),
        ),
        texts=unmasked,
    ),
    Configuration(
        "ModernBERT, masked words",
        trained(
            lambda: model_of("ModernBert", "ForMaskedLM", cls_token_id=2, sep_token_id=3),
            rows=language_rows,
            collator=lambda words: DataCollatorForLanguageModeling(words, mlm_probability=0.3),
        ),
        texts=unmasked,
    ),
    Configuration(
        "T5, Adafactor, generates at evaluation",
        trained(
            t5, kind=Seq2SeqTrainer, rows=translated, collator=DataCollatorForSeq2Seq, optim="adafactor", eval_strategy="steps",
            eval_steps=1, predict_with_generate=True,
        ),
        also=targets,
    ),
    Configuration(
        "Marian, accumulation",
        trained(
            lambda: model_of(
                "Marian", "MTModel", d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
                decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, decoder_start_token_id=0,
            ),
            kind=Seq2SeqTrainer, rows=translated, collator=DataCollatorForSeq2Seq, gradient_accumulation_steps=2,
        ),
        also=targets,
    ),
)  # fmt: skip

LOSSES = (
    Configuration("focal loss in compute_loss", trained(tiny.bert, kind=Focal), loss=focal_over_batches, fresh=tiny.bert),
    Configuration("class weights, accumulation, dropout", trained(lambda: tiny.bert(dropout=0.1), kind=Weighted, gradient_accumulation_steps=2)),
    Configuration("distillation: labels, logits, hidden states", trained(lambda: tiny.bert(dropout=0.1), kind=Distilled)),
    Configuration("label smoothing without attach", trained(tiny.bert, attach=False, label_smoothing_factor=0.2)),
    Configuration("contrastive, two masks", looped(lambda: simcse)),
    Configuration("triplets in one pass", looped(lambda: triplet, batches=lambda: stacks.classes(size=4))),
    Configuration("mixup of embeddings", looped(lambda: mixed_up), stamp="none kept"),
    Configuration("penalty on the head's weights", looped(lambda: with_l1), stamp="mismatch"),
    Configuration("entropy bonus", looped(lambda: penalised_confidence)),
    Configuration("virtual adversarial", looped(lambda: adversarial), stamp="none kept"),
    Configuration("gradient reversal, two heads", looped(lambda: domain, make=lambda: Judge(2), core=lambda model: model.encoder)),
    Configuration("two tasks in turn", looped(two_tasks, make=lambda: Judge(2), core=lambda model: model.encoder)),
)  # fmt: skip

LOOPS = (
    Configuration("clipped by hand, not told", looped(then=clip_by_hand), stamp="scaled"),
    Configuration("values clipped by hand, not told", looped(then=clip_values), stamp="mismatch"),
    Configuration("centralised gradients, not told", looped(then=centralise), stamp="mismatch"),
    Configuration("noise by hand, not told", looped(then=noise), stamp="mismatch"),
    Configuration("gradients halved in hooks of parameters", looped(before=halve), stamp="rescaled"),
    Configuration("windows of 1, 3 and 2", uneven),
    Configuration("gradients set by autograd.grad", by_autograd),
    Configuration("two backward passes over one forward", twice_backward),
    Configuration("gradients never emptied", kept_gradients, stamp="3 mismatch, 1 verified"),
    Configuration("gradients zeroed in place after the forward", zero_in_place),
    Configuration("batches skipped after an exception", skipped_batches),
    Configuration("a batch tried again in halves", halved_batches),
    Configuration("other tensors in the parameters", new_storage),
    Configuration("copies of the model in every step", looped(between=Best)),
    Configuration("the whole model saved in every step", looped(between=lambda: saved_whole)),
    Configuration("double precision for a look", looped(make=tiny.bert, between=lambda: in_float64)),
    Configuration("a new head in the middle", looped(make=tiny.bert, between=lambda: grown)),
    Configuration("training in eval mode", in_eval_mode),
    Configuration("eval mode for one batch of a step", eval_for_a_batch),
    Configuration("layers left out by Python's random numbers", dropped_layers, stamp="3 mismatch, 3 verified"),
    Configuration("words left out by a generator of torch of its own", looped(before=leaving_out(torch.Generator)), stamp="mismatch"),
    Configuration(
        "words left out by a generator of numpy of its own",
        looped(before=leaving_out(lambda: numpy.random.default_rng(0))), stamp="mismatch"),
    Configuration(
        "words left out by a generator of Python of its own", looped(before=leaving_out(lambda: random.Random(0))), stamp="mismatch"),
    Configuration("words left out by a helper that counts", looped(before=leaving_out(Sampler)), stamp="mismatch"),
    Configuration("words left out by an iterator", looped(before=leaving_out(lambda: iter(range(10_000)))), stamp="mismatch"),
    Configuration("a schedule by the number of calls, in a hook", looped(before=counted_calls), stamp="scaled"),
    Configuration("a schedule by the number of calls, in a global", looped(before=globally_counted), stamp="scaled"),
    Configuration("a batch norm that a hook holds", looped(before=module_in_a_hook), stamp="mismatch"),
    Configuration("a schedule by a generator function", looped(before=generated), stamp="scaled"),
    Configuration(
        "two optimizers, one of them told and the other in every second step",
        alternating, stamp="none kept"),
    Configuration("a group of parameters added", looped(make=frozen_table, between=lambda: thaw)),
    Configuration("frozen in the middle", looped(make=tiny.bert, between=lambda: freeze)),
    Configuration("evaluation between steps", looped(between=lambda: evaluate)),
    Configuration("samples a text between steps", texts_loop(between=lambda: generate)),
    Configuration("gradient of another batch in between", looped(between=lambda: saliency)),
    Configuration("moving average put in for evaluation", looped(between=Averaged)),
    Configuration(
        "cosine schedule, AdamW",
        looped(
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
            between=lambda: Scheduled(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)),
        ),
    ),
    Configuration(
        "SWA schedule, NAdam",
        looped(
            optimizer=lambda model: torch.optim.NAdam(model.parameters(), lr=1e-3),
            between=lambda: Scheduled(lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01)),
        ),
    ),
    Configuration(
        "learning rates by layer",
        looped(
            optimizer=lambda model: torch.optim.RMSprop([{"params": [p], "lr": 1e-4 * (i + 1)} for i, p in enumerate(model.parameters())])
        ),
    ),
    Configuration("Rprop, which looks at signs", looped(optimizer=lambda model: torch.optim.Rprop(model.parameters(), lr=1e-3))),
    Configuration("Accelerate, two loaders in one step", two_loaders),
    Configuration("Fabric, accumulation, clipped", fabric()),
    Configuration("Fabric, bf16-mixed", fabric("bf16-mixed")),
    Configuration("Lightning, growing accumulation, validation, AdamW", lightning(schedule=True)),
    Configuration("Lightning, clipped values", lightning(gradient_clip_val=0.01, gradient_clip_algorithm="value")),
    Configuration("Opacus, head only, AdamW, noise", private(head_only, 1.0), stamp="noised"),
)  # fmt: skip

TRAINERS = (
    Configuration("resumed from a checkpoint, AdamW", resumed),
    Configuration(
        "early stopping, best model loaded",
        trained(
            lambda: tiny.bert(dropout=0.1), eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
            load_best_model_at_end=True, metric_for_best_model="eval_loss", max_steps=6,
            callbacks=lambda: [EarlyStoppingCallback(early_stopping_patience=1)],
        ),
    ),
    Configuration("samples a text in every step", language_model(tiny.gpt2_lm, callbacks=lambda: [Generating()])),
    Configuration(
        "warmup and linear decay, fused AdamW, decay of weights",
        trained(
            lambda: tiny.bert(dropout=0.1), optim="adamw_torch_fused", lr_scheduler_type="linear", warmup_steps=2, weight_decay=0.1,
            learning_rate=1e-2, max_grad_norm=0.5,
        ),
    ),
    Configuration("all in bfloat16, AdamW", trained(lambda: tiny.bert().to(torch.bfloat16), optim="adamw_torch")),
    Configuration(
        "bf16 autocast, checkpointing, accumulation, dropout",
        trained(lambda: tiny.bert(dropout=0.1), bf16=True, gradient_checkpointing=True, gradient_accumulation_steps=2),
    ),
    Configuration(
        "copies of the model within a step",
        trained(lambda: tiny.bert(dropout=0.1), gradient_accumulation_steps=2, callbacks=lambda: [Copying()]),
    ),
    Configuration("LoRA and layer norms", trained(mixed_lora)),
    Configuration("LoRA, merged for a look in every step", trained(mixed_lora, callbacks=lambda: [Merging()])),
    Configuration("batches of one length", trained(tiny.bert, train_sampling_strategy="group_by_length")),
    Configuration("NEFTune on a classifier with AdamW", trained(tiny.bert, neftune_noise_alpha=3.0, optim="adamw_torch")),
)  # fmt: skip

FAST = (*LOSSES, *LOOPS)
SLOW = (*MODELS, *TASKS, *TRAINERS)
ALL = (*SLOW, *FAST)
