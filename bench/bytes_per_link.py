"""Who sends how many bytes over which wire: the placements of an all-reduce at 64 nodes x 8 ranks, without moving any.

    python bench/bytes_per_link.py --output bench/results/bytes_per_link.md

Figures are exact counts from the same code that runs the collectives (tbik.backend.bytes_per_link), of the rank that
sends most, in units of the message n.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from tbik.backend import bytes_per_link

WORLDS = ((64, 8), (8, 8), (2, 2))  # nodes, ranks per node
NUM_BYTES = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines = [
        "# Bytes per link",
        "",
        f"All-reduce of n = {NUM_BYTES >> 20} MiB, bytes sent by the rank that sends most, in units of n; counted by",
        "`python bench/bytes_per_link.py` (`tbik.backend.bytes_per_link`), nothing moves. bf16 covers travel between",
        "nodes as fp32, so that half costs twice; results travel as bf16.",
        "",
        "| nodes x ranks | dtype | placement | between nodes | inside the node | to one rank | out of a node |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for nodes, per_node in WORLDS:
        for dtype in (torch.float32, torch.bfloat16):
            for placement in ("two_level", "two_shot", "one_shot"):
                rows = bytes_per_link(
                    "all_reduce",
                    NUM_BYTES // dtype.itemsize,
                    dtype,
                    world_size=nodes * per_node,
                    node_size=per_node,
                    placement=placement,
                )
                between, within, link = (
                    max(row[key] for row in rows) / NUM_BYTES
                    for key in ("between_nodes", "within_node", "largest_link")
                )
                busiest = max(
                    sum(row["between_nodes"] for row in rows[a * per_node : (a + 1) * per_node]) for a in range(nodes)
                )
                name = str(dtype).removeprefix("torch.")
                lines.append(
                    f"| {nodes} x {per_node} | {name} | {placement} | {between:.4f} | {within:.4f} | {link:.4f} | "
                    f"{busiest / NUM_BYTES:.3f} |"
                )
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
