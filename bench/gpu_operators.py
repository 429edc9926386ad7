"""The part "operators" of bench/gpu.py: every operator of tbik.ops on CUDA tensors; a row per operator and check.

    fma = CPU               results and gradients by leaf fma are those of the same call on CPU tensors
    row alone               a row alone, with the gradient that comes to it, is the row in the batch
    CUDA graph              forward, and forward with backward, replayed = called
    ranks W = 2, 3, 4       the covers of W ranks' shards, folded = the whole (uneven runs for 3)
    prefill = decoding      the last tokens one at a time over pages = in their prompt; a chunk too

Contractions and attention by both leaves, fma and the GPU's tensor cores; the latter have no CPU to compare with.
A check that cannot be made is a row that says so and why. Not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from gpu_operator_cases import BF16, Case, all_cases, rows_of
from gpu_setting import Setting, finish, in_graph, require_equal, use_tests
from torch import Tensor

from tbik import TreePlan, devices, ops, tree
from tbik.ops.linear import CoverRun, linear_cover, linear_dw, linear_dx
from tbik.plan import leaf_runs

use_tests()
from cases import wide_exponents  # noqa: E402

WORLDS = (2, 3, 4)
NO_ORDER = "not made: the interpreter's dot has no fixed order"
NO_GRAPHS = "not made: no CUDA graphs in the interpreter"


@contextlib.contextmanager
def on_device(setting: Setting) -> Iterator[None]:
    """In a dry run, CPU tensors are served by the kernels in the interpreter, with a correctly rounded fma.

    Errors: AssertionError where no kernel was asked for: what follows would compare the CPU with itself.
    """
    if not setting.is_dry:
        yield
        return
    asked: list[Tensor] = []
    from interpreter import exact_builder

    from tbik.kernels import attention

    table = attention.attention_tile

    def small_tile(*given: Any, **masks: Any) -> Any:
        return table(*given, **masks)._replace(rows=4, keys=64)

    builder, create_fma = exact_builder()
    with (
        mock.patch.object(devices, "is_cuda", lambda t: asked.append(t) or True),
        mock.patch.object(attention, "attention_tile", small_tile),
        mock.patch.object(builder, "create_fma", create_fma),
    ):
        yield
    if not asked:
        raise AssertionError("no kernel was asked for")


class Results:
    """Outputs of a call, and per operand its gradient or None."""

    def __init__(self, outputs: list[Tensor], gradients: list[Tensor | None]) -> None:
        self.outputs, self.gradients = outputs, gradients

    def named(self) -> list[tuple[str, Tensor]]:
        outputs = [(f"result {i}", t) for i, t in enumerate(self.outputs)]
        return outputs + [(f"gradient of operand {i}", t) for i, t in enumerate(self.gradients) if t is not None]


def upstream_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Fixed gradients that come to the results, on the CPU."""
    return [
        wide_exponents(tuple(y.shape), y.dtype, 99 + i, spread=6) if y.dim() else torch.ones((), dtype=y.dtype)
        for i, y in enumerate(outputs)
        if y.is_floating_point()
    ]


def evaluate(
    operator: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    device: str,
    backward: bool = True,
    upstream: list[Tensor] | None = None,
) -> Results:
    inputs = [
        None if t is None else t.to(device).detach().clone().requires_grad_(backward and t.is_floating_point())
        for t in tensors
    ]
    outputs = as_list(operator(*inputs))
    if backward:
        given = upstream_of(outputs) if upstream is None else upstream
        floating = [y for y in outputs if y.is_floating_point()]
        live = [(y, g.to(device)) for y, g in zip(floating, given, strict=True) if y.requires_grad]
        torch.autograd.backward([y for y, _ in live], [g for _, g in live])
    gradients = [None if t is None or t.grad is None else t.grad.cpu() for t in inputs]
    return Results([y.detach().cpu() for y in outputs], gradients)


def as_list(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def require_same(actual: Results, expected: Results) -> None:
    a, e = actual.named(), expected.named()
    if [name for name, _ in a] != [name for name, _ in e]:
        raise AssertionError(f"expected {[name for name, _ in e]}, got {[name for name, _ in a]}")
    for (name, value), (_, wanted) in zip(a, e, strict=True):
        require_equal(name, value, wanted)


# --- checks of the table ----------------------------------------------------------------------------------------------


def check_cpu(setting: Setting, case: Case, whole: Results) -> None:
    require_same(whole, evaluate(case.operator, case.tensors, "cpu", case.backward))


def check_alone(setting: Setting, case: Case, whole: Results) -> None:
    """The last row; on a GPU the first and one of the middle too."""
    count = len(whole.outputs[0])
    given = upstream_of(whole.outputs)
    for at in {count - 1} if setting.is_dry else {0, count // 2, count - 1}:
        row = slice(at, at + 1)
        tensors = [t[row] if i in case.rows and t is not None else t for i, t in enumerate(case.tensors)]
        operator = case.operator if case.alone is None else case.alone(at)
        with on_device(setting):
            alone = evaluate(operator, tensors, setting.device, case.backward, [g[row] for g in given])
        for i, (actual, expected) in enumerate(zip(alone.outputs, whole.outputs, strict=True)):
            require_equal(f"row {at}, result {i}", actual, expected[row])
        for i in case.rows:
            actual, expected = alone.gradients[i], whole.gradients[i]
            if expected is not None:
                assert actual is not None
                require_equal(f"row {at}, gradient of operand {i}", actual, expected[row])


def check_graph(setting: Setting, case: Case, whole: Results, backward: bool) -> None:
    inputs = [
        None if t is None else t.to(setting.device).requires_grad_(backward and t.is_floating_point())
        for t in case.tensors
    ]
    if not backward:
        with torch.no_grad():
            outputs = in_graph(lambda: as_list(case.operator(*inputs)))
        for i, (actual, expected) in enumerate(zip(outputs, whole.outputs, strict=True)):
            require_equal(f"result {i}", actual, expected)
        return
    given = [g.to(setting.device) for g in upstream_of(whole.outputs)]
    wanted = [i for i, gradient in enumerate(whole.gradients) if gradient is not None]

    def step() -> list[Tensor]:
        floating = [y for y in as_list(case.operator(*inputs)) if y.is_floating_point()]
        live = [(y, g) for y, g in zip(floating, given, strict=True) if y.requires_grad]
        of = [inputs[i] for i in wanted]
        return list(torch.autograd.grad([y for y, _ in live], of, [g for _, g in live]))

    for i, actual in zip(wanted, in_graph(step), strict=True):
        expected = whole.gradients[i]
        assert expected is not None
        require_equal(f"gradient of operand {i}", actual, expected)


def rows_of_case(setting: Setting, case: Case) -> Iterator[dict[str, Any]]:
    """A row per check that the case has."""
    row: dict[str, Any] = {"operator": case.name, "leaf": case.leaf}
    try:
        with on_device(setting):
            whole = evaluate(case.operator, case.tensors, setting.device, case.backward)
    except Exception as error:
        yield {**row, "check": "call", "result": failed(error)}
        return
    directions = "forward, backward" if case.backward else "forward"
    if case.leaf == "fma":
        yield {**row, "check": f"fma = CPU, {directions}", "result": outcome(check_cpu, setting, case, whole)}
    if case.rows:
        check = f"row alone = row in the batch, {directions}"
        yield {**row, "check": check, "result": outcome(check_alone, setting, case, whole)}
    for backward in (False, True) if case.backward else (False,):
        why = case.no_graph or (case.no_backward_graph if backward else "")
        what = f"CUDA graph = eager, {'backward' if backward else 'forward'}"
        if why:
            result = f"not made: {why}"
        else:
            result = NO_GRAPHS if setting.is_dry else outcome(check_graph, setting, case, whole, backward)
        yield {**row, "check": what, "result": result}


def outcome(check: Callable[..., Any], *args: Any) -> str:
    try:
        check(*args)
    except Exception as error:
        return failed(error)
    return "equal"


def failed(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"FAILED: {type(error).__name__}: {lines[0][:300]}"


# --- ranks of contractions --------------------------------------------------------------------------------------------


def folded(covers: Sequence[tuple[int, int, Tensor]]) -> Tensor:
    """The root of the ranks' covers [C, ...] of the leaves [lo, hi), together all of them."""
    nodes = [node for lo, hi, _ in covers for node in tree.cover(lo, hi)]
    values = [value for _, _, cover in covers for value in cover]
    root: Tensor = tree.run(tree.schedule(nodes, max(hi for _, hi, _ in covers)), values, torch.add)[0]
    return root


def check_linear_ranks(setting: Setting, leaf: str, world: int) -> None:
    """Row-parallel y, and dX of a column-parallel group of two; L = 8 (4 in a dry run)."""
    m, k, n = (2, 12, 8) if setting.is_dry else (67, 1000, 520)
    plan = TreePlan(leaves=4 if setting.is_dry else 8, leaf=leaf)
    x, w = (rows_of(shape, BF16, i, 12).to(setting.device) for i, shape in enumerate(((m, k), (n, k))))
    runs = leaf_runs(k, plan.leaves, world)
    whole = ops.linear(x, w, plan=plan, out_dtype=torch.float32)
    cuts = plan.cuts(k)
    covers = []
    for lo, hi in runs:
        part = slice(cuts[lo], cuts[hi])
        run = CoverRun(k, lo, hi)
        cover = linear_cover(
            x[:, part].contiguous(), w[:, part].contiguous(), run, plan=plan, compute_dtype=BF16, parallel=True
        )
        covers.append((lo, hi, cover))
    require_equal("y", folded(covers), whole)
    lengths = (n, n + 4)
    dys = [rows_of((m, length), BF16, 5 + i, 12).to(setting.device) for i, length in enumerate(lengths)]
    ws = [rows_of((length, k), BF16, 8 + i, 12).to(setting.device) for i, length in enumerate(lengths)]
    options: Any = {"plan": plan, "compute_dtype": BF16, "parallel": True}
    whole = linear_dx(dys, ws, out_dtype=torch.float32, **options)
    covers = []
    for lo, hi in leaf_runs(n, plan.leaves, world):
        parts = [slice(plan.cuts(length)[lo], plan.cuts(length)[hi]) for length in lengths]
        some = [dy[:, part].contiguous() for dy, part in zip(dys, parts, strict=True)]
        of = [w[part].contiguous() for w, part in zip(ws, parts, strict=True)]
        covers.append((lo, hi, linear_dx(some, of, [CoverRun(length, lo, hi) for length in lengths], **options)))
    require_equal("dX of a group", folded(covers), whole)


def check_weight_ranks(setting: Setting, leaf: str, world: int) -> None:
    """dW of four samples, two ranks with aligned halves or four with a sample each: nodes of one tree."""
    tokens, k, n = (8, 6, 5) if setting.is_dry else (1800, 256, 192)
    plan = TreePlan(leaves=4, leaf=leaf)
    dy, x = (rows_of((tokens, width), BF16, i, 12).to(setting.device) for i, width in enumerate((n, k)))
    ends = [0, tokens // 8, tokens // 4, tokens // 2, tokens]
    options: Any = {"plan": plan, "compute_dtype": BF16}
    whole = linear_dw(dy, x, sample_offsets=ends, **options)
    step = 4 // world
    covers = []
    for lo in range(0, 4, step):
        first, end = ends[lo], ends[lo + step]
        own = [offset - first for offset in ends[lo : lo + step + 1]]
        cover = linear_dw(dy[first:end], x[first:end], sample_offsets=own, **options)
        covers.append((lo, lo + step, cover[None]))
    require_equal("dW", folded(covers), whole)


def check_expert_ranks(setting: Setting, leaf: str, world: int) -> None:
    """Every rank holds a run of leaves of every expert."""
    tokens, hidden, inner, experts = (2, 4, 4, 2) if setting.is_dry else (67, 250, 256, 8)
    plan = TreePlan(leaves=4 if setting.is_dry else 8, leaf=leaf)
    x = rows_of((tokens, hidden), BF16, 1, 6).to(setting.device)
    gate_up = rows_of((experts, 2 * inner, hidden), BF16, 2, 6).to(setting.device)
    down = rows_of((experts, hidden, inner), BF16, 3, 6).to(setting.device)
    scores = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(4)).to(setting.device)
    routing = ops.route(scores, 2)
    whole = ops.experts(x, routing, gate_up, down, plan=plan, out_dtype=torch.float32)
    cuts = plan.cuts(inner)
    covers = []
    for lo, hi in leaf_runs(inner, plan.leaves, world):
        part = slice(cuts[lo], cuts[hi])
        own = gate_up.view(experts, 2, inner, hidden)[:, :, part].reshape(experts, -1, hidden)
        run = CoverRun(inner, lo, hi)
        cover = ops.experts_cover(x, routing, own.contiguous(), down[:, :, part].contiguous(), run, plan=plan)
        covers.append((lo, hi, cover))
    require_equal("y", folded(covers), whole)


def check_head_ranks(setting: Setting, leaf: str, world: int) -> None:
    """Query heads over ranks, one KV head on all of them: out and dq are slices, dk and dv the covers' roots."""
    heads, dim = (3, 4) if setting.is_dry else (12, 64)
    tokens = 2 if setting.is_dry else 150
    generator = torch.Generator().manual_seed(6)
    q, g = (torch.randn(tokens, heads, dim, generator=generator).to(BF16).to(setting.device) for _ in range(2))
    k, v = (torch.randn(tokens, 1, dim, generator=generator).to(BF16).to(setting.device) for _ in range(2))
    cu = torch.tensor([0, tokens], dtype=torch.int32, device=setting.device)

    def step(lo: int, hi: int) -> tuple[Tensor, Any]:
        options: Any = {"sharing": [ops.HeadRun(heads, lo, hi)], "plan": TreePlan(leaf=leaf)}
        own, dy = q[:, lo:hi].contiguous(), g[:, lo:hi].contiguous()
        state = ops.attention_forward(own, k, v, cu, **options)
        return state.out, ops.attention_backward(dy, own, k, v, state, cu, **options)

    out, whole = step(0, heads)
    nodes: dict[str, list[tuple[int, int, Tensor]]] = {"dk": [], "dv": []}
    for lo, hi in itertools.pairwise([heads * rank // world for rank in range(world + 1)]):
        part, gradients = step(lo, hi)
        require_equal(f"out of heads {lo}..{hi}", part, out[:, lo:hi])
        require_equal(f"dq of heads {lo}..{hi}", gradients.dq, whole.dq[:, lo:hi])
        for name, covers in nodes.items():
            covers.append((lo, hi, getattr(gradients, name).transpose(0, 1).contiguous()))
    for name, covers in nodes.items():
        require_equal(name, folded(covers), getattr(whole, name)[:, 0])


RANKS: dict[str, tuple[Callable[[Setting, str, int], None], tuple[int, ...]]] = {
    "linear, dX of a group": (check_linear_ranks, WORLDS),
    "dW by samples": (check_weight_ranks, (2, 4)),
    "experts": (check_expert_ranks, WORLDS),
    "attention heads": (check_head_ranks, WORLDS),
}


def check_decoding(setting: Setting, leaf: str) -> None:
    """The last token over shuffled pages with stale slots, and a chunk of the two before it, = the prompt at once."""
    heads, groups, dim = (1, 1, 4) if setting.is_dry else (8, 2, 64)
    length, page = (66, 16) if setting.is_dry else (333, 16)
    generator = torch.Generator().manual_seed(7)
    q, k, v = (
        torch.randn(length, count, dim, generator=generator).to(BF16).to(setting.device)
        for count in (heads, groups, groups)
    )
    plan = TreePlan(leaf=leaf)
    device = setting.device
    # all keys, in the interpreter the last queries only
    first = length - 3 if setting.is_dry else 0
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (length - first, length))
    with torch.no_grad():
        prefill = ops.attention(q[first:], k, v, cu_q, cu_k, plan=plan)
        pages = -(-length // page)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(8)).to(device)
        at = torch.arange(length, device=device)
        slots = order[at // page] * page + at % page
        caches = [torch.full((pages, page, groups, dim), float("nan"), dtype=BF16, device=device) for _ in "kv"]
        ops.store_kv(k, v, *caches, slots)
        table = order[None].int()
        for lo, hi in ((length - 1, length), (length - 3, length - 1)):
            ends = torch.tensor([hi], dtype=torch.int32, device=device)
            cu = torch.tensor([0, hi - lo], dtype=torch.int32, device=device)
            some = ops.paged_attention(q[lo:hi], *caches, table, ends, cu, plan=plan)
            require_equal(f"queries {lo}..{hi} over pages", some, prefill[lo - first : hi - first])


def part_operators(setting: Setting) -> list[dict[str, Any]]:
    """Proves, of every operator through tbik.ops on CUDA tensors: fma = CPU, row alone, graph = eager, ranks, decoding.

    Errors: PartFailed with the rows of all checks where one is not equal.
    """
    leaves = ("fma",) if setting.is_dry else ("fma", setting.leaf)
    rows = [row for case in all_cases(setting.is_dry, leaves) for row in rows_of_case(setting, case)]
    for leaf in leaves:
        for name, (check, worlds) in RANKS.items():
            for world in worlds[-2:-1] if setting.is_dry else worlds:
                with on_device(setting):
                    result = outcome(check, setting, leaf, world)
                rows.append({"operator": name, "leaf": leaf, "check": f"ranks W = {world}", "result": result})
        with on_device(setting):
            result = outcome(check_decoding, setting, leaf)
        names = "attention, store_kv, paged_attention"
        rows.append({"operator": names, "leaf": leaf, "check": "prefill = decoding", "result": result})
    if setting.is_dry:
        for name in ("linear", "linear_group", "experts", "attention", "rope_attention", *RANKS):
            rows.append({"operator": name, "leaf": setting.leaf, "check": "all", "result": NO_ORDER})
    return finish(rows)
