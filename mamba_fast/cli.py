"""The command `mamba-fast`: train, generate, eval, info.

Exit codes: 0 done, 1 a fault in mamba-fast itself, 2 bad input (one line on stderr says what and
what to do), 130 stopped with Ctrl-C, 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from mamba_fast._cli import evaluate, generate, info, train
from mamba_fast._cli.options import DEBUG_VARIABLE, FailedError

__all__ = ["build_parser", "main"]

DESCRIPTION = """\
Train and run Mamba language models on this machine: no torch, no CUDA.

  mamba-fast train --data my_texts/ --out my_model    learn from text
  mamba-fast generate my_model --prompt "Once"         write text
  mamba-fast eval my_model --data other.txt            measure how well it predicts
  mamba-fast info                                      what is installed and what runs here
"""

EPILOG = "mamba-fast COMMAND --help explains each command, with examples."


class _Parser(argparse.ArgumentParser):
    """argparse, with errors of one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (try {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; nothing heavy is imported for it."""
    parser = _Parser(
        prog="mamba-fast",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for module in (train, generate, evaluate, info):
        command = commands.add_parser(
            module.NAME,
            help=module.SUMMARY,
            usage=f"mamba-fast {module.NAME} {module.USAGE}",
            description=module.DESCRIPTION,
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_options(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Parameters
    ----------
    argv
        The words after `mamba-fast`; those of the process if None.
    """
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # --help, or an error that has been printed
        return stop.code if isinstance(stop.code, int) else 2
    if args.version:
        import mamba_fast

        print(f"mamba-fast {mamba_fast.__version__}")
        return 0
    if args.command is None:
        print(
            "mamba-fast: error: give a command: train, generate, eval or info (try mamba-fast --help)",
            file=sys.stderr,
        )
        return 2
    debug = args.debug or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    try:
        args.run(args)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt as stop:
        print(f"mamba-fast {args.command}: {stop.args[0] if stop.args else 'stopped'}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard_stdout()
        return 141
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _report(args.command, error)


def _report(command: str, error: Exception) -> int:
    """One line on stderr; the exit code."""
    expected: tuple[type[Exception], ...] = (
        ValueError, OSError, FailedError, ModuleNotFoundError, FloatingPointError, MemoryError,
    )  # fmt: skip
    if "mamba_fast.backend" in sys.modules:  # else none of its errors can have been raised
        expected += (sys.modules["mamba_fast.backend"].BackendError,)
    if isinstance(error, expected):
        print(f"mamba-fast {command}: error: {_one_line(error)}", file=sys.stderr)
        return 2
    print(
        f"mamba-fast {command}: internal error: {type(error).__name__}: {_one_line(error)} "
        "(please report it, with what --debug shows)",
        file=sys.stderr,
    )
    return 1


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, MemoryError):
        return "out of memory: use a smaller --batch-size or --seq-len, or a smaller model"
    return " ".join(str(error).split()) or type(error).__name__


def _discard_stdout() -> None:
    """Let the interpreter's last flush of a closed pipe go nowhere instead of into an error."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):  # not a real file: nothing will be flushed to it
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


if __name__ == "__main__":
    sys.exit(main())
