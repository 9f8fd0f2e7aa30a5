"""The function that makes the recorder of an audited run."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from leakaudit.capture.array_batches import array_pass
from leakaudit.capture.describe import RunDescription
from leakaudit.capture.notify import notify
from leakaudit.capture.recording.recorder import Recorder
from leakaudit.capture.recording.step_writer import StepWriter
from leakaudit.config.audit import AuditConfig
from leakaudit.models.array_classifier import ArrayClassifier
from leakaudit.models.first_blocks import BLOCKS, KEEP_ALL_BYTES, Parts, first_parts
from leakaudit.registry import attacks
from leakaudit.storage.spool import Spool

WHOLE = "everything"
"""Value of `Attack.needs` where an attack does not set it: the attack reads the whole update."""


def make_recorder(config: AuditConfig, spool: Spool, description: RunDescription) -> Recorder:
    """Return the recorder of a run, without its hooks.

    Args:
        config: the audit's configuration.
        spool: takes the steps that are kept.
        description: of the run.
    """
    trainer, model = description.trainer, description.model
    recorder = Recorder(
        model,
        trainer.optimizer,
        StepWriter(spool, description.fit.foreign, config.unit, poisson=description.private is not None),
        called=trainer.loop_calls,
        scaler=trainer.scaler,
        peers=trainer.peers,
        observe=trainer.observe,
        local_steps=trainer.local_steps,
        max_bytes=config.max_spool_gb * 1e9,
        complete_manifest=description.with_current_defenses,
        unsaved_buffers=description.fit.unlike,
        quantised=description.fit.quantised,
        withdraw=spool.withdraw,
        made_again=config.schedule != "inline",
        **_options_for_arrays(model),
    )
    if parts := _parts_to_keep(config, description, recorder):
        recorder.keep_only(parts)
    return recorder


def _options_for_arrays(model: nn.Module) -> dict[str, Any]:
    """Return recorder arguments for a wrapped array classifier.

    The result is empty for another model.
    """
    if not isinstance(model, ArrayClassifier):
        return {}
    return {"convert_pass": functools.partial(array_pass, num_labels=model.num_labels)}


def _parts_to_keep(config: AuditConfig, description: RunDescription, recorder: Recorder) -> Parts | None:
    """Return which parts of each step to keep; None to keep all.

    Parts are kept if a whole step would be too large, an attack of the configuration reads only the first blocks, and the model can be
    rebuilt without the other blocks.
    """
    trainer, size = description.trainer, recorder.bytes_of_a_step()
    elsewhere = config.schedule == "inline" or config.server is not None
    alone = trainer.peers is None and trainer.observe == "update"
    if config.keep == "all" or size <= KEEP_ALL_BYTES or elsewhere or not alone:
        return None
    needs = {spec.name: getattr(attacks.create(spec.name, spec.options), "needs", WHOLE) for spec in config.attacks}
    reading = [name for name, need in needs.items() if need != WHOLE]
    parts = first_parts(description.model, description.recipe, description.fit.unlike) if reading else None
    if parts is not None:
        rest = [name for name in needs if name not in reading]
        more = f"; attacks that read everything do not run: {', '.join(rest)} (`keep: all` runs them)" if rest else ""
        notify(
            f"a step of this model takes {size / 1e9:.1f} GB; kept is what {' and '.join(reading)} needs of the first {BLOCKS} blocks, and a "
            f"sketch of the rest{more}"
        )
    return parts
