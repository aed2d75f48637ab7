"""ResNeXt-101 64x4d: ResNet's bottlenecks, wider, with 3x3 convolutions in 64 groups of 4 to 32 channels."""

import numpy as np
from torch import nn

from bench.zoo import resnet50
from bench.zoo.resnet50 import Config

FULL = Config(
    resolution=224,
    classes=1000,
    stem=64,
    stages=((256, 3), (512, 4), (1024, 23), (2048, 3)),
    calibration_batch=2,
    expansion=1,
    groups=64,
)
SMALL = Config(
    resolution=32, classes=10, stem=8, stages=((16, 1), (32, 2)), calibration_batch=16, expansion=1, groups=4
)
CONFIGS = {"full": FULL, "small": SMALL}


def build(size: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    return resnet50.build_seeded(CONFIGS[size], seed=20, image_seed=10)
