"""The classes of NVFlare that the filter needs, where nvflare is not installed.

They have the same names, keys and types as those of nvflare 2.9.0, so a transmission has the same form.
"""

from __future__ import annotations

import importlib.util
import sys
from enum import Enum
from types import ModuleType
from typing import Any

import pytest


class ReservedHeaderKey:
    """Keys of headers."""

    HEADERS = "__headers__"
    RC = "__rc__"
    CONTENT_TYPE = "__content_type__"


class ReturnCode:
    """Values of the header `RC`."""

    OK = "OK"
    EXECUTION_EXCEPTION = "EXECUTION_EXCEPTION"


class DataKind(str, Enum):  # noqa: UP042  # as nvflare has it
    """What a DXO holds."""

    WEIGHTS = "WEIGHTS"
    WEIGHT_DIFF = "WEIGHT_DIFF"
    METRICS = "METRICS"
    COLLECTION = "COLLECTION"


class Shareable(dict[str, Any]):
    """A result."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        """Hold some data and no headers."""
        super().__init__(data or {})
        self["__headers__"] = {}

    def set_header(self, key: str, value: Any) -> None:
        """Set one header."""
        self["__headers__"][key] = value

    def get_header(self, key: str, default: Any = None) -> Any:
        """Return one header."""
        return self["__headers__"].get(key, default)

    def get_return_code(self) -> Any:
        """Return the code of success or failure."""
        return self.get_header("__rc__", "OK")

    def set_return_code(self, code: str) -> None:
        """Set the code of success or failure."""
        self.set_header("__rc__", code)


class DXO:
    """Data with their kind and more data about them."""

    def __init__(self, data_kind: Any, data: Any, meta: Any = None) -> None:
        """Hold them."""
        self.data_kind, self.data, self.meta = data_kind, data, meta or {}

    def to_shareable(self) -> Shareable:
        """Return the result that holds it."""
        made = Shareable({"DXO": {"kind": self.data_kind, "data": self.data, "meta": self.meta}})
        made.set_header("__content_type__", "DXO")
        return made


class EventType:
    """Names of events."""

    BEFORE_TASK_DATA_FILTER = "_before_task_data_filter"
    END_RUN = "_end_run"


class Filter:
    """Base class of filters."""


class ContentBlockedException(Exception):  # nvflare's name
    """A filter blocked a transmission."""


MODULES: dict[str, dict[str, Any]] = {
    "apis.dxo": {"DXO": DXO, "DataKind": DataKind},
    "apis.event_type": {"EventType": EventType},
    "apis.filter": {"Filter": Filter, "ContentBlockedException": ContentBlockedException},
    "apis.fl_constant": {"ReturnCode": ReturnCode},
    "apis.fl_context": {"FLContext": object},
    "apis.shareable": {"ReservedHeaderKey": ReservedHeaderKey, "Shareable": Shareable},
}
"""Module of nvflare -> its names."""


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `import nvflare` work for one test, if it is not installed."""
    if importlib.util.find_spec("nvflare") is not None:
        return
    monkeypatch.delitem(sys.modules, "leakaudit.integrations.nvflare", raising=False)
    for name in ("", "apis", *MODULES):
        module = ModuleType(".".join(filter(None, ("nvflare", name))))
        module.__dict__.update(MODULES.get(name, {"__path__": []}))
        monkeypatch.setitem(sys.modules, module.__name__, module)
