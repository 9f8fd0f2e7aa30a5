"""A shard: the part of an audit's steps that one of several machines audits."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict

MOST_SHARDS = 10_000
"""Most shards of an audit. Our choice: no audit has more steps that are worth a machine each."""

_FORM = re.compile(r"([1-9][0-9]{0,4})/([1-9][0-9]{0,4})", re.ASCII)


class Shard(BaseModel):
    """One shard of several, written `2/8`.

    Shard k of n has the steps i with i % n == k - 1, so that early and late steps are in all of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: int
    """Number of the shard, from 1."""
    count: int
    """Number of shards."""

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read a shard such as `2/8`.

        Raises:
            ValueError: the text has another form, or names a shard that does not exist.

        >>> Shard.parse("2/8").numbers(12)
        range(1, 12, 8)
        """
        found = _FORM.fullmatch(text.strip())
        if found is None or not 1 <= int(found[1]) <= int(found[2]) <= MOST_SHARDS:
            raise ValueError(f"{text[:40]!r} is no shard; write a number and how many there are, such as 2/8")
        return cls(index=int(found[1]), count=int(found[2]))

    def numbers(self, total: int) -> range:
        """Return the numbers of this shard's steps.

        Args:
            total: steps of the whole audit.
        """
        return range(self.index - 1, total, self.count)

    def __str__(self) -> str:
        """Return the shard as it is written on the command line."""
        return f"{self.index}/{self.count}"
