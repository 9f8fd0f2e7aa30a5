"""Membership: which of some candidate texts does the update of a step name?

An audit knows both kinds: the texts of the step, and texts of no step that its owner holds back.

1. `nonmembers`: texts of no step, and their parts.
2. `measure`: scores of the candidates of one step.
3. `log`: these scores in the audit's private folder.
4. `summary`: counts of all steps, for the results.
"""

__all__ = ["log", "measure", "nonmembers", "summary"]
