"""Holds every test to leaving nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import leaks
import pytest

from samestep.launch import job
from samestep.launch.options import Options


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    before = leaks.take()
    yield
    left = leaks.left_since(before)
    if left:
        leaks.end(before)
        pytest.fail("the test left behind " + ", ".join(left), pytrace=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """Collects what would be launched, and launches nothing."""
    seen: list[Options] = []

    def note(options: Options) -> int:
        seen.append(options)
        return 42

    monkeypatch.setattr(job, "launch", note)
    return seen
