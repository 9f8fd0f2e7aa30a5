"""Publishes finished results: `results.json`, the gate's verdict and the report.

No other module of this package imports `gate` or `reports`; both read only what `results.json` holds.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

from leakaudit.config.audit import AuditConfig
from leakaudit.errors import ResultsError
from leakaudit.files.private_files import write_atomic
from leakaudit.results.files import to_json
from leakaudit.results.schema import Results, TextMode
from leakaudit.storage.spool_files import RedLine


def check_text_mode(mode: TextMode) -> None:
    """Refuse text mode full on a CI machine, before anything is audited.

    Raises:
        RedactionError: the text mode is full, and this is a CI machine.
    """
    from leakaudit.reports.redaction import refuse_full_in_ci

    if mode is TextMode.FULL:
        refuse_full_in_ci()


def red_line_of(results: Results, config: AuditConfig, now: datetime) -> RedLine | None:
    """Return the first red line that results cross; None if they cross none.

    One leak is proof at any time, so this may be asked after every step.

    Raises:
        ConfigError: the policy cannot be read.
    """
    from leakaudit.gate.early import red_lines
    from leakaudit.gate.evaluate import evaluate
    from leakaudit.gate.policy_source import PolicyFiles
    from leakaudit.gate.verdict import Status
    from leakaudit.plugins.names import names_for, registered_names

    names = names_for(results) | registered_names()
    policy = PolicyFiles(config.policy).load_policy(names)
    red = red_lines(policy)
    crossed = (
        rule
        for rule in evaluate(results, policy, now=now).rules
        if rule.id in red and rule.status is Status.FAIL and rule.k
    )
    found = next(crossed, None)
    return None if found is None else RedLine(rule=found.id, sentence=found.sentence)


def publish(folder: Path, results: Results, config: AuditConfig) -> None:
    """Write `results.json`, `verdict.json` and `report.html`.

    Args:
        folder: folder of the audit; the report may read samples of text from its journal.
        results: the results with their digest.
        config: holds the policy and the text mode.

    Raises:
        ConfigError: the policy or its waivers cannot be read, or it names an attack, a defence or a metric that does not exist. In this case only
            `results.json` is written.
    """
    from leakaudit.gate.evaluate import evaluate
    from leakaudit.gate.policy_source import PolicyFiles
    from leakaudit.gate.regression import Reference
    from leakaudit.gate.verdict import to_json as verdict_json
    from leakaudit.history.reference import reference_for
    from leakaudit.plugins.names import names_for, registered_names
    from leakaudit.reports.page import write_report

    text = json.dumps(to_json(results), indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(folder / "results.json", text)
    names = names_for(results) | registered_names()
    files = PolicyFiles(config.policy)
    policy = files.load_policy(names)
    now = datetime.now(UTC)
    digest = hashlib.sha256(text.encode()).hexdigest()
    try:
        reference = reference_for(results, policy, config.policy)
    except ResultsError:  # the audit is done, so the other rules are judged
        reference = Reference(problem="the baseline's file cannot be read, or was changed after it was written")
    verdict = evaluate(
        results, policy, now=now, results_sha256=digest, waivers=files.load_waivers(policy), reference=reference
    )
    write_atomic(folder / "verdict.json", json.dumps(verdict_json(verdict), indent=1))
    write_report(folder, config.text, now=now, policy=policy, verdict=verdict, allow_full=config.allow_full)
