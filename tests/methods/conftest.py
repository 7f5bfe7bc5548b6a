"""`pytest tests/methods/test_contract.py --collection DIR` asks the methods of another collection the same questions."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--collection", default=None, help="a directory with methods/; the repository's own when absent")
