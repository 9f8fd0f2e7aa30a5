"""Add to an audit what each of its defences costs.

`leakaudit frontier` audits and trains with one command. Here the audit is that of a training with the callback. While its side process attacks,
this one trains under each defence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from leakaudit.audit.battery import labelled_defenses
from leakaudit.audit.devices import choose_device
from leakaudit.audit.frontier.plan import Candidate
from leakaudit.audit.frontier.rows import with_frontier
from leakaudit.audit.frontier.store import Store
from leakaudit.audit.frontier.training import Trainer
from leakaudit.audit.frontier.work import Work
from leakaudit.audit.publish import publish
from leakaudit.config import AuditConfig
from leakaudit.config.frontier import Trainings
from leakaudit.config.simulation import Simulation
from leakaudit.results.schema import Results


def add_prices(
    config: AuditConfig,
    results: Callable[[], Results],
    what: Simulation,
    trainings: Trainings,
    seeds: Sequence[int],
    tell: Callable[[str], None],
) -> None:
    """Train a model under each defence, and write results and report again.

    Args:
        config: of the audit in `config.out_dir`.
        results: waits for the end of the audit and returns its results.
        what: model, data and mode of the trainings.
        trainings: their length and learning rate.
        seeds: of the trainings; an interval of the cost needs two or more.
        tell: called with the name of each training that begins.
    """
    folder = config.out_dir
    candidates = [
        Candidate(label, None if defense.is_identity() else defense, family, spec.label)
        for family, ((label, defense), spec) in enumerate(zip(labelled_defenses(config), config.defenses, strict=True))
    ]
    trainer = Trainer(what, trainings, choose_device(config.device))
    work = Work(trainer, Store(folder / "trainings"), candidates, seeds, source="the demo", drop=False, notice=tell)
    work.price_all()
    work.run()
    publish(folder, with_frontier(results(), work.found(), candidates[0].label), config)
