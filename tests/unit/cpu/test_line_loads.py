"""Lines that products miss in simulated caches, for every described machine."""

import pytest

from bench.line_loads import counted
from tilewright.target import machine, stored_machines

LINE = 64


@pytest.mark.parametrize("name", stored_machines("cpu"))
def test_what_fits_the_first_cache_is_read_once(name, tmp_path):
    rows, inner, columns = 29, 48, 64
    lines = counted((rows, inner, columns), machine(name), tmp_path)
    height = lines.tile.get("o0", rows)
    width = lines.tile.get("o1", columns)
    assert lines.near[0] == 4 * height * inner / LINE
    assert 4 * inner * width / LINE <= lines.near[1] <= 4 * inner * (width + 64) / LINE
    assert lines.near[2] == 4 * height * width / LINE
    assert lines.far == lines.near


def test_rows_a_way_apart_throw_each_other_out(tmp_path):
    target = machine("emerald_rapids")
    together, apart = (counted((96, inner, 512), target, tmp_path) for inner in (1024, 1040))
    assert dict(together.plan.register) == dict(apart.plan.register)
    height = dict(apart.plan.register)["o0"]
    assert apart.near[0] / apart.steps == pytest.approx(height / 16, rel=0.05)
    assert together.near[0] / together.steps > 1.2 * height / 16
