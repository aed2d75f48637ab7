"""The table of candidate tiles: what batches have in common is worked out once, and comes out the same."""

import numpy as np

from tilewright.tile_graph.algebra.propagate import Size
from tilewright.tile_graph.algebra.rows import Rows


def test_batches_that_overlap_ask_for_new_tiles_alone() -> None:
    asked: list[tuple[int, int]] = []

    def work(sizes: list[Size]) -> Size:
        height, width = np.broadcast_arrays(*sizes)
        asked.extend(zip(height.tolist(), width.tolist(), strict=True))
        return height / (1 + width)

    rows = Rows()
    random = np.random.default_rng(0)
    for _ in range(20):
        height, width = random.integers(1, 10, (2, 30))
        np.testing.assert_array_equal(rows.of([height, width], [9, 20], work), height / (1 + width))
        np.testing.assert_array_equal(rows.of([height, 20], [9, 20], work), height / 21)
    assert len(asked) == len(set(asked)) <= 90


def test_one_size_for_all_candidates_is_one_number() -> None:
    assert Rows().of([3, 4], [9, 20], lambda sizes: sizes[0] * sizes[1]) == 12


def test_results_that_do_not_depend_on_the_tile_have_an_entry_each() -> None:
    np.testing.assert_array_equal(Rows().of([np.array([2, 1, 2])], [4], lambda _: 0.5), [0.5, 0.5, 0.5])
