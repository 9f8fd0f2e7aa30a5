"""What each client of `nvflare_audited.py` runs; NVFlare starts it."""

from __future__ import annotations

import argparse
import os
from typing import Any

import nvflare.client as flare
import torch
from nvflare.app_common.abstract.fl_model import FLModel
from torch import Tensor

from leakaudit.callbacks.torch_loop import watch
from leakaudit.integrations.nvflare import round_config
from leakaudit.plugins.testing.small_models import bert, bert_tokenizer

TEXTS = (
    "the old dog chased a cat .",
    "a small bird saw the red fish near the river .",
    "one horse ate .",
    "the new blue house under a big tree .",
    "three dogs found a bird in the old tree .",
    "always a horse on the road .",
)
"""What the clients train on; the words of the tiny model's vocabulary."""


def train(model: Any, text: str, audit: dict[str, Any]) -> None:
    """Take the one local step of a round, on one text."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokenizer = bert_tokenizer()
    with watch(model, optimizer, tokenizer=tokenizer, config=audit):
        model(**tokenizer(text, return_tensors="pt"), labels=torch.tensor([1])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def with_noise(before: dict[str, Tensor], after: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return the weights with Gaussian noise, `scale` times the root mean square of what a client changed in them."""
    change = torch.cat([(after[name] - before[name]).flatten() for name in after])
    sigma = scale * float(change.square().mean().sqrt())
    return {name: weight + sigma * torch.randn_like(weight) for name, weight in after.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder of the audits")
    parser.add_argument("--noise", type=float, default=0.0, help="noise on the sent weights over their change")
    parser.add_argument("--no-audit", action="store_true", help="keep no rounds")
    options = parser.parse_args()
    flare.init()
    site = flare.get_site_name()
    # Two attacks, so that the example takes minutes; without `attacks` and `controls` the battery is a whole one.
    audit = round_config(options.out, attacks=["embedding-rows", "span"], controls=1, nice=0)
    if options.noise:
        audit["shipped_defense"] = f"gaussian-noise(scale={options.noise})"
    if options.no_audit:
        os.environ["LEAKAUDIT_DISABLED"] = "1"
    model: Any = bert()
    while flare.is_running():
        received = flare.receive()
        if received.params:  # there are none in the first round: every client begins with the same model
            model.load_state_dict({n: torch.as_tensor(w) for n, w in received.params.items()}, strict=False)
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        train(model, TEXTS[(3 * received.current_round + int(site[-1])) % len(TEXTS)], audit)
        after = {name: weight.detach() for name, weight in model.named_parameters()}
        flare.send(FLModel(params=with_noise(before, after, options.noise) if options.noise else after))


if __name__ == "__main__":
    main()
