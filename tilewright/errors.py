"""Errors a user can act on. Anything else that escapes is a bug of ours."""

from __future__ import annotations

from typing import Any

_LONGEST = 2000  # characters of a message: names in a model are as long as they like


def printable(text: str, keep: str = "") -> str:
    """Names in a model may be any text: what ends a line or commands a terminal is spelled out, but for what to
    keep."""
    return "".join(c if c in keep or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class TilewrightError(Exception):
    """Base of every error that tells the user what to do; its text is one line."""


class _WithNames(TilewrightError):
    """An error whose text has names of a model in it."""

    def __init__(self, text: str = "") -> None:
        line = printable(text)
        both_ends = f"{line[: _LONGEST - 500]} ... {line[-500:]}"
        super().__init__(line if len(line) <= _LONGEST else both_ends)


class ModelError(_WithNames):
    """The model file is missing, damaged or contradicts itself."""


class UnsupportedError(_WithNames):
    """The model is fine, but uses something Tilewright does not compile yet; the text names the node."""


class BudgetError(UnsupportedError):
    """The model asks for more than one compilation does: nodes when all is written out, or kernel calls of a run."""


class OpenShapeError(ModelError):
    """The model leaves a dimension of an input open."""


class CutError(UnsupportedError):
    """A model that can run in parts, up to `node` and from it on. In `scope` are the values before it: an array of what
    is known while compiling, the number of tensors of a sequence, None of an optional that holds nothing; what is not
    there is known when the part before has run."""

    def __init__(self, text: str = "") -> None:
        super().__init__(text)
        self.node: object = None
        self.scope: dict[str, Any] = {}
        self.forms: dict[str, Any] = {}  # of arrays in `scope` that follow from run-time numbers, what they are


class UndecidedError(CutError):
    """A shape depends on values that are known only when the model is called: those of `tensor`, which the model's
    `inputs` of these names decide."""

    def __init__(
        self,
        text: str = "",
        tensor: object = None,
        inputs: tuple[str, ...] = (),
        number: int = 0,
        most: int | None = None,
    ) -> None:
        super().__init__(text)
        self.tensor = tensor
        self.inputs = inputs
        self.number = number  # of the question among those of the node
        self.most = most  # of a count of what the data holds, which is another at nearly every call
        self.itself = ""  # the name of the value that is asked for, where it is no tensor inside the node


class RegionError(CutError):
    """The data decides how often the node, a Loop, repeats its body; or it is an If with such a Loop inside."""


class OutsideError(CutError):
    """The node has no native code and is on the closed list of those that run outside of it."""


class UnevenError(UnsupportedError):
    """What is computed for one number differs from that for another in more than the number."""


class BorderError(UnsupportedError):
    """An input or output is no tensor: a sequence, an optional value or strings."""


class InputError(_WithNames):
    """A call with a wrong name, shape or element type."""


class OptionError(_WithNames):
    """An option of the API or the command line that cannot be."""


class ToolError(TilewrightError):
    """A compiler, library or device that is needed is not there, or failed."""


class CancelledError(TilewrightError):
    """A run that `cancel` ended before it was through; the model can be called again."""


class InternalError(Exception):
    """A form broke its own grammar: a bug of Tilewright, never of the user."""
