"""vLLM's processes forked from one that has imported vLLM: each would import it for ten seconds of processor time.

    start_processes_by_fork()     before vLLM is imported, in the engine's process; the server imports it meanwhile

vLLM on a CPU spawns. Python's forkserver makes processes that are as clean as spawned ones: its server has imported
modules and done nothing else, no thread, no operator. A process gets the environment of the one that starts it, as a
spawned one does. Only how processes begin differs, in the engines of `tbik verify`; the plug-in has no part in it.
Bits: none here.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from multiprocessing import context, forkserver
from typing import Any

PRELOADED = (
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.engine.core",
    "vllm.model_executor.model_loader",
)


class _Process(context.ForkServerProcess):
    def start(self) -> None:
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        super().run()


class _Context(context.ForkServerContext):
    Process = _Process  # type: ignore[assignment]


def start_processes_by_fork() -> None:
    multiprocessing.set_forkserver_preload([f"{__package__}.preload"])
    forkserver.ensure_running()
    replace_context()


def replace_context() -> None:
    """vLLM's get_mp_context, before the modules that take its name."""
    system: Any = importlib.import_module("vllm.utils.system_utils")
    system.get_mp_context = _Context
