"""Sections of the report: one file and one template each.

`reports/contents.py` lists them in order.

Each file has a function `section`, which takes the redacted results and returns a `Section`, or None where it has nothing to show.
"""

from pkgutil import iter_modules

__all__ = [found.name for found in iter_modules(__path__)]
