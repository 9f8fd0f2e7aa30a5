"""A verdict in the forms that pipelines read.

Each module turns a `Verdict` into one text. None of them holds training text: a verdict has ids, counts and digests only.
"""

from leakaudit.reports.outputs.github import badge, job_outputs, workflow_commands
from leakaudit.reports.outputs.junit import junit_xml
from leakaudit.reports.outputs.markdown import summary

__all__ = ["badge", "job_outputs", "junit_xml", "summary", "workflow_commands"]
