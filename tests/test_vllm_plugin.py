"""The vLLM plug-in without an engine: layers built in a vLLM process, refusals, weights that are written to.

vLLM is no dependency of tbik: `make vllm` makes an environment with both, and these tests run there:
.venv-vllm/bin/python -m pytest tests/test_vllm_plugin.py
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents

import tbik
from tbik import PlanError, TreePlan, ops
from tbik.plan import ModelShape

vllm = pytest.importorskip("vllm", reason="vLLM is not installed here; `make vllm` makes an environment that has it")

PLAN = TreePlan(leaves=8)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
ENVIRONMENT = {
    "TBIK": "1",
    "TBIK_PLAN": json.dumps({"leaves": PLAN.leaves}),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_CI_ENV": "1",
}


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Iterator[None]:
    """The plug-in as vLLM loads it; it stays for the rest of the process."""
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    os.environ.pop("TBIK_VLLM", None)
    import tbik_vllm

    tbik_vllm.register()
    tbik_vllm.register()  # vLLM may call it again
    yield
    os.environ.clear()
    os.environ.update(before)


def write_config(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def engine_config(folder: Path, **arguments: Any) -> Any:
    """What vLLM checks before it starts anything."""
    from vllm.engine.arg_utils import EngineArgs

    settings = {"model": str(folder), "skip_tokenizer_init": True, "max_model_len": 256} | arguments
    return EngineArgs(**settings).create_engine_config()


# --- refusals before the start ---------------------------------------------------------------------------------------


REFUSED = {
    "architecture": ({"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}, {}, "the architecture"),
    "parallel block": ({"architectures": ["CohereForCausalLM"], "model_type": "cohere"}, {}, "the architecture"),
    "quantization": ({}, {"quantization": "fp8"}, "quantization"),
    "lora": ({}, {"enable_lora": True}, "enable_lora"),
    "kv cache": ({}, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
    "pipeline": ({}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    "speculation": (
        {},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        "speculative_config",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_verify_engines_are_refused_before_they_start(case: str, tmp_path: Path) -> None:
    changes, arguments, named = REFUSED[case]
    with pytest.raises(Exception, match="tbik_vllm") as caught:
        engine_config(write_config(tmp_path / "model", **changes), **arguments)
    assert named in str(caught.value)


def test_verify_plans_that_cut_a_shard_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBIK_PLAN", '{"leaves": 12}')
    with pytest.raises(Exception, match="TP=8, L=12: intermediate.*no leaf cut"):
        engine_config(write_config(tmp_path / "model"), tensor_parallel_size=8)


def test_verify_a_plain_engine_is_accepted_and_eager(tmp_path: Path) -> None:
    """Negative control of the refusals; compiled graphs are turned off."""
    from vllm.config import CompilationMode

    config = engine_config(write_config(tmp_path / "model"), tensor_parallel_size=2)
    assert config.model_config.enforce_eager
    assert config.compilation_config.mode == CompilationMode.NONE


REFUSED_OPTIONS = {
    "no architecture": ("model_config", "architectures", []),
    "double precision": ("model_config", "dtype", torch.float64),
    "quantised on the fly": ("", "quant_config", object()),
    "fused product and collective": ("compilation_config.pass_config", "fuse_gemm_comms", True),
    "prefill over ranks": ("parallel_config", "prefill_context_parallel_size", 2),
    "balanced experts": ("parallel_config", "enable_eplb", True),
    "two batches at once": ("parallel_config", "enable_dbo", True),
    "parts of a batch": ("parallel_config", "ubatch_size", 2),
    "elastic experts": ("parallel_config", "enable_elastic_ep", True),
    "sequence parallel": ("compilation_config.pass_config", "enable_sp", True),
    "fused all-reduce and norm": ("compilation_config.pass_config", "fuse_allreduce_rms", True),
    "expert parallel": ("parallel_config", "enable_expert_parallel", True),
    "data parallel": ("parallel_config", "data_parallel_size", 2),
    "context parallel": ("parallel_config", "decode_context_parallel_size", 2),
    "V2 runner": ("", "use_v2_model_runner", True),
    "pooling": ("model_config", "runner_type", "pooling"),
}


@pytest.mark.parametrize("case", REFUSED_OPTIONS)
def test_verify_options_of_other_platforms_are_refused(case: str) -> None:
    """Options that the CPU platform turns off itself: the check is asked directly."""
    from tbik_vllm.refusals import refuse_config

    def config() -> SimpleNamespace:
        return SimpleNamespace(
            model_config=SimpleNamespace(
                architectures=["Qwen3ForCausalLM"], quantization=None, dtype=torch.bfloat16, runner_type="generate"
            ),
            parallel_config=SimpleNamespace(
                pipeline_parallel_size=1,
                data_parallel_size=1,
                prefill_context_parallel_size=1,
                decode_context_parallel_size=1,
                enable_expert_parallel=False,
                enable_eplb=False,
                enable_dbo=False,
                enable_elastic_ep=False,
                ubatch_size=0,
            ),
            compilation_config=SimpleNamespace(pass_config=SimpleNamespace()),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            quant_config=None,
            lora_config=None,
            speculative_config=None,
            use_v2_model_runner=False,
        )

    refuse_config(config())
    where, name, value = REFUSED_OPTIONS[case]
    changed = config()
    target: Any = changed
    for part in where.split("."):
        target = getattr(target, part) if part else target
    setattr(target, name, value)
    named = {
        "runner_type": "runner is 'pooling'",
        "use_v2_model_runner": "V2_MODEL_RUNNER",
        "architectures": "the architecture is 'none'",
        "quant_config": "quantization",
    }
    with pytest.raises(PlanError, match=named.get(name, name)):
        refuse_config(changed)


def test_verify_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    import tbik_vllm
    from tbik_vllm.settings import Settings, plan_from_text

    monkeypatch.setenv("TBIK", "yes")
    with pytest.raises(PlanError, match="TBIK: expected 1"):
        tbik_vllm.register()
    monkeypatch.setenv("TBIK_VLLM", "half")
    with pytest.raises(PlanError, match="TBIK_VLLM"):
        Settings.from_environment()
    assert plan_from_text('{"leaves": 12}') == TreePlan(leaves=12)
    assert plan_from_text(PLAN.key()) == PLAN
    for text in ("{", "8", '{"leafs": 8}', '{"leaves": "8"}'):
        with pytest.raises(PlanError):
            plan_from_text(text)


def test_verify_plans_in_double_precision_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TBIK_PLAN", '{"leaves": 8, "acc_dtype": "float64"}')
    with pytest.raises(Exception, match="float32 at most, the plan says float64"):
        engine_config(write_config(tmp_path / "model"))


def test_verify_what_is_asked_before_an_engine_has_a_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tbik_vllm import settings
    from vllm.v1.sample.sampler import Sampler

    monkeypatch.setattr(settings, "_active", None)
    with pytest.raises(PlanError, match="no engine of this process has a plan"):
        Sampler.compute_logprobs(torch.zeros(1, 4))


def test_verify_a_changed_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import tbik_vllm

    monkeypatch.setenv("TBIK_VLLM", "allreduce")
    with pytest.raises(PlanError, match=r"loaded with .*full.* and again with .*allreduce"):
        tbik_vllm.register()


def test_verify_leaves_that_the_devices_lack_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine on a CPU, and the check itself for every device."""
    from tbik_vllm.settings import explain_leaf, require_leaf

    engine_config(write_config(tmp_path / "model"))  # vLLM loads its plug-ins once, with the environment of then
    monkeypatch.setenv("TBIK_PLAN", '{"leaf": "mma:sm_90"}')
    with pytest.raises(Exception, match="leaf is 'mma:sm_90', the devices are cpu.*expected fma or amx"):
        engine_config(write_config(tmp_path / "model"))
    plans = {leaf: TreePlan(leaves=4, leaf=leaf) for leaf in ("fma", "amx", "mma:sm_90")}
    for leaf, here in (("fma", "cpu"), ("amx", "cpu"), ("fma", "sm_90"), ("fma", "sm_89"), ("mma:sm_90", "sm_90")):
        require_leaf(plans[leaf], here)
    for leaf, here, instead in (
        ("amx", "sm_90", "fma or mma:sm_90"),
        ("mma:sm_90", "sm_80", "fma or mma:sm_80"),
        ("mma:sm_90", "sm_89", "fma"),
    ):
        with pytest.raises(PlanError, match=f"leaf is '{leaf}', the devices are {here}.*expected {instead}\\."):
            require_leaf(plans[leaf], here)
    assert '\'{"leaves": 4, "leaf": "mma:sm_90"}\'' in explain_leaf(plans["fma"], "sm_90")
    assert "sm_80, sm_90, sm_100" in explain_leaf(plans["fma"], "sm_89")
    assert not explain_leaf(plans["fma"], "cpu") and not explain_leaf(plans["mma:sm_90"], "sm_90")


def test_verify_derived_plans_ignore_the_tp_size() -> None:
    """A function of the config; SmolLM2's nine heads allow equal shards at TP 1 and 3 only."""
    from tbik_vllm.settings import derived_plan

    qwen = ModelShape(heads=16, kv_heads=8, head_dim=128, hidden=1024, intermediate=3072, vocab=151936)
    smollm2 = ModelShape(heads=9, kv_heads=3, head_dim=64, hidden=576, intermediate=1536, vocab=49152)
    assert derived_plan(qwen).leaves == 8
    for tp in (1, 2, 4, 8):
        derived_plan(qwen).layout(qwen, tp, equal=True)
    for tp in (1, 3):
        derived_plan(smollm2).layout(smollm2, tp, equal=True)
    with pytest.raises(PlanError):
        derived_plan(smollm2).layout(smollm2, 2, equal=True)


def test_verify_signatures_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    from tbik_vllm import guard

    guard.require_known_vllm()
    name = "vllm.v1.sample.sampler.Sampler.sample"
    monkeypatch.setattr(guard, "SIGNATURES", {name: "self logits"})
    with pytest.raises(PlanError, match="Sampler.sample"):
        guard.require_known_vllm()
    monkeypatch.setattr(guard, "SIGNATURES", {"vllm.v1.sample.sampler.Nobody.sample": "self"})
    with pytest.raises(PlanError, match="no such symbol"):
        guard.require_known_vllm()
    monkeypatch.setattr(guard, "TESTED_VERSIONS", ("0.1.0",))
    with pytest.raises(PlanError, match="untested"):
        guard.require_known_vllm()


# --- layers, at one rank and at two ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_rank(plugin: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = write_config(tmp_path_factory.mktemp("plugin") / "model")
    with vllm_rank(0, 1, folder, tempfile.mktemp()):
        yield


class vllm_rank:
    """A vLLM worker without model: its config is current and its tensor-parallel group is made."""

    def __init__(self, rank: int, world: int, folder: Path, meeting: str) -> None:
        from vllm.config import set_current_vllm_config

        self.rank, self.world, self.meeting = rank, world, meeting
        self.config = engine_config(folder, tensor_parallel_size=world)
        self.current = set_current_vllm_config(self.config)

    def __enter__(self) -> None:
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        self.current.__enter__()
        os.environ["VLLM_DIST_IDENT"] = os.path.basename(self.meeting)
        init_distributed_environment(self.world, self.rank, f"file://{self.meeting}", self.rank, "gloo")
        initialize_model_parallel(self.world)

    def __exit__(self, *exception: Any) -> None:
        from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

        destroy_model_parallel()
        destroy_distributed_environment()
        self.current.__exit__(*exception)


def load(layer: Any, weight: torch.Tensor, bias: torch.Tensor | None = None, shard: Any = None) -> None:
    """A whole weight by the layer's own loader."""
    arguments = () if shard is None else (shard,)
    layer.weight.weight_loader(layer.weight, weight, *arguments)
    if bias is not None:
        layer.bias.weight_loader(layer.bias, bias, *arguments)


def finish(layer: Any) -> Any:
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def dense(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return wide_exponents(shape, torch.bfloat16, seed, spread=20)


EXPERTS = 6


def mixture(**options: Any) -> Any:
    """vLLM's runner of six experts, two for each token."""
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

    settings = {"num_experts": EXPERTS, "top_k": 2, "hidden_size": 96, "intermediate_size": 128, "prefix": "moe"}
    vllm.config.get_current_vllm_config().compilation_config.static_forward_context.clear()  # one "moe" after another
    return FusedMoEFactory(**{**settings, **options})


def expert_weights() -> dict[str, torch.Tensor]:
    shapes = {"gate": (EXPERTS, 128, 96), "up": (EXPERTS, 128, 96), "down": (EXPERTS, 96, 128)}
    return {name: dense(shape, 24 + i) for i, (name, shape) in enumerate(shapes.items())}


def all_layers() -> dict[str, torch.Tensor]:
    """What every layer gives this rank; row-parallel, embedding and head are whole."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.linear import (
        MergedColumnParallelLinear,
        QKVParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    torch.set_default_dtype(torch.bfloat16)
    try:
        rank, world = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        out = {}
        x = dense((5, 192), 1)
        row = RowParallelLinear(192, 96, bias=True, prefix="row")
        load(row, dense((96, 192), 2), dense((96,), 3))
        finish(row)
        out["row"] = row(x[:, 192 // world * rank : 192 // world * (rank + 1)])[0]
        h = dense((5, 96), 4)
        merged = MergedColumnParallelLinear(96, [192, 192], bias=False, prefix="merged")
        for part in (0, 1):
            load(merged, dense((192, 96), 5 + part), shard=part)
        out["merged"] = finish(merged)(h)[0]
        qkv = QKVParallelLinear(96, 64, 8, 4, bias=True, prefix="qkv")
        for part, heads, seed in (("q", 8, 7), ("k", 4, 8), ("v", 4, 9)):
            load(qkv, dense((heads * 64, 96), seed), dense((heads * 64,), seed + 10), part)
        out["qkv"] = finish(qkv)(h)[0]
        replicated = ReplicatedLinear(96, 7, bias=False, prefix="replicated")
        load(replicated, dense((7, 96), 20))
        out["replicated"] = finish(replicated)(h)[0]
        embedding = VocabParallelEmbedding(317, 96, prefix="embedding")
        load(embedding, dense((317, 96), 21))
        out["embedding"] = finish(embedding)(torch.tensor([0, 316, 5, 160, 159]))
        head = ParallelLMHead(317, 96, prefix="head")
        load(head, dense((317, 96), 22))
        out["logits"] = LogitsProcessor(317)(finish(head), h)
        router = GateLinear(96, EXPERTS, prefix="moe.gate")
        load(router, dense((EXPERTS, 96), 23))
        out["router"] = finish(router)(h)[0]
        experts = mixture().routed_experts
        for parameter, name, shard in (
            (experts.w13_weight, "gate", "w1"),
            (experts.w2_weight, "down", "w2"),
            (experts.w13_weight, "up", "w3"),
        ):
            for expert, weight in enumerate(expert_weights()[name]):
                parameter.weight_loader(parameter, weight, f"moe.{name}.weight", shard_id=shard, expert_id=expert)
        experts.quant_method.process_weights_after_loading(experts)
        out["experts"] = experts.forward_monolithic(x=h, router_logits=out["router"])
        return {name: value.clone() for name, value in out.items()}
    finally:
        torch.set_default_dtype(torch.float32)


def expected_layers(rank: int, world: int) -> dict[str, torch.Tensor]:
    """The same by tbik.ops on whole weights, as the trainer calls them."""
    x, h = dense((5, 192), 1), dense((5, 96), 4)

    def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        return ops.linear(x, w, bias, plan=PLAN, **options)

    def mine(y: torch.Tensor) -> torch.Tensor:
        width = y.shape[1] // world
        return y[:, width * rank : width * (rank + 1)]

    parts = [mine(linear(h, dense((192, 96), 5 + part))) for part in (0, 1)]
    w, router = expert_weights(), linear(h, dense((EXPERTS, 96), 23), out_dtype=torch.float32)
    heads = [mine(linear(h, dense((n * 64, 96), s), dense((n * 64,), s + 10))) for n, s in ((8, 7), (4, 8), (4, 9))]
    return {
        "row": linear(x, dense((96, 192), 2), dense((96,), 3), parallel="row"),
        "merged": torch.cat(parts, 1),
        "qkv": torch.cat(heads, 1),
        "replicated": linear(h, dense((7, 96), 20)),
        "embedding": dense((317, 96), 21)[torch.tensor([0, 316, 5, 160, 159])],
        "logits": linear(h, dense((317, 96), 22), out_dtype=torch.float32),
        "router": router,
        "experts": ops.experts(
            h, ops.route(router, 2, normalize=True), torch.cat([w["gate"], w["up"]], 1), w["down"], plan=PLAN
        ),
    }


def test_verify_layers_equal_nn(one_rank: None) -> None:
    got, expected = all_layers(), expected_layers(0, 1)
    for name, value in expected.items():
        assert_bitwise_equal(got[name], value, name)
    stock = torch.nn.functional.linear(dense((5, 96), 4).float(), dense((317, 96), 22).float())
    assert_bits_differ(stock, got["logits"], "torch's linear")


def _rank_main(rank: int, world: int, folder: str, meeting: str, tasks: list[str], results: Any) -> None:
    torch.set_num_threads(1)
    import tbik_vllm

    tbik_vllm.register()
    with vllm_rank(rank, world, Path(folder), meeting):
        for task in tasks:
            try:
                results.put((task, rank, globals()[task](), ""))
            except BaseException as error:
                results.put((task, rank, None, f"{type(error).__name__}: {error}"))


def on_ranks(world: int, tasks: list[str], folder: Path) -> dict[str, list[tuple[Any, str]]]:
    """Per task [(what it gave, error) of each rank]; processes of their own, with a deadline."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    meeting = tempfile.mktemp()
    ranks = [
        context.Process(target=_rank_main, args=(r, world, str(folder), meeting, tasks, results), daemon=True)
        for r in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        got = sorted((results.get(timeout=240) for _ in range(world * len(tasks))), key=lambda result: result[:2])
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    return {task: [(value, error) for name, _, value, error in got if name == task] for task in tasks}


def all_layers_by_value() -> dict[str, Any]:
    """Tensors as bits and shapes, which travel between processes by value."""
    return {name: (value.dtype, value.contiguous().view(torch.uint8).numpy().tobytes(), value.shape)
            for name, value in all_layers().items()}  # fmt: skip


def unowned_sum() -> None:
    from vllm.distributed import tensor_model_parallel_all_reduce

    tensor_model_parallel_all_reduce(torch.ones(3))


def other_plan_on_rank_1() -> None:
    from tbik_vllm.plugin import _require_one_plan
    from vllm.distributed import get_tensor_model_parallel_rank

    _require_one_plan(TreePlan(leaves=8 * (1 + get_tensor_model_parallel_rank())))


@pytest.fixture(scope="module")
def two_ranks(plugin: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[Any, str]]]:
    folder = write_config(tmp_path_factory.mktemp("two") / "model")
    return on_ranks(2, ["all_layers_by_value", "unowned_sum", "other_plan_on_rank_1"], folder)


@pytest.mark.slow
def test_verify_layers_of_two_ranks(two_ranks: Any) -> None:
    """Sums over two ranks are the roots of one; columns and rows are this rank's."""
    for rank, (got, error) in enumerate(two_ranks["all_layers_by_value"]):
        assert not error
        for name, value in expected_layers(rank, 2).items():
            dtype, content, shape = got[name]
            mine = torch.frombuffer(bytearray(content), dtype=dtype).view(shape)
            assert_bitwise_equal(mine, value, f"{name} on rank {rank}")


@pytest.mark.slow
def test_verify_sums_that_no_layer_owns_are_refused(two_ranks: Any) -> None:
    for _, error in two_ranks["unowned_sum"]:
        assert "no layer of tbik asked for" in error


@pytest.mark.slow
def test_verify_ranks_with_two_plans_are_refused(two_ranks: Any) -> None:
    for _, error in two_ranks["other_plan_on_rank_1"]:
        assert TreePlan(leaves=8).fingerprint() in error and TreePlan(leaves=16).fingerprint() in error


def test_verify_row_operators_equal_ops(one_rank: None) -> None:
    from tbik_vllm.settings import activate
    from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.v1.sample.sampler import Sampler

    torch.set_default_dtype(torch.bfloat16)
    try:
        x, residual, w = dense((5, 96), 1), dense((5, 96), 2), dense((96,), 3)
        for cls, offset in ((RMSNorm, False), (GemmaRMSNorm, True)):
            norm = cls(96, eps=1e-6)
            norm.weight.data.copy_(w)
            assert_bitwise_equal(norm(x), ops.rms_norm(x, w, 1e-6, offset=offset), cls.__name__)
            got = norm(x.clone(), residual.clone())
            for mine, theirs in zip(got, ops.add_rms_norm(x, residual, w, 1e-6, offset=offset), strict=True):
                assert_bitwise_equal(mine, theirs, cls.__name__)
        packed = dense((5, 192), 4)
        assert_bitwise_equal(SiluAndMul()(packed), ops.silu_and_mul(packed), "silu")
        assert_bitwise_equal(GeluAndMul("tanh")(packed), ops.gelu_and_mul(packed), "gelu")
        positions = torch.tensor([0, 3, 255])
        for parameters in (
            {"rope_type": "default", "rope_theta": 10000.0},
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
        ):
            rope = get_rope(64, 512, rope_parameters=parameters)
            inv_freq, scale = ops.inverse_frequencies({"head_dim": 64, "rope_parameters": parameters})
            sin, cos = ops.rope_tables(positions, inv_freq, scale=scale)
            q, k = dense((3, 8 * 64), 5), dense((3, 4 * 64), 6)
            for mine, x in zip(rope(positions, q.clone(), k.clone()), (q, k), strict=True):
                theirs = ops.rope(x.view(3, -1, 64), sin, cos).view(3, -1)
                assert_bitwise_equal(mine, theirs, parameters["rope_type"])
        activate(PLAN)
        logits = wide_exponents((4, 320), torch.float32, 7, spread=6)
        assert_bitwise_equal(Sampler.compute_logprobs(logits), ops.log_softmax(logits, PLAN.leaves), "log-softmax")
    finally:
        torch.set_default_dtype(torch.float32)


def test_verify_attention_equals_the_trainers(one_rank: None) -> None:
    """Over vLLM's cache and metadata: a prompt in two chunks, and packed attention of the whole sequence."""
    from tbik_vllm.attention import TbikAttentionImpl

    impl = TbikAttentionImpl(8, 64, 0.125, 4, None, None, "auto")
    cache = torch.zeros(4, 4, 32, 128, dtype=torch.bfloat16)  # pages, KV heads, slots, keys and values
    q, k, v = (dense((40, heads, 64), seed) for heads, seed in ((8, 1), (4, 2), (4, 3)))
    slots = torch.tensor([(3 if t < 32 else 1) * 32 + t % 32 for t in range(40)])
    got = []
    for first, end in ((0, 25), (25, 40)):
        impl.do_kv_cache_update(None, k[first:end], v[first:end], cache, slots[first:end])
        metadata = SimpleNamespace(
            num_actual_tokens=end - first,
            block_table=torch.tensor([[3, 1]], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            query_start_loc=torch.tensor([0, end - first], dtype=torch.int32),
        )
        got.append(impl.forward(None, q[first:end], None, None, cache, metadata, torch.empty_like(q[first:end])))
    assert_bitwise_equal(torch.cat(got), ops.attention(q, k, v, scale=0.125), "attention")
    arguments: dict[str, Any]
    for arguments, named in (
        ({"kv_cache_dtype": "fp8"}, "a KV cache in fp8"),
        ({"alibi_slopes": [0.5] * 8}, "alibi slopes"),
        ({"attn_type": "encoder"}, "attn_type 'encoder'"),
        ({"kv_sharing_target_layer_name": "other"}, "keys shared with another layer"),
        ({"num_kv_heads": 3}, "8 heads over 3 KV heads"),
    ):
        settings = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", "num_kv_heads": 4}
        with pytest.raises(PlanError, match=f"{named}.* not supported"):
            TbikAttentionImpl(num_heads=8, head_size=64, scale=0.125, **(settings | arguments))


# --- layers that are refused -----------------------------------------------------------------------------------------


def test_verify_layers_are_refused_by_name(one_rank: None) -> None:
    from tbik_vllm.attention import TbikAttentionBackend
    from tbik_vllm.refusals import refuse_model
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers.activation import GeluAndMul, QuickGELU
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    def refused(match: str, make: Callable[[], Any]) -> None:
        with pytest.raises(PlanError, match=match):
            make()

    refused("reduce_results=False", lambda: RowParallelLinear(96, 96, False, reduce_results=False, prefix="a.down"))
    refused("skip_bias_add", lambda: RowParallelLinear(96, 96, True, skip_bias_add=True, prefix="a.down"))
    fp8: dict[str, Any] = {"quant_config": Fp8Config(), "prefix": "a.quantised"}
    for make in (
        lambda: RowParallelLinear(96, 96, False, **fp8),
        lambda: ColumnParallelLinear(96, 96, False, **fp8),
        lambda: MergedColumnParallelLinear(96, [96, 96], False, **fp8),
        lambda: QKVParallelLinear(96, 64, 8, 4, False, **fp8),
        lambda: ReplicatedLinear(96, 96, False, **fp8),
    ):
        refused(r"Linear 'a.quantised' is quantised \(Fp8LinearMethod\)", make)
    refused("cuts a leaf|leaf", lambda: equal_shards_of(96, 8))
    refused("100 input features do not divide by 8 ranks", lambda: equal_shards_of(100, 8))
    refused("added rows", lambda: VocabParallelEmbedding(330, 96, org_num_embeddings=320, prefix="embed"))
    refused("added rows", lambda: ParallelLMHead(330, 96, org_num_embeddings=320, prefix="head"))
    refused(
        "'embed' has reduce_results=False",
        lambda: VocabParallelEmbedding(320, 96, prefix="embed", reduce_results=False),
    )
    refused(
        "'embed' is sharded over a group of its own",
        lambda: VocabParallelEmbedding(320, 96, prefix="embed", parallel_group=get_tp_group()),
    )
    refused(
        r"VocabParallelEmbedding 'embed' is quantised \(Quantised\)",
        lambda: VocabParallelEmbedding(320, 96, prefix="embed", quant_method=quantised_rows()),
    )
    refused(
        r"VocabParallelEmbedding 'embed' is quantised \(Quantised\)",
        lambda: VocabParallelEmbedding(320, 96, prefix="embed", quant_config=quantised_everywhere()),
    )
    refused(
        r"ParallelLMHead 'head' is quantised \(Quantised\)",
        lambda: ParallelLMHead(320, 96, prefix="head", quant_config=quantised_everywhere()),
    )
    refused("soft_cap=30.0", lambda: LogitsProcessor(320, soft_cap=30.0))
    refused("scale=0.5", lambda: LogitsProcessor(320, scale=0.5))
    refused("logits_as_input=True", lambda: LogitsProcessor(320, logits_as_input=True))
    head = LogitsProcessor(320)
    head.head_dtype = torch.float16
    refused("head_dtype is torch.float16", lambda: head._apply_head(None, torch.zeros(1, 96), None))
    refused("without a weight", lambda: RMSNorm(96, has_weight=False))
    refused("a part of the row", lambda: RMSNorm(96, var_hidden_size=48))
    refused("tanh", lambda: GeluAndMul("none"))
    refused(
        r"one factor, got \[2.0, 4.0\]",
        lambda: LinearScalingRotaryEmbedding(64, 64, 512, 10000.0, True, [2.0, 4.0], torch.float32),
    )
    model = torch.nn.Module()
    model.act = QuickGELU()
    refused("act is a .*QuickGELU: there is no tbik form", lambda: refuse_model(model, {}))
    refused("act is a .*QuickGELU: another plug-in", lambda: refuse_model(model, {"QuickGELU": QuickGELU}))
    model = torch.nn.Module()
    model.attn = torch.nn.Module()
    model.attn.attn_backend = CPUAttentionBackend
    refused("attn has the attention backend vllm.*CPUAttentionBackend; expected", lambda: refuse_model(model, {}))
    model.attn.attn_backend = TbikAttentionBackend
    refuse_model(model, {})


def quantised_rows() -> Any:
    """An embedding whose rows vLLM would look up in another form than they were trained in."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    class Quantised(UnquantizedEmbeddingMethod):
        pass

    return Quantised()


def quantised_everywhere() -> Any:
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    class Everywhere(QuantizationConfig):
        def get_name(self) -> str:
            return "everywhere"

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.bfloat16]

        @classmethod
        def get_min_capability(cls) -> int:
            return -1

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            return cls()

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            return quantised_rows()

    return Everywhere()


class FakeSums:
    """The sums of two ranks, of which this process is one."""

    bytes_sent = 0


def communicator_of(mode: str) -> Any:
    """A tensor-parallel communicator of vLLM's class for CPUs with tbik's before it, without other ranks."""
    from tbik_vllm.communicator import TbikCpuCommunicator

    communicator = TbikCpuCommunicator.__new__(TbikCpuCommunicator)
    communicator.sums, communicator.world_size = FakeSums(), 2
    communicator.is_alone = mode == "allreduce"
    return communicator


def test_verify_sums_of_a_communicator_are_refused() -> None:
    full, alone = communicator_of("full"), communicator_of("allreduce")
    for call in (full.all_reduce, full.reduce_scatter):
        with pytest.raises(PlanError, match="no layer of tbik asked for"):
            call(torch.zeros(4, 3))
    with pytest.raises(PlanError, match=r"2 ranks of dimension 0 of \[3, 4\], which they do not divide"):
        alone.reduce_scatter(torch.zeros(3, 4), 0)
    for communicator in (full, alone):
        with pytest.raises(PlanError, match="reduce_scatterv"):
            communicator.reduce_scatterv(torch.zeros(4, 3), 0, [1, 3])


def test_verify_a_group_made_before_the_plugin_is_refused(one_rank: None) -> None:
    """Of one rank nothing is summed, so its communicator has no sums: as one that was made before, or by another."""
    from tbik_vllm.communicator import tensor_parallel_sums

    with pytest.raises(PlanError, match="made before the plug-in was loaded, or another plug-in"):
        tensor_parallel_sums()


def test_verify_shards_that_nccl_cannot_add_are_refused() -> None:
    """The CUDA communicator without peer memory, asked before anything touches a device."""
    from tbik_vllm.communicator_cuda import NcclRankSums
    from tbik_vllm.sharding import equal_shard

    two_nodes = equal_shard("down", TreePlan(leaves=12), 96, 0, 2)
    narrow = equal_shard("down", TreePlan(leaves=8, wire_dtype="bfloat16"), 96, 0, 2)
    assert not two_nodes.is_node_per_rank and narrow.is_node_per_rank
    for shard in (two_nodes, narrow):
        with pytest.raises(PlanError, match="without peer memory"):
            NcclRankSums(None, 2).sum_cover(torch.zeros(1, 4), shard, None, torch.bfloat16)


def test_verify_platforms_of_vllm_that_are_not_known_are_refused() -> None:
    from tbik_vllm import plugin

    class Other:
        @classmethod
        def get_device_communicator_cls(cls) -> str:
            return "vllm.somewhere.XpuCommunicator"

    with pytest.raises(PlanError, match="XpuCommunicator; expected one of"):
        plugin._replace_communicator(Other)


def test_verify_weights_that_have_no_name_in_the_checkpoint_are_refused(one_rank: None) -> None:
    from tbik_vllm import weight_digest
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    model = torch.nn.Module()
    model.other_proj = MergedColumnParallelLinear(96, [96, 96], bias=False, prefix="other_proj")
    with pytest.raises(PlanError, match="other_proj: expected gate_up_proj"):
        weight_digest.digest(model, None)
    model = torch.nn.Module()
    model.conv = torch.nn.Conv1d(3, 3, 1)
    with pytest.raises(PlanError, match="conv.weight belongs to a Conv1d"):
        weight_digest.digest(model, None)


REFUSED_EXPERTS: dict[str, dict[str, Any]] = {
    "biases": {"has_bias": True},
    "activation": {"activation": "gelu"},
    "scores by sigmoid": {"scoring_func": "sigmoid"},
    "grouped top-k": {"use_grouped_topk": True, "num_expert_group": 2, "topk_group": 1},
    "a routing function of its own": {"custom_routing_function": lambda *arguments, **options: None},
    "score corrections": {"e_score_correction_bias": torch.zeros(EXPERTS)},
    "a scaling factor": {"routed_scaling_factor": 2.5},
    "weights on the input": {"apply_router_weight_on_input": True},
    "a clamped gate": {"swiglu_limit": 7.0},
}


@pytest.mark.parametrize("named", REFUSED_EXPERTS)
def test_verify_other_mixtures_of_experts_are_refused(named: str, one_rank: None) -> None:
    with pytest.raises(PlanError, match=named):
        experts = mixture(**REFUSED_EXPERTS[named]).routed_experts
        experts.quant_method.process_weights_after_loading(experts)


def test_verify_experts_over_expert_parallel_ranks_are_refused() -> None:
    from tbik_vllm.moe import refuse_experts
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    parallel = SimpleNamespace(use_ep=False, dp_size=1)
    moe = SimpleNamespace(
        has_bias=False, activation=MoEActivation.SILU, is_sequence_parallel=False, moe_parallel_config=parallel
    )
    refuse_experts(moe)
    for holder, name, value, named in (
        (parallel, "use_ep", True, "expert parallelism"),
        (parallel, "dp_size", 2, "data or sequence parallelism"),
        (moe, "is_sequence_parallel", True, "data or sequence parallelism"),
    ):
        before = getattr(holder, name)
        setattr(holder, name, value)
        with pytest.raises(PlanError, match=named):
            refuse_experts(moe)
        setattr(holder, name, before)


def test_verify_shared_experts_are_refused(one_rank: None) -> None:
    """Qwen3-MoE with a shared expert: vLLM adds its partial sums to those of the routed ones."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeMLP

    assert get_current_vllm_config() is not None
    with pytest.raises(PlanError, match=r"shared_expert.down_proj.*shared experts"):
        Qwen3MoeMLP(96, 128, "silu", reduce_results=False, prefix="mlp.shared_expert")


def test_verify_calls_that_attention_does_not_know_are_refused(one_rank: None) -> None:
    from tbik_vllm.attention import TbikAttentionImpl, TbikAttentionMetadataBuilder
    from vllm.model_executor.layers.rotary_embedding import get_rope

    builder = TbikAttentionMetadataBuilder.__new__(TbikAttentionMetadataBuilder)
    with pytest.raises(PlanError, match="causal=False"):
        builder.build(0, SimpleNamespace(causal=False))
    impl = TbikAttentionImpl(8, 64, 0.125, 4, None, None, "auto")
    for scale in ("output_scale", "output_block_scale"):
        with pytest.raises(PlanError, match="quantised output"):
            impl.forward(None, *[torch.zeros(1)] * 4, None, torch.zeros(1), **{scale: torch.ones(1)})
    rope = get_rope(64, 512, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    with pytest.raises(PlanError, match="multimodal"):
        rope(torch.zeros(3, 5, dtype=torch.int64), torch.zeros(5, 64), torch.zeros(5, 64))


def test_verify_another_plugin_before_this_one_is_refused() -> None:
    """Its own pieces stand there already, as another's would."""
    from tbik_vllm import plugin

    with pytest.raises(PlanError, match="another plug-in has replaced vLLM's"):
        plugin._replace_layers()
    with pytest.raises(PlanError, match="another plug-in has replaced CPU_ATTN"):
        plugin._replace_attention()


def test_verify_full_is_refused_where_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from tbik_vllm import plugin
    from vllm.platforms import current_platform

    monkeypatch.setattr(plugin, "_installed", None)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(PlanError, match="kernels for the CPU and for CUDA, this is CpuPlatform"):
        plugin.install()


def test_verify_a_second_plan_in_one_process_is_refused() -> None:
    from tbik_vllm.settings import activate

    activate(PLAN)
    with pytest.raises(PlanError, match="in a process of its own"):
        activate(TreePlan(leaves=16))


def equal_shards_of(length: int, size: int) -> Any:
    from tbik_vllm.sharding import equal_shard

    return equal_shard("down", TreePlan(leaves=12), length, 0, size)


# --- weights that are written to -------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Any, torch.Tensor], None]] = {
    "loader": lambda p, w: p.weight_loader(p, w),
    "data.copy_": lambda p, w: p.data.copy_(w),
    "copy_": lambda p, w: p.copy_(w),
    "a row": lambda p, w: [p[i].copy_(w[i]) for i in range(len(w))] and None,
    "narrow of data": lambda p, w: p.data.narrow(0, 0, len(w)).copy_(w),
    "foreach": lambda p, w: torch._foreach_copy_([p], [w]),
    "data = ": lambda p, w: setattr(p, "data", w.clone()),
}


@pytest.mark.parametrize("write", WRITES)
def test_verify_written_weights_are_packed_again(write: str, one_rank: None) -> None:
    from vllm.model_executor.layers.linear import RowParallelLinear

    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = RowParallelLinear(192, 96, bias=False, prefix="row")
    finally:
        torch.set_default_dtype(torch.float32)
    x, first, second = dense((5, 192), 1), dense((96, 192), 2), dense((96, 192), 3)
    load(layer, first)
    finish(layer)
    before = layer(x)[0].clone()
    with torch.no_grad():
        WRITES[write](layer.weight, second)
    assert_bitwise_equal(layer(x)[0], ops.linear(x, second, plan=PLAN, parallel="row"), write)
    assert_bits_differ(layer(x)[0], before, write)


def test_verify_a_kept_pack_is_the_old_weight(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what the tests above would see if nobody dropped the packs."""
    from tbik_vllm.weights import Watch
    from vllm.model_executor.layers.linear import RowParallelLinear

    layer = RowParallelLinear(192, 96, bias=False, params_dtype=torch.bfloat16, prefix="row")
    x, first, second = dense((5, 192), 1), dense((96, 192), 2), dense((96, 192), 3)
    load(layer, first)
    finish(layer)
    monkeypatch.setattr(Watch, "drop", lambda watch: None)
    layer.weight.data.copy_(second)
    assert_bitwise_equal(layer(x)[0], ops.linear(x, first, plan=PLAN, parallel="row"), "the old pack")
    assert_bits_differ(layer(x)[0], ops.linear(x, second, plan=PLAN, parallel="row"), "the new weight")


def test_verify_aliases_keep_no_pack(one_rank: None) -> None:
    """An alias that lives on may be written to at any time; without one the pack is made once."""
    from tbik_vllm.linear import pack_of
    from vllm.model_executor.layers.linear import RowParallelLinear

    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = RowParallelLinear(192, 96, bias=False, prefix="row")
    finally:
        torch.set_default_dtype(torch.float32)
    x, first, second = dense((5, 192), 1), dense((96, 192), 2), dense((96, 192), 3)
    load(layer, first)
    finish(layer)
    assert pack_of(layer) is pack_of(layer)
    alias = layer.weight.data
    layer(x)
    alias.copy_(second)
    assert_bitwise_equal(layer(x)[0], ops.linear(x, second, plan=PLAN, parallel="row"), "an old alias")
    alias.copy_(first)
    del alias
    assert_bitwise_equal(layer(x)[0], ops.linear(x, first, plan=PLAN, parallel="row"), "an alias that is gone")
    assert pack_of(layer) is pack_of(layer)


def test_verify_replaced_parameters_are_packed_again(one_rank: None) -> None:
    from vllm.model_executor.layers.linear import RowParallelLinear

    layer = RowParallelLinear(192, 96, bias=False, params_dtype=torch.bfloat16, prefix="row")
    x, first, second = dense((5, 192), 1), dense((96, 192), 2), dense((96, 192), 3)
    load(layer, first)
    finish(layer)
    layer.weight = torch.nn.Parameter(second.clone(), requires_grad=False)
    assert_bitwise_equal(layer(x)[0], ops.linear(x, second, plan=PLAN, parallel="row"), "another parameter")


def test_verify_the_plugin_is_off_without_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    import tbik_vllm

    def fail() -> None:
        raise AssertionError("installed")

    import tbik_vllm.plugin

    monkeypatch.setattr(tbik_vllm.plugin, "install", fail)
    for value in ("", "0"):
        monkeypatch.setenv("TBIK", value)
        tbik_vllm.register()
    monkeypatch.delenv("TBIK")
    tbik_vllm.register()
    monkeypatch.setenv("TBIK", "1")
    with pytest.raises(AssertionError, match="installed"):
        tbik_vllm.register()
    assert tbik.__version__
