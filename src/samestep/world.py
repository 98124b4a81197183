"""Who am I: rank, world size, host and device, read from the launcher's environment."""

import os

__all__ = ["environment"]


def environment() -> dict[str, str]:
    """Return a copy of this process's environment variables, for those who start other processes."""
    return dict(os.environ)
