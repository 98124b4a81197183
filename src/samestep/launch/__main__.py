"""Makes `python -m samestep.launch` what `python -m torch.distributed.launch` was."""

from samestep.cli.launch import entry

__all__: list[str] = []

if __name__ == "__main__":
    entry()
