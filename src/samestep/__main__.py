"""Makes `python -m samestep` the same as the `samestep` command."""

from samestep.cli.main import entry

__all__: list[str] = []

if __name__ == "__main__":
    entry()
