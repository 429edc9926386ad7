"""TBIK_VLLM=full on vLLM's CUDA platform, without a GPU: what is registered, settled and refused, and the bits.

vllm_on_cuda.py makes a process whose vLLM platform is vLLM's own CUDA class. There the plug-in is loaded as vLLM loads
it, the tests of tests/test_vllm_plugin.py run once more, and a whole model is loaded and run over vLLM's KV cache, on
CPU tensors. Not seen here: a device, streams, NCCL, peer memory, the compiled CUDA kernels, vLLM's GPU worker.
.venv-vllm/bin/python -m pytest tests/test_vllm_cuda.py
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from interpreter import exact_fma, needs_triton  # noqa: F401
from vllm_on_cuda import in_a_process, pretend

from tbik import PlanError, TreePlan, models, ops

vllm = pytest.importorskip("vllm", reason="vLLM is not installed here; `make vllm` makes an environment that has it")
import test_vllm_plugin as on_cpu  # noqa: E402

PLAN = on_cpu.PLAN
ENVIRONMENT = {name: value for name, value in on_cpu.ENVIRONMENT.items() if not name.startswith("VLLM_CPU")}


def report(task: Callable[[], Any]) -> tuple[Any, str]:
    """(what it gave, error)."""
    try:
        return task(), ""
    except BaseException as error:
        return None, f"{type(error).__name__}: {error}"


def start(engine: bool = False) -> None:
    """A process of vLLM on CUDA that has loaded the plug-in."""
    pretend(engine)
    import tbik_vllm

    tbik_vllm.register()


# --- what the plug-in does to vLLM -----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "attention": ({"attention_backend": "FLASH_ATTN"}, "the attention backend is FLASH_ATTN, expected CUSTOM or none"),
    "attention of a kind": (
        {"attention_config": {"backend_per_kind": {"full_attention": "TRITON_ATTN"}}},
        "the attention backend is .*full_attention.*expected CUSTOM",
    ),
    "fused sums": ({"compilation_config": {"pass_config": {"fuse_allreduce_rms": True}}}, "fuse_allreduce_rms is True"),
    "lora": ({"enable_lora": True}, "enable_lora"),
    "quantization": ({"quantization": "fp8"}, "quantization"),
    "kv cache": ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
    "batches at once": ({"ubatch_size": 2}, "ubatch_size"),
    "data parallel": ({"data_parallel_size": 2}, "data_parallel_size"),
}
LEAVES = ('{"leaves": 8, "leaf": "mma:sm_90"}', '{"leaves": 8, "leaf": "amx"}', '{"leaves": 8, "leaf": "mma:sm_80"}')


def platform_of_full(folder: Path) -> dict[str, Any]:
    """Everything about a process with TBIK_VLLM=full that needs no layers."""
    start()
    import tbik_vllm
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import get_attn_backend
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    tbik_vllm.register()  # vLLM may call it again
    out: dict[str, Any] = {"environment": {name: value for name, value in os.environ.items() if name[:5] == "VLLM_"}}
    out["replaced"] = {name: f"{kind.__module__}.{kind.__name__}" for name, kind in op_registry_oot.items()}
    communicator = resolve_obj_by_qualname(current_platform.get_device_communicator_cls())
    out["communicator"] = [kind.__name__ for kind in communicator.__mro__[:3]]
    out["sampler"] = [
        function.__module__
        for function in (TopKTopPSampler.forward_native, TopKTopPSampler.forward_cuda, Sampler.compute_logprobs)
    ]
    out["stock attention"] = AttentionBackendEnum.CPU_ATTN.is_overridden()
    config = on_cpu.engine_config(folder, tensor_parallel_size=2)
    out["settled"] = {
        "compilation": config.compilation_config.mode.name,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "sizes": config.compilation_config.cudagraph_capture_sizes,
        "eager": config.model_config.enforce_eager,
        "runner V2": config.use_v2_model_runner,
        "attention": config.attention_config.backend.name,
        "custom all-reduce": not config.parallel_config.disable_custom_all_reduce,
        "worker": config.parallel_config.worker_cls,
        "fused": config.compilation_config.pass_config.fuse_allreduce_rms,
    }
    out["asked for"] = on_cpu.engine_config(folder, attention_backend="CUSTOM").attention_config.backend.name

    def select(*arguments: Any, **options: Any) -> Any:
        with set_current_vllm_config(config):
            return report(lambda: get_attn_backend(*arguments, **options).__name__)

    out["selected"] = select(64, torch.bfloat16, "auto", has_sliding_window=True, has_sink=True)
    out["large heads"] = select(320, torch.bfloat16, "auto")
    out["other cache"] = select(64, torch.bfloat16, "float16")
    for name, (arguments, _) in REFUSED.items():
        out[f"refused: {name}"] = report(lambda arguments=arguments: on_cpu.engine_config(folder, **arguments))[1]
    for leaf in LEAVES:
        os.environ["TBIK_PLAN"] = leaf
        out[f"leaf: {leaf}"] = report(lambda: on_cpu.engine_config(folder) and None)[1]
    return out


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = on_cpu.write_config(tmp_path_factory.mktemp("cuda") / "model")
    got, error = in_a_process(platform_of_full, folder, environment=ENVIRONMENT)
    assert not error, error
    return got


def test_verify_pieces_stand_at_their_places(full: dict[str, Any]) -> None:
    assert set(full["replaced"]) == set(ON_BOTH) and all(
        name.startswith("tbik_vllm.") for name in full["replaced"].values()
    )
    assert full["communicator"] == ["TbikCudaCommunicator", "TreeCommunicator", "CudaCommunicator"]
    assert full["sampler"] == ["tbik_vllm.sampling_cuda", "tbik_vllm.sampling_cuda", "tbik_vllm.vocabulary"]
    assert not full["stock attention"]
    assert full["selected"] == ("TbikCudaAttentionBackend", "") and full["asked for"] == "CUSTOM"


ON_BOTH = (
    "ReplicatedLinear",
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "ParallelLMHead",
    "LogitsProcessor",
    "RMSNorm",
    "GemmaRMSNorm",
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
    "SiluAndMul",
    "GeluAndMul",
    "GateLinear",
    "UnquantizedFusedMoEMethod",
)


def test_verify_engines_on_cuda_are_settled(full: dict[str, Any]) -> None:
    assert full["settled"] == {
        "compilation": "NONE",
        "graphs": "NONE",
        "sizes": [],
        "eager": True,
        "runner V2": False,
        "attention": "CUSTOM",
        "custom all-reduce": False,
        "worker": "vllm.v1.worker.gpu_worker.Worker",
        "fused": False,
    }
    wanted = {
        "VLLM_BATCH_INVARIANT": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_USE_BREAKABLE_CUDAGRAPH": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    assert {name: full["environment"].get(name) for name in wanted} == wanted


@pytest.mark.parametrize("case", REFUSED)
def test_verify_engines_on_cuda_are_refused(case: str, full: dict[str, Any]) -> None:
    assert "tbik_vllm" in full[f"refused: {case}"]
    with pytest.raises(PlanError, match=REFUSED[case][1]):
        raise PlanError(full[f"refused: {case}"])


def test_verify_attention_on_cuda_says_what_it_cannot_do(full: dict[str, Any]) -> None:
    assert "head_size not supported" in full["large heads"][1]
    assert "keys would be rounded; expected kv_cache_dtype 'auto'" in full["other cache"][1]


def test_verify_leaves_on_cuda(full: dict[str, Any]) -> None:
    assert not full[f"leaf: {LEAVES[0]}"]
    assert "leaf is 'amx', the devices are sm_90" in full[f"leaf: {LEAVES[1]}"]
    assert "leaf is 'mma:sm_80', the devices are sm_90" in full[f"leaf: {LEAVES[2]}"]


def platform_of_allreduce(folder: Path) -> dict[str, Any]:
    start()
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    config = on_cpu.engine_config(folder, compilation_config={"pass_config": {"fuse_allreduce_rms": True}})
    return {
        "replaced": list(op_registry_oot),
        "attention": AttentionBackendEnum.CUSTOM.is_overridden() or config.attention_config.backend is not None,
        "fused": config.compilation_config.pass_config.fuse_allreduce_rms,
        "eager": config.model_config.enforce_eager,
        "environment": {name: value for name, value in os.environ.items() if name[:5] == "VLLM_"},
    }


def test_verify_allreduce_alone_leaves_the_operators_to_vllm(tmp_path: Path) -> None:
    """Negative control of the settings above; sums stay apart from what surrounds them."""
    folder = on_cpu.write_config(tmp_path / "model")
    got, error = in_a_process(platform_of_allreduce, folder, environment=ENVIRONMENT | {"TBIK_VLLM": "allreduce"})
    assert not error, error
    environment = got.pop("environment")
    assert got == {"replaced": [], "attention": False, "fused": False, "eager": False}
    assert environment["VLLM_BATCH_INVARIANT"] == "1" and "VLLM_USE_V2_MODEL_RUNNER" not in environment


def test_verify_environments_that_were_set_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tbik_vllm.cuda_platform import FULL, set_environment

    for name, (value, _) in FULL.items():
        with monkeypatch.context() as patch:
            for other in FULL:
                patch.delenv(other, raising=False)
            patch.setenv(name, str(1 - int(value)))
            with pytest.raises(PlanError, match=f"{name} is '{1 - int(value)}'; on CUDA .* or set it to {value}"):
                set_environment(FULL, lambda what, by: None)
            for other in FULL:
                patch.delenv(other, raising=False)
            set_environment(FULL, lambda what, by: None)
            assert os.environ[name] == value
            for other in FULL:
                os.environ.pop(other)


def other_plugin() -> list[str]:
    pretend()
    from tbik_vllm import cuda_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "somebody.else.Backend")
    first = report(lambda: cuda_platform.register_attention(lambda what, by: None))[1]
    nobody = SimpleNamespace(get_device_capability=lambda: None)
    return [first, report(lambda: cuda_platform.architecture(nobody))[1]]


def test_verify_another_attention_plugin_is_refused() -> None:
    got, error = in_a_process(other_plugin, environment=ENVIRONMENT)
    assert not error, error
    assert "another plug-in has the attention backend CUSTOM (somebody.else.Backend)" in got[0]
    assert "no CUDA device" in got[1]


# --- layers ----------------------------------------------------------------------------------------------------------


def layers_on_cuda(folder: Path) -> dict[str, str]:
    """The tests of the CPU's layers, on CUDA's platform: name -> error. With weights as they lie, and packed."""
    start()
    from tbik_vllm import linear, vocabulary

    out = {}
    with on_cpu.vllm_rank(0, 1, folder, tempfile.mktemp()):
        for packs in (False, True):
            linear.wants_packs = vocabulary.wants_packs = lambda parameter, packs=packs: packs
            for test in (
                on_cpu.test_verify_layers_equal_nn,
                on_cpu.test_verify_row_operators_equal_ops,
                on_cpu.test_verify_layers_are_refused_by_name,
                gate_on_cuda,
                weights_on_cuda,
            ):
                if packs and test is weights_on_cuda:
                    continue
                out[f"{test.__name__}, {packs=}"] = report(lambda test=test: test(None))[1]
    return out


def gate_on_cuda(one_rank: None) -> None:
    """A router that asks for fp32 when it is made, for which vLLM takes a GEMM past the linear method on Hopper."""
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    x, weight = on_cpu.dense((5, 96), 4), on_cpu.dense((6, 96), 23)
    gate = GateLinear(96, 6, out_dtype=torch.float32, params_dtype=torch.bfloat16, prefix="gate")
    assert gate.allow_cublas_router_gemm
    on_cpu.load(gate, weight)
    assert_bitwise_equal(on_cpu.finish(gate)(x)[0], ops.linear(x, weight, plan=PLAN, out_dtype=torch.float32), "gate")


def weights_on_cuda(one_rank: None) -> None:
    """No pack is kept, so every write is seen, and the parameter keeps its class."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    x, first, second = on_cpu.dense((5, 192), 1), on_cpu.dense((96, 192), 2), on_cpu.dense((96, 192), 3)
    for name, write in on_cpu.WRITES.items():
        layer = RowParallelLinear(192, 96, bias=False, params_dtype=torch.bfloat16, prefix="row")
        kind = type(layer.weight)
        on_cpu.load(layer, first)
        on_cpu.finish(layer)
        assert_bitwise_equal(layer(x)[0], ops.linear(x, first, plan=PLAN, parallel="row"), name)
        with torch.no_grad():
            write(layer.weight, second)
        assert_bitwise_equal(layer(x)[0], ops.linear(x, second, plan=PLAN, parallel="row"), name)
        assert type(layer.weight) is kind and layer.tbik_watch is None
    layer.weight = torch.nn.Parameter(first.clone(), requires_grad=False)
    assert_bitwise_equal(layer(x)[0], ops.linear(x, first, plan=PLAN, parallel="row"), "another parameter")


def small_layers() -> dict[str, torch.Tensor]:
    """What one layer of each kind gives, small enough for an interpreter."""
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
    from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.v1.sample.sampler import Sampler

    assert get_tp_group().world_size == 1
    dense = on_cpu.dense
    torch.set_default_dtype(torch.bfloat16)
    try:
        x, out = dense((3, 32), 1), {}
        row = RowParallelLinear(32, 16, bias=True, prefix="row")
        on_cpu.load(row, dense((16, 32), 2), dense((16,), 3))
        out["row"] = on_cpu.finish(row)(x)[0]
        qkv = QKVParallelLinear(32, 8, 2, 1, bias=False, prefix="qkv")
        for part, heads, seed in (("q", 2, 4), ("k", 1, 5), ("v", 1, 6)):
            on_cpu.load(qkv, dense((heads * 8, 32), seed), shard=part)
        q, k, _ = on_cpu.finish(qkv)(x)[0].split([16, 8, 8], dim=-1)
        norm, gemma = RMSNorm(8, eps=1e-6), GemmaRMSNorm(8, eps=1e-6)
        for layer in (norm, gemma):
            layer.weight.data.copy_(dense((8,), 7))
        q, k = norm(q.view(3, 2, 8)).view(3, 16), gemma(k.view(3, 1, 8)).view(3, 8)
        rope = get_rope(8, 64, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
        out["q"], out["k"] = rope(torch.tensor([0, 3, 40]), q, k)
        out["normed"], out["residual"] = norm(dense((3, 8), 8), dense((3, 8), 9))
        out["silu"], out["gelu"] = SiluAndMul()(x), GeluAndMul("tanh")(x)
        embedding = VocabParallelEmbedding(64, 32, prefix="embedding")
        on_cpu.load(embedding, dense((64, 32), 10))
        out["embedding"] = on_cpu.finish(embedding)(torch.tensor([0, 63, 5]))
        head = ParallelLMHead(64, 32, prefix="head")
        on_cpu.load(head, dense((64, 32), 11))
        out["logits"] = LogitsProcessor(64)(on_cpu.finish(head), x)
        out["logprobs"] = Sampler.compute_logprobs(out["logits"])
        gate = GateLinear(32, 4, prefix="gate")
        on_cpu.load(gate, dense((4, 32), 12))
        out["router"] = on_cpu.finish(gate)(x)[0]
        experts = on_cpu.mixture(num_experts=4, hidden_size=32, intermediate_size=16).routed_experts
        experts.w13_weight.data.copy_(dense((4, 32, 32), 13))
        experts.w2_weight.data.copy_(dense((4, 32, 16), 14))
        experts.quant_method.process_weights_after_loading(experts)
        out["experts"] = experts.forward_monolithic(x=x, router_logits=out["router"])
        return out
    finally:
        torch.set_default_dtype(torch.float32)


@needs_triton
def test_verify_layers_by_triton(
    one_rank: None,
    exact_fma: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's layers on the CUDA kernels, in Triton's interpreter: unpacked weights, strides and dtypes as they come."""
    from tbik_vllm.settings import activate

    from tbik import devices

    activate(PLAN)
    expected = small_layers()
    monkeypatch.setattr(devices, "is_cuda", lambda t: True)
    for name, value in small_layers().items():
        assert_bitwise_equal(value, expected[name], name)


def test_verify_layers_on_cuda(tmp_path: Path) -> None:
    folder = on_cpu.write_config(tmp_path / "model")
    got, error = in_a_process(layers_on_cuda, folder, environment=ENVIRONMENT)
    assert not error, error
    assert len(got) == 9 and not any(got.values()), got


# --- two ranks -------------------------------------------------------------------------------------------------------


def rank_on_cuda(rank: int, folder: Path, meeting: str, peers: bool) -> dict[str, Any]:
    """One of two ranks: its layers, over the host's memory in the place of peer memory, or over gloo in NCCL's.

    Of vLLM's communicator what only moves is its base class's.
    """
    start()
    from vllm.distributed import get_tp_group
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase as Base
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    from tbik import peer_library, peer_reductions

    def begin(
        self: Any, cpu_group: Any, device: Any, device_group: Any, unique_name: str, *rest: Any, **named: Any
    ) -> None:
        Base.__init__(self, cpu_group, device, device_group, unique_name)

    stock: Any = CudaCommunicator
    stock.__init__ = begin
    for name in ("all_gather", "all_gatherv", "gather", "broadcast", "send", "recv", "destroy"):
        setattr(stock, name, getattr(Base, name))
    peer_reductions.LIBRARIES.clear()
    if peers:
        peer_reductions.LIBRARIES["cuda"] = peer_library.host
    else:
        peer_reductions.LIBRARIES["cuda"] = no_library
    torch.cuda.current_device = lambda: 0
    from tbik_vllm import linear, vocabulary

    linear.wants_packs = vocabulary.wants_packs = lambda parameter: False
    with on_cpu.vllm_rank(rank, 2, folder, meeting):
        communicator = get_tp_group().device_communicator
        layers = on_cpu.all_layers_by_value()
        return {
            "layers": layers,
            "communicator": type(communicator).__name__,
            "sums": type(communicator.sums).__name__,
            "sent": communicator.sums.bytes_sent,
            "unowned": report(on_cpu.unowned_sum)[1],
        }


def no_library() -> Any:
    raise PlanError("no peer memory in this test")


@pytest.mark.long
@pytest.mark.parametrize("sums", ["PeerRankSums", "NcclRankSums"])
def test_verify_layers_of_two_ranks_on_cuda(sums: str, tmp_path: Path) -> None:
    """Roots over two ranks are those of one, whether peers add or NCCL moves."""
    folder, meeting = on_cpu.write_config(tmp_path / "model"), str(tmp_path / "meeting")

    def run(rank: int) -> Any:
        return in_a_process(rank_on_cuda, rank, folder, meeting, sums == "PeerRankSums", environment=ENVIRONMENT)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, (0, 1)))
    for rank, (got, error) in enumerate(results):
        assert not error, error
        assert got["communicator"] == "TbikCudaCommunicator" and got["sums"] == sums and got["sent"] > 0
        assert "no layer of tbik asked for" in got["unowned"]
        for name, value in on_cpu.expected_layers(rank, 2).items():
            dtype, content, shape = got["layers"][name]
            mine = torch.frombuffer(bytearray(content), dtype=dtype).view(shape)
            assert_bitwise_equal(mine, value, f"{name} on rank {rank}")


# --- attention over vLLM's cache -------------------------------------------------------------------------------------

HEADS, GROUPS, DIM, SLOTS, BLOCKS = 8, 4, 64, 16, 9
LENGTHS = (70, 33)
PAGES = ((7, 2, 8, 0, 5), (3, 6, 1))
STEPS = (((0, 25), (0, 32)), ((25, 69), (32, 33)), ((69, 70), (33, 33)))
"""Of each step the positions of each sequence: chunks of a prompt beside a prompt, decoding, and nothing."""


def step_metadata(step: tuple[tuple[int, int], ...], **changes: Any) -> Any:
    """vLLM's CommonAttentionMetadata of a step."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = list(itertools.accumulate((end - first for first, end in step), initial=0))
    table = torch.full((len(PAGES), max(map(len, PAGES)) + 1), 0, dtype=torch.int32)
    for row, pages in enumerate(PAGES):
        table[row, : len(pages)] = torch.tensor(pages)
    settings: dict[str, Any] = {
        "query_start_loc": torch.tensor(starts, dtype=torch.int32),
        "query_start_loc_cpu": torch.tensor(starts, dtype=torch.int32),
        "seq_lens": torch.tensor([end for _, end in step], dtype=torch.int32),
        "num_reqs": len(step),
        "num_actual_tokens": starts[-1],
        "max_query_len": max(end - first for first, end in step),
        "max_seq_len": max(end for _, end in step),
        "block_table_tensor": table,
        "slot_mapping": slots_of(step),
    }
    return CommonAttentionMetadata(**(settings | changes))


def slots_of(step: tuple[tuple[int, int], ...]) -> torch.Tensor:
    at = [(row, position) for row, (first, end) in enumerate(step) for position in range(first, end)]
    return torch.tensor([PAGES[row][i // SLOTS] * SLOTS + i % SLOTS for row, i in at], dtype=torch.int64)


def caches_of(layout: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """The caches of two layers in one of vLLM's physical layouts, full of what no attention may read."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheTensor,
        compute_layout_strides,
        create_kv_cache_views,
    )

    spec = FullAttentionSpec(block_size=SLOTS, num_kv_heads=GROUPS, head_size=DIM, head_size_v=DIM, dtype=dtype)
    strides = compute_layout_strides(spec, BLOCKS, 2, layout)
    raw = torch.zeros(2 * BLOCKS * spec.page_size_bytes, dtype=torch.int8)
    place = KVCacheTensor(size=len(raw), layers=["a", "b"], layer_stride=strides[0], block_stride=strides[1])
    views = create_kv_cache_views(raw, spec, BLOCKS, layout, place)
    for view in views:
        view.fill_(float("nan"))
    return views


def run_attention(impl: Any, builder: Any, cache: torch.Tensor, inputs: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """What the layer gives each sequence over STEPS; inputs: per sequence q [T, H, D], k and v [T, G, D]."""
    out = [torch.empty_like(q) for q, _, _ in inputs]
    for step in STEPS:
        common = step_metadata(step)
        metadata = builder.build(0, common)
        q, k, v = (
            torch.cat([sequence[i][first:end] for sequence, (first, end) in zip(inputs, step, strict=True)])
            for i in range(3)
        )
        impl.do_kv_cache_update(None, k, v, cache, common.slot_mapping)
        got = impl.forward(None, q, k, v, cache, metadata, torch.full_like(q, float("nan")))
        start = 0
        for row, (first, end) in enumerate(step):
            out[row][first:end] = got[start : start + end - first]
            start += end - first
    return out


ATTENTIONS: dict[str, tuple[torch.dtype, dict[str, Any], dict[str, Any]]] = {
    "bf16": (torch.bfloat16, {}, {}),
    "fp16, window": (torch.float16, {"sliding_window": 20}, {"window": 20}),
    "fp32": (torch.float32, {}, {}),
    "bf16, soft-cap": (torch.bfloat16, {"logits_soft_cap": 5.0}, {"softcap": 5.0}),
    "bf16, sinks": (torch.bfloat16, {"sinks": torch.linspace(-2, 2, HEADS)}, {"sinks": torch.linspace(-2, 2, HEADS)}),
}


def check_attention(kind: str, layouts: Any = None, choose_kernels: Callable[[], None] = lambda: None) -> None:
    """Our backend's pieces over every layout: each sequence has the bits of packed attention of it alone."""
    from tbik_vllm.attention_cuda import TbikCudaAttentionBackend as Backend
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.kv_cache_layout import KVCacheLayout

    dtype, settings, options = ATTENTIONS[kind]
    inputs = [
        [
            wide_exponents((length, heads, DIM), dtype, 10 * row + i, spread=6)
            for i, heads in enumerate((HEADS, GROUPS, GROUPS))
        ]
        for row, length in enumerate(LENGTHS)
    ]
    config = vllm.config.get_current_vllm_config()
    builder = Backend.get_builder_cls()(None, ["a"], config, torch.device("cpu"))
    assert builder.get_cudagraph_support(config, None) is AttentionCGSupport.NEVER
    expected = [ops.attention(*sequence, scale=0.125, **options) for sequence in inputs]
    choose_kernels()
    for layout in KVCacheLayout if layouts is None else [KVCacheLayout[name] for name in layouts]:
        impl = Backend.get_impl_cls()(HEADS, DIM, 0.125, GROUPS, None, kv_cache_dtype="auto", **(
            {"sliding_window": None} | settings))  # fmt: skip
        first, second = caches_of(layout, dtype)
        got = run_attention(impl, builder, first, inputs)
        for row, value in enumerate(expected):
            assert_bitwise_equal(got[row], value, f"{kind}, {layout.name}, sequence {row}")
        assert second.isnan().all()
        keys, _ = impl.split(first)
        slot = slots_of(((0, LENGTHS[0]), (0, 0)))[17].item()
        assert_bitwise_equal(keys[slot // SLOTS, slot % SLOTS], inputs[0][1][17], f"{layout.name}, the stored key")
        assert keys.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A rank of vLLM on the CPU: backend, builder and layer are plain Python and take its tensors."""
    before = dict(os.environ)
    os.environ.update(on_cpu.ENVIRONMENT)
    os.environ.pop("TBIK_VLLM", None)
    import tbik_vllm

    tbik_vllm.register()
    folder = on_cpu.write_config(tmp_path_factory.mktemp("rank") / "model")
    with on_cpu.vllm_rank(0, 1, folder, tempfile.mktemp()):
        yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_verify_attention_over_vllms_cache(kind: str, one_rank: None) -> None:
    check_attention(kind)


@needs_triton
def test_verify_attention_over_vllms_cache_by_triton(
    one_rank: None,
    exact_fma: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CUDA kernels themselves, in Triton's interpreter, over the same caches; small, since that is slow."""
    from tbik import devices

    sizes = {
        "HEADS": 2,
        "GROUPS": 1,
        "DIM": 16,
        "LENGTHS": (20, 5),
        "PAGES": ((3, 1), (2,)),
        "STEPS": (((0, 18), (0, 5)), ((18, 20), (5, 5))),
    }
    for name, value in sizes.items():
        monkeypatch.setitem(globals(), name, value)

    def by_triton() -> None:
        monkeypatch.setattr(devices, "is_cuda", lambda t: True)

    check_attention("bf16", ["LBNHC", "BHLNC"], by_triton)


def test_verify_steps_that_attention_on_cuda_does_not_know_are_refused(one_rank: None) -> None:
    from tbik_vllm.attention_cuda import TbikCudaAttentionImpl as Impl
    from tbik_vllm.attention_cuda import TbikCudaAttentionMetadataBuilder as Builder

    builder = Builder(None, ["a"], None, torch.device("cpu"))
    with pytest.raises(PlanError, match="asks for causal=False"):
        builder.build(0, step_metadata(STEPS[0], causal=False))
    for name, value in (("mm_req_doc_ranges", {0: [(0, 3)]}), ("rswa_prefix_lens", torch.zeros(2)),
                        ("encoder_seq_lens", torch.zeros(2)), ("dcp_local_seq_lens", torch.zeros(2))):  # fmt: skip
        with pytest.raises(PlanError, match=f"attention with {name} is not supported"):
            builder.build(0, step_metadata(STEPS[0], **{name: value}))
    assert torch.equal(Impl(8, 64, 0.125, 4).forward(None, *[None] * 4, None, torch.ones(2)), torch.zeros(2))
    arguments: dict[str, Any]
    for arguments, named in (
        ({"kv_cache_dtype": "fp8"}, "a KV cache in fp8"),
        ({"alibi_slopes": [0.5] * 8}, "alibi slopes"),
        ({"attn_type": "encoder"}, "attn_type 'encoder'"),
        ({"kv_sharing_target_layer_name": "other"}, "keys shared with another layer"),
        ({"num_kv_heads": 3}, "8 heads over 3 KV heads"),
    ):
        with pytest.raises(PlanError, match=f"{named}.* not supported"):
            Impl(num_heads=8, head_size=64, scale=0.125, **({"num_kv_heads": 4} | arguments))


# --- sampling --------------------------------------------------------------------------------------------------------


def test_verify_top_k_and_top_p_are_exact() -> None:
    """Against rational arithmetic; ties stay or go together."""
    from tbik_vllm.sampling_cuda import ONE, keep_top

    logits = wide_exponents((6, 320), torch.float32, 3, spread=3)
    logits[4, 7] = logits[4, 9] = logits[4].max() + 1  # two best ones
    k, p = torch.tensor([1, 5, 320, 40, 1, 3]), torch.tensor([1.0, 0.9, 0.5, 0.01, 0.9, 0.999])
    got = keep_top(logits.clone(), k, p, PLAN.leaves)
    for row in range(len(logits)):
        kept = logits[row] >= logits[row].sort(descending=True).values[k[row] - 1]
        x = torch.where(kept, logits[row], -torch.inf)
        probability = ops.softmax(x, PLAN.leaves)
        weights = [int(Fraction(value) * int(ONE)) for value in probability.tolist()]
        for token, weight in enumerate(weights):
            before = sum(other for other in weights if other > weight)
            stays = bool(kept[token]) and (p[row] == 1 or before < Fraction(p[row].item()) * sum(weights))
            assert (got[row, token] == logits[row, token]) if stays else got[row, token] == -torch.inf, (row, token)
    assert (got[4] > -torch.inf).sum() == 2
    assert (got > -torch.inf).sum(1).tolist() != [320] * 6


def test_verify_sampling_ignores_the_batch(one_rank: None) -> None:
    """Seeded tokens and processed log-probabilities of a request, alone, in company, and beside requests with top-p."""
    from tbik_vllm.sampling_cuda import sample
    from tbik_vllm.settings import activate

    activate(PLAN)
    logits = wide_exponents((9, 320), torch.float32, 5, spread=2)
    p = torch.tensor([0.9, 1.0, 0.5] * 3)
    sampler = SimpleNamespace(logprobs_mode="processed_logprobs", use_fp64_gumbel=False)

    def draw(rows: list[int], p: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        generators = {i: torch.Generator().manual_seed(row) for i, row in enumerate(rows)}
        return sample(sampler, logits[rows], generators, None, p)

    tokens, processed = draw(list(range(9)), p)
    for row in range(9):
        alone = draw([row], None if p[row] == 1 else p[row : row + 1])
        assert alone[0].item() == tokens[row].item()
        assert_bitwise_equal(alone[1][0], processed[row], f"row {row}")
    assert len(set(tokens.tolist())) > 3
    sampler.logprobs_mode = "processed_logits"
    assert_bitwise_equal(draw([1], None)[1], logits[[1]], "logits")
    sampler.logprobs_mode = "raw_logprobs"
    assert draw([1], None)[1] is None


# --- a whole model ---------------------------------------------------------------------------------------------------


def model_on_cuda(folder: Path, packs: bool) -> dict[str, Any]:
    """vLLM's model on its CUDA platform, loaded by its loader and run over its cache: logits of every position."""
    start()
    import numpy as np
    from tbik_vllm import linear, vocabulary
    from tbik_vllm.plugin import status
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader import get_model
    from vllm.v1.kv_cache_layout import KVCacheLayout

    linear.wants_packs = vocabulary.wants_packs = lambda parameter: packs
    rank = on_cpu.vllm_rank(0, 1, folder, tempfile.mktemp())
    with rank:
        config = rank.config
        config.load_config.device = "cpu"
        model = get_model(vllm_config=config)
        layers = [module for module in model.modules() if isinstance(module, Attention)]
        backends = {layer.attn_backend.__name__ for layer in layers}
        global GROUPS, DIM
        GROUPS, DIM = layers[0].num_kv_heads, layers[0].head_size
        caches = caches_of(KVCacheLayout.LBNHC, torch.bfloat16)
        for layer, cache in zip(layers, caches, strict=True):
            layer.kv_cache = cache
        builder = layers[0].attn_backend.get_builder_cls()(None, [], config, torch.device("cpu"))
        ids = tokens_of()
        logits = [torch.empty(length, config.model_config.get_vocab_size()) for length in LENGTHS]
        with torch.inference_mode(), set_current_vllm_config(config):
            for step in STEPS:
                common = step_metadata(step)
                metadata, names = builder.build(0, common), [layer.layer_name for layer in layers]
                positions = torch.cat([torch.arange(first, end) for first, end in step])
                inputs = torch.cat([ids[row][first:end] for row, (first, end) in enumerate(step)])
                with set_forward_context(
                    dict.fromkeys(names, metadata),
                    config,
                    num_tokens=len(inputs),
                    slot_mapping=dict.fromkeys(names, common.slot_mapping),
                ):
                    hidden = model(inputs, positions)
                got = model.compute_logits(hidden)
                start_row = 0
                for row, (first, end) in enumerate(step):
                    logits[row][first:end] = got[start_row : start_row + end - first]
                    start_row += end - first
        return {
            "backends": backends,
            "plan": status()["fingerprint"],
            "logits": [np.array(value) for value in logits],
        }


def tokens_of() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 320, (length,), generator=generator) for length in LENGTHS]


def trainer_of(folder: Path, plan: TreePlan) -> Any:
    """The Hugging Face model of tbik's operators: token ids -> logits fp32 [T, V]."""
    from tbik.huggingface.parallelize import load_checkpoint

    model = load_checkpoint(folder, None, plan, dtype=torch.bfloat16)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids[None], use_cache=False).logits[0]

    return logits


@pytest.mark.parametrize(
    ("kind", "packs"),
    [
        ("qwen3_moe", False),
        pytest.param("qwen3", True, marks=pytest.mark.long),
        pytest.param("qwen2", False, marks=pytest.mark.long),
        pytest.param("llama", False, marks=pytest.mark.long),
    ],
)
def test_verify_a_model_on_cuda_has_the_trainers_bits(kind: str, packs: bool, tmp_path: Path) -> None:
    """Chunks, pages and company on one side, a Hugging Face model of tbik's operators on the other."""
    folder = models.random_model(kind, tmp_path / "model", num_hidden_layers=2, vocab_size=320)
    got, error = in_a_process(model_on_cuda, folder, packs, environment=ENVIRONMENT)
    assert not error, error
    assert got["backends"] == {"TbikCudaAttentionBackend"} and got["plan"] == PLAN.fingerprint()
    trainer, other = trainer_of(folder, PLAN), trainer_of(folder, TreePlan(leaves=4))
    for ids, logits in zip(tokens_of(), got["logits"], strict=True):
        assert_bitwise_equal(torch.from_numpy(logits), trainer(ids), kind)
        assert_bits_differ(torch.from_numpy(logits), other(ids), "another plan")


# --- a whole engine --------------------------------------------------------------------------------------------------

PROMPTS = ([*range(3, 60)], [5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1])


def engine_on_cuda(folder: Path) -> dict[str, Any]:
    """vLLM's engine on its CUDA platform: (tokens, log-probabilities) of each prompt, in company and alone."""
    start(engine=True)
    from tbik_vllm import linear, vocabulary
    from vllm import LLM, SamplingParams

    linear.wants_packs = vocabulary.wants_packs = lambda parameter: False

    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=32,  # chunks
        kv_cache_memory_bytes=8 << 20,
        logprobs_mode="raw_logprobs",
        worker_cls="vllm.v1.worker.cpu_worker.CPUWorker",
    )

    def generate(prompts: Any, **options: Any) -> list[tuple[list[int], list[float]]]:
        parameters = SamplingParams(max_tokens=6, logprobs=1, detokenize=False, ignore_eos=True, **options)
        answers = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], parameters, use_tqdm=False)
        outputs = [answer.outputs[0] for answer in answers]
        return [
            (list(o.token_ids), [step[token].logprob for token, step in zip(o.token_ids, o.logprobs, strict=True)])
            for o in outputs
        ]

    seeded = {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 100}
    stock = {
        "linear": lambda: torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3)),
        "softmax": lambda: torch.ones(2, 3).softmax(-1),
    }
    # what the GPU worker does before it serves
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    runner.profile_run()
    runner._dummy_run(8, force_attention=True)
    return {
        "cache": llm.llm_engine.vllm_config.cache_config.kv_cache_layout,
        "together": generate(PROMPTS, temperature=0.0),
        "alone": [generate([prompt], temperature=0.0)[0] for prompt in PROMPTS],
        "seeded": generate(PROMPTS[1:], **seeded),
        "seeded alone": [generate([prompt], **seeded)[0] for prompt in PROMPTS[1:]],
        "stock": {name: report(call)[1] for name, call in stock.items()},
    }


def test_verify_an_engine_on_cuda_has_the_trainers_bits(tmp_path: Path) -> None:
    folder = models.random_model("qwen3", tmp_path / "model", num_hidden_layers=2, vocab_size=320)
    environment = ENVIRONMENT | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_CI_ENV": "1",
    }
    got, error = in_a_process(engine_on_cuda, folder, environment=environment)
    assert not error, error
    assert all(got["stock"].values()), "the batch-invariant mode would have noticed stock operators"
    assert got["together"] == got["alone"] and got["seeded"] == got["seeded alone"]
    assert got["seeded"] != got["together"][1:]
    trainer = trainer_of(folder, PLAN)
    for prompt, (tokens, logprobs) in zip(PROMPTS, got["together"], strict=True):
        logits = trainer(torch.tensor([*prompt, *tokens]))[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        assert_bitwise_equal(
            torch.tensor(logprobs), ops.logprobs(logits, torch.tensor(tokens), PLAN.leaves), "logprobs"
        )
