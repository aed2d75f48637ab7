"""Pages for weights that stay near, on systems that are played: of other page sizes, other clocks, without room."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from tests.native_models import NATIVE
from tilewright.runtime import find_compiler

PLACING = NATIVE / "placing.c"

# The system calls that placing.c makes, as functions of ours. The clock is read eight times a measurement; of a part
# first half the pages are measured, then twelve sets of them, of which each seems to be a little faster than the last.
SYSTEM = """
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
int mapped, most, refuses_to_move;
int64_t page = 4096, readings;
static long fake_sysconf(int name) { (void)name; return page; }
static int fake_clock(int id, struct timespec *t)
{
    static int64_t now;
    int64_t measured = readings++ / 8 % 13;
    (void)id;
    now += measured ? 1000 - measured : 1;
    *t = (struct timespec){now / 1000000000, now % 1000000000};
    return 0;
}
static size_t rounded(size_t bytes) { return (bytes + page - 1) / page * page; }
static void *fake_mmap(void *at, size_t bytes, int access, int flags, int file, long offset)
{
    (void)access, (void)flags, (void)file, (void)offset;
    if (at) return MAP_FAILED;
    if (++mapped > most) most = mapped;
    return calloc(rounded(bytes), 1);
}
static int fake_munmap(void *at, size_t bytes) { (void)bytes; mapped--; free(at); return 0; }
static void *fake_mremap(void *from, size_t bytes, size_t same, int flags, void *to)
{
    (void)same, (void)flags;
    if (refuses_to_move) return MAP_FAILED;
    memcpy(to, from, rounded(bytes)); /* whole pages move, and take the place of whole pages */
    fake_munmap(from, bytes);
    return to;
}
#define sysconf fake_sysconf
#define clock_gettime fake_clock
#define mmap fake_mmap
#define munmap fake_munmap
#define mremap fake_mremap
"""


class Losers(ctypes.Structure):
    """tw_losers in native/placing.h, and some room to spare."""

    _fields_ = [("count", ctypes.c_int), ("sets", ctypes.c_size_t * 256)]


@pytest.fixture(scope="module")
def placing(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if not sys.platform.startswith("linux"):
        pytest.skip("pages are looked for on Linux alone")
    folder = tmp_path_factory.mktemp("placing")
    source, library = folder / "placing.c", folder / "placing.so"
    source.write_text(SYSTEM + PLACING.read_text())
    command = [*find_compiler().argv, "-O1", "-shared", "-fPIC", f"-I{PLACING.parent}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def place(placing: ctypes.CDLL, part: int, parts: int, page: int = 4096, moves: bool = True) -> tuple[bool, bool]:
    """Whether the weights were placed, and whether they then are what they were."""
    ctypes.c_int64.in_dll(placing, "page").value = page
    ctypes.c_int64.in_dll(placing, "readings").value = 0
    ctypes.c_int.in_dll(placing, "refuses_to_move").value = not moves
    weights = (bytes(range(1, 252)) * (part * parts // 251 + 1))[: part * parts]
    room = ctypes.create_string_buffer(len(weights) + 65536)
    losers = Losers()
    size, count = ctypes.c_int64(len(weights)), ctypes.c_int64(parts)
    placed = placing.tw_place(room, weights, size, count, ctypes.byref(losers))
    placing.tw_release(ctypes.byref(losers))
    assert ctypes.c_int.in_dll(placing, "mapped").value == 0
    return bool(placed), room.raw[: len(weights)] == weights


@pytest.mark.parametrize("page", [4096, 16384, 65536])
@pytest.mark.parametrize(("part", "parts"), [(3 * 4096, 2), (4 * 65536, 2), (65536, 3), (5000, 2)])
def test_weights_are_what_they_were_whatever_a_page_is(placing: ctypes.CDLL, page: int, part: int, parts: int) -> None:
    assert place(placing, part, parts, page) == (True, True)


def test_pages_that_cannot_be_moved_are_given_back(placing: ctypes.CDLL) -> None:
    assert place(placing, 4 * 4096, 2, moves=False)[0] is False


def test_a_bounded_number_of_pages_is_tried(placing: ctypes.CDLL) -> None:
    most = ctypes.c_int.in_dll(placing, "most")
    most.value = 0
    assert place(placing, 4096, 40) == (True, True)
    assert 60 < most.value <= 66
