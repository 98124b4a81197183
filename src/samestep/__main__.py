"""Makes `python -m samestep` the same as the `samestep` command."""

from samestep.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    raise SystemExit(main())
