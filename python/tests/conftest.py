"""Tests marked gpu run only when asked for by name (-m gpu), as in the rest of the project."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "gpu" in config.getoption("-m"):
        return
    chosen = [item for item in items if item.get_closest_marker("gpu") is None]
    left_out = [item for item in items if item not in chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = chosen
