"""pytest: the marker `limit_tensor_memory("24MiB", device="cpu")` and the fixture `memlab`.

pytest loads this plugin in every project of an environment, also in one without torch. So this
module lies outside the package, whose import imports torch, and imports koila.memlab when a test
uses one of the two.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from types import ModuleType
from typing import Any

import pytest

_UNITS = {
    "": 1,
    "B": 1,
    "K": 1000,
    "KB": 1000,
    "M": 10**6,
    "MB": 10**6,
    "G": 10**9,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def size_of(limit: int | str) -> int:
    """Bytes of an int or of a text like "24MiB" or "512 MB"."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(limit))
    if not found or found.group(2).upper() not in _UNITS:
        raise ValueError(f"limit_tensor_memory({limit!r}): expected bytes, or a text like '24MiB'")
    return int(float(found.group(1)) * _UNITS[found.group(2).upper()])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "limit_tensor_memory(limit, device=None): fail if the test needs more tensor memory than "
        "this above its start",
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    marker = item.get_closest_marker("limit_tensor_memory")
    if marker is None:
        yield
        return
    from koila.memlab import measure
    from koila.memlab.utils import readable_size

    limit = size_of(marker.args[0] if marker.args else marker.kwargs["limit"])
    with measure(marker.kwargs.get("device")) as m:
        outcome = yield
    if outcome.excinfo is None and m.rise > limit:
        text = (
            f"needed {readable_size(m.rise)} of tensor memory ({m.rise} bytes), "
            f"limit {readable_size(limit)} ({limit} bytes)"
        )
        outcome.force_exception(pytest.fail.Exception(text, pytrace=False))


@pytest.fixture
def memlab() -> ModuleType:
    """koila.memlab with its hooks installed: memlab.measure(), memlab.snapshot(), ..."""
    import koila.memlab

    koila.memlab.start()
    return koila.memlab
