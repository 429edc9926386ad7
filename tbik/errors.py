"""What can go wrong, in five classes.

Every message says what, where, expected, got and what would work.
"""

from __future__ import annotations


class TbikError(Exception):
    """Base of every error that tbik raises on purpose."""


class PlanError(TbikError, ValueError):
    """An unsupported shape, dtype, world size, plan or version; raised at construction, before any arithmetic."""


class TransportError(TbikError, RuntimeError):
    """Bytes did not arrive: a peer is gone, or the ranks disagree about the call."""


class TransportTimeout(TransportError):
    """Bytes did not arrive before the deadline."""


class IntegrityError(TbikError, AssertionError):
    """Two values that must have the same bits do not."""
