"""The whole command line: parsing, running a command, and what becomes of errors."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn

from mamba_fast._cli import evaluate, generate, info, train
from mamba_fast._cli.options import DEBUG_VARIABLE, FailedError, UsageError, flush, in_flags, write
from mamba_fast.interrupts import Terminated

__all__ = ["build_parser", "run"]

DESCRIPTION = """\
Train and run Mamba language models on this machine: no torch, no CUDA.

  mamba-fast train --data my_texts/ --out my_model    learn from text
  mamba-fast generate my_model --prompt "Once"         write text
  mamba-fast eval my_model --data other.txt            measure how well it predicts
  mamba-fast info                                      what is installed and what runs here
"""

EPILOG = "mamba-fast COMMAND --help explains each command, with examples."


# What other programs call an option, where it is not spelt alike.
_OTHER_NAMES = {
    "--learning-rate": "--lr",
    "--output": "--out",
    "--output-dir": "--out",
    "--layers": "--n-layers",
    "--context-length": "--seq-len",
    "--block-size": "--seq-len",
    "--length": "--max-new-tokens",
    "--max-length": "--max-new-tokens",
    "--max-tokens": "--max-new-tokens",
    "--num-steps": "--steps",
    "--max-steps": "--steps",
    "--num-epochs": "--epochs",
    "--device": "--backend",
}


class _Parser(argparse.ArgumentParser):
    """argparse, with errors of one line, and help whose failure to be written is one."""

    def print_help(self, file: Any = None) -> None:
        if file is None:
            write(self.format_help())
        else:
            super().print_help(file)

    def flags(self) -> list[str]:
        """The long options there are."""
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown and " " in self.prog:  # a command, which knows better than the program what it takes
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._meant(unknown)}")
        return namespace, unknown

    def _meant(self, unknown: Sequence[str]) -> str:
        """The option that an unknown one may stand for."""
        flags = self.flags()
        for word in (word.split("=")[0] for word in unknown if word.startswith("--")):
            near = difflib.get_close_matches(word, flags, n=1, cutoff=0.75)
            other = _OTHER_NAMES.get(word)
            if other in flags:
                near = [other]
            if near:
                return f"; did you mean {near[0]}?"
        return ""

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
        command.set_defaults(run=module.run, flags=command.flags())
    return parser


def run(argv: Sequence[str] | None) -> int:
    """Run one command and return its exit code; see `mamba_fast.cli.main`."""
    flags: Collection[str] = ()
    name, debug = "mamba-fast", os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    with _standard_streams():
        try:
            args = _parse(argv)
            if isinstance(args, int):
                code = args
            else:
                name, debug = f"mamba-fast {args.command}", debug or args.debug
                flags = args.flags
                args.run(args)
                code = 0
            flush()
            return code
        except KeyboardInterrupt as stop:
            _say(f"{name}: {stop.args[0] if stop.args else 'stopped'}")
            return 143 if isinstance(stop, Terminated) else 130
        except BrokenPipeError:
            _discard_stdout()
            return 141
        except Exception as error:
            if _is_interrupt(error):
                _say(f"{name}: stopped")
                return 130
            if debug:
                traceback.print_exc()
            return _report(name, error, flags)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace | int:
    """The words of the command line; the exit code where nothing is left to do."""
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as stop:  # --help, or an error that has been printed
        return stop.code if isinstance(stop.code, int) else 2
    if args.version:
        import mamba_fast

        write(f"mamba-fast {mamba_fast.__version__}\n")
        return 0
    if args.command is None:
        _say("mamba-fast: error: give a command: train, generate, eval or info (try mamba-fast --help)")
        return 2
    return args


def _report(name: str, error: Exception, flags: Collection[str]) -> int:
    """One line on stderr; the exit code."""
    try:
        flush()  # what was written before comes before
    except OSError:
        _discard_stdout()
    expected: tuple[type[Exception], ...] = (
        ValueError, OSError, FailedError, ModuleNotFoundError, FloatingPointError, MemoryError,
    )  # fmt: skip
    if "mamba_fast.backend" in sys.modules:  # else none of its errors can have been raised
        expected += (sys.modules["mamba_fast.backend"].BackendError,)
    if isinstance(error, expected):
        line = _one_line(error)
        ours = not isinstance(error, OSError) or error.filename is None  # else a path and the system's words
        if ours and not isinstance(error, UsageError):
            line = in_flags(line, flags)
        _say(f"{name}: error: {line}")
        return 2
    _say(
        f"{name}: internal error: {type(error).__name__}: {_one_line(error)} "
        "(please report it, with what --debug shows)"
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


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether an error came of Ctrl-C: a compiled module that it meets while it loads says ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _say(line: str) -> None:
    """A line on stderr, if there is anywhere for it to go."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


@contextmanager
def _standard_streams() -> Iterator[None]:
    """Stand-ins for standard streams that are closed: what is written there goes nowhere, as with
    `print`, and no file that is opened gets their numbers, which libraries write to. A closed stdin
    stays None: what wants to read it can say so."""
    with ExitStack() as stack:
        # In this order, because each takes the lowest number that is free.
        if sys.stdin is None:
            stack.enter_context(open(os.devnull, "rb"))
        for stream in ("stdout", "stderr"):
            if getattr(sys, stream) is None:
                setattr(sys, stream, stack.enter_context(open(os.devnull, "w", encoding="utf-8")))
                stack.callback(setattr, sys, stream, None)
        yield
