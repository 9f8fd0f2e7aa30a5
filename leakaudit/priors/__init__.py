"""Priors: one file for each, compared in README.md.

The registry imports every module of this folder, and each registers exactly one plugin.
"""

from pkgutil import iter_modules

__all__ = [found.name for found in iter_modules(__path__)]
