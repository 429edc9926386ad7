"""One rank of tests/test_trainer.py::test_verify_trainer_ignores_the_number_of_processes, started by torchrun.

torchrun --nproc-per-node 2 tests/trainer_program.py FOLDER OUT MICRO_SAMPLES MICRO_STEPS     rank 0 writes OUT
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist
from tbik_trainer import Trainer
from test_trainer import samples, trained


def main() -> None:
    folder, out, micro_samples, micro_steps = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        options = {"ddp_backend": "gloo"}
        result = trained(
            Trainer, Path(folder), samples(), Path(scratch), int(micro_samples), int(micro_steps), **options
        )
    everywhere: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, result)
    assert all(of == everywhere[0] for of in everywhere), everywhere
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
