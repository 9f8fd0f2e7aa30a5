"""Reports of an audit: one HTML page and one terminal screen.

Both show a `RedactedResult`, which `redact` makes. The package may import `gate`, `results` and `files`.

It is imported as `leakaudit.reports`. Nothing here imports torch, so a report can be made on any machine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leakaudit.reports.page import render_html, write_report
    from leakaudit.reports.redaction import RedactedResult, redact
    from leakaudit.reports.terminal import print_audit, print_summary
    from leakaudit.reports.verdict_screen import print_verdict

__all__ = [
    "RedactedResult",
    "print_audit",
    "print_summary",
    "print_verdict",
    "redact",
    "render_html",
    "write_report",
]

_MODULES = {
    "page": ("render_html", "write_report"),
    "redaction": ("RedactedResult", "redact"),
    "verdict_screen": ("print_verdict",),
}


def __getattr__(name: str) -> Any:
    """Import what is asked for; the gate prints a verdict without the page."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "terminal")
    return getattr(import_module(f"leakaudit.reports.{module}"), name)
