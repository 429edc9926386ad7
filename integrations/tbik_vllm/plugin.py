"""Puts tbik's pieces at vLLM's extension points, once per process.

    classes by name (register_oot)     linears, embedding, lm_head, logits, norms, rope, activations
    CPU_ATTN or CUSTOM of the registry attention
    platform class                     get_device_communicator_cls, check_and_update_config; on CUDA also
                                       apply_config_platform_defaults
    Sampler.compute_logprobs           log-softmax; on CUDA also TopKTopPSampler
    BaseModelLoader.load_model         the plan's agreement between ranks, and a look at the model that was built

Errors: PlanError. Bits: none here.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from tbik import PlanError, TreePlan
from tbik_vllm import cuda_platform, guard, refusals
from tbik_vllm.settings import Settings, activate, active_plan, explain_leaf, plan_for, require_leaf

_installed: Settings | None = None
_REPLACED: dict[str, type] = {}


def install() -> None:
    """Everything that Settings ask for. A second call in a process does nothing.

    Errors: PlanError where vLLM is not the one that was tested, or the platform has no kernels.
    """
    global _installed
    settings = Settings.from_environment()
    if _installed is not None:
        if _installed != settings:
            raise PlanError(f"tbik_vllm: loaded with {_installed} and again with {settings}; the environment changed")
        return
    from vllm.platforms import current_platform

    platform = type(current_platform)
    is_cpu, is_cuda = current_platform.is_cpu(), current_platform.is_cuda()
    if settings.mode == "full" and not (is_cpu or is_cuda):
        raise PlanError(
            f"tbik_vllm: TBIK_VLLM=full has kernels for the CPU and for CUDA, this is {platform.__name__}; "
            "TBIK_VLLM=allreduce replaces the collectives alone"
        )
    guard.require_known_vllm(is_cpu)
    if not is_cpu:  # before a configuration is made from it
        full = settings.mode == "full"
        cuda_platform.set_environment(cuda_platform.FULL if full else cuda_platform.BATCH_INVARIANT, _say)
    _replace_communicator(platform)
    if settings.mode == "allreduce":
        _logger().warning(
            "tbik: TBIK_VLLM=allreduce replaces the tensor-parallel collectives alone. Their sums are "
            "deterministic, but this alone does not make the outputs of two TP sizes equal: TBIK_VLLM=full does"
        )
        if not is_cpu:
            cuda_platform.keep_stock_apart(platform, _say)
    else:
        _replace_layers()
        if is_cpu:
            _replace_attention()
        else:
            cuda_platform.register_attention(_say)
            cuda_platform.replace_sampling(_say)
            cuda_platform.wrap_defaults(platform, _say)
        _replace_sampler()
        _wrap_config(platform)
        _wrap_loader()
    _installed = settings


def status() -> dict[str, Any]:
    """Of this worker: fingerprint of its plan (None for the collectives alone), bytes_sent since the last call."""
    from vllm.distributed import get_tp_group

    from tbik_vllm.communicator import tensor_parallel_sums

    sent = 0
    if get_tp_group().world_size > 1:
        sums = tensor_parallel_sums()
        sent, sums.bytes_sent = sums.bytes_sent, 0
    plan = None if _installed is None or _installed.mode == "allreduce" else active_plan().fingerprint()
    return {"fingerprint": plan, "bytes_sent": sent}


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.tbik")


def _say(what: str, by: str) -> None:
    _logger().info("tbik: %s -> %s", what, by)


# --- pieces -----------------------------------------------------------------------------------------------------------


def _replace_communicator(platform: type) -> None:
    stock = platform.get_device_communicator_cls()  # type: ignore[attr-defined]
    names = {
        "CpuCommunicator": "tbik_vllm.communicator.TbikCpuCommunicator",
        "CudaCommunicator": "tbik_vllm.communicator_cuda.TbikCudaCommunicator",
    }
    ours = names.get(stock.rsplit(".", 1)[-1])
    if ours is None:
        raise PlanError(f"tbik_vllm: the platform's communicator is {stock}; expected one of {sorted(names)}")
    platform.get_device_communicator_cls = classmethod(lambda cls: ours)  # type: ignore[attr-defined]
    _say(f"{platform.__name__}.get_device_communicator_cls: {stock}", ours)


def _replace_layers() -> None:
    from tbik_vllm import activation, linear, moe, norm, rope, vocabulary

    for ours in (
        linear.TbikReplicatedLinear,
        linear.TbikColumnParallelLinear,
        linear.TbikMergedColumnParallelLinear,
        linear.TbikQKVParallelLinear,
        linear.TbikRowParallelLinear,
        vocabulary.TbikVocabParallelEmbedding,
        vocabulary.TbikParallelLMHead,
        vocabulary.TbikLogitsProcessor,
        norm.TbikRMSNorm,
        norm.TbikGemmaRMSNorm,
        rope.TbikRotaryEmbedding,
        rope.TbikLinearScalingRotaryEmbedding,
        rope.TbikLlama3RotaryEmbedding,
        rope.TbikYaRNScalingRotaryEmbedding,
        activation.TbikSiluAndMul,
        activation.TbikGeluAndMul,
        moe.TbikGateLinear,
        moe.TbikMoEMethod,
    ):
        stock: Any = next(base for base in ours.__mro__ if base.__module__.startswith("vllm."))
        name = stock.__name__
        try:
            stock.register_oot(ours, name=name)
        except AssertionError as error:
            raise PlanError(f"tbik_vllm: another plug-in has replaced vLLM's {name}; unload it: {error}") from error
        _REPLACED[name] = ours
        _say(name, f"{ours.__module__}.{ours.__name__}")


def _replace_attention() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    ours = "tbik_vllm.attention.TbikAttentionBackend"
    if AttentionBackendEnum.CPU_ATTN.is_overridden():
        raise PlanError(
            f"tbik_vllm: another plug-in has replaced CPU_ATTN by {AttentionBackendEnum.CPU_ATTN.get_path()}; unload it"
        )
    register_backend(AttentionBackendEnum.CPU_ATTN, ours)
    _say("attention backend CPU_ATTN", ours)


def _replace_sampler() -> None:
    from vllm.v1.sample.sampler import Sampler

    from tbik_vllm.vocabulary import compute_logprobs

    Sampler.compute_logprobs = staticmethod(compute_logprobs)
    _say("Sampler.compute_logprobs", "tbik_vllm.vocabulary.compute_logprobs")


# --- checks -----------------------------------------------------------------------------------------------------------


def _wrap_config(platform: Any) -> None:
    """Refuse in the process that made the config, before anything is started; run eagerly."""
    stock = platform.check_and_update_config.__func__

    @wraps(stock)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        if vllm_config.model_config is None:
            return
        _run_eagerly(vllm_config)
        refusals.refuse_config(vllm_config)
        _require_device_leaf(plan_for(vllm_config))

    platform.check_and_update_config = classmethod(check_and_update_config)
    _say(f"{platform.__name__}.check_and_update_config", "the same, then tbik's refusals")


def _require_device_leaf(plan: TreePlan) -> None:
    """PlanError for a leaf that this platform's devices do not have; says what a slow one costs."""
    from vllm.platforms import current_platform

    here = "cpu" if current_platform.is_cpu() else cuda_platform.architecture(current_platform)
    require_leaf(plan, here)
    warning = explain_leaf(plan, here)
    if warning:
        _logger().warning("tbik: %s", warning)


def _run_eagerly(vllm_config: Any) -> None:
    """Compiled code between the operators would round elsewhere; the operators are no slower without it."""
    from vllm.config import CompilationMode

    compilation = vllm_config.compilation_config
    if compilation.mode not in (None, CompilationMode.NONE):
        _logger().info("tbik: runs eagerly (compilation mode %s -> NONE)", compilation.mode)
    compilation.mode = CompilationMode.NONE
    vllm_config.model_config.enforce_eager = True


def _wrap_loader() -> None:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    stock = BaseModelLoader.load_model

    @wraps(stock)
    def load_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        plan = plan_for(vllm_config)
        _require_device_leaf(plan)
        _require_one_plan(plan)
        activate(plan)
        model = stock(self, vllm_config, model_config, prefix)
        refusals.refuse_model(model, _REPLACED)
        return model

    BaseModelLoader.load_model = load_model  # type: ignore[method-assign]
    _say("BaseModelLoader.load_model", "the same, between the plan's comparison and a look at the model")


def _require_one_plan(plan: TreePlan) -> None:
    """PlanError on all ranks unless all have this plan."""
    import torch.distributed as dist
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    prints = [plan.fingerprint()]
    if group.world_size > 1:
        prints = [""] * group.world_size
        dist.all_gather_object(prints, plan.fingerprint(), group=group.cpu_group)
    if len(set(prints)) > 1:
        raise PlanError(f"tbik_vllm: the ranks have different plans: fingerprints {prints}; give all one TBIK_PLAN")
    _logger().info("tbik: plan %s on %d tensor-parallel ranks: %s", prints[0], len(prints), plan.key())
