"""Keeps defects of the audit out of training.

No exception of the audit crosses this boundary, and no exception of the user's is held back.

Whatever torch, a framework or a training loop calls in this package is an `entry`: an exception in it ends up in `_fail` of its
object, and training goes on. Ctrl-C and the end of the interpreter are no defects and go through.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class Insider(Protocol):
    """An object with entries."""

    def _fail(self, error: Exception) -> None:
        """Take an exception of one of its entries: say once what it costs the audit, and end what cannot go on."""


class _LastResort(contextlib.suppress, ContextDecorator):
    """Swallows what a guard itself raises, as it does where neither memory nor stack is left.

    As a decorator it adds one frame, which is the standard library's: nothing of ours runs outside of it.
    """


last_resort = _LastResort(Exception)
"""Decorator of a function that may be called from outside and calls entries: it returns None where it fails itself."""


def entry(method: F) -> F:
    """Return a method that hands its exceptions to `_fail` of its object, an `Insider`, and returns None then."""

    @functools.wraps(method)
    def guarded(self: Insider, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self._fail(error)
        return None

    return cast(F, last_resort(guarded))


def around(
    call: Callable[P, R], before: Callable[P, object] | None = None, after: Callable[[R], object] | None = None
) -> Callable[P, R]:
    """Return a function of the user's with an entry before it, and one after it where it returns.

    Args:
        call: the user's; what it raises reaches the caller unchanged.
        before: entry that is given the same arguments.
        after: entry that is given what `call` returned.
    """

    @functools.wraps(call)
    def observed(*args: P.args, **kwargs: P.kwargs) -> R:
        if before is not None:
            before(*args, **kwargs)
        outputs = call(*args, **kwargs)
        if after is not None:
            after(outputs)
        return outputs

    return observed


class Ending(AbstractContextManager[Any], ContextDecorator):
    """Decorator of a function of the user's that tells of the exception that ends it, Ctrl-C included; it goes on unchanged."""

    def __init__(self, ended: Callable[[BaseException], object]) -> None:
        """Remember whom to tell.

        Args:
            ended: entry that is given the exception.
        """
        self._ended = ended

    @last_resort
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell of an exception."""
        if error is not None:
            self._ended(error)


class Hook:
    """A function of ours that a module calls.

    If the module is copied or pickled, a function that does nothing takes its place.

    Loops copy models whenever they like (`copy.deepcopy` of the best one, an average of weights, `torch.save` of the module).
    A copy belongs to no recorded step, and needs no `leakaudit` where it is loaded.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        """Remember the function, an entry."""
        self._call = call

    @last_resort
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Become a function of the standard library that takes anything and returns None."""
        return getattr, (contextlib.nullcontext(), "__exit__")
