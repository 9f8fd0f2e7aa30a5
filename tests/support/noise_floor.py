"""Prints how far rounding moves an update, on other processors and in our order.

Run it with `python -m tests.support.noise_floor`. Other processors are this one, limited to older instructions.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from leakaudit.audit.comparison import relative_error
from leakaudit.client.other_order import other_order

PRECISIONS = {"float32": torch.float32, "bf16 autocast": torch.float32, "bfloat16": torch.bfloat16}
OLDER = {
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "SSE": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
ORDERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "MATH attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "reversed products": lambda: other_order(attention=False),
    "both": other_order,
}


def model(name: str, folder: Path) -> Any:
    """Return a small model, with the same weights in every process."""
    import transformers as t

    size: dict[str, Any] = {"vocab_size": 500, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    models: Any = {
        "BERT": lambda: t.BertForSequenceClassification(t.BertConfig(**size, intermediate_size=256)),
        "GPT-2": lambda: t.GPT2LMHeadModel(t.GPT2Config(vocab_size=500, n_embd=96, n_layer=3, n_head=4)),
        "Llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**size, intermediate_size=256)),
    }
    made = models[name]()
    weights = folder / f"{name}.weights"
    if weights.exists():
        made.load_state_dict(torch.load(weights))
    else:
        torch.save(made.state_dict(), weights)
    return made.eval()


def gradient(name: str, precision: str, folder: Path, attention: str = "sdpa") -> dict[str, Tensor]:
    """Return the gradient of a padded batch of 8 x 64 tokens."""
    made = model(name, folder).to(PRECISIONS[precision])
    made.set_attn_implementation(attention)
    tokens = torch.randint(5, 500, (8, 64), generator=torch.Generator().manual_seed(1))  # (B, T)
    mask = (torch.arange(64) < 64 - 5 * torch.arange(8)[:, None]).long()
    labels = torch.arange(8) % 2 if name == "BERT" else tokens.masked_fill(mask == 0, -100)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16 autocast"):
        loss = made(input_ids=tokens, attention_mask=mask, labels=labels).loss
    loss.backward()
    return {n: p.grad.float() for n, p in made.named_parameters() if p.grad is not None}


def main(folder: Path) -> None:
    """Print a row for each model and precision."""
    print("| model | precision | two threads | eager attention |", *(f"{n} |" for n in (*OLDER, *ORDERS)))
    print("|" + " --- |" * (4 + len(OLDER) + len(ORDERS)))
    for name in ("BERT", "GPT-2", "Llama"):
        for precision in PRECISIONS:
            plain = gradient(name, precision, folder)
            torch.set_num_threads(2)
            found = [gradient(name, precision, folder)]
            torch.set_num_threads(1)
            found.append(gradient(name, precision, folder, "eager"))
            for kind, limits in OLDER.items():
                file, environment = folder / f"{kind}.gradient", {**os.environ, **limits, "OMP_NUM_THREADS": "1"}
                words = [name, precision, str(folder), str(file)]
                subprocess.run([sys.executable, "-m", __spec__.name, *words], env=environment, check=True)
                found.append(torch.load(file))
            for order in ORDERS.values():
                with order():
                    found.append(gradient(name, precision, folder))
            print(f"| {name} | {precision} |", *(f"{relative_error(one, plain):.1e} |" for one in found), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        name, precision, place, file = sys.argv[1:]
        torch.save(gradient(name, precision, Path(place)), file)
    else:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
