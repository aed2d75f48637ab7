"""The `tilewright` command: parses, calls the subcommand, and turns every error a user can act on into one line."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import tilewright
from tilewright.cli import bench, cache, common, compile, devices, explain, records, run, suite, tune
from tilewright.errors import InternalError, TilewrightError

DESCRIPTION = """\
Tilewright compiles deep-learning models (ONNX files) to native code for this machine,
scheduled so that data moves as little as possible."""

EPILOG = """\
examples:
  tilewright run model.onnx                     compile, run on random inputs, show the outputs
  tilewright bench model.onnx                   time it beside the other runtimes installed here
  tilewright explain model.onnx                 which kernels it became, and why
  tilewright tune model.onnx --for 2m           measure other plans, and keep the faster ones
  tilewright compile model.onnx -o model        a directory that starts without compiling, also from C
  tilewright run --help                         everything about one command

environment:
  TILEWRIGHT_CACHE     where compiled kernels are kept (default: ~/.cache/tilewright)
  TILEWRIGHT_CC        the C compiler to use (default: the first of cc, gcc, clang, ziglang)
  TILEWRIGHT_THREADS   the number of worker threads (default: every core)
"""

COMMANDS = (run, bench, explain, compile, tune, records, devices, cache, suite)

USER_ERROR = 2
OUR_ERROR = 3
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE


def command() -> NoReturn:
    """The whole process. Ctrl-C while Python ends finds nothing left to tell: it ends at once, without a word."""
    try:
        status = main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name may hold what the terminal's encoding does not
    parsed = make_parser().parse_args(arguments)
    try:
        status: int = parsed.command(parsed)
        sys.stdout.flush()
        return status
    except TilewrightError as error:
        print(f"tilewright: error: {one_line(str(error))}", file=sys.stderr)
        return USER_ERROR
    except InternalError as error:
        print(f"tilewright: internal error: {one_line(str(error))}", file=sys.stderr)
        print("tilewright: this is a bug of ours; --dump DIR writes what a report of it needs", file=sys.stderr)
        return OUR_ERROR
    except KeyboardInterrupt:
        print("tilewright: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone, which is no error; the exit must not try to flush to it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilewright",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tilewright {tilewright.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add_parser(commands)
    return parser


def one_line(text: str) -> str:
    return common.printable(" ".join(text.split("\n")).strip())
