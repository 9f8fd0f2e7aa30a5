"""What each client of `nvflare_audited.py` runs; NVFlare starts it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import nvflare.client as flare
import torch
from nvflare.app_common.abstract.fl_model import FLModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from leakaudit.callbacks.torch_loop import watch
from leakaudit.integrations.nvflare import site_folder

LEARNING_RATE = 0.1


def train(model: Any, tokenizer: Any, note: str, audit: dict[str, Any]) -> None:
    """Take the one local step of a round, on one note."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    batch = tokenizer(note, return_tensors="pt")
    with watch(model, optimizer, tokenizer=tokenizer, config=audit):
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", required=True, help="folder of the examples")
    parser.add_argument("--model", type=Path, required=True, help="as `tiny_language_model.py` makes it")
    parser.add_argument("--out", required=True, help="folder of the audits")
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of noise on the sent weights")
    parser.add_argument("--no-audit", action="store_true", help="keep no rounds")
    options = parser.parse_args()
    sys.path.insert(0, options.examples)
    from tiny_language_model import notes

    flare.init()
    site = flare.get_site_name()
    audit: dict[str, Any] = {"unit": "round", "out_dir": str(site_folder(options.out, site)), "every_n_steps": 1}
    audit |= {"attacks": ["span"], "controls": 1, "budget_s": 60}  # one attack, so that the example takes minutes
    if options.noise:  # of the weights; the audit counts in gradients, which a step multiplies by the learning rate
        audit["shipped_defense"] = f"gaussian-noise(sigma={options.noise / LEARNING_RATE})"
    if options.no_audit:
        os.environ["LEAKAUDIT_DISABLED"] = "1"
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(options.model, trust_remote_code=False)
    while flare.is_running():
        received = flare.receive()
        if received.params:  # empty in the first round: every client begins with the model of its own disk
            model.load_state_dict({name: torch.as_tensor(value) for name, value in received.params.items()})
        train(model, tokenizer, notes()[3 * received.current_round + int(site[-1])], audit)
        sent: dict[str, Tensor] = {n: w + options.noise * torch.randn_like(w) for n, w in model.state_dict().items()}
        flare.send(FLModel(params=sent))


if __name__ == "__main__":
    main()
