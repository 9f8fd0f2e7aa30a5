"""Reports of an audit: one HTML page and one terminal screen.

Both show a `RedactedResult`, which `redact` makes. The package may import `gate`, `results` and `files`.

It is imported as `leakaudit.reports`. Nothing here imports torch, so a report can be made on any machine.
"""

from leakaudit.reports.page import render_html, write_report
from leakaudit.reports.redaction import RedactedResult, redact
from leakaudit.reports.terminal import print_audit, print_summary, print_verdict

__all__ = [
    "RedactedResult",
    "print_audit",
    "print_summary",
    "print_verdict",
    "redact",
    "render_html",
    "write_report",
]
