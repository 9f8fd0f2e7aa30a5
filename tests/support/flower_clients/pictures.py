"""Stands in for transforms of torchvision and for its vision transformer.

Not every machine has a build of it for its torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


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


@dataclass(frozen=True)
class Resize:
    """Changes the size of a picture."""

    size: tuple[int, int]

    def __call__(self, picture: Any) -> Any:
        return picture.resize(self.size)


class CenterCrop(Resize):
    """Cuts nothing away."""


class RandomResizedCrop(Resize):
    """Cuts a random half away, and changes the size of the rest."""

    def __call__(self, picture: Any) -> Any:
        side = picture.width // 2
        left, top = (int(torch.randint(0, side, ())) for _ in range(2))
        return picture.crop((left, top, left + side, top + side)).resize(self.size)


class ViT_B_16_Weights:
    """Names weights that are random here."""

    IMAGENET1K_V1 = None


class vit_b_16(nn.Module):
    """Has the form of the published model, with two layers in place of twelve."""

    def __init__(self, weights: None) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, 768, kernel_size=16, stride=16)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.class_token = nn.Parameter(torch.zeros(1, 1, 768))
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(768, 1000))

    def forward(self, pictures: Tensor) -> Tensor:
        patches = self.conv_proj(pictures).flatten(2).transpose(1, 2)  # (B, T, D)
        tokens = torch.cat([self.class_token.expand(len(patches), -1, -1), patches], dim=1)
        logits: Tensor = self.heads(self.encoder(tokens)[:, 0])
        return logits
