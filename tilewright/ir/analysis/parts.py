"""Parts that a count of steps is cut into."""


def even_part(count: int, about: int) -> int:
    """A part of so many steps: one that leaves no rest, if one is at most half as long again or two thirds of it."""
    near = (n for n in range(-(-2 * about // 3), 3 * about // 2 + 1) if count % n == 0)
    return min(near, key=lambda n: abs(n - about), default=about)
