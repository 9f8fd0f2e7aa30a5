"""Messages below the cell of a notebook, in one output that is updated.

A notebook shows each line of stderr in a red box, as if it were an error. IPython is recognised by what it offers and is never imported here.
"""

from __future__ import annotations

import sys
import threading
from html import escape
from typing import Any

_lock = threading.Lock()


class CellOutput:
    """The output of one cell: its messages, and a line of progress below them."""

    def __init__(self, display: Any, cell: object) -> None:
        """Begin an output for a cell; nothing is shown yet.

        Args:
            display: IPython's function `display`.
            cell: what tells this cell from the next one.
        """
        self.cell = cell
        self._display = display
        self._handle: Any = None
        self._lines: list[str] = []

    def show(self, line: str = "", progress: str = "") -> None:
        """Add a line, and replace the line of progress; an empty one is left out."""
        self._lines += [line] if line else []
        text = "\n".join([*self._lines, *([progress] if progress else [])])
        bundle = {"text/plain": text, "text/html": f'<pre style="white-space:pre-wrap">{escape(text)}</pre>'}
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


_current: CellOutput | None = None
"""Output of the cell that showed a message last."""


def shown_in_cell(line: str = "", progress: str = "") -> bool:
    """Show a line or a progress in the output of the cell that runs.

    Args:
        line: stays.
        progress: replaces the progress that stood there.

    Returns:
        Whether this process is the kernel of a notebook. If not, nothing was shown.
    """
    global _current
    shell, display = _kernel_shell(), getattr(sys.modules.get("IPython.display"), "display", None)
    if shell is None or display is None:
        return False
    cell = (id(shell), getattr(shell, "execution_count", None))
    with _lock:
        if _current is None or _current.cell != cell:
            _current = CellOutput(display, cell)
        _current.show(line, progress)
    return True


def in_kernel() -> bool:
    """Return whether this process is the kernel of a notebook."""
    return _kernel_shell() is not None


def _kernel_shell() -> Any:
    """Return the shell of a notebook's kernel.

    None elsewhere, also in IPython's terminal.
    """
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if get_ipython is None else get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None
