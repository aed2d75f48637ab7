"""The guest of the emulated machine: its boot image, the files it starts with, and the emulator's configuration."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_DIRECTORY, _FILE, _DEVICE = 0o040755, 0o100755, 0o020600


def list_line(name: str, arguments: Sequence[str]) -> str:
    return f"/cases/{name} ./program {' '.join(arguments)}\n"


def archive(entries: Sequence[tuple[str, int, bytes, tuple[int, int]]]) -> bytes:
    """A cpio archive as Linux unpacks it at its start: (path, mode, contents, device)."""
    parts = []
    for number, (path, mode, data, device) in enumerate([*entries, ("TRAILER!!!", 0, b"", (0, 0))], 1):
        name = path.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name), 0)
        head = b"070701" + b"".join(b"%08X" % f for f in fields) + name
        parts += [head, b"\0" * (-len(head) % 4), data, b"\0" * (-len(data) % 4)]
    return b"".join(parts)


def boot_files(folder: Path, kernel: Path, isolinux: Path, listing: str, names: Sequence[str]) -> Path:
    """A bootable disc with the kernel and a first file system of the cases."""
    entries: list[tuple[str, int, bytes, tuple[int, int]]] = [
        ("dev", _DIRECTORY, b"", (0, 0)), ("proc", _DIRECTORY, b"", (0, 0)), ("cases", _DIRECTORY, b"", (0, 0)),
        ("dev/console", _DEVICE, b"", (5, 1)), ("list", _FILE, listing.encode(), (0, 0)),
    ]  # fmt: skip
    entries += [(n, _FILE, (folder / n).read_bytes(), (0, 0)) for n in ("init", "untouched", "measure")]
    for name in names:
        entries.append((f"cases/{name}", _DIRECTORY, b"", (0, 0)))
        for path in sorted((folder / "cases" / name).iterdir()):
            if path.suffix not in (".c", ".o"):
                entries.append((f"cases/{name}/{path.name}", _FILE, path.read_bytes(), (0, 0)))
    disc = folder / "disc"
    disc.mkdir(exist_ok=True)
    (disc / "files").write_bytes(archive(entries))
    shutil.copy(kernel, disc / "kernel")
    for name in ("isolinux.bin", "ldlinux.c32"):
        shutil.copy(next(isolinux.rglob(name)), disc / name)
    # everything a kernel waits for or measures at its start, left out
    boot = ("console=ttyS0 quiet nokaslr mitigations=off tsc=reliable lpj=1000000 no_timer_check nosmp noapic "
            "random.trust_cpu=on rdinit=/init panic=0 pci=off nowatchdog "
            "no5lvl acpi=off")  # fmt: skip
    (disc / "isolinux.cfg").write_text(f"DEFAULT go\nPROMPT 0\nLABEL go\nKERNEL kernel\nINITRD files\nAPPEND {boot}\n")
    image = folder / "disc.iso"
    command = ["xorriso", "-as", "mkisofs", "-quiet", "-o", str(image), "-b", "isolinux.bin", "-c", "boot.cat",
               "-no-emul-boot", "-boot-load-size", "4", "-boot-info-table", "-iso-level", "3", str(disc)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return image


def configuration(bochs: Path, bios: Path | None, image: Path, serial: Path) -> str:
    """A machine with the processor's whole instruction set, one core and a serial port that goes to a file."""
    roms = bios or bochs / "bios"
    return f"""megs: 1024
cpu: model=sapphire_rapids, count=1, ips=100000000, reset_on_triple_fault=0
romimage: file={next(roms.rglob("BIOS-bochs-latest"))}
vgaromimage: file={next(p for p in roms.rglob("vgabios*.bin") if "debug" not in p.name)}
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path={image}, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={serial}
clock: sync=none, time0=1700000000
display_library: nogui
log: bochs.log
panic: action=fatal
error: action=report
info: action=ignore
debug: action=ignore
"""
