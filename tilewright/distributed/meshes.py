"""Meshes as users write them, `tp=2`, `dp=2,tp=4`, `tp=2/tp=1` or `auto`, and the clusters that are planned for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from tilewright.errors import OptionError
from tilewright.target import Cluster, Link, Target, cluster

SPLIT = "tp"  # along an axis of this name the weights are shared out; along others whatever is predicted to take least
STAGES = "pp"  # along an axis of this name stages follow each other
PROCESSES = "processes"  # the links between processes of one computer, where no cluster is described
AUTO = "auto"

Axes = tuple[tuple[str, int], ...]  # names and sizes, in order


@dataclass(frozen=True)
class MeshText:
    """The axes of every stage's mesh, one stage behind the other; no stages where meshes are to be found."""

    stages: tuple[Axes, ...]

    @property
    def is_auto(self) -> bool:
        return not self.stages

    @property
    def ranks(self) -> int:
        return sum(prod(size for _, size in axes) for axes in self.stages)

    def check_ranks(self, started: int) -> None:
        """Raises an OptionError where another number of ranks was started."""
        if self.ranks != started:
            raise OptionError(f"the mesh {self} has {self.ranks} ranks, and {started} were started: "
                              f"torchrun --nproc-per-node {self.ranks}")  # fmt: skip

    def __str__(self) -> str:
        return "/".join(",".join(f"{name}={size}" for name, size in axes) for axes in self.stages) or AUTO


def parse_mesh(text: object) -> MeshText:
    """`dp=2,tp=4`: names and sizes of the axes, the outermost first; stages with axes of their own behind a slash."""
    form = "it is names and sizes of axes, as in 'tp=2' or 'dp=2,tp=4', stage by stage as in 'tp=2/tp=1', or 'auto'"
    wrong = OptionError(f"mesh cannot be {text!r}: {form}")
    if not isinstance(text, str) or not text:
        raise wrong
    if text == AUTO:
        return MeshText(())
    stages: list[Axes] = []
    for stage in text.split("/"):
        axes: list[tuple[str, int]] = []
        for each in stage.split(","):
            name, separator, size = each.strip().partition("=")
            if not separator or not name.isidentifier() or not size.isdecimal() or int(size) < 1:
                raise wrong
            if name in dict(axes):
                raise OptionError(f"mesh {text!r} has two axes named '{name}'")
            axes.append((name, int(size)))
        stages.append(tuple(axes))
    if len(stages) > 1 and any(STAGES in dict(axes) for axes in stages):
        raise OptionError(f"mesh {text!r} says its stages twice: by slashes, and by '{STAGES}'")
    return mesh_of(stages[0]) if len(stages) == 1 else MeshText(tuple(stages))


def mesh_of(axes: Axes) -> MeshText:
    """One mesh; along an axis for stages there are as many of the rest of it."""
    count = dict(axes).get(STAGES, 1)
    return MeshText((tuple((name, size) for name, size in axes if name != STAGES),) * count)


def described(mesh: MeshText, name: str, device: Callable[[str], Target]) -> tuple[list[Cluster], Link]:
    """A cluster a stage, with links of the same name as described, others as the innermost link is; and the link
    between stages."""
    about = cluster(name, device)
    if not about.links:
        raise OptionError(f"the cluster '{name}' describes no links")
    known = {link.name: link for link in about.links}
    inner = about.links[-1]
    stages = [replace(about, links=tuple(replace(known.get(n, inner), name=n, size=size) for n, size in axes))
              for axes in mesh.stages]  # fmt: skip
    return stages, replace(known.get(STAGES, inner), name=STAGES, size=len(stages))


def undecided(name: str, ranks: int | None, device: Callable[[str], Target]) -> Cluster:
    """The cluster for which meshes are to be found; where so many ranks were started, all along its innermost link."""
    about = cluster(name, device)
    if not about.links:
        raise OptionError(f"the cluster '{name}' describes no links")
    if ranks is None:
        return about
    return replace(about, links=(replace(about.links[-1], size=ranks),))
