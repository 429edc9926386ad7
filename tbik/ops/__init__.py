"""Operators whose bits do not depend on the layout: one file per operator = schema, CPU kernel, backward, fake."""

from tbik.ops.linear import PackedWeight, linear, linear_group, pack_weight

__all__ = ["PackedWeight", "linear", "linear_group", "pack_weight"]
