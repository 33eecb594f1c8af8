"""`python -m mamba_fast`: the same as the command `mamba-fast`."""

import sys

from mamba_fast.cli import main

if __name__ == "__main__":
    sys.exit(main())
