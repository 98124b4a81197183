"""Holds every test to leaving nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import leaks
import pytest


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    before = leaks.take()
    yield
    left = leaks.left_since(before)
    if left:
        leaks.end(before)
        pytest.fail("the test left behind " + ", ".join(left), pytrace=False)
