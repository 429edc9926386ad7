"""Types of the compiled module; what the functions do: csrc/gemm.h, csrc/combine.h, csrc/tree.h."""

from collections.abc import Sequence

import torch
from torch import Tensor

class Schedule:
    @property
    def steps(self) -> list[tuple[str, int, int]]: ...
    @property
    def rounds(self) -> list[bool]: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def num_inputs(self) -> int: ...
    @property
    def is_root(self) -> bool: ...
    @property
    def outputs(self) -> list[tuple[int, int]]: ...

class Packed:
    @property
    def n(self) -> int: ...
    @property
    def num_chains(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def compute(self) -> str: ...

def run_schedule(lo: int, hi: int, leaves: int, to_root: bool, round_bf16: bool = False) -> Schedule: ...
def nodes_schedule(
    nodes: Sequence[tuple[int, int]], leaves: int | None = None, round_bf16: bool = False
) -> Schedule: ...
def sample_schedule(block_counts: Sequence[int], round_bf16: bool = False) -> Schedule: ...
def cuts(length: int, leaves: int) -> list[int]: ...
def cover(lo: int, hi: int) -> list[tuple[int, int]]: ...
def hash_fold(values: Sequence[int], schedule: Schedule) -> list[int]: ...
def pack(b: Sequence[Tensor], b_k_major: bool, cuts: Sequence[Sequence[int]], compute: str) -> Packed: ...
def gemm(
    a: Sequence[Tensor],
    a_k_major: bool,
    b: Sequence[Tensor] | Packed,
    b_k_major: bool,
    cuts: Sequence[Sequence[int]],
    schedule: Schedule,
    compute: str,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    path: str = "",
) -> Tensor: ...
def fold(
    inputs: Tensor | Sequence[Tensor],
    schedule: Schedule,
    avg: int = 1,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    path: str = "",
) -> Tensor: ...
def fingerprint(x: Tensor, first: int, index_strides: Sequence[int], key: int, path: str = "") -> int: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    k_extent: Tensor,
    block_table: Tensor | None,
    sinks: Tensor | None,
    head_offsets: Sequence[int],
    scale: float,
    cap: float,
    causal: bool,
    window: int,
    path: str = "",
) -> tuple[Tensor, Tensor, Tensor]: ...
def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    m: Tensor,
    total: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    sinks: Tensor | None,
    head_offsets: Sequence[int],
    scale: float,
    cap: float,
    causal: bool,
    window: int,
    programs: Sequence[Schedule],
    path: str = "",
) -> list[Tensor]: ...
def store_kv(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None: ...
def cpu_paths() -> list[str]: ...
def default_path(compute: str) -> str: ...
def fp_mode() -> int: ...
def torch_version_built_against() -> str: ...
def exp(x: Tensor, path: str = "") -> Tensor: ...
def log(x: Tensor, path: str = "") -> Tensor: ...
def sigmoid(x: Tensor, path: str = "") -> Tensor: ...
def tanh(x: Tensor, path: str = "") -> Tensor: ...
def silu(x: Tensor, path: str = "") -> Tensor: ...
def sin_cos(angle: Tensor, path: str = "") -> tuple[Tensor, Tensor]: ...
def row_sum(x: Tensor, leaves: int = 1, path: str = "") -> Tensor: ...
def row_max(x: Tensor, path: str = "") -> Tensor: ...
def hash_fold_present(values: Sequence[int], present: Sequence[int], leaves: int) -> int: ...
def gelu(x: Tensor, path: str = "") -> Tensor: ...
def row_nodes(
    x: Tensor, cuts: Sequence[int], schedule: Schedule, divisor: int, out_dtype: torch.dtype, path: str = ""
) -> Tensor: ...
def sum_inputs(inputs: Sequence[Tensor], path: str = "") -> Tensor: ...
def norm(
    x: Tensor,
    residual: Tensor | None,
    w: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    one_plus: bool,
    compute: torch.dtype,
    path: str = "",
) -> tuple[Tensor, Tensor]: ...
def norm_dx(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    residual: Tensor | None,
    eps: float,
    centered: bool,
    one_plus: bool,
    compute: torch.dtype,
    out_dtype: torch.dtype,
    path: str = "",
) -> Tensor: ...
def norm_gradients(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    residual: Tensor | None,
    eps: float,
    centered: bool,
    one_plus: bool,
    compute: torch.dtype,
    out_dtype: torch.dtype,
    with_dx: bool,
    with_dw: bool,
    with_dbias: bool,
    heads: int,
    cuts: Sequence[int],
    path: str = "",
) -> tuple[Tensor | None, Tensor | None, Tensor | None]: ...
def is_direct(*tensors: Tensor | None) -> bool: ...
def is_simple(x: Tensor, *parameters: Tensor | None) -> bool: ...
def is_simple_pair(a: Tensor, b: Tensor | None) -> bool: ...
def column_leaves(
    dy: Tensor, x: Tensor | None, heads: int, eps: float, centered: bool, cuts: Sequence[int], path: str = ""
) -> Tensor: ...
def activation(gate: Tensor, up: Tensor | None, kind: str, path: str = "") -> Tensor: ...
def activation_dx(
    dy: Tensor, gate: Tensor, up: Tensor | None, kind: str, packed: bool, path: str = ""
) -> list[Tensor]: ...
def rope(
    x: Tensor, sin: Tensor, cos: Tensor, interleaved: bool, backward: bool, out_dtype: torch.dtype, path: str = ""
) -> Tensor: ...
def rope_tables(positions: Tensor, inv_freq: Tensor, scale: float = 1.0, path: str = "") -> tuple[Tensor, Tensor]: ...
def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]: ...
def dropout(
    x: Tensor,
    p: float,
    seed: int,
    step: int,
    name: int,
    sample_offsets: Sequence[int],
    first_sample: int,
    first_position: int,
    first_feature: int,
    path: str = "",
) -> Tensor: ...
def embedding(
    ids: Tensor, w: Tensor, first_row: int, vocabulary: int, out_dtype: torch.dtype, path: str = ""
) -> Tensor: ...
def embedding_rows(
    dy: Tensor,
    ids: Tensor,
    first_row: int,
    num_rows: int,
    vocabulary: int,
    sample_offsets: Sequence[int],
    narrow: bool,
    path: str = "",
) -> tuple[Tensor, Tensor]: ...
