"""The command of the user that learns how a night ended."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

from leakaudit.cli.common import say

if TYPE_CHECKING:
    from leakaudit.config.nightly import Nightly
    from leakaudit.history.record import NightRecord

NOTIFY_SECONDS = 60.0
"""Seconds that the command may take. Our choice: a webhook takes one."""


def notify(config: Nightly, document: dict[str, Any], before: NightRecord | None) -> None:
    """Run the user's command with the night on its standard input.

    Whatever it does, the night and its exit code stay as they are.

    Args:
        config: the command, and when to run it.
        document: the night as JSON, without private text.
        before: the night before.
    """
    if not config.notify_command or not _is_due(config, document, before):
        return
    try:
        subprocess.run(
            config.notify_command, input=json.dumps(document) + "\n", text=True, timeout=NOTIFY_SECONDS, check=True
        )
    except subprocess.TimeoutExpired:
        say(f"the command of notify_command was ended after {NOTIFY_SECONDS:.0f} s")
    except subprocess.CalledProcessError as error:
        say(f"the command of notify_command failed (exit code {error.returncode})")
    except OSError as error:
        say(f"the command of notify_command cannot be started ({error.strerror})")


def _is_due(config: Nightly, document: dict[str, Any], before: NightRecord | None) -> bool:
    if config.notify_on == "fail":
        return bool(document["exit_code"])
    if config.notify_on == "change":
        return before is None or document["status"] == "gap" or document["exit_code"] != before.exit_code
    return True
