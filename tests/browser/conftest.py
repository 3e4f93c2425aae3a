"""A browser for the tests of each page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.browser import opened_browser, why_no_browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    reason = why_no_browser()
    if reason is not None:
        pytest.skip(reason)
    with opened_browser() as browser:
        yield browser
