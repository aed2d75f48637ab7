"""Sizes that instruction sets fix for all their machines, which lowering and rendering count in, with their sources."""

from __future__ import annotations

# --- CPUs

LINE_BYTES = 64  # a cache line of x86 and of most Arm, and the widest vector, that of AVX-512: buffers begin with one
AVX512_BYTES = 64  # of a register of AVX-512 (Intel's manual, volume 1, chapter 15)
MASKED_BYTES = (32, 64)  # of registers with masked moves: vmaskmov of AVX, masks of AVX-512; NEON and SSE have none
NARROWEST_BYTES = 16  # of the shortest vector register, of SSE and of NEON
WAY_BYTES = 4096  # of a way of the first cache on x86, which a page addresses: lines as far apart fall on one set

# --- GPUs (the PTX manual)

BANK_ROW_BYTES = 128  # of shared memory that is read at once: 32 banks of 4 bytes; and of a line of its first cache
PACKET_BYTES = 16  # the most that a thread loads or stores at once, and copies asynchronously
LEAST_COPY_BYTES = 4  # the least that it copies asynchronously (cp.async)
BANK_PACKETS = BANK_ROW_BYTES // PACKET_BYTES  # that lie in banks of their own, and that a line of wgmma exchanges
MATRIX_BYTES = BANK_PACKETS * BANK_ROW_BYTES  # where what wgmma reads by itself begins: lines that exchange packets
MOST_BLOCKS_YZ = 65535  # of a grid in y and z; x reaches 2^31 - 1
