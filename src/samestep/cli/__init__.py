"""The `samestep` command: one file for each subcommand."""

__all__: list[str] = []
