"""The backends that come with the package; reached by name through `mamba_fast.registry` alone."""
