"""Chunks of candidates, so small that one chunk fits into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Chunks:
    """Runs candidates in chunks, and halves the chunks when memory runs out."""

    def __init__(self, size: int) -> None:
        """Begin with `size` candidates in a chunk."""
        self.size = size
        """The number of candidates that run at once."""
        self.halvings = 0
        """How often memory ran out, so that the size of a chunk was halved."""

    def run(self, candidates: int, function: Callable[[slice], Result]) -> Iterator[Result]:
        """Yield the function's result for each chunk of the candidates.

        The function gets the numbers of a chunk's candidates as a slice.

        Raises:
            RuntimeError: the function's error, if it is not about memory, or if a single candidate needs too much memory.
        """
        start = 0
        while start < candidates:
            part = slice(start, min(start + self.size, candidates))
            try:
                found = function(part)
            except RuntimeError as error:
                self._halve(error)
                continue
            yield found
            start = part.stop

    def _halve(self, error: RuntimeError) -> None:
        """Run half as many candidates at once from now on, if memory ran out.

        Raises:
            RuntimeError: `error`, if it is not about memory, or if a single candidate needs too much memory.
        """
        out_of_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not out_of_memory or self.size == 1:
            raise error
        self.size //= 2
        self.halvings += 1
