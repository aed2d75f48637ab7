"""Features of a processor that compiled code may rely on: those that a C compiler uses unasked when it compiles for the
machine it runs on. Names are the Linux kernel's; for each, how a C program asks for it."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.runtime.toolchain import NativeMachine


@dataclass(frozen=True)
class _Bit:
    """A bit of a register that the `cpuid` instruction fills, or of a word that the system hands every program."""

    place: str
    bit: int


# By leaf, subleaf and register of `cpuid`. (`__builtin_cpu_supports` would need a library that zig does not have.)
_X86 = {
    "pni": _Bit("1, 0, c", 0), "ssse3": _Bit("1, 0, c", 9), "fma": _Bit("1, 0, c", 12), "sse4_1": _Bit("1, 0, c", 19),
    "sse4_2": _Bit("1, 0, c", 20), "movbe": _Bit("1, 0, c", 22), "popcnt": _Bit("1, 0, c", 23),
    "avx": _Bit("1, 0, c", 28), "f16c": _Bit("1, 0, c", 29), "abm": _Bit("0x80000001, 0, c", 5),
    "sse4a": _Bit("0x80000001, 0, c", 6), "bmi1": _Bit("7, 0, b", 3), "avx2": _Bit("7, 0, b", 5),
    "bmi2": _Bit("7, 0, b", 8), "avx512f": _Bit("7, 0, b", 16), "avx512dq": _Bit("7, 0, b", 17),
    "adx": _Bit("7, 0, b", 19), "avx512ifma": _Bit("7, 0, b", 21), "avx512cd": _Bit("7, 0, b", 28),
    "avx512bw": _Bit("7, 0, b", 30), "avx512vl": _Bit("7, 0, b", 31), "avx512vbmi": _Bit("7, 0, c", 1),
    "avx512_vbmi2": _Bit("7, 0, c", 6), "gfni": _Bit("7, 0, c", 8), "avx512_vnni": _Bit("7, 0, c", 11),
    "avx512_bitalg": _Bit("7, 0, c", 12), "avx512_vpopcntdq": _Bit("7, 0, c", 14), "amx_bf16": _Bit("7, 0, d", 22),
    "avx512_fp16": _Bit("7, 0, d", 23), "amx_tile": _Bit("7, 0, d", 24), "amx_int8": _Bit("7, 0, d", 25),
    "avx_vnni": _Bit("7, 1, a", 4), "avx512_bf16": _Bit("7, 1, a", 5), "avx_ifma": _Bit("7, 1, a", 23),
}  # fmt: skip
# Registers that the system must save for a program, by what the names of features begin with.
_SAVED = {"avx": 0x6, "fma": 0x6, "f16c": 0x6, "avx512": 0xE6, "amx": 0x60000}
_ARM = {
    "fp": _Bit("AT_HWCAP", 0), "asimd": _Bit("AT_HWCAP", 1), "crc32": _Bit("AT_HWCAP", 7),
    "atomics": _Bit("AT_HWCAP", 8), "fphp": _Bit("AT_HWCAP", 9), "asimdhp": _Bit("AT_HWCAP", 10),
    "asimdrdm": _Bit("AT_HWCAP", 12), "jscvt": _Bit("AT_HWCAP", 13), "fcma": _Bit("AT_HWCAP", 14),
    "lrcpc": _Bit("AT_HWCAP", 15), "asimddp": _Bit("AT_HWCAP", 20), "sve": _Bit("AT_HWCAP", 22),
    "asimdfhm": _Bit("AT_HWCAP", 23), "ilrcpc": _Bit("AT_HWCAP", 26), "flagm": _Bit("AT_HWCAP", 27),
    "sve2": _Bit("AT_HWCAP2", 1), "flagm2": _Bit("AT_HWCAP2", 7), "frint": _Bit("AT_HWCAP2", 8),
    "svei8mm": _Bit("AT_HWCAP2", 9), "svebf16": _Bit("AT_HWCAP2", 12), "i8mm": _Bit("AT_HWCAP2", 13),
    "bf16": _Bit("AT_HWCAP2", 14),
}  # fmt: skip
_ON_REQUEST = {"amx_tile": "amx", "amx_bf16": "amx", "amx_int8": "amx"}  # used only where a kernel names them


def relied_on(machine: NativeMachine, permissions: tuple[str, ...] = ()) -> tuple[str, ...]:
    """What code compiled on this machine, with these permissions to ask for, may use."""
    used = (n for n in (*_X86, *_ARM) if n in machine.features and _ON_REQUEST.get(n, "") in ("", *permissions))
    return tuple(sorted(used))


def c_checks(features: tuple[str, ...]) -> list[str]:
    """The same question in C: expressions that are all true where a program runs on a processor with these, and a
    system that saves their registers."""
    found = []
    for bit in (_X86[name] for name in features if name in _X86):
        found.append(f"tw_cpuid({bit.place[:-1]}'{bit.place[-1]}', {bit.bit})")
    saved = 0
    for start, mask in _SAVED.items():
        saved |= mask if any(name.startswith(start) for name in features) else 0
    if saved:
        found.append(f"tw_saved({saved:#x})")
    words: dict[str, int] = {}
    for bit in (_ARM[name] for name in features if name in _ARM):
        words[bit.place] = words.get(bit.place, 0) | 1 << bit.bit
    return found + [f"(getauxval({word}) & {mask:#x}ul) == {mask:#x}ul" for word, mask in words.items()]
