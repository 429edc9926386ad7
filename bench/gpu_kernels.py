"""Parts of bench/gpu.py that take the kernels by themselves: bits of the tree matmul, times of folds, rows, attention.

Their rows are compared with the CPU's kernels in bits first, then timed beside torch's. Every operator through tbik.ops
is in bench/gpu_operators.py.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from gpu_setting import (
    FEW_ROWS,
    LARGE,
    ROOT,
    Setting,
    beside,
    in_graph,
    matmul,
    randn,
    require_equal,
)


def part_tests(setting: Setting) -> list[dict[str, Any]]:
    """Proves what tests/test_kernels_*.py prove, on the device: kernels against the oracle and the CPU, in bits."""
    if setting.is_dry:
        return [{"check": "tests of tbik.kernels", "result": "not made: in a dry run they are make test's"}]
    tests = sorted(str(path) for path in (ROOT / "tests").glob("test_kernels_*.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, cwd=ROOT)
    if done.returncode:
        raise AssertionError(
            f"tests of tbik.kernels ended with {done.returncode}:\n{done.stdout[-6000:]}{done.stderr[-1000:]}"
        )
    return [{"check": "tests of tbik.kernels", "result": done.stdout.strip().splitlines()[-1]}]


def part_bits(setting: Setting) -> list[dict[str, Any]]:
    """Proves, of the tree matmul: whole form = split form = by descriptors, row alone = row in the batch, graph = eager
    for the tensor-core leaf; and that the fma leaf has the bits of the CPU's kernel."""
    import torch

    rows = []
    for m, k, n in setting.shapes if setting.is_dry else (*LARGE[:2], *FEW_ROWS):
        x, w = setting.operands(m, k, n)
        whole = matmul(setting, x, w, form="whole")
        require_equal(f"whole = split at {m}x{k}x{n}", matmul(setting, x, w, form="split"), whole)
        if setting.architecture in ("sm_90", "sm_100"):
            described = matmul(setting, x, w, form="described")
            require_equal(f"by descriptors at {m}x{k}x{n}", described, whole)
        require_equal(f"row alone at {m}x{k}x{n}", matmul(setting, x[-1:], w), whole[-1:])
        if not setting.is_dry:
            require_equal(f"CUDA graph at {m}x{k}x{n}", in_graph(lambda x=x, w=w: matmul(setting, x, w)), whole)
        rows.append({"check": "whole = split = row alone" + ("" if setting.is_dry else " = graph"), "shape": [m, k, n]})
    x, w = setting.operands(3, 12, 5) if setting.is_dry else setting.operands(33, 257, 65)
    if not setting.is_dry:  # the interpreter's fma rounds twice; the tests put the correct one in its place
        from tbik import TreePlan, ops

        actual = matmul(setting, x, w, leaf="fma")
        require_equal("fma = CPU", actual, ops.linear(x.cpu(), w.cpu(), plan=TreePlan(leaves=setting.leaves)))
        rows.append({"check": "fma leaf = CPU", "shape": [33, 257, 65]})
    assert torch.isfinite(whole.float()).all()
    return rows


def part_combine(setting: Setting) -> list[dict[str, Any]]:
    """Times folds of R buffers to one. It proves nothing; their bits are the parts "tests" and "collective_bits"."""
    import torch

    from tbik import _C
    from tbik.kernels import combine

    rows = []
    elements = 256 if setting.is_dry else 2**24
    for buffers in (2,) if setting.is_dry else (2, 4, 8):
        x = torch.randn(buffers, elements, device=setting.device)
        schedule = _C.run_schedule(0, buffers, buffers, True, False)
        ms = setting.time_ms(lambda x=x, schedule=schedule: combine.combine(x, schedule, out_dtype=torch.bfloat16))
        moved = x.numel() * 4 + elements * 2
        rows.append({"buffers": buffers, "elements": elements, "ms": ms, "GB_per_s": moved / ms / 1e6})
    return rows


def part_rows(setting: Setting) -> list[dict[str, Any]]:
    """Proves that norms, activations, rope and its tables have the CPU's bits; times them beside torch's."""
    import torch
    from torch.nn import functional

    from tbik import _C
    from tbik.kernels import on_cuda as kernels

    tokens, k = (3, 40) if setting.is_dry else (8192, 4096)
    bf16 = torch.bfloat16
    x, residual, dy = (randn(setting, tokens, k, seed=i) for i in range(3))
    w = randn(setting, k, dtype="float32")
    few = [t[:3].cpu() for t in (x, residual, dy)]
    arguments = (1e-6, False, False, bf16)
    y, h = kernels.norm(x, residual, w, None, *arguments)
    expected_y, expected_h = _C.norm(few[0], few[1], w.cpu(), None, *arguments)
    require_equal("add and rms norm = CPU", y[:3], expected_y)
    require_equal("its sum = CPU", h[:3], expected_h)
    dx = kernels.norm_dx(dy, x, w, None, *arguments, bf16)
    require_equal("rms norm dx = CPU", dx[:3], _C.norm_dx(few[2], few[0], w.cpu(), None, *arguments, bf16))
    gated = kernels.activation(x, residual, "silu")
    require_equal("silu and mul = CPU", gated[:3], _C.activation(few[0], few[1], "silu"))
    heads, dim = (2, 8) if setting.is_dry else (32, 128)
    q = randn(setting, tokens, heads, dim)
    frequencies = torch.logspace(0, -4, dim // 2)
    sin, cos = kernels.rope_tables(torch.arange(tokens, device=setting.device), frequencies.to(setting.device))
    sin_cpu, cos_cpu = _C.rope_tables(torch.arange(3), frequencies)
    require_equal("rope tables = CPU", sin[:3], sin_cpu)
    turned = kernels.rope(q, sin, cos, False, False, bf16)
    require_equal("rope = CPU", turned[:3], _C.rope(q[:3].cpu(), sin_cpu, cos_cpu, False, False, bf16))
    size = x.numel() * 2
    weight = w.to(bf16)

    def torch_rope() -> Any:
        a, b = q.float().chunk(2, -1)
        s, c = sin[:, None], cos[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1).to(bf16)

    return [
        beside(
            setting,
            "add and rms norm",
            [tokens, k],
            lambda: kernels.norm(x, residual, w, None, *arguments),
            lambda: functional.rms_norm(x + residual, (k,), weight, 1e-6),
            4 * size,
        ),
        beside(
            setting,
            "rms norm gradients",
            [tokens, k],
            lambda: kernels.norm_gradients(
                dy, x, w, None, *arguments, bf16, True, True, False, 1, [*range(0, tokens, 512), tokens]
            ),
            lambda: functional.rms_norm(x, (k,), weight, 1e-6),  # the forward: its backward wants a graph
            5 * size,
        ),
        beside(
            setting,
            "silu and mul",
            [tokens, k],
            lambda: kernels.activation(x, residual, "silu"),
            lambda: functional.silu(x) * residual,
            3 * size,
        ),
        beside(
            setting,
            "rope",
            [tokens, heads, dim],
            lambda: kernels.rope(q, sin, cos, False, False, bf16),
            torch_rope,
            2 * q.numel() * 2,
        ),
    ]


def part_vocabulary(setting: Setting) -> list[dict[str, Any]]:
    """Proves that log-softmax and the gradient of cross-entropy have the CPU's bits; times them beside torch's."""
    import torch
    from torch.nn import functional

    from tbik import _C
    from tbik.kernels import on_cuda as kernels

    rows: list[dict[str, Any]] = []
    for tokens, vocab in ((3, 100),) if setting.is_dry else ((16, 128256), (4096, 128256)):
        x = randn(setting, tokens, vocab) * 4
        targets = torch.arange(tokens, device=setting.device) % vocab
        y, lse = kernels.vocab_log_softmax(x, setting.leaves)
        expected, expected_lse = _C.vocab_log_softmax(x[:3].cpu(), setting.leaves)
        require_equal("log-softmax = CPU", y[:3], expected)
        require_equal("lse = CPU", lse[:3], expected_lse)
        g = torch.ones_like(lse)
        dx = kernels.vocab_cross_entropy_dx(g, x, targets, lse, 0, -100)
        expected = _C.vocab_cross_entropy_dx(g[:3].cpu(), x[:3].cpu(), targets[:3].cpu(), expected_lse, 0, -100)
        require_equal("cross-entropy dx = CPU", dx[:3], expected)
        size = x.numel() * 2

        def losses(x: Any = x, targets: Any = targets) -> Any:
            picked = kernels.vocab_pick(x, targets[:, None], 0)[:, 0]
            return kernels.vocab_losses(kernels.vocab_log_sum_exp(x, setting.leaves), picked, targets, -100)

        rows += [
            beside(
                setting,
                "log-softmax",
                [tokens, vocab],
                lambda x=x: kernels.vocab_log_softmax(x, setting.leaves),
                lambda x=x: torch.log_softmax(x, -1),
                2 * size,
            ),
            beside(
                setting,
                "cross-entropy",
                [tokens, vocab],
                losses,
                lambda x=x, t=targets: functional.cross_entropy(x, t, reduction="none"),
                size,
            ),
            beside(
                setting,
                "cross-entropy dx",
                [tokens, vocab],
                lambda x=x, t=targets, g=g, lse=lse: kernels.vocab_cross_entropy_dx(g, x, t, lse, 0, -100),
                lambda x=x: torch.softmax(x, -1),
                2 * size,
            ),
        ]
    return rows


def part_attention(setting: Setting) -> list[dict[str, Any]]:
    """Proves, by tensor cores: a query alone = in its prompt, pages = packed, graph = eager; by fma: the CPU's bits.
    Times beside SDPA."""
    import torch
    from torch.nn import functional

    from tbik import _C
    from tbik.kernels import attention
    from tbik.kernels.tiles import attention_tile

    small: dict[str, Any] = {"rows": 16, "keys": 16, "num_warps": 4, "num_stages": 1}
    tile = attention_tile(setting.leaf, 16, "forward")._replace(**small) if setting.is_dry else None
    heads, groups, dim = (2, 1, 16) if setting.is_dry else (32, 8, 128)
    offsets = list(range(0, heads + 1, heads // groups))
    pairs = attention.Pairs(dim**-0.5, 0.0, True, 0)
    programs = [_C.run_schedule(0, heads // groups, heads // groups, True, False)] * groups
    rows: list[dict[str, Any]] = []

    def starts(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=setting.device)

    def run(q: Any, k: Any, v: Any, cu_q: Any, extent: Any, table: Any = None, leaf: str = setting.leaf) -> Any:
        return attention.forward(q, k, v, cu_q, extent, table, None, offsets, pairs, leaf=leaf, tile=tile)

    for length in (70,) if setting.is_dry else (1024, 8192):
        q, k, v = randn(setting, length, heads, dim), *(randn(setting, length, groups, dim, seed=i) for i in (1, 2))
        cu = starts(0, length)
        state = run(q, k, v, cu, cu)
        alone = run(q[-1:], k, v, starts(0, 1), cu)
        if not setting.is_dry:  # the interpreter's dot has no fixed order
            require_equal(f"last query alone at {length}", alone.out, state.out[-1:])
        page = 16
        pages = -(-length // page)
        table = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).to(setting.device)
        caches = [torch.zeros(pages, page, groups, dim, dtype=q.dtype, device=setting.device) for _ in "kv"]
        at = torch.arange(length, device=setting.device)
        attention.store_kv(k, v, *caches, table[at // page] * page + at % page)
        paged = run(q[-1:], *caches, starts(0, 1), starts(length), table[None].int())
        if not setting.is_dry:
            require_equal(f"pages at {length}", paged.out, state.out[-1:])
            graph = in_graph(lambda q=q, k=k, v=v, cu=cu: run(q, k, v, cu, cu).out)
            require_equal(f"CUDA graph at {length}", graph, state.out)
        turned = [t.transpose(0, 1)[None] for t in (q, k, v)]
        flops = 2 * 2 * heads * dim * length * length / 2

        def sdpa(turned: Any = turned) -> Any:
            return functional.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)

        row = {"operator": "prefill", "shape": [length, heads, groups, dim]}
        row["ms"] = setting.time_ms(lambda q=q, k=k, v=v, cu=cu: run(q, k, v, cu, cu))
        row["torch_ms"] = setting.time_ms(sdpa)
        row |= {"speed_of_torch": row["torch_ms"] / row["ms"], "TFLOPS": flops / row["ms"] / 1e9}
        rows.append(row)

        def backward(q: Any = q, k: Any = k, v: Any = v, cu: Any = cu, state: Any = state) -> Any:
            full = attention.State(*state[:3], torch.zeros_like(state.out))
            return attention.backward(
                q, q, k, v, full, cu, cu, None, offsets, programs, pairs, leaf=setting.leaf, tile=tile
            )

        leaves = [t.detach().clone().requires_grad_() for t in turned]
        out = sdpa(leaves)
        row = {"operator": "backward", "shape": [length, heads, groups, dim], "ms": setting.time_ms(backward)}
        row["torch_ms"] = setting.time_ms(
            lambda out=out, leaves=leaves: torch.autograd.grad(out, leaves, out, retain_graph=True)
        )
        row |= {"speed_of_torch": row["torch_ms"] / row["ms"], "TFLOPS": 2.5 * flops / row["ms"] / 1e9}
        rows.append(row)
    sequences, length = (2, 20) if setting.is_dry else (64, 4096)
    q = randn(setting, sequences, heads, dim)
    page = 16
    pages = -(-length // page)
    caches = [randn(setting, sequences * pages, page, groups, dim, seed=i) for i in (3, 4)]
    table = torch.arange(sequences * pages, device=setting.device).view(sequences, pages).int()
    cu = starts(*range(sequences + 1))
    lengths = starts(*[length] * sequences)
    whole = [cache.view(sequences, pages * page, groups, dim)[:, :length].transpose(1, 2) for cache in caches]
    row = {"operator": "decoding", "shape": [sequences, length, heads, groups, dim]}
    row["ms"] = setting.time_ms(lambda: run(q, *caches, cu, lengths, table))
    row["torch_ms"] = setting.time_ms(
        lambda: functional.scaled_dot_product_attention(q[:, :, None], *whole, enable_gqa=True)
    )
    moved = 2 * sequences * length * groups * dim * 2
    rows.append({**row, "speed_of_torch": row["torch_ms"] / row["ms"], "GB_per_s": moved / row["ms"] / 1e6})
    if not setting.is_dry:  # the interpreter's fma rounds twice
        q, k, v = randn(setting, 5, heads, dim), *(randn(setting, 70, groups, dim, seed=i) for i in (1, 2))
        cu_q, cu_k = starts(0, 5), starts(0, 70)
        expected = _C.attention(
            *(t.cpu() for t in (q, k, v, cu_q, cu_k)), None, None, offsets, dim**-0.5, 0.0, True, 0
        )[0]
        require_equal("fma = CPU", run(q, k, v, cu_q, cu_k, leaf="fma").out, expected)
    return rows


def part_fingerprint(setting: Setting) -> list[dict[str, Any]]:
    """Proves that the digest is the CPU's; times GB/s."""
    from tbik import _C
    from tbik.integrity.fingerprint import KEY
    from tbik.kernels import fingerprint

    rows = []
    for dtype in ("bfloat16", "float32"):
        x = randn(setting, *((7, 40) if setting.is_dry else (2**15, 2**14)), dtype=dtype)
        strides = [x.shape[1], 1]
        few = x[:7]
        if fingerprint.fingerprint(few, 5, strides, KEY) != _C.fingerprint(few.cpu(), 5, strides, KEY):
            raise AssertionError(f"fingerprint of {dtype}: not the CPU's")
        ms = setting.time_ms(lambda x=x, strides=strides: fingerprint.fingerprint(x, 0, strides, KEY))
        moved = x.numel() * x.element_size()
        rows.append({"dtype": dtype, "bytes": moved, "ms": ms, "GB_per_s": moved / ms / 1e6})
    return rows
