"""Attention's tiles: the table's beside the candidates that the compile table leaves open, in bits and in time.

Which of them spill stands in bench/results/gpu_compile.md; what that costs is measured here. All have the same bits.
"""

from __future__ import annotations

from typing import Any

from gpu_setting import Setting, randn, require_equal


def candidates(leaf: str, head_dim: int, is_dry: bool) -> dict[str, Any]:
    """name -> tile of all kernels; None: the table's, by kernel."""
    from tbik.kernels.tiles import AttentionTile, attention_tile

    if is_dry:
        return {"table": AttentionTile(16, 16, 4, 1), "parts": AttentionTile(32, 32, 4, 1, parts=2, is_divided=True)}
    whole = attention_tile(leaf, head_dim, "forward")._replace(parts=1, is_divided=False)
    found = {"table": None, "whole": whole, "parts of head_dim": whole._replace(parts=2)}
    found["dK and dV divided"] = whole._replace(is_divided=True)
    for stages in (1, 2, 3):
        found[f"{stages} stages"] = whole._replace(num_stages=stages)
    for warps in (4, 8):
        found[f"{warps} warps"] = whole._replace(num_warps=warps)
    if leaf == "mma:sm_80":  # no wgmma, which needs 64 rows
        found["32 rows"] = whole._replace(rows=32)
    return found


def part_attention_tiles(setting: Setting) -> list[dict[str, Any]]:
    """Proves: out, dq, dk and dv have the same bits by every tile. Times forward and backward by each."""
    import torch
    from triton.runtime.errors import OutOfResources

    from tbik import _C
    from tbik.kernels import attention

    heads, groups, tokens = (2, 1, 20) if setting.is_dry else (32, 8, 4096)
    offsets = list(range(0, heads + 1, heads // groups))
    programs = [_C.run_schedule(0, heads // groups, heads // groups, True, False)] * groups
    cu = torch.tensor([0, tokens], dtype=torch.int32, device=setting.device)
    rows: list[dict[str, Any]] = []
    for dim in (16,) if setting.is_dry else (64, 128, 256):
        for window in (0, 7 if setting.is_dry else 1024):
            pairs = attention.Pairs(dim**-0.5, 0.0, True, window)
            q, grad = (randn(setting, tokens, heads, dim, seed=seed) for seed in (1, 2))
            k, v = (randn(setting, tokens, groups, dim, seed=seed) for seed in (3, 4))

            def forward(tile: Any, q: Any = q, k: Any = k, v: Any = v, pairs: Any = pairs) -> Any:
                options = {"leaf": setting.leaf, "with_rest": True, "tile": tile}
                return attention.forward(q, k, v, cu, cu, None, None, offsets, pairs, **options)

            def backward(
                tile: Any, state: Any, q: Any = q, k: Any = k, v: Any = v, pairs: Any = pairs, grad: Any = grad
            ) -> Any:
                options = {"leaf": setting.leaf, "tile": tile}
                return attention.backward(grad, q, k, v, state, cu, cu, None, offsets, programs, pairs, **options)

            tiles = candidates(setting.leaf, dim, setting.is_dry)
            state = forward(tiles["table"])
            gradients = backward(tiles["table"], state)
            works: dict[str, Any] = {}
            for name, tile in tiles.items():
                row = {"head_dim": dim, "window": window, "tile": name, "numbers": str(tile or "by kernel")}
                rows.append(row)
                try:
                    out = forward(tile)
                    found = backward(tile, state)
                except OutOfResources as error:
                    row["result"] = f"not on this device: {error}"
                    continue
                pairs_of_results = [("out", out.out, state.out), ("dq", found.dq, gradients.dq)]
                pairs_of_results += [("dk", found.dk, gradients.dk), ("dv", found.dv, gradients.dv)]
                for what, actual, expected in pairs_of_results:
                    if setting.is_dry:  # the interpreter's dot has no fixed order
                        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
                    else:
                        require_equal(f"{what} by {name}, head_dim {dim}, window {window}", actual, expected)
                row["result"] = "compared by value" if setting.is_dry else "same bits"
                works[f"{len(rows) - 1} forward_ms"] = lambda tile=tile, run=forward: run(tile)
                works[f"{len(rows) - 1} backward_ms"] = lambda tile=tile, run=backward, state=state: run(tile, state)
            for key, ms in setting.times_ms(works).items():
                number, column = key.split()
                rows[int(number)][column] = ms
    return rows
