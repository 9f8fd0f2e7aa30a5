"""A client in its own process, whose rounds another process sends.

    python -m tests.support.elsewhere_client FOLDER SITE '{"shipped_defense": ...}'

It reads commands on its standard input: `train FILE` trains a round and saves the state dicts before and after it in FILE, and anything
else ends it. It prints a line after each round.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from leakaudit.callbacks.torch_loop import watch
from leakaudit.config.audit import AuditConfig
from tests.support import tiny

TEXTS = ("the old dog chased a cat .", "a small bird saw the red fish .", "one horse ate .")


def main() -> None:
    folder, site, more = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    config = AuditConfig.model_validate(
        {
            "out_dir": str(folder / site), "unit": "round", "every_n_steps": 1, "sent_elsewhere": True,
            "attacks": ["embedding-rows", "span"], "controls": 1, "device": "cpu", "nice": 0, "at_end": "detach",
            **more,
        }
    )  # fmt: skip
    number = 0
    while (words := sys.stdin.readline().split())[:1] == ["train"]:
        model, tokenizer = tiny.bert(initializer_range=0.1), tiny.bert_tokenizer()
        before = {n: w.detach().clone() for n, w in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch(model, optimizer, tokenizer=tokenizer, config=config):
            batch = tokenizer([TEXTS[number % len(TEXTS)]], return_tensors="pt")
            model(**batch, labels=torch.tensor([number % 2])).loss.backward()
            optimizer.step()
        torch.save({"before": before, "after": dict(model.state_dict())}, words[1])
        number += 1
        print("trained", flush=True)


if __name__ == "__main__":
    main()
