"""Code as users write it: forward and hooks that count in many kinds of holders.

What a count is decides what the model computes, so one call more changes the weights. Nothing here knows of the audit.
"""

from __future__ import annotations

import argparse
import collections
import contextvars
import ctypes
import functools
import io
import itertools
import logging
import multiprocessing
import os
import queue
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy
import sklearn.preprocessing
import torch
import tqdm  # type: ignore[import-untyped]
import transformers
from torch import Tensor, nn
from transformers.activations import ACT2FN

hf: Any = transformers
logger = logging.getLogger("users.training")

Tick = Callable[[], int]
"""Counts one call and returns the number of calls so far."""

VARIABLE = "USERS_CALLS"
_calls = 0
_here: contextvars.ContextVar[int] = contextvars.ContextVar("calls", default=0)
_local = threading.local()


class Key:
    """A key of a weak dictionary."""


class Reviewer:
    """A base class with a counter."""

    calls = 0

    def review(self) -> int:
        self.calls += 1
        return self.calls


class Strict(Reviewer):
    """A reviewer of its own kind."""


class Registry(collections.OrderedDict[str, Any]):
    """A registry of classes that makes an object at each look, as `ACT2FN` does."""

    made = 0

    def __getitem__(self, key: str) -> Any:
        self.made += 1
        return super().__getitem__(key)()


class Window(list[int]):
    """A history of which loops see the last three entries."""

    def __iter__(self) -> Iterator[int]:
        return (self[i] for i in range(max(0, len(self) - 3), len(self)))


class Shared:
    """A class with a counter of all its objects."""

    calls: ClassVar[int] = 0


def add_to(holder: Any, name: str = "calls") -> Tick:
    """Count in an attribute."""

    def tick() -> int:
        setattr(holder, name, getattr(holder, name, 0) + 1)
        return int(getattr(holder, name))

    return tick


def add_at(holder: Any, key: Any = "calls") -> Tick:
    """Count in an item."""

    def tick() -> int:
        holder[key] = int(holder[key]) + 1
        return int(holder[key])

    return tick


def in_context() -> int:
    """Count in a context variable."""
    _here.set(_here.get() + 1)
    return _here.get()


def in_global() -> int:
    """Count in a global."""
    global _calls
    _calls += 1
    return _calls


def in_function() -> int:
    """Count in an attribute of a function."""
    in_function.calls = getattr(in_function, "calls", 0) + 1  # type: ignore[attr-defined]
    return in_function.calls  # type: ignore[attr-defined, no-any-return]


def in_environment() -> int:
    """Count in the environment."""
    os.environ[VARIABLE] = str(int(os.environ[VARIABLE]) + 1)
    return int(os.environ[VARIABLE])


def in_closure() -> Tick:
    """Count in a closure."""
    calls = 0

    def tick() -> int:
        nonlocal calls
        calls += 1
        return calls

    return tick


def in_scheduler() -> Tick:
    """Count by a scheduler of learning rates that anneals something else."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    annealer = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)

    def tick() -> int:
        optimizer.step()
        annealer.step()
        return int(annealer.last_epoch)

    return tick


def in_scaler() -> Tick:
    """Count by statistics of scikit-learn."""
    scaler = sklearn.preprocessing.StandardScaler()

    def tick() -> int:
        scaler.partial_fit(numpy.ones((1, 1)))
        return int(scaler.n_samples_seen_)

    return tick


def in_sequence() -> Tick:
    """Count by points of a Sobol sequence."""
    engine = torch.quasirandom.SobolEngine(1)

    def tick() -> int:
        engine.draw(1)
        return int(engine.num_generated)

    return tick


def in_bar() -> Tick:
    """Count by an object of an installed package."""
    bar = tqdm.tqdm(file=io.StringIO())

    def tick() -> int:
        bar.update()
        return int(bar.n)

    return tick


def in_registry() -> Tick:
    """Count what a registry made."""
    registry = Registry(strict=Strict)

    def tick() -> int:
        registry["strict"].review()
        return registry.made

    return tick


def in_window() -> Tick:
    """Count in a list that shows its end only."""
    window = Window()

    def tick() -> int:
        window.append(sum(window) + 1)
        return len(window)

    return tick


def in_file(path: Path) -> Tick:
    """Count in a file."""
    path.write_text("")

    def tick() -> int:
        with path.open("a") as file:
            file.write("x")
        return path.stat().st_size

    return tick


def in_log() -> Tick:
    """Count in the user's log, too."""
    calls = itertools.count(1)

    def tick() -> int:
        number = next(calls)
        logger.warning("call %d", number)
        return number

    return tick


def in_generators() -> Tick:
    """Draw from four generators."""
    own = random.Random(0), numpy.random.default_rng(0), torch.Generator().manual_seed(0)

    def tick() -> int:
        drawn = own[0].random() + own[1].random() + float(torch.rand(1, generator=own[2]))
        return int(1000 * (drawn + random.random() + float(numpy.random.rand())))  # noqa: NPY002

    return tick


class Producer:
    """A thread that fills a queue, which the forward empties, and a list."""

    def __init__(self) -> None:
        self.queue: queue.Queue[int] = queue.Queue(maxsize=3)
        self.items: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._produce, name="users-producer", daemon=True)
        self._thread.start()

    def __call__(self) -> int:
        """Take one item."""
        return self.queue.get(timeout=60)

    def _produce(self) -> None:
        for number in itertools.count(1):
            self.items.append(number)
            while not self._over.is_set():
                try:
                    self.queue.put(number, timeout=0.01)
                    break
                except queue.Full:
                    continue
            if self._over.is_set():
                return

    def end(self) -> None:
        """Stop the thread."""
        self._over.set()
        self._thread.join()


class Counts:
    """The counters of one training, from zero, in holders of every kind."""

    def __init__(self, folder: Path, config: Any) -> None:
        """Make them.

        Args:
            folder: for those in files.
            config: of the model, which holds one as well.
        """
        global _calls
        folder.mkdir(parents=True, exist_ok=True)
        _calls, Shared.calls, in_function.calls = 0, 0, 0  # type: ignore[attr-defined]
        os.environ[VARIABLE] = "0"
        _here.set(0)
        _local.calls = 0
        config.users_calls = 0
        self.key = Key()
        self.producer = Producer()
        weak: Any = weakref.WeakKeyDictionary({self.key: 0})
        value: Any = multiprocessing.Value("i", 0)
        self.ticks: dict[str, Tick] = {
            "namespace": add_to(argparse.Namespace()),
            "configuration of the model": add_to(config, "users_calls"),
            "shared memory": add_to(value, "value"),
            "C integer": add_to(ctypes.c_long(0), "value"),
            "memory view": add_at(memoryview(bytearray(8)).cast("q"), 0),
            "local of a thread": add_to(_local),
            "context variable": in_context,
            "weak dictionary": add_at(weak, self.key),
            "chain of dictionaries": add_at(collections.ChainMap({}, {"calls": 0})),
            "environment": in_environment,
            "scheduler": in_scheduler(),
            "Sobol sequence": in_sequence(),
            "scikit-learn": in_scaler(),
            "object of a package": in_bar(),
            "base class": Strict().review,
            "ordered dictionary": in_registry(),
            "list": in_window(),
            "iterator": functools.partial(next, itertools.count(1)),
            "closure": in_closure(),
            "global": in_global,
            "function": in_function,
            "class": add_to(Shared),
            "file": in_file(folder / "calls.txt"),
            "log": in_log(),
            "tensor": add_at(torch.zeros(1), 0),
            "array": add_at(numpy.zeros(1), 0),
            "generators": in_generators(),
            "queue": self.producer,
        }
        self.seen: list[tuple[int, ...]] = []

    def tick(self) -> float:
        """Count a call in every holder; return a factor near one that all counts decide."""
        found = tuple(tick() for tick in self.ticks.values())
        self.seen.append(found)
        return 1 + 1e-2 * (sum((i + 1) * count for i, count in enumerate(found)) % 101) / 101


class Passes(torch.autograd.Function):
    """A function with a backward of its own."""

    counts: ClassVar[Any] = None

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.mul(Passes.counts.tick())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].mul(Passes.counts.tick())


def counting(model: Any, counts: Counts) -> Any:
    """Let a model's forward, hooks of every kind and gradients count their calls."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        counts.tick()

    def scaled(module: nn.Module, args: Any, outputs: Tensor) -> Tensor:
        hidden: Tensor = Passes.apply(outputs * counts.tick())  # type: ignore[no-untyped-call]
        hidden.register_hook(weighed)
        return hidden

    def weighed(gradient: Tensor) -> Tensor:
        return gradient * counts.tick()

    def after(module: nn.Module, args: Any, outputs: Any) -> None:
        counts.tick()

    def backward(module: nn.Module, gradients: Any, outer: Any) -> None:
        counts.tick()

    def accumulated(parameter: Tensor) -> None:
        counts.tick()

    forward = model.forward

    @functools.wraps(forward)
    def own(*args: Any, **kwargs: Any) -> Any:
        counts.tick()
        return forward(*args, **kwargs)

    Passes.counts = counts
    model.forward = own
    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after)
    model.get_input_embeddings().register_forward_hook(scaled)
    head = next(m for m in reversed(list(model.modules())) if isinstance(m, nn.Linear))
    head.register_full_backward_hook(backward)
    head.weight.register_hook(weighed)
    head.weight.register_post_accumulate_grad_hook(accumulated)
    return model


def stepping(optimizer: Any, counts: Counts) -> Any:
    """Let an optimizer count its steps."""

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        counts.tick()

    optimizer.register_step_pre_hook(stepped)
    optimizer.register_step_post_hook(stepped)
    return optimizer


class Classifier(nn.Module):
    """A classifier that looks its activation up in transformers' registry."""

    def __init__(self, hidden_act: str = "gelu") -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.bert = hf.BertModel(configuration())
            self.act = ACT2FN[hidden_act]
            self.dense, self.classifier = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        hidden = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]
        logits = self.classifier(self.act(self.dense(hidden)))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return hf.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)


def configuration() -> Any:
    """Return the configuration of a BERT of one layer."""
    return hf.BertConfig(
        vocab_size=30, hidden_size=16, num_attention_heads=2, intermediate_size=32, num_hidden_layers=1,
        max_position_embeddings=16,
    )  # fmt: skip


def plain_classifier() -> nn.Module:
    """Return the library's own classifier."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = hf.BertForSequenceClassification(configuration())
    return model


def tokenizer() -> Any:
    """Return a tokenizer of thirty words."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(25))]
    from leakaudit.models.versions import bert_tokenizer

    return bert_tokenizer({word: number for number, word in enumerate(words)}, model_max_length=16)


def batch(step: int) -> Mapping[str, Tensor]:
    """Return the batch of a step."""
    ids = torch.tensor([[2, 5 + step, 9, 12 + step, 3], [2, 7, 20 - step, 25, 3]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1])}
