"""A verdict in the forms that pipelines read.

Each module turns a `Verdict` into one text. None of them holds training text: a verdict has ids, counts and digests only.
"""

from leakaudit.reports.outputs.annex import annex
from leakaudit.reports.outputs.attestation import attestation
from leakaudit.reports.outputs.cyclonedx import cyclonedx
from leakaudit.reports.outputs.github import badge, job_outputs, workflow_commands
from leakaudit.reports.outputs.junit import junit_xml
from leakaudit.reports.outputs.markdown import summary
from leakaudit.reports.outputs.model_card import model_card
from leakaudit.reports.outputs.sarif import sarif
from leakaudit.reports.outputs.svr import not_shown, svr
from leakaudit.reports.outputs.tags import tags

__all__ = [
    "annex",
    "attestation",
    "badge",
    "cyclonedx",
    "job_outputs",
    "junit_xml",
    "model_card",
    "not_shown",
    "sarif",
    "summary",
    "svr",
    "tags",
    "workflow_commands",
]
