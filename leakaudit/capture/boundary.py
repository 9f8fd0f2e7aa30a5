"""The boundary that keeps defects of the audit out of training.

Exceptions of the audit do not cross this boundary. Exceptions of the user's code do.

Whatever torch, a framework or a training loop calls in this package is an `entry`: an exception in it is given to `_fail` of its
object, and training continues. Ctrl-C and the end of the interpreter are not defects; they pass unchanged.
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
        """Handle an exception of an entry.

        The first time, it tells the user what the audit loses. It ends the parts of the audit that cannot continue.
        """


class _LastResort(contextlib.suppress, ContextDecorator):
    """A decorator that suppresses exceptions of a guard itself.

    A guard may fail when memory or stack is used up. The decorator adds one frame, which is the standard library's, so no code of ours
    runs outside of it.
    """


last_resort = _LastResort(Exception)
"""Decorator of a function that is called from outside and calls entries. It returns None if the function itself fails."""


def entry(method: F) -> F:
    """Return a method that gives its exceptions to `_fail` of its object.

    The method returns None then. The object is an `Insider`.
    """

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
    """Return the user's function with an entry before it and one after it.

    The entry after it is called only if the function returns.

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
    """Decorator that reports the exception which ends a user's function.

    That includes Ctrl-C. The exception reaches the caller unchanged.
    """

    def __init__(self, ended: Callable[[BaseException], object]) -> None:
        """Note the function that is called at an exception.

        Args:
            ended: entry that is given the exception.
        """
        self._ended = ended

    @last_resort
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give an exception to the entry."""
        if error is not None:
            self._ended(error)


class Hook:
    """A function of ours that a module calls.

    In a copied or pickled module, a function that does nothing takes its place.

    Loops copy models whenever they like (`copy.deepcopy` of the best one, an average of weights, `torch.save` of the module).
    A copy belongs to no recorded step, and needs no `leakaudit` where it is loaded.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        """Note the function, an entry."""
        self._call = call

    @last_resort
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Pickle as a function of the standard library that does nothing."""
        return getattr, (contextlib.nullcontext(), "__exit__")
