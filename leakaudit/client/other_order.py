"""Another order of additions, to measure how far rounding moves a step's update.

Adding the same numbers in another order gives another rounding, as another processor does. Another number of threads changes it too
little: see `docs/decisions/noise_floor.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten

_FACTORS = {_ATEN.mm: 0, _ATEN.bmm: 0, _ATEN.addmm: 1, _ATEN.baddbmm: 1, _ATEN.convolution: 0}
"""Operator that sums products -> place of its first factor; the second one follows."""


class _Backwards(TorchDispatchMode):
    """Adds the products of matrices and of convolutions from the last to the first."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator with both factors reversed in the dimension that is summed."""
        run: Callable[..., Any] = func
        place = _FACTORS.get(func.overloadpacket)
        if place is None:
            return run(*args, **(kwargs or {}))
        one, two = args[place : place + 2]
        if func.overloadpacket is not _ATEN.convolution:
            one, two = one.flip(-1), two.flip(-2)
        elif (
            args[8] == 1
        ):  # one group: the summed channels are the input's, and the weight's second dimension, or first if transposed
            one, two = one.flip(1), two.flip(0 if args[6] else 1)
        return run(*args[:place], one, two, *args[place + 2 :], **(kwargs or {}))


@contextmanager
def other_order(*, attention: bool = True) -> Iterator[None]:
    """Add in another order within the block, with the same random numbers.

    Args:
        attention: whether fused attention is computed by its formula, too. A GPU's fused kernels draw other dropout masks.
    """
    with ExitStack() as stack:
        if attention:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(_Backwards())  # type: ignore[no-untyped-call]  # torch gives its constructor no types
        yield
