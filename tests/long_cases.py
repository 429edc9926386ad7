"""Parameters that only `.ci/run` and MARKERS="not sanitize" take, so that `make test` stays under 12 minutes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long_cases(values: Iterable[Any]) -> list[Any]:
    """Each value (a tuple: the values of one case) as a parameter marked long."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.long) for v in values]
