"""Measures what the record of entries costs each optimizer step that is kept.

    python -m tests.benchmarks.step_trace

A BERT of 22 million random weights (six layers, 384 dimensions, 105 parameters) takes steps of four texts of 32 tokens, ten without and ten with
the record in turn, five times. Printed are the medians, and the size of the record of ten steps.
"""

from __future__ import annotations

import statistics
import time

import torch
from transformers import BertConfig, BertForSequenceClassification

from leakaudit.capture.recording.live_model import LiveModel
from leakaudit.capture.recording.step_trace import StepTrace

STEPS, TURNS = 10, 5


class Loop:
    """A loop that may note entries."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
        self.model = BertForSequenceClassification(config)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batch = {"input_ids": torch.randint(0, 30_000, (4, 32)), "labels": torch.tensor([0, 1, 0, 1])}

    def step(self, trace: StepTrace | None) -> None:
        """Take one step."""
        if trace is not None:
            trace.forward()
        loss = self.model(**self.batch).loss
        if trace is not None:
            loss.register_hook(lambda _gradient: trace.backward(empty=False))
        loss.backward()
        if trace is not None:
            trace.given()
        self.optimizer.step()
        if trace is not None:
            trace.moved()
        self.optimizer.zero_grad()

    def seconds(self, trace: StepTrace | None) -> float:
        """Return the seconds of a step."""
        start = time.perf_counter()
        for _ in range(STEPS):
            self.step(trace)
        return (time.perf_counter() - start) / STEPS


def main() -> None:
    loop = Loop()
    loop.seconds(None)
    without, noted = [], []
    for _ in range(TURNS):
        trace = StepTrace(LiveModel(loop.model, [loop.optimizer]))
        without.append(loop.seconds(None))
        noted.append(loop.seconds(trace))
    names = {id(parameter): name for name, parameter in loop.model.named_parameters()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in trace.tensors(names).values())
    plain, more = (1e3 * statistics.median(found) for found in (without, noted))
    print(f"a step: {plain:.1f} ms; with the record {more:.1f} ms; {STEPS} steps of it: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
