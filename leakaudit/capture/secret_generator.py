"""Random numbers of a defence that nobody outside this process can repeat."""

from __future__ import annotations

import os
import secrets

import torch
from torch import Tensor

from leakaudit.errors import DefenseError

WORDS = 624
"""Numbers of 32 bits in the state of the Mersenne Twister MT19937 (Matsumoto and Nishimura 1998)."""
OFFSET = 24
"""Bytes before these numbers in the state of torch's generator on a CPU (`THGeneratorState` in torch 2.6 to 2.13); each takes eight bytes."""
PROBE = 0x5EED
"""Seed by which this place is recognized: the first number of the state is the seed itself."""


def secret_generator(device: torch.device) -> torch.Generator:
    """Return a new generator whose state the operating system has drawn.

    On a CPU a seed would not do: torch uses 32 bits of it. Noise on an entry whose gradient is zero is sent as it is, such as the row of a word
    that is not in the batch, so an attacker could try all seeds. Therefore the whole state is drawn. On other devices 63 bits of seed are drawn.

    Neither kind of generator is made for cryptography: see docs/threat_model.md.

    Raises:
        DefenseError: this version of torch keeps the state in another form.
    """
    generator = torch.Generator(device)
    if device.type != "cpu":
        return generator.manual_seed(secrets.randbits(63))
    state = generator.manual_seed(PROBE).get_state()
    words = _words(state)
    if len(words) != WORDS or int(words[0]) != PROBE:
        raise DefenseError(
            f"torch {torch.__version__} keeps the state of its random generator in an unknown form, so noise could not be kept secret; "
            "use another version of torch"
        )
    words.copy_(torch.frombuffer(bytearray(os.urandom(4 * WORDS)), dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF)
    return generator.set_state(state)


def _words(state: Tensor) -> Tensor:
    """Return the numbers in the state of a generator, as a view."""
    return state[OFFSET : OFFSET + 8 * WORDS].view(torch.int64)
