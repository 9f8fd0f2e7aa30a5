"""The boundary that keeps defects of the audit out of training.

Exceptions of the audit do not cross this boundary. Exceptions of the user's code do.

Whatever torch, a framework or a training loop calls in this package is an `entry`: an exception in it is given to `_fail` of its
object, and training continues. Ctrl-C, the end of the interpreter and whatever the user's signal handlers raise are not defects; they
pass unchanged. So does a `DefenseError`: a training whose user asked for a defence must not go on without it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator
from types import FrameType, TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from leakaudit.errors import DefenseError

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class Insider(Protocol):
    """An object with entries."""

    def _fail(self, error: Exception) -> None:
        """Handle an exception of an entry.

        The first time, it tells the user what the audit loses. It ends the parts of the audit that cannot continue.
        """


def from_signal_handler(error: BaseException | None) -> bool:
    """Return whether a handler of a signal raised an exception.

    The property: one frame of its traceback was called with the number of a signal and with the frame that called it. So Python calls a
    handler, in the main thread, between any two instructions of any function; no other function gets its caller as an argument.
    """
    trace = None if error is None else error.__traceback__
    while trace is not None:
        if _handles_signal(trace.tb_frame):
            return True
        trace = trace.tb_next
    return False


def _passes(error: BaseException | None) -> bool:
    """Return whether an exception is meant for the user's loop."""
    return isinstance(error, DefenseError) or from_signal_handler(error)


def _handles_signal(frame: FrameType) -> bool:
    code, values = frame.f_code, frame.f_locals
    given = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        given += values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    pairs = itertools.pairwise(given)
    return frame.f_back is not None and any(type(one) is int and two is frame.f_back for one, two in pairs)


class suppress(contextlib.suppress, ContextDecorator):
    """A `contextlib.suppress` that lets some exceptions pass.

    These are a `DefenseError`, and whatever a handler of a signal raises.

    As a decorator it returns None in place of the exception.
    """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Return whether the exception ends here."""
        try:
            return bool(super().__exit__(kind, error, trace)) and not _passes(error)
        except (RuntimeError, MemoryError):  # stack or memory is used up; a RecursionError is a RuntimeError
            return True


last_resort = suppress(Exception)
"""Decorator of a function that is called from outside and calls entries. It returns None if the function itself fails, as a guard may
when memory or stack is used up."""


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Run code of ours outside the user's modes and overrides of torch.

    A mode that counts operations or draws random numbers is the user's code, and so is the `__torch_function__` of a tensor's class. A default
    device is a mode as well.
    """
    stack = [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]
    dispatched = torch._C._len_torch_dispatch_stack() > 0
    try:
        _clear_function_stack()
        with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes() if dispatched else _NOTHING:
            yield
    finally:
        if stack:
            _clear_function_stack()
            for mode in stack:
                torch._C._push_on_torch_function_stack(mode)


_NOTHING = contextlib.nullcontext()


def _clear_function_stack() -> None:
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()


def entry(method: F) -> F:
    """Return a method that gives its exceptions to `_fail` of its object.

    The method returns None then. The object is an `Insider`. A `DefenseError` passes, and so does what a handler of a signal raises. The method
    runs outside the user's modes of torch.
    """

    @functools.wraps(method)
    def guarded(self: Insider, *args: Any, **kwargs: Any) -> Any:
        try:
            with without_modes():
                return method(self, *args, **kwargs)
        except Exception as error:
            if _passes(error):
                raise
            self._fail(error)
        return None

    return cast(F, last_resort(guarded))


def in_one_graph() -> bool:
    """Return whether torch compiles this code into a graph that may not break.

    Hooks cannot be part of a graph. Where a graph may break, torch calls them between two parts of it; with `fullgraph=True` they would end
    the training. The compiler calls this function while it traces, and takes its answer for a constant.
    """
    translator = getattr(sys.modules.get("torch._dynamo.symbolic_convert"), "tls", None)
    now = getattr(translator, "current_tx", None)
    whole = now is None or bool(getattr(now, "one_graph", True) or getattr(now, "error_on_graph_break", True))
    LEFT_OUT.update(hooks=int(whole))
    return whole


LEFT_OUT: Counter[str] = Counter()
"""How often, in this process, a function of ours was left out of a graph that may not break."""


in_one_graph._dynamo_marked_constant = True  # type: ignore[attr-defined] # `torch.compiler.assume_constant_result` sets it and imports the compiler


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
        if torch.compiler.is_compiling() and in_one_graph():
            return call(*args, **kwargs)
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, outside graphs that may not break."""
        if torch.compiler.is_compiling() and in_one_graph():
            return None
        return self._guarded(*args, **kwargs)

    @last_resort
    def _guarded(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Pickle as a function of the standard library that does nothing."""
        return getattr, (contextlib.nullcontext(), "__exit__")
