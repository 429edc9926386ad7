"""Imported by the fork server of forking.py; importing this is its whole use."""

from __future__ import annotations

import importlib

from tbik_vllm.forking import PRELOADED, replace_context

replace_context()
for name in PRELOADED:
    importlib.import_module(name)
