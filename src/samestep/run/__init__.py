"""What a training program holds on to: its weights on disk, and what its ranks bring together."""

__all__: list[str] = []
