"""Attacks in the training process, which waits for them (`schedule: inline`)."""

from __future__ import annotations

from typing import Any

from leakaudit.capture.notify import notify
from leakaudit.storage.spool import Spool


class InlineAttacks:
    """The audit in this process, opened when the first step waits for it."""

    def __init__(self, spool: Spool, model: Any) -> None:
        """Note what to attack; nothing is imported or opened.

        Args:
            spool: with the kept steps.
            model: the live one.
        """
        self._spool = spool
        self._model = model
        self._audit: Any = None

    def catch_up(self) -> None:
        """Attack the waiting steps, while training stands still."""
        if self._audit is None:
            from leakaudit.audit.inline import InlineAudit

            notify(
                "attacks run in the training process, which waits for them (`schedule: inline`); a model that says how it is made "
                "(`leakaudit.models.factories.rebuilt_by`) can be attacked beside training"
            )
            self._audit = InlineAudit(self._spool, self._model)
        self._audit.catch_up()

    def finish(self) -> None:
        """Write the results of the attacked steps."""
        if self._audit is not None:
            self._audit.finish()
