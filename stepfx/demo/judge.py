"""The classifier that grades the demo's samples."""

from __future__ import annotations

import torch
from torch import nn


class Judge(nn.Module):
    """Name the digit in an image [B, 1, 16, 16] with values in [-1, 1]: logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.GELU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.GELU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(256, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, 10] of `images` [B, 1, 16, 16]."""
        logits: torch.Tensor = self.layers(images)
        return logits
