"""tbik in vLLM: one switch, and the same tokens and log-probability bits at every tensor-parallel size.

    TBIK=1                          off otherwise; read by the plug-in that vLLM loads in each of its processes
    TBIK_VLLM=full | allreduce      full (default): every sum; allreduce: the tensor-parallel collectives alone
    TBIK_PLAN='{"leaves": 8}'       fields of a TreePlan; by default the checkpoint's (`tbik_plan` of its config.json),
                                    else one derived from the config for equal shards

README.md lists the symbols of vLLM that are touched. Errors: PlanError, before the engine starts.
Bits: batch-invariant and layout-invariant (tests/test_vllm_engine.py); of `allreduce` alone: deterministic.
"""

from __future__ import annotations

import os

from tbik.errors import PlanError

__all__ = ["register"]


def register() -> None:
    """What the entry point `vllm.general_plugins` names. vLLM may call it more than once per process."""
    switch = os.environ.get("TBIK", "0")
    if switch in ("", "0"):
        return
    if switch != "1":
        raise PlanError(f"TBIK: expected 1 (on) or 0 (off), got {switch!r}")
    from tbik_vllm.plugin import install

    install()
