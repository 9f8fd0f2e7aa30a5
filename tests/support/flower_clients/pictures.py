"""Stands in for three transforms of torchvision.

Not every machine has a build of it for its torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Compose:
    """Calls transforms one after the other."""

    transforms: list[Callable[[Any], Any]]

    def __call__(self, picture: Any) -> Any:
        for one in self.transforms:
            picture = one(picture)
        return picture


class ToTensor:
    """Makes a tensor between 0 and 1 of a picture, with the channels first."""

    def __call__(self, picture: Any) -> Tensor:
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255


@dataclass(frozen=True)
class Normalize:
    """Subtracts a mean from each channel, and divides by a deviation."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, picture: Tensor) -> Tensor:
        return (picture - torch.tensor(self.mean)[:, None, None]) / torch.tensor(self.std)[:, None, None]
