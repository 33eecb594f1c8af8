# cython: language_level=3, freethreading_compatible=True
"""What this processor can run, and what this build holds; see backends/_dispatch.py."""

cdef extern from "_cpu.h":
    int mf_x86_level()

cdef extern from *:
    """
    #ifndef MAMBA_FAST_VARIANTS
    #define MAMBA_FAST_VARIANTS 0
    #endif
    """
    int MAMBA_FAST_VARIANTS


def supported_variants():
    """The names of the kernel variants that this machine can run, slowest first."""
    cdef int level = mf_x86_level()
    return ("baseline", "v3", "v4")[:1 + (level >= 3) + (level >= 4)]


def built_variants():
    """The names of the kernel variants that were compiled into this installation, slowest first."""
    return ("baseline", "v3", "v4") if MAMBA_FAST_VARIANTS else ("baseline",)
