"""What each client of `nvflare_lora.py` runs; NVFlare starts it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import nvflare.client as flare
import torch
from nvflare.app_common.abstract.fl_model import FLModel

from leakaudit.integrations.nvflare import site_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=Path, required=True, help="folder of the examples")
    parser.add_argument("--out", required=True, help="folder of the audits")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of noise on the sent weights")
    parser.add_argument("--no-audit", action="store_true", help="keep no rounds")
    options = parser.parse_args()
    sys.path.insert(0, str(options.examples))
    import lora_client

    flare.init()
    site = flare.get_site_name()
    audit = {"out_dir": str(site_folder(options.out, site)), "rounds": options.rounds, **lora_client.QUICK}
    if options.noise:  # on the weights; the audit counts in gradients, which a step multiplies by the learning rate
        audit["shipped_defense"] = f"gaussian-noise(sigma={options.noise / lora_client.LEARNING_RATE})"
    if options.no_audit:
        os.environ["LEAKAUDIT_DISABLED"] = "1"
    while flare.is_running():
        received = flare.receive()
        weights = {
            name: torch.as_tensor(value) for name, value in received.params.items()
        } or lora_client.first_weights()
        sent = lora_client.train(weights, int(site[-1]) - 1, received.current_round, audit)
        flare.send(FLModel(params={name: w + options.noise * torch.randn_like(w) for name, w in sent.items()}))


if __name__ == "__main__":
    main()
