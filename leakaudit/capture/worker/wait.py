"""The wait at the end of training until the attacks are finished."""

from __future__ import annotations

import time
from collections.abc import Callable

from leakaudit.capture.notify import countdown
from leakaudit.capture.worker.progress import Progress
from leakaudit.results.wording import duration
from leakaudit.storage.spool import Spool

LOOK_SECONDS = 0.2
"""Seconds between two looks at the worker. Our choice: the countdown changes once a second."""


def wait_for_attacks(spool: Spool, works: Callable[[], bool], seconds: float) -> str:
    """Wait with a visible countdown; a Ctrl-C ends the waiting.

    Args:
        spool: with the steps that are attacked.
        works: returns whether a worker is running; it may start one.
        seconds: to wait at most.

    Returns:
        Why the waiting ended although a worker is running; empty if no worker is running any more.
    """
    deadline = time.monotonic() + seconds
    progress = Progress(spool)
    try:
        with countdown() as show:
            while works():
                patience = deadline - time.monotonic()
                if patience <= 0:
                    return f"stopped waiting after {seconds:g} s (`wait_at_end_s`)"
                show(waiting_line(*progress.look(), patience))
                time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        return "not waiting any longer"
    return ""


def waiting_line(what: str, left: float | None, patience: float) -> str:
    """Return a line on what training waits for, how long, and how to stop the wait.

    Args:
        what: description of what the worker does now.
        left: seconds that the rest takes; None if that is not known.
        patience: seconds that remain of `wait_at_end_s`.

    >>> waiting_line("attempt 3 of 7: tag on step 0, up to 60 s; about 40 s left", 40.0, 600.0)
    'attempt 3 of 7: tag on step 0, up to 60 s; about 40 s left (Ctrl-C: do not wait)'
    """
    limit = f", waiting {duration(patience)} of it at most" if left is None or left > patience else ""
    return f"{what}{limit if left else ''} (Ctrl-C: do not wait)"
