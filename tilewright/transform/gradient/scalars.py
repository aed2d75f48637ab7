"""Derivatives of the scalar operations, and the chain rule inside one expression."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from tilewright.errors import UnsupportedError
from tilewright.ir.forms.expr import Const, Expr, Load, Op, cast, const, lt, op, select, walk

Terms = tuple[Expr | None, ...]  # an operand each; None where it changes nothing
Rule = Callable[[Op, Expr], Terms]


def adjoints(value: Expr, seed: Expr) -> dict[Load, Expr]:
    """By each element of a tensor of floats that an expression reads, what a change of it adds to the loss, where one
    of the expression's value adds `seed`."""
    found: dict[Expr, Expr] = {value: seed}
    for node in reversed(list(walk(value))):
        here = found.get(node)
        if here is None or not isinstance(node, Op) or not any(_counts(arg) for arg in node.args):
            continue
        if node.op.name not in _RULES:
            raise UnsupportedError(f"'{node.op.name}' has no derivative here")
        for arg, term in zip(node.args, _RULES[node.op.name](node, here), strict=True):
            if term is not None and _counts(arg):
                found[arg] = found[arg] + term if arg in found else term
    return {node: each for node, each in found.items() if isinstance(node, Load) and node.dtype.is_float}


def _counts(node: Expr) -> bool:
    return node.dtype.is_float and node.reads


def _zero(like: Expr) -> Expr:
    return const(0.0, like.dtype)


def _extreme(node: Op, g: Expr, less: Callable[[Expr, Expr], Expr]) -> Terms:
    """The operand that is the result has it all; equal ones share it, unless one is a number: then neither has any."""
    a, b = node.args
    at_equal = _zero(g) if isinstance(a, Const) or isinstance(b, Const) else g * 0.5
    return tuple(select(less(y, x), g, select(less(x, y), _zero(g), at_equal)) for x, y in ((a, b), (b, a)))


def _pow(node: Op, g: Expr) -> Terms:
    base, exponent = node.args
    first = g * exponent * op("pow", base, exponent - 1.0)
    return first, None if not exponent.reads else g * node * op("log", base)


def _one(factor: Callable[[Op, Expr], Expr]) -> Rule:
    return lambda node, g: (g * factor(node, node.args[0]),)


_RULES: Mapping[str, Rule] = {
    "add": lambda node, g: (g, g),
    "sub": lambda node, g: (g, -g),
    "mul": lambda node, g: (g * node.args[1], g * node.args[0]),
    "div": lambda node, g: (g / node.args[1], -(g * node) / node.args[1]),
    "min": lambda node, g: _extreme(node, g, lambda a, b: lt(b, a)),
    "max": lambda node, g: _extreme(node, g, lt),
    "pow": _pow,
    "neg": lambda node, g: (-g,),
    "abs": _one(lambda node, x: op("sign", x)),
    "exp": _one(lambda node, x: node),
    "exp2": _one(lambda node, x: node * math.log(2.0)),
    "log": lambda node, g: (g / node.args[0],),
    "sqrt": lambda node, g: (g * 0.5 / node,),
    "rsqrt": _one(lambda node, x: node * node * node * -0.5),
    "tanh": _one(lambda node, x: 1.0 - node * node),
    "erf": _one(lambda node, x: op("exp", -(x * x)) * (2.0 / math.sqrt(math.pi))),
    "sigmoid": _one(lambda node, x: node * (1.0 - node)),
    "sin": _one(lambda node, x: op("cos", x)),
    "cos": _one(lambda node, x: -op("sin", x)),
    "fmod": lambda node, g: (g, None if not node.args[1].reads else -(g * op("trunc", node.args[0] / node.args[1]))),
    "select": lambda node, g: (None, select(node.args[0], g, _zero(g)), select(node.args[0], _zero(g), g)),
    "cast": lambda node, g: (cast(g, node.args[0].dtype),),
    # steps, which are level wherever they have a slope
    **dict.fromkeys(("sign", "floor", "ceil", "round", "trunc"), lambda node, g: (None,)),
}
