"""Optimisers: from a weight, its gradient and what is kept about it to all of these in the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Protocol

import numpy as np

from tilewright.errors import OptionError
from tilewright.ir.forms.expr import Expr, op

RATES = 2  # numbers that an optimiser has of every step


class Optimiser(Protocol):
    @property
    def moments(self) -> tuple[str, ...]:
        """What is kept beside every weight, in its shape and from zeros on."""
        ...

    def rates(self, step: int) -> np.ndarray:
        """Numbers of a step, the first of which is 1."""
        ...

    def following(self, weight: Expr, gradient: Expr, moments: Sequence[Expr], rates: Sequence[Expr]) -> list[Expr]:
        """The moments and, last, the weight of the next step; each may read those before it."""
        ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent: `rate` times the gradient, or times its running sum with `momentum`."""

    rate: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        _check(rate=(self.rate, 0.0, float("inf")), momentum=(self.momentum, 0.0, 1.0))

    @property
    def moments(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def rates(self, step: int) -> np.ndarray:
        return np.array([self.rate, 0.0], np.float32)

    def following(self, weight: Expr, gradient: Expr, moments: Sequence[Expr], rates: Sequence[Expr]) -> list[Expr]:
        if not moments:
            return [weight - rates[0] * gradient]
        total = moments[0] * self.momentum + gradient
        return [total, weight - rates[0] * total]


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, 2015): steps of about `rate`, by running means of the gradient and of its square."""

    rate: float = 1e-3
    first: float = 0.9
    second: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _check(rate=(self.rate, 0.0, float("inf")), first=(self.first, 0.0, 1.0), second=(self.second, 0.0, 1.0),
               epsilon=(self.epsilon, 0.0, float("inf")))  # fmt: skip

    @property
    def moments(self) -> tuple[str, ...]:
        return ("mean", "square")

    def rates(self, step: int) -> np.ndarray:
        """Both running means begin at zero, which the first steps make up for."""
        return np.array([self.rate / (1 - self.first**step), 1 / sqrt(1 - self.second**step)], np.float32)

    def following(self, weight: Expr, gradient: Expr, moments: Sequence[Expr], rates: Sequence[Expr]) -> list[Expr]:
        mean = moments[0] * self.first + gradient * (1 - self.first)
        square = moments[1] * self.second + gradient * gradient * (1 - self.second)
        return [mean, square, weight - rates[0] * mean / (op("sqrt", square) * rates[1] + self.epsilon)]


def _check(**given: tuple[float, float, float]) -> None:
    for name, (value, low, high) in given.items():
        if not low <= value < high:
            raise OptionError(f"{name} of an optimiser is at least {low:g} and below {high:g}, not {value!r}")
