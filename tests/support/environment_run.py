"""Trains without the audit and then with it, and prints a comparison as JSON.

    python -m tests.support.environment_run FOLDER

It runs in any environment. The first training ends before `leakaudit` is imported. After the audited ones, models are made and trained once more.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from tests.support import counting, user_code

STEPS = 3
MODELS: dict[str, Callable[[], nn.Module]] = {
    "BERT": user_code.plain_classifier,
    "activation of the registry": user_code.Classifier,
}


def train(make: Callable[[], nn.Module], audit: Callable[[nn.Module, Any], Any]) -> dict[str, Any]:
    """Train a model and return what is left."""
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    with audit(model, optimizer):
        for step in range(STEPS):
            model(**user_code.batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return counting.state_of(model, [optimizer])


def main(folder: Path) -> dict[str, Any]:
    """Return what is wrong, and where packages were found."""
    quiet = lambda model, optimizer: contextlib.nullcontext()
    without = {name: train(make, quiet) for name, make in MODELS.items()}
    before = counting.digest(user_code)
    assert not any(name.partition(".")[0] == "leakaudit" for name in sys.modules), "the first training knows no audit"

    from leakaudit.callbacks.torch_loop import watch
    from leakaudit.models.factories import rebuilt_by

    kept: dict[str, int] = {}
    wrong: list[str] = []
    cases = {f"{name}, {schedule}": (name, schedule) for name in MODELS for schedule in ("deferred", "inline")}
    for case, (name, schedule) in cases.items():
        out = folder / case
        leave = {"at_end": "leave"} if schedule == "deferred" else {}
        config = {
            "out_dir": out, "schedule": schedule, "every_n_steps": 1, "controls": 0, "attacks": ({"name": "idlg"},),
        } | leave  # fmt: skip

        def audit(model: nn.Module, optimizer: Any, config: dict[str, Any] = config) -> Any:
            if isinstance(model, user_code.Classifier):
                rebuilt_by(model, "tests.support.user_code:Classifier", hidden_act="gelu")
            return watch(model, optimizer, tokenizer=user_code.tokenizer(), config=config)

        left = train(MODELS[name], audit)
        wrong += [f"{case}: {what}" for what in counting.differences(without[name], left)]
        wrong += [f"{case}: {what}" for what in counting.differences(before, counting.digest(user_code))]
        kept[case] = len(list((out / "spool").glob("*.ready"))) + (out / "results.json").exists()
    for name, make in MODELS.items():
        wrong += [f"{name}, afterwards: {what}" for what in counting.differences(without[name], train(make, quiet))]
    return {"wrong": wrong, "kept": kept, "torch": torch.__file__, "transformers": transformers.__file__}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
