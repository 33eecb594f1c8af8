"""The commands of `mamba-fast`, a module each; `mamba_fast.cli` puts them together."""
