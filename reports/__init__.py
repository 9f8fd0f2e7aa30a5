"""Reports: what people read of an audit. Redaction first (`redact`), then one page or one screen.

Imported as `leakaudit.reports`. Nothing here imports torch, so a report can be made on any machine.
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
