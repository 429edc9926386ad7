"""A product that is none: speaks the protocol of tbik.engines and answers by arithmetic on token ids. For test_engines.

FAKE_ENGINE in the environment says how it misbehaves. "tbik" answers depend on the prompt alone; "stock" ones on the TP
size and the batch too, by one bit of each log-probability.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
from typing import Any

from tbik.plan import TreePlan

BEHAVIOUR = os.environ.get("FAKE_ENGINE", "")


def reply(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def ranks(job: dict[str, Any]) -> list[dict[str, Any]]:
    plan = TreePlan.from_key(job["plan"])
    if BEHAVIOUR == "other plan":
        plan = TreePlan(leaves=plan.leaves + 1)
    return [
        {
            "rank": rank,
            "plan": plan.fingerprint() if job["mode"] == "tbik" else None,
            "logprobs_mode": "processed_logprobs" if BEHAVIOUR == "processed" else "raw_logprobs",
            "shards": {"w": [[8 * rank // job["tp"], 8 * (rank + 1) // job["tp"]], 80 // job["tp"]]},
            "bytes_sent": 5 if job["tp"] > 1 else 0,
            "environment": {"engine": "fake 1.0"},
        }
        for rank in range(job["tp"])
    ]


def answer(job: dict[str, Any], command: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    moved = job["tp"] * 10 + len(command["prompts"]) if job["mode"] == "stock" else 0
    tokens = [(sum(prompt) + step) % 512 for step in range(command["new_tokens"])]
    bits = [(struct.unpack(">I", struct.pack(">f", -1.5 - t))[0] + moved).to_bytes(4, "big").hex() for t in tokens]
    return {
        "tokens": tokens,
        "bits": bits,
        "top_ids": [[t] for t in tokens],
        "top_bits": [[b] for b in bits],
        "cached": 3 if job["prefix_cache"] and BEHAVIOUR != "never cached" else 0,
    }


def wait_for_the_end() -> None:
    for line in sys.stdin:
        commands.append(line)
        arrived.release()
    os.killpg(0, 9)


job = json.loads(sys.stdin.readline())
commands: list[str] = []
arrived = threading.Semaphore(0)
threading.Thread(target=wait_for_the_end, daemon=True).start()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(f"child {child.pid}", file=sys.stderr, flush=True)
if BEHAVIOUR == "exits":
    print("SomeError: the reason", file=sys.stderr, flush=True)
    sys.exit(3)
if BEHAVIOUR == "refuses":
    reply(kind="refused", text="PlanError: unsupported")
if BEHAVIOUR == "refuses in a child":
    print("(Worker 1) tbik.errors.PlanError: model.layers.0.mlp: unsupported", file=sys.stderr, flush=True)
    reply(kind="failed", text="RuntimeError: see above")
if BEHAVIOUR == "silent":
    time.sleep(300)
reply(kind="ready", ranks=ranks(job))
while True:
    arrived.acquire()
    command = json.loads(commands.pop(0))
    if BEHAVIOUR == "dies":
        os.kill(os.getpid(), 9)
    if command["do"] == "generate":
        reply(kind="answers", answers=[answer(job, command, prompt) for prompt in command["prompts"]], seconds=0.5)
    elif command["do"] == "call":
        reply(kind="results", results=[command["method"]] * job["tp"])
    else:
        reply(kind="ready", ranks=ranks(job))
