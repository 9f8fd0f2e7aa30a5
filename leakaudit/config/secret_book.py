"""The secrets that were put into batches, and how an attack's guesses are checked.

No torch.
"""

from __future__ import annotations

import hashlib
import hmac
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from leakaudit.config.secret_template import Record, SecretTemplate, Value
from leakaudit.errors import ConfigError
from leakaudit.results.journal import SecretOutcome

IN_MEMORY = b""
"""Key of a book that is never written: its hashes need no protection."""


@dataclass(frozen=True)
class SecretBook:
    """The template of the secrets, and keyed hashes of those that were drawn."""

    template: SecretTemplate
    marks: frozenset[str]
    """`mark_of` each secret that is in the data."""
    key: bytes
    """Key of the hashes."""
    total: int | None = None
    """Rows of the training data; None if no step holds a record again."""

    @classmethod
    def of(cls, template: SecretTemplate, secrets: Iterable[Value], key: bytes = IN_MEMORY) -> SecretBook:
        """Return the book of secrets that were drawn.

        Args:
            template: of which they were drawn.
            secrets: all that are in the data.
            key: of the hashes, 32 random bytes for a book that is written to a file.
        """
        return cls(template, frozenset(mark_of(secret, key) for secret in secrets), key)

    def joined(self, other: SecretBook) -> SecretBook:
        """Return a book with the secrets of both, which have one template and key."""
        return replace(self, marks=self.marks | other.marks)

    def outcome(self, texts: Sequence[str], guesses: Iterable[str], step: int = 0) -> SecretOutcome | None:
        """Say whether an attack's guesses hold the secret of a batch.

        If a batch holds several secrets, only that of its first record counts: guesses on one update depend on each other.

        Args:
            texts: of the batch.
            guesses: the texts that the attack guessed; each names one value at most.
            step: number of the step, counted from 0. In a later epoch an earlier step has held the record.

        Returns:
            None if the batch holds no secret.
        """
        secret = self._secret_of(texts)
        if secret is None:
            return None
        named = [self.template.guess_in(text) for text in guesses]
        first = self.total is None or (step + 1) * len(texts) <= self.total
        return SecretOutcome(recovered=secret in named, guesses=len(named), values=self.template.values, first=first)

    def _secret_of(self, texts: Sequence[str]) -> Value | None:
        found = (self.template.secret_in(text) for text in texts)
        return next((one for one in found if one is not None and mark_of(one, self.key) in self.marks), None)


def mark_of(secret: Value, key: bytes) -> str:
    """Return the keyed hash of a secret: 64 bits of HMAC-SHA-256, in hex."""
    return hmac.new(key, "\x1f".join(secret).encode(), hashlib.sha256).hexdigest()[:16]


def simulated_record(template: SecretTemplate, seed: int, step: int) -> Record:
    """Return the record of a simulated step.

    It depends on the seed and the number of the step, and on nothing that attacks draw.
    """
    return template.draw(random.Random(f"secret of step {step} with seed {seed}"))


def check_tokenizer(template: SecretTemplate, read: Callable[[str], str]) -> None:
    """Refuse a tokenizer that does not tell all values apart.

    Args:
        template: of the secrets.
        read: returns a text as it comes back from the tokenizer.

    Raises:
        ConfigError: a value is lost.
    """
    for record in template.corners():
        if template.secret_in(read(record.text)) != record.secret:
            raise ConfigError(
                "the tokenizer changes or cuts a secret of the template, so its values could not be told apart; use signs that the model's "
                "vocabulary has, and a shorter text"
            )
