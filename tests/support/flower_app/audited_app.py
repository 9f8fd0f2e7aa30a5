"""An app for Flower's deployment: a tiny model, an audit of rounds, the mod."""

from __future__ import annotations

import os
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from leakaudit.callbacks.torch_loop import watch
from leakaudit.integrations.flower import LeakAuditMod
from leakaudit.plugins.testing.small_models import bert, bert_tokenizer

audited = LeakAuditMod(os.environ["AUDITED_OUT"])
client = ClientApp()
server = ServerApp()


@client.train(mods=[audited])  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """Take the one local step of a round."""
    model, tokenizer = bert(), bert_tokenizer()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    audit: dict[str, Any] = {
        "out_dir": str(audited.folder(context)), "unit": "round", "rounds": int(context.run_config["rounds"]),
        "every_n_steps": 1, "attacks": ["embedding-rows"], "controls": 1, "nice": 0,
    }  # fmt: skip
    with watch(model, optimizer, tokenizer=tokenizer, config=audit):
        model(**tokenizer("the old dog chased a cat .", return_tensors="pt"), labels=torch.tensor([1])).loss.backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)


@server.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Average over two clients."""
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
    strategy.start(
        grid=grid, initial_arrays=ArrayRecord(bert().state_dict()), num_rounds=int(context.run_config["rounds"])
    )
