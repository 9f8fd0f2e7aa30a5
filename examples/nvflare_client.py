"""What each client of `nvflare_lora.py` runs; NVFlare starts it."""

from __future__ import annotations

import argparse
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
    options = parser.parse_args()
    sys.path.insert(0, str(options.examples))
    import lora_client

    flare.init()
    site = flare.get_site_name()
    audit = {"out_dir": str(site_folder(options.out, site)), "rounds": options.rounds, **lora_client.QUICK}
    while flare.is_running():
        received = flare.receive()
        weights = {name: torch.as_tensor(value) for name, value in received.params.items()} or lora_client.first_weights()
        sent = lora_client.train(weights, int(site[-1]) - 1, received.current_round, audit)
        flare.send(FLModel(params={name: value.numpy() for name, value in sent.items()}))


if __name__ == "__main__":
    main()
