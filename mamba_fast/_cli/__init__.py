"""The commands of `mamba-fast`, a module each; `program` puts them together."""
