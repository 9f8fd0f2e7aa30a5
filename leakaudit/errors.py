"""The exceptions of leakaudit, as a tree.

    LeakAuditError                  base of every exception that this package raises on purpose
      ConfigError                   a YAML file, a policy or a command-line option is wrong
        UnknownPluginError          no attack, defence, metric or prior has that name
        WrongFileError              a YAML file has problems, each of which it names by line and key
      PluginError                   a plugin's file or package does not register what it should
      MissingPartError              a part of the extra `leakaudit[audit]` is not installed; also an ImportError
      ModelError                    a model or tokenizer cannot be loaded or rebuilt
        ModelNotVouchedError        a snapshot names code that makes its model, and the user did not name that code
        AnatomyError                a model's parts cannot be found by structure
        PriorError                  a prior cannot be loaded, or its tokens do not match the model's
      DataError                     a data file is missing, empty or lacks a field
      SnapshotError                 a snapshot cannot be written or trusted
        SnapshotDamagedError        it is truncated or changed, or its parts do not belong together
        SnapshotSealedError         it is encrypted, and no given private key opens it
        SnapshotVersionError        a newer version of leakaudit wrote it
        NonFiniteUpdateError        the update holds NaN or infinity: the step was skipped or diverged
      PeersError                    the processes of a distributed run cannot be audited together
      SpoolError                    the folder between trainer and battery cannot be used
        SpoolBusyError              another worker is at work on it
        RoundError                  a round cannot be added to the audit of its folder, which goes on without it
      RedLineError                  a leak was found for which the user wants the training to stop
      DefenseError                  a training cannot apply the defence that its user asked for, and stops
      ResultsError                  results.json cannot be read, or is of a newer major version
      BudgetError                   the time of an audit ended before its first attempt
      RedactionError                the evidence or the policy does not allow the requested text mode

A message says what was asked, what was found and what to do. It may hold names, shapes, counts and norms. It never holds private text,
token ids, label names or values of a tensor.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import NamedTuple


class LeakAuditError(Exception):
    """The base of every exception that leakaudit raises on purpose."""


class ConfigError(LeakAuditError):
    """A YAML file, a policy or an option is wrong; the message names the place."""


class UnknownPluginError(ConfigError):
    """No attack, defence, metric or prior of that name is registered."""


class Problem(NamedTuple):
    """One problem of a file."""

    line: int
    """Counted from 1; 0 if unknown."""
    message: str
    path: tuple[str | int, ...] = ()
    """Keys and indices from the top of the file to the value."""


class WrongFileError(ConfigError):
    """A YAML file has problems; the message has one line for each."""

    def __init__(self, message: str, problems: tuple[Problem, ...]) -> None:
        """Keep the problems for callers that print them in another form."""
        super().__init__(message)
        self.problems = problems


class PluginError(LeakAuditError):
    """A plugin's file or package does not register what it should."""


class MissingPartError(LeakAuditError, ImportError):
    """A part of an audit is not installed; the message says what to type."""


class ModelError(LeakAuditError):
    """A model or tokenizer cannot be loaded or rebuilt."""


class ModelNotVouchedError(ModelError):
    """A snapshot names code that makes its model, and the user did not name that code."""


class AnatomyError(ModelError):
    """A model's parts cannot be found by structure."""


class PriorError(ModelError):
    """A prior cannot be loaded, or its tokens cannot be mapped to the model's."""


class DataError(LeakAuditError):
    """A data file is missing, empty or lacks a field."""


class SnapshotError(LeakAuditError):
    """A snapshot cannot be written or trusted."""


class SnapshotDamagedError(SnapshotError):
    """A snapshot is truncated or changed, or its parts do not belong together."""


class SnapshotSealedError(SnapshotError):
    """A snapshot is encrypted, and no given private key opens it."""


class SnapshotVersionError(SnapshotError):
    """A newer version of leakaudit wrote the snapshot."""


class NonFiniteUpdateError(SnapshotError):
    """An update holds NaN or infinity: the step was skipped, or training diverged."""


class SpoolError(LeakAuditError):
    """The folder between trainer and battery cannot be used."""


class SpoolBusyError(SpoolError):
    """Another worker is at work on the folder."""


class RoundError(SpoolError):
    """A round cannot be added to the audit of its folder; that audit goes on."""


class PeersError(LeakAuditError):
    """The processes of a distributed run cannot be audited together."""

    def __init__(self, message: str, *, first: bool = False) -> None:
        """Create the error.

        Args:
            message: names the processes by rank and says what to do.
            first: whether this process is the first of the audited processes.
        """
        super().__init__(message)
        self.first = first


class RedLineError(LeakAuditError):
    """A leak was found at which the user wants training to stop.

    Only `Watch.stop_if_asked` raises it.
    """


class DefenseError(LeakAuditError):
    """A training cannot apply the defence that its user asked for.

    It is the one exception that a callback raises on purpose: training must not go on undefended.
    """


class ResultsError(LeakAuditError):
    """`results.json` cannot be read, or is of a newer major version."""


class BudgetError(LeakAuditError):
    """The time of an audit ended before its first attempt."""


class RedactionError(LeakAuditError):
    """The evidence or the policy does not allow the requested text mode."""


def type_and_place(error: BaseException) -> str:
    """Return the type of an exception, and the lines that raised it.

    The last line of this package on the way is named, and the line that raised the exception if it is another one. The message is left
    out, because it may hold private values.

    >>> type_and_place(KeyError("name of a patient"))
    'KeyError'
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(Path(__file__).parent)]
    places = [f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})" for frame in ours[-1:]]
    if frames and frames[-1] not in ours[-1:]:
        places.insert(0, f"{Path(frames[-1].filename).name}:{frames[-1].lineno}")
    return type(error).__name__ + (f" at {', called from '.join(places)}" if places else "")
