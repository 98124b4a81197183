"""Which sample goes to which rank, and the real data that the examples train on."""

__all__: list[str] = []
