"""A client app of Flower, which trains one text a round and is audited."""

from __future__ import annotations

from pathlib import Path

import small
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.clientapp.typing import ClientAppCallable
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

from leakaudit.callbacks.hf_trainer import LeakAuditCallback
from leakaudit.integrations.flower import LeakAuditMod

NORM, SIGMA = 1.0, 0.05
app = ClientApp()


def _told(context: Context) -> LeakAuditMod:
    return LeakAuditMod(str(context.run_config["folder"]))


def audited(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Tell the audit what leaves; its folder is in the configuration of the run."""
    return _told(context)(message, context, call_next)


def private(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Clip and noise the update, where the configuration of the run asks for it."""
    if not context.run_config["defended"]:
        return call_next(message, context)
    mod = LocalDpMod(NORM, SIGMA, 1.0, 1e-5)
    return mod(message, context, call_next)


@app.train(mods=[audited, private])  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """Take one step on one text, and reply with the weights."""
    model = small.classifier()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    number = int(message.content["config"]["server-round"])
    folder = Path(str(context.run_config["folder"]))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            str(folder / "model"), max_steps=1, optim="sgd", learning_rate=0.1, report_to="none", use_cpu=True
        ),
        train_dataset=small.labelled()[number - 1 : number],
        data_collator=DataCollatorWithPadding(small.tokenizer()),
        processing_class=small.tokenizer(),
    )
    rounds = context.run_config["num-server-rounds"]
    config = _told(context).config(context, rounds=rounds, attacks=["embedding-rows"], controls=1, nice=0)
    LeakAuditCallback(config).attach(trainer)
    trainer.train()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)
