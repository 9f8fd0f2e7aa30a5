"""A user's Flower app, in the simulation: one client, two rounds."""

from __future__ import annotations

from typing import Any

import small
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

app = ClientApp()
server = ServerApp()


def trainer_of(message: Any) -> Trainer:
    """Return the trainer of a round, with one text."""
    model = small.classifier()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    number = int(message.content["config"]["server-round"])
    return Trainer(
        model=model,
        args=TrainingArguments("model", max_steps=1, optim="sgd", learning_rate=0.1, report_to="none", use_cpu=True),
        train_dataset=small.labelled()[number - 1 : number],
        data_collator=DataCollatorWithPadding(small.tokenizer()),
        processing_class=small.tokenizer(),
    )


def trained(trainer: Any, message: Any) -> Message:
    """Train, and return what the client sends."""
    trainer.train()
    content = {"arrays": ArrayRecord(trainer.model.state_dict()), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)


# paste: trainer_of(message) | trained(trainer, message)


@server.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Average over one client."""
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(small.classifier().state_dict()), num_rounds=2)


run_simulation(server, app, num_supernodes=1, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
