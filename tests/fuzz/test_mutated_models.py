"""Model files with bytes changed at random: a program or one clean line, soon; never another exception."""

from __future__ import annotations

import random
import time
import warnings

import numpy as np
import pytest

from tests.errors.test_bad_models import CASES, IMAGE, WEIGHTS, F, integers, one, pool
from tilewright import TilewrightError
from tilewright.frontend.onnx.model import load
from tilewright.ir.analysis.verify import verify_program
from tilewright.ops.lower import lower

PRODUCT = {"x": (F, [2, 3]), "z": (F, [3, 4])}
GOOD = [
    one("Conv", IMAGE, ["x", "w"], WEIGHTS, pads=[1] * 4),
    pool(),
    one("Softmax", axis=1),
    one("Einsum", PRODUCT, ["x", "z"], equation="ij,jk->ik"),
    one("Slice", given=["x", "a", "b"], constants={"a": integers(0), "b": integers(1)}),
    one("Resize", IMAGE, ["x", "", "s"], {"s": np.array([1, 1, 2, 2], np.float32)}),
    one("LayerNormalization", given=["x", "s"], constants={"s": np.ones(3, np.float32)}),
    one("LRN", IMAGE, size=3),
    one("CumSum", given=["x", "k"], constants={"k": integers(1)}),
]
SECONDS = 10  # of the processor; each takes a fraction of one


def mutated(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(changed))
        match rng.randrange(5):
            case 0:
                del changed[place : place + rng.randint(1, 3)]
            case 1:
                changed[place:place] = rng.randbytes(rng.randint(1, 3))
            case _:
                changed[place] = rng.choice([0, 1, 2, 3, 127, 128, 255, rng.randrange(256)])
    return bytes(changed)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))])
def test_mutated_models(seed: int) -> None:
    rng = random.Random(seed)
    files = [m if isinstance(m, bytes) else m.SerializeToString() for m in (*GOOD, *(c for c, _ in CASES.values()))]
    for number in range(1000):
        data = mutated(rng.choice(files), rng)
        start = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                verify_program(lower(load(data)))
            except TilewrightError as error:
                assert "\n" not in str(error)
        assert time.process_time() - start < SECONDS, f"mutation {number} of seed {seed}"
