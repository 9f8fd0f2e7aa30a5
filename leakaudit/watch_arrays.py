"""Audits the labels of a training loop on pictures or tables, for any `nn.Module` classifier, in the training process.

    watch = ClassifierWatch(net, num_labels=10, config={"out_dir": "labels", "every_n_steps": 50})
    for inputs, labels in loader:
        with watch(inputs, labels):
            criterion(net(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    watch.finish()

No other process can rebuild such a model, and label attacks take milliseconds: so the loop waits for them on the few steps that
are due. It never raises into the loop, and leaves the model, its gradients and all random states as they were.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leakaudit.battery import Audit
from leakaudit.classifiers import ArrayClassifier, NoText, array_batch, array_facts, array_recipe
from leakaudit.config import AuditConfig
from leakaudit.errors import LeakAuditError
from leakaudit.scores import Overhead
from leakaudit.snapshot import MicroBatch, Observation, Provenance, Snapshot, StepRecipe, Truth, check_finite
from leakaudit.strict_yaml import validate_mapping

logger = logging.getLogger(__name__)

ATTACKS = ("random-labels", "idlg", "llg", "llg-star", "ilrg")
"""What runs unless the configuration names others: all that needs neither auxiliary data nor a search."""


class ClassifierWatch:
    """Keeps some of a loop's steps and attacks their labels on the spot."""

    def __init__(
        self,
        net: nn.Module,
        *,
        num_labels: int,
        criterion: nn.Module | None = None,
        config: AuditConfig | Mapping[str, Any] | None = None,
        total_steps: int | None = None,
    ) -> None:
        """Prepare; nothing is copied yet.

        Args:
            net: the classifier that is trained, (B, ...) -> (B, C).
            num_labels: C.
            criterion: the loop's loss of (logits, labels); mean cross-entropy if None.
            config: as for every audit; `out_dir`, `every_n_steps`, `first_step`, `max_snapshots`, `attacks`, `defenses`...
            total_steps: of the run, for the report.

        Raises:
            ConfigError: the configuration is wrong.
        """
        given = config if isinstance(config, AuditConfig) else dict(config or {})
        if isinstance(given, dict):
            given = validate_mapping({"attacks": list(ATTACKS)} | given, AuditConfig, "ClassifierWatch")
        self._config: AuditConfig = given
        self._net, self._criterion, self._classes = net, criterion, num_labels
        self._total = total_steps
        self._audit: Audit | None = None
        self._off = False
        self._blocked = 0.0
        self._start = time.perf_counter()
        self.steps = 0
        """Steps seen so far."""
        self.kept = 0
        """Of them audited."""

    @contextmanager
    def __call__(self, inputs: Tensor, labels: Tensor) -> Iterator[None]:
        """Surround the forward and backward pass of one step, whose gradients were zero before.

        Args:
            inputs: (B, ...) as the classifier gets them.
            labels: (B,) classes.
        """
        config, number = self._config, self.steps
        since = number - config.first_step
        due = since >= 0 and since % config.every_n_steps == 0 and self.kept < config.max_snapshots and not self._off
        rng = {"cpu": torch.get_rng_state()} if due else {}
        buffers = {name: b.detach().clone() for name, b in self._net.named_buffers()} if due else {}
        self.steps += 1
        yield
        if due:
            start = time.perf_counter()
            try:
                self._keep(number, inputs.detach(), labels.detach(), rng, buffers)
            except LeakAuditError as error:
                logger.warning("step %d was not audited: %s", number, error)
            except Exception as error:  # training comes first: whatever it was, the run goes on without the audit
                self._off = True
                logger.warning(
                    "leakaudit stops after a %s; training goes on, later steps are not audited", type(error).__name__
                )
            self._blocked += time.perf_counter() - start

    def _keep(
        self, number: int, inputs: Tensor, labels: Tensor, rng: dict[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> None:
        update = {
            f"net.{name}": parameter.grad.detach().float().cpu().clone()
            for name, parameter in self._net.named_parameters()
            if parameter.grad is not None
        }
        check_finite(update)
        training = self._net.training
        twin = copy.deepcopy(self._net).cpu()
        for name, buffer in twin.named_buffers():  # batch normalisation counted on during the forward pass
            buffer.copy_(buffers[name])
        twin.zero_grad(set_to_none=True)
        model = ArrayClassifier(twin, tuple(inputs.shape[1:]), self._classes, copy.deepcopy(self._criterion)).eval()
        frozen = frozenset(name for name, _ in model.named_parameters() if name not in update)
        plain = array_batch(inputs.cpu(), labels.cpu().long())
        batch = MicroBatch(inputs=plain.inputs, rng=rng if training else {})
        facts = array_facts(model, training=training, frozen=frozen, batch_size_bound=len(labels))
        snapshot = Snapshot(
            observation=Observation(update=update, model=model, facts=facts),
            truth=Truth((batch,)),
            recipe=StepRecipe(training=training),
            model_recipe=array_recipe(model),
            provenance=Provenance(
                framework="loop",
                step=number,
                total_steps=self._total,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
            ),
        )
        if self._audit is None:
            self._audit = Audit(self._config.out_dir, self._config, NoText())
        self._audit.step(snapshot)
        self.kept += 1

    def finish(self) -> Path | None:
        """Write results, verdict and report; return the report's path, None where no step was audited."""
        if self._audit is None or self.kept == 0:
            logger.warning(
                "no step was audited: %d were seen, the first due was %d", self.steps, self._config.first_step
            )
            return None
        trained = time.perf_counter() - self._start
        try:
            self._audit.finish(
                total_steps=self.steps,
                overhead=Overhead(blocked_s=self._blocked, training_s=trained),
                interrupted=False,
            )
        except LeakAuditError as error:
            logger.warning("the results were not written: %s", error)
            return None
        return self._config.out_dir / "report.html"
