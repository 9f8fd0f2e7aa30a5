"""Gives one training message to a published Flower app, as a node does.

    python one_message.py WORK MODEL

The working directory is the app's folder, with its `pyproject.toml`. MODEL names what the server sends first: `adapters`, `classifier`, `net`, `heads` or `words`. A small
language model with random weights is saved in WORK/model, and stands in for the published one; everything else of the app's configuration stays. The names
of the arrays in the reply are written to WORK/reply.
"""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path.cwd()))

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common.config import flatten_dict, unflatten_dict
from flwr.supercore.task_identity import TaskIdentity
from small_model import save_model
from transformers import set_seed


def first_arrays(kind: str, package: str, settings: dict[str, Any]) -> Any:
    """Return what the example's server sends in the first round."""
    if kind == "classifier":
        return import_module(f"{package}.task").get_model(settings["model-name"]).state_dict()
    if kind == "net":
        return import_module(f"{package}.task").Net().state_dict()
    if kind == "words":
        return import_module(f"{package}.model").get_model("cpu", settings["num-classes"], False)[1].state_dict()
    if kind == "heads":
        return import_module(f"{package}.task").get_model(settings["num-classes"]).heads.state_dict()
    from omegaconf import DictConfig
    from peft import get_peft_model_state_dict

    config = DictConfig(import_module(f"{package}.dataset").replace_keys(unflatten_dict(settings)))
    return get_peft_model_state_dict(import_module(f"{package}.models").get_model(config.model))


def main(work: Path, kind: str) -> None:
    app = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
    settings = flatten_dict(app["config"])
    for name in {"model-name", "model.name"} & set(settings):
        settings[name] = str(work / "model")
        save_model(work / "model", kind)
    if kind == "words":
        save_model(work / "model", kind)
    module, _, name = app["components"]["clientapp"].partition(":")
    for one in ("_task_id", "_run_id", "_node_id"):  # of the process that handles a message
        setattr(TaskIdentity, one, 1)
    set_seed(5)
    content = {
        "arrays": ArrayRecord(first_arrays(kind, module.partition(".")[0], settings)),
        "config": ConfigRecord({"server-round": 1, "lr": 0.1, "save_path": str(work / "results")}),
    }
    message = Message(RecordDict(content), dst_node_id=1, message_type="train")
    node = {"partition-id": 0, "num-partitions": 1}
    context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=settings)
    reply = getattr(import_module(module), name)(message, context)
    (work / "reply").write_text(" ".join(reply.content["arrays"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
