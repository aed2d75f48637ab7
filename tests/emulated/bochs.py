"""Builds Bochs from its source so that Linux can run AMX on it: python -m tests.emulated.bochs SOURCE_FOLDER

Bochs 3.0 has the instructions, but not XFD, by which a system gives tiles only to a process that asks: without it Linux
does not enable tiles at all. And it takes the signed bytes of AMX-INT8 as unsigned. Both are put right here first.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CONFIGURE = (
    "--enable-cpu-level=6", "--enable-x86-64", "--enable-avx", "--enable-evex", "--enable-amx", "--enable-pci",
    "--enable-all-optimizations", "--enable-long-phy-address", "--with-nogui", "--disable-docbook",
    "CXXFLAGS=-O2 -w -fno-strict-aliasing", "CFLAGS=-O2 -w",
)  # fmt: skip

# file, a text in it that is there once, what goes before it, what goes behind it
ADDITIONS = (
    ("cpuid.cc", "    // EBX[31:00] - The size (in bytes) of the XSAVE area containing all states enabled by (", """\
#if BX_SUPPORT_AMX
    if (is_cpu_extension_supported(BX_ISA_AMX))
      leaf->eax |= (1<<4); // XFD
#endif
""", ""),
    ("cpuid.cc", "      leaf->ecx = (cpu->ia32_xss_suppmask & (1 << subfunction)) != 0;\n", "", """\
#if BX_SUPPORT_AMX
      if (subfunction == xcr0_t::BX_XCR0_XTILEDATA_BIT) leaf->ecx |= (1<<1) | (1<<2);
#endif
"""),
    ("proc_ctrl.cc", "#if BX_SUPPORT_AVX\nvoid BX_CPU_C::handleAvxModeChange(void)\n", """\
#if BX_SUPPORT_AMX
Bit64u bx_ia32_xfd = 0, bx_ia32_xfd_err = 0; // of the one processor
#endif
""", ""),
    ("proc_ctrl.cc", "    clear_amx_ok();\n  else\n", "", """\
  if ((bx_ia32_xfd & BX_XCR0_XTILEDATA_MASK) != 0)
    clear_amx_ok();
  else
"""),
    ("proc_ctrl.cc", "  BX_ASSERT(0);\n\n  BX_NEXT_TRACE(i); // keep compiler happy\n}\n#endif\n\n#endif\n", """\
  if (bx_ia32_xfd & BX_XCR0_XTILEDATA_MASK) {
    switch (i->getIaOpcode()) { // these leave the data of tiles alone
    case BX_IA_LDTILECFG: LDTILECFG(i); return;
    case BX_IA_STTILECFG: STTILECFG(i); return;
    case BX_IA_TILERELEASE: TILERELEASE(i); return;
    default: break;
    }
    bx_ia32_xfd_err |= BX_XCR0_XTILEDATA_MASK;
    exception(BX_NM_EXCEPTION, 0);
  }

""", ""),
    ("msr.cc", "#define LOG_THIS BX_CPU_THIS_PTR\n", "", """\
#if BX_SUPPORT_AMX
extern Bit64u bx_ia32_xfd, bx_ia32_xfd_err;
#endif
"""),
    ("msr.cc", "  msr_desc[BX_MSR_XSS] = new", """\
#if BX_SUPPORT_AMX
  msr_desc[BX_MSR_IA32_XFD] = new MSR_Descriptor("MSR_IA32_XFD", BX_ISA_AMX);
  msr_desc[BX_MSR_IA32_XFD_ERROR] = new MSR_Descriptor("MSR_IA32_XFD_ERROR", BX_ISA_AMX);
#endif
""", ""),
    ("msr.cc", "    case BX_MSR_XSS:\n      if (", """\
#if BX_SUPPORT_AMX
    case BX_MSR_IA32_XFD:
      val64 = bx_ia32_xfd;
      break;
    case BX_MSR_IA32_XFD_ERROR:
      val64 = bx_ia32_xfd_err;
      break;
#endif
""", ""),
    ("msr.cc", "    case BX_MSR_XSS:\n      {\n", """\
#if BX_SUPPORT_AMX
    case BX_MSR_IA32_XFD:
      bx_ia32_xfd = val_64;
      handleAvxModeChange();
      break;
    case BX_MSR_IA32_XFD_ERROR:
      bx_ia32_xfd_err = val_64;
      break;
#endif
""", ""),
)  # fmt: skip


def put_right(cpu: Path) -> None:
    """Changes the sources once; a version that has XFD of its own keeps it."""
    if "BX_MSR_IA32_XFD" not in (cpu / "msr.cc").read_text():
        for name, at, before, behind in ADDITIONS:
            text = (cpu / name).read_text()
            if text.count(at) != 1:
                raise SystemExit(f"{name} is not as in Bochs 3.0: {text.count(at)} times {at!r}")
            (cpu / name).write_text(text.replace(at, before + at + behind))
    tiles = cpu / "avx" / "amx.cc"
    text = tiles.read_text()
    for name, signed in (("DPBDSS", "xy"), ("DPBDSU", "x"), ("DPBDUS", "y")):
        start = text.index(f"Bit32u {name}(")
        end = text.index("return", start)
        body = re.sub(r"Bit32[su]\(([xy])byte\[(\d)\]\)",
                      lambda m, s=signed: f"Bit32s(Bit8{'s' if m[1] in s else 'u'}({m[1]}byte[{m[2]}]))",
                      text[start:end])  # fmt: skip
        text = text[:start] + body + text[end:]
    tiles.write_text(text)


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1], "configure").is_file():
        raise SystemExit(__doc__)
    source = Path(sys.argv[1])
    put_right(source / "cpu")
    subprocess.run(["./configure", *CONFIGURE], cwd=source, check=True)
    subprocess.run(["make", "-j2"], cwd=source, check=True)
    print(f"made {source / 'bochs'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
