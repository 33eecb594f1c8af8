"""Says in one line what a machine lacks for building mamba_fast. Run by make before anything else.

Plain enough for any Python 3, because an old one is among the things it reports.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig


def missing() -> str:
    """What to do first, or an empty string."""
    here = "%s is Python %d.%d" % (sys.executable, *sys.version_info[:2])
    if sys.version_info < (3, 11):
        return here + "; 3.11 or newer is needed: choose one with make PYTHON=/path/to/python3"
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            return here + " without the module " + module + " (Debian, Ubuntu: apt install python3-venv)"
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if not os.path.exists(header):
        return here + " without its C headers, " + header + " (Debian, Ubuntu: apt install python3-dev)"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return "no C compiler: " + compiler + " is not on PATH (Debian, Ubuntu: apt install gcc; or set CC)"
    return ""


if __name__ == "__main__":
    message = missing()
    if message:
        sys.exit("cannot build mamba_fast: " + message)
