"""BERT-base over a longer text: attention over 384 positions is a larger share of the work than over 128."""

from dataclasses import replace

import numpy as np
from torch import nn

from bench.zoo import bert_base

FULL = replace(bert_base.FULL, sequence=384, padding=51)
SMALL = replace(bert_base.SMALL, layers=1, sequence=27, padding=4)
CONFIGS = {"full": FULL, "small": SMALL}


def build(size: str) -> tuple[nn.Module, dict[str, np.ndarray]]:
    return bert_base.build_sized(CONFIGS[size])
