"""The classifiers of LLG's experiments and the data that stands in for MNIST.

Source: LLG (Wainakh et al. 2022), Appendix, Tables 2 and 3, and He et al. 2016, Sec. 4.2, for ResNet20. Kernel sizes and strides of the
CNN are not in the paper; those of the DLG code that it builds on are taken as they are generally described: 5 x 5, strides 2, 2, 1.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from leakaudit.models.array_classifier import ArrayClassifier

Weights = Literal["default", "uniform"]
"""How the weights of an untrained classifier are drawn."""

SIDE = 28
"""Height and width of the pictures: MNIST's, to which the 8 x 8 digits are enlarged so that the networks are the paper's."""

CLASSES = 10


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's 1,797 digits, (N, 1, 28, 28) from 0 to 1, and labels.

    Enlarged from 8 x 8 bilinearly; (N,) labels.
    """
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    small = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16  # (N, 1, 8, 8)
    return nn.functional.interpolate(small, size=(SIDE, SIDE), mode="bilinear"), torch.tensor(found.target)


def cnn() -> nn.Module:
    """Return Table 2's network: three convolutions, then the output layer.

    The convolutions have 12 channels and sigmoids; the output layer has 588 features.
    """
    layers: list[nn.Module] = []
    for channels, stride in ((1, 2), (12, 2), (12, 1)):
        layers += [nn.Conv2d(channels, 12, kernel_size=5, padding=2, stride=stride), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(588, CLASSES))


def lenet() -> nn.Module:
    """Return Table 3's network."""
    return nn.Sequential(
        nn.Conv2d(1, 6, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES),
    )  # fmt: skip


class _Residual(nn.Module):
    """Two convolutions with batch normalisation around an identity shortcut.

    Option A: subsampled, padded with zeros.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.two = nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])
        self.stride, self.more = stride, width - channels

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[1](self.two(self.norms[0](self.one(x)).relu()))
        shortcut = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        result: Tensor = (inner + shortcut).relu()
        return result


def resnet20() -> nn.Module:
    """Return ResNet20 with 16, 32 and 64 channels for one-channel pictures."""
    blocks: list[nn.Module] = []
    channels = 16
    for width in (16, 32, 64):
        for turn in range(3):
            blocks.append(_Residual(channels, width, 2 if turn == 0 and width > 16 else 1))
            channels = width
    first = nn.Conv2d(1, 16, kernel_size=3, padding=1, bias=False)
    return nn.Sequential(
        first, nn.BatchNorm2d(16), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)
    )


NETWORKS = {"CNN": cnn, "LeNet": lenet, "ResNet20": resnet20}


def fresh(name: str, seed: int, weights: Weights = "default") -> ArrayClassifier:
    """Return an untrained classifier, its weights drawn from `seed`.

    By PyTorch's defaults, or uniform from -0.5 to 0.5.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ArrayClassifier(NETWORKS[name](), CLASSES).eval()
        if weights == "uniform":
            for parameter in model.parameters():
                nn.init.uniform_(parameter, -0.5, 0.5)
        return model


def draw(labels: Tensor, pool: Tensor, size: int, balanced: bool, rng: torch.Generator) -> Tensor:
    """Return (size,) indices of a batch by LLG's rule (Sec. 6.1).

    Args:
        labels: (N,) classes of all examples.
        pool: (M,) indices to draw from, with replacement.
        size: B.
        balanced: at random; else half from one class, a quarter from another and the rest at random.
        rng: draws.
    """
    if balanced:
        return pool[torch.randint(len(pool), (size,), generator=rng)]
    one, two = torch.randperm(int(labels.max()) + 1, generator=rng)[:2].tolist()
    parts = []
    for members, count in ((labels[pool] == one, size // 2), (labels[pool] == two, size // 4)):
        mine = pool[members]
        parts.append(mine[torch.randint(len(mine), (count,), generator=rng)])
    rest = size - sum(map(len, parts))
    return torch.cat([*parts, pool[torch.randint(len(pool), (rest,), generator=rng)]])
