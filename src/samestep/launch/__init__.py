"""Starts the worker processes of a run, watches them, passes their output on and reports how they ended."""

__all__: list[str] = []
