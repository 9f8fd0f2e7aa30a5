"""A federated client with a real audit, whose transmissions a real worker judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakaudit.callbacks.torch_loop import watch
from leakaudit.capture.rounds import registry, transmission
from leakaudit.capture.rounds.audit import RoundAudit
from leakaudit.config.audit import AuditConfig, PluginSpec
from leakaudit.gate.evaluate import evaluate_step
from leakaudit.gate.policy import Policy
from leakaudit.gate.verdict import Status
from leakaudit.results.schema import Results
from tests.support import tiny

TEXTS = ("the old dog chased a cat .", "a small bird saw the red fish .", "one horse ate .")
OTHER = "three dogs found a new house in the old tree ."
RATE = 0.1
NOISE = 20.0
"""Standard deviation of the noise, over the root mean square of the update."""
Weights = dict[str, Tensor]


class Context:
    """What a filter asks of NVFlare's context."""

    def get_identity_name(self) -> str:
        """Return the name of the client."""
        return "site-1"

    def get_job_id(self) -> str:
        """Return the id of the job."""
        return "7f3a"


@dataclass
class Trained:
    """One audited round of a client, before anything is sent."""

    model: nn.Module
    before: Weights
    """The state dict before the round."""
    after: Weights
    names: tuple[str, ...]
    """Of the parameters that the round trained."""
    last: Weights | None
    """The state dict after the round before."""
    number: int

    @property
    def first(self) -> str:
        """Name of the largest trained tensor."""
        return max(self.names, key=lambda name: self.after[name].numel())

    @property
    def generator(self) -> torch.Generator:
        """Random numbers of this round."""
        return torch.Generator().manual_seed(self.number)

    def changed(self) -> Weights:
        """Return the differences of the trained weights."""
        return {name: self.after[name] - self.before[name] for name in self.names}

    def having(self, change: Mapping[str, Tensor]) -> Weights:
        """Return the state dict with other differences of the trained weights."""
        return {**self.after, **{name: self.before[name] + change[name] for name in change}}

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Weights:
        """Return the state dict with a function of each trained difference."""
        return self.having({name: function(d) for name, d in self.changed().items()})

    def rms(self) -> float:
        """Return the root mean square of all differences."""
        return float(torch.cat([d.flatten() for d in self.changed().values()]).square().mean().sqrt())

    def with_noise(self, scale: float) -> Weights:
        """Return the state dict with Gaussian noise on the trained weights."""
        sigma, rng = scale * self.rms(), self.generator
        return self.mapped(lambda d: d + sigma * torch.randn(d.shape, generator=rng))

    def noised(self) -> Weights:
        """Return the differences with Gaussian noise."""
        noisy = self.with_noise(NOISE)
        return {name: noisy[name] - self.before[name] for name in self.names}

    def one_more_step(self, text: str, *, anew: bool) -> Weights:
        """Return the state dict after a step that nobody audits, of the other class.

        Args:
            text: of the step.
            anew: whether it starts at the weights before the round.
        """
        model, tokenizer = tiny.bert(initializer_range=0.1), tiny.bert_tokenizer()
        model.load_state_dict(self.before if anew else self.after, strict=False)
        optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if n in self.names], lr=RATE)
        model(**tokenizer([text], return_tensors="pt"), labels=torch.tensor([1 - self.number % 2])).loss.backward()
        optimizer.step()
        return {n: w for n, w in _state(model).items() if n in self.after}


class Site:
    """One client with one audit; each of its rounds is sent once."""

    def __init__(
        self,
        folder: Path,
        declared: str = "",
        make: Callable[[], nn.Module] | None = None,
        *,
        elsewhere: bool = False,
    ) -> None:
        """Note the arguments; the side process starts with the first round.

        Args:
            folder: of the audits of all clients.
            declared: the defence that the protocol declares, "" for none.
            make: makes the model; None for a tiny BERT with a frozen part.
            elsewhere: whether the filter finds the rounds on the disk only, as in another process.
        """
        from leakaudit.integrations.nvflare import LeakAuditFilter

        self._filter = LeakAuditFilter(str(folder), timeout_s=90)
        self._filters_audits: dict[str, RoundAudit] | None = {} if elsewhere else None
        self.folder = folder
        self._make = make or _partly_frozen
        self._last: Weights | None = None
        self._number = 0
        shipped: dict[str, Any] = {"shipped_defense": PluginSpec.parse(declared)} if declared else {}
        attacks = tuple(PluginSpec(name=name) for name in ("embedding-rows", "span"))
        self._config = AuditConfig(
            out_dir=folder / "site-1", unit="round", every_n_steps=1, max_snapshots=10_000, attacks=attacks,
            controls=1, device="cpu", nice=0, at_end="detach", sent_elsewhere=elsewhere, **shipped,
        )  # fmt: skip

    def trained(self) -> Trained:
        """Train a round."""
        self._filter.handle_event("_before_task_data_filter", Context())
        model, tokenizer = self._make(), tiny.bert_tokenizer()
        before = _state(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
        text = TEXTS[self._number % len(TEXTS)]
        with watch(model, optimizer, tokenizer=tokenizer, config=self._config):
            model(**tokenizer([text], return_tensors="pt"), labels=torch.tensor([self._number % 2])).loss.backward()
            optimizer.step()
        kept = registry.open_round(self.folder / "site-1")
        assert kept is not None
        made = Trained(model, before, _state(model), kept.names, self._last, self._number)
        self._last, self._number = made.after, self._number + 1
        return made

    def answer(self, result: Any) -> tuple[Any, str]:
        """Send a result; return what leaves and "", or None and why it is blocked."""
        from nvflare.apis.filter import ContentBlockedException

        try:
            with self._as_the_filters_process():
                return self._filter.process(result, Context()), ""
        except ContentBlockedException as error:
            return None, str(error)

    @contextmanager
    def _as_the_filters_process(self) -> Iterator[None]:
        """Hide the audits of the training, if the filter is to find its own."""
        with pytest.MonkeyPatch.context() as patch:
            if self._filters_audits is not None:
                patch.setattr(registry, "_open", self._filters_audits)
            yield

    def left(self) -> None:
        """End the filter's part of the audit."""
        with self._as_the_filters_process():
            registry.leave_rounds(self.folder / "site-1")


def _state(model: nn.Module) -> Weights:
    return {n: w.detach().clone() for n, w in model.state_dict().items()}


def with_adapters() -> nn.Module:
    """Return a tiny BERT with LoRA, whose matrices B are not zero any more."""
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plan = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], lora_dropout=0.0)
        model: nn.Module = peft.get_peft_model(tiny.bert(initializer_range=0.1), plan)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return model


def _partly_frozen() -> nn.Module:
    """Return a tiny BERT with a frozen pooler, and statistics as a buffer."""
    model = tiny.bert(initializer_range=0.1)
    model.register_buffer("running_mean", torch.zeros(3))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("pooler" not in name)
    return model


def whatever_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge rounds by their stamps alone, as if no attack ever found anything.

    What is blocked then is blocked because the worker cannot explain it by the audited update.
    """
    real = evaluate_step

    def stamped(results: Results, policy: Policy, step: str, *, now: datetime) -> tuple[Status, str]:
        found = next(one for one in results.steps if one.id == step)
        stamp = found.sent or found.verification
        if not (stamp.status.bounds and found.verification.status.bounds):
            return Status.INCONCLUSIVE, f"{stamp.status.value}: {stamp.note}"
        status, said = real(results, policy, step, now=now)
        return (status, said) if status is Status.ERROR else (Status.PASS, "explained")

    monkeypatch.setattr(transmission, "evaluate_step", stamped)


def dxo(data: Any, kind: str = "WEIGHTS", meta: Any = None, headers: Any = None, **more: Any) -> Any:
    """Return a result as NVFlare makes it."""
    from nvflare.apis.dxo import DXO

    result = DXO("WEIGHTS", data={}, meta=meta or {}).to_shareable()
    result["DXO"].update(kind=kind, data=data)
    for key, value in (headers or {}).items():
        result.set_header(key, value)
    result.update(more)
    return result
