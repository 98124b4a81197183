"""What a person asks when something looks wrong."""

__all__: list[str] = []
