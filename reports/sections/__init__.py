"""Sections of the report: each has one module and one template.

`reports/contents.py` lists them in order.

Each module has a function `section`, which takes the redacted results and returns a `Section`, or None if it has nothing to show.
"""

from pkgutil import iter_modules

__all__ = [found.name for found in iter_modules(__path__)]
