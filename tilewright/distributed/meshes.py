"""Meshes as users write them, `tp=2` or `dp=2,tp=4`, and the cluster that is planned for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tilewright.errors import OptionError
from tilewright.target import Cluster, Target, cluster

SPLIT = "tp"  # along an axis of this name the weights are shared out; along others whatever is predicted to take least
STAGES = "pp"  # along an axis of this name stages follow each other
PROCESSES = "processes"  # the links between processes of one computer, where no cluster is described


@dataclass(frozen=True)
class MeshText:
    """Axes by name and size, in order."""

    axes: tuple[tuple[str, int], ...]

    @property
    def split(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes if name == SPLIT)


def parse_mesh(text: object) -> MeshText:
    """`dp=2,tp=4`: names and sizes of the axes, the outermost first."""
    wrong = OptionError(f"mesh cannot be {text!r}: it is names and sizes of axes, as in 'tp=2' or 'dp=2,tp=4'")
    if not isinstance(text, str) or not text:
        raise wrong
    axes: list[tuple[str, int]] = []
    for each in text.split(","):
        name, separator, size = each.strip().partition("=")
        if not separator or not name.isidentifier() or not size.isdecimal() or int(size) < 1:
            raise wrong
        if name in dict(axes):
            raise OptionError(f"mesh {text!r} has two axes named '{name}'")
        axes.append((name, int(size)))
    return MeshText(tuple(axes))


def described(mesh: MeshText, name: str, device: Callable[[str], Target]) -> Cluster:
    """The cluster with the axes of a mesh: links of the same name as described, others as the innermost link is."""
    about = cluster(name, device)
    if not about.links:
        raise OptionError(f"the cluster '{name}' describes no links")
    known = {link.name: link for link in about.links}
    links = tuple(replace(known.get(axis, about.links[-1]), name=axis, size=size) for axis, size in mesh.axes)
    return replace(about, links=links)
