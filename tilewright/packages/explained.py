"""What an explanation is made of, kept as text: it is written when somebody asks for it, not at every compilation."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tilewright.ir.forms.dtypes import by_name
from tilewright.ir.forms.graph import Graph, Node
from tilewright.ir.text.parse import parse_loops, parse_program
from tilewright.ir.text.text import loops_text, program_text
from tilewright.target import Target
from tilewright.tile_graph.plan.form import Plan

if TYPE_CHECKING:
    from tilewright.compiler.pipeline import Artifact

FORMS = "forms.json"


def forms_of(artifact: Artifact) -> str:
    """All but the plan, which a saved model has as a text of its own. Constants without their numbers."""
    program, loops = artifact.program, artifact.loops
    assert program is not None and loops is not None
    return json.dumps({
        "model": artifact.graph.name, "operators": len(artifact.graph.nodes), "effort": artifact.effort,
        "batches": artifact.batches, "seconds": artifact.stage_seconds, "remarks": program.remarks,
        "program": program_text(program, numbers=False), "loops": loops_text(loops),
        "constants": {t.name: [t.dtype.name, t.shape] for t in program.constants},
    })  # fmt: skip


def explanation(forms: str, plan: str, target: Target) -> str:
    """What `explain` says of the compilation that these are from."""
    from tilewright.compiler.pipeline import Artifact
    from tilewright.report.explain import explain_text

    row = json.loads(forms)
    program = parse_program(row["program"], {name: _nothing(*typed) for name, typed in row["constants"].items()})
    graph = Graph(row["model"], (), (), (Node("", "", (), ()),) * row["operators"], {})  # their number is told
    artifact = Artifact(graph, target, replace(program, remarks=tuple(row["remarks"])), Plan.from_json(plan),
                        parse_loops(row["loops"]), {}, None, (), (), row["seconds"], row["effort"],
                        batches=row["batches"])  # fmt: skip
    return explain_text(artifact)


def _nothing(dtype: str, shape: list[int]) -> np.ndarray:
    return np.broadcast_to(np.zeros((), by_name(dtype).numpy), shape)
