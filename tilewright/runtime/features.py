"""Features of a processor that compiled code may rely on: those that a C compiler uses unasked when it compiles for the
machine it runs on. Names are the Linux kernel's; for each, how a C program asks for it."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.runtime.toolchain import Machine


@dataclass(frozen=True)
class _Bit:
    """A bit of a register that the `cpuid` instruction fills, or of a word that the system hands every program."""

    place: str
    bit: int


# Names that `__builtin_cpu_supports` has in every gcc and clang; it also asks whether the system saves the registers.
_BUILTIN = {
    "pni": "sse3", "ssse3": "ssse3", "sse4_1": "sse4.1", "sse4_2": "sse4.2", "sse4a": "sse4a", "popcnt": "popcnt",
    "avx": "avx", "avx2": "avx2", "fma": "fma", "bmi1": "bmi", "bmi2": "bmi2", "avx512f": "avx512f",
    "avx512cd": "avx512cd", "avx512bw": "avx512bw", "avx512dq": "avx512dq", "avx512vl": "avx512vl",
    "avx512ifma": "avx512ifma", "avx512vbmi": "avx512vbmi", "avx512_vbmi2": "avx512vbmi2",
    "avx512_vnni": "avx512vnni", "avx512_bitalg": "avx512bitalg", "avx512_vpopcntdq": "avx512vpopcntdq",
    "gfni": "gfni",
}  # fmt: skip
# By leaf, subleaf and register of `cpuid`.
_CPUID = {
    "movbe": _Bit("1, 0, c", 22), "f16c": _Bit("1, 0, c", 29), "abm": _Bit("0x80000001, 0, c", 5),
    "adx": _Bit("7, 0, b", 19), "avx512_fp16": _Bit("7, 0, d", 23), "avx_vnni": _Bit("7, 1, a", 4),
    "avx512_bf16": _Bit("7, 1, a", 5), "avx_ifma": _Bit("7, 1, a", 23), "amx_bf16": _Bit("7, 0, d", 22),
    "amx_tile": _Bit("7, 0, d", 24), "amx_int8": _Bit("7, 0, d", 25),
}  # fmt: skip
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


def relied_on(machine: Machine, permissions: tuple[str, ...] = ()) -> tuple[str, ...]:
    """What code compiled on this machine, with these permissions to ask for, may use."""
    known = (*_BUILTIN, *_CPUID, *_ARM)
    used = (n for n in known if n in machine.features and _ON_REQUEST.get(n, "") in ("", *permissions))
    return tuple(sorted(used))


def c_checks(features: tuple[str, ...]) -> list[str]:
    """The same question in C: expressions that are all true where a program runs on a processor with these."""
    found = [f'__builtin_cpu_supports("{_BUILTIN[name]}")' for name in features if name in _BUILTIN]
    found += [
        f"tw_cpuid({_CPUID[n].place[:-1]}'{_CPUID[n].place[-1]}', {_CPUID[n].bit})" for n in features if n in _CPUID
    ]
    words: dict[str, int] = {}
    for bit in (_ARM[name] for name in features if name in _ARM):
        words[bit.place] = words.get(bit.place, 0) | 1 << bit.bit
    return found + [f"(getauxval({word}) & {mask:#x}ul) == {mask:#x}ul" for word, mask in words.items()]
