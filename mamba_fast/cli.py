"""The command `mamba-fast`: train, generate, eval, info.

Exit codes: 0 done, 1 a fault in mamba-fast itself, 2 bad input (one line on stderr says what and
what to do), 130 stopped with Ctrl-C, 141 the reader of the output went away, 143 stopped by
SIGTERM.

Everything else is in `mamba_fast._cli` and loaded by `main`, not before it: Ctrl-C may come at once,
and ends with 130 while modules are loaded too.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # not from typing, which takes longer to load than all of this
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["build_parser", "main"]


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; nothing heavy is imported for it."""
    from mamba_fast._cli.program import build_parser

    return build_parser()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Parameters
    ----------
    argv
        The words after `mamba-fast`; those of the process if None.
    """
    try:
        from mamba_fast._cli.program import run

        return run(argv)
    except KeyboardInterrupt:
        if sys.stderr is not None:
            sys.stderr.write("mamba-fast: stopped\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
