"""The processes of a distributed run, as the recorder needs them."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from leakaudit.client.truth import Truth

END_OF = "the end of "
"""Prefix of the topics on which processes agree at the end of a step. At its beginning the topic is the step's name alone."""


class ProcessGroup(Protocol):
    """The processes of a distributed run.

    All of them enter `gather` and `whole`, or no process does.
    """

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""

    @property
    def mean_over(self) -> int:
        """Number of processes over whose gradients the update is the mean."""

    @property
    def over(self) -> str:
        """Why these processes keep no more steps together; empty while they do."""

    def agree(self, topic: str, yes: bool) -> bool:
        """Return whether all processes say yes to a topic within a time limit."""

    def leave(self) -> None:
        """Tell the other processes that this one takes no part any more."""

    def gather(self, truth: Truth) -> Truth:
        """Return the micro-batches of all processes to the first one, ordered by rank."""

    def whole(self, shard: Any) -> Tensor:
        """Return a sharded tensor as a whole to the first process."""


class EndOfStepAnswer:
    """The answer that this process owes the others at the end of a step."""

    def __init__(self, group: ProcessGroup | None) -> None:
        """Prepare.

        Args:
            group: the processes; None if training runs in one process, which owes no answer.
        """
        self._group = group
        self._topic = ""

    def owe(self, step: int, restarts: int = 0) -> None:
        """Note that the other processes will ask whether this one keeps a step.

        Args:
            step: its number.
            restarts: how often the step began again; the others ask anew each time.
        """
        again = f", attempt {restarts + 1}" if restarts else ""
        self._topic = "" if self._group is None else f"{END_OF}step {step}{again}"

    def give(self, yes: bool) -> bool:
        """Tell the other processes whether this one keeps the step; return whether all do."""
        topic, self._topic = self._topic, ""
        return self._group is None or self._group.agree(topic, yes)

    def refuse(self) -> None:
        """Tell processes that still wait that this one does not keep the step."""
        if self._topic:
            self.give(False)
