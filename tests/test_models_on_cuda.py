"""A parallelized model on CUDA: every tensor that its layers make is where its weights and ids are.

No GPU and no Triton kernel is used: pretend_cuda's tensors say that they are on cuda:0, hold CPU tensors and raise
where two devices meet in one operation. So what is shown is that the layers are right about devices, forward, backward,
with caches, gradient trees and over ranks, and that then the bits are the CPU's, its kernels being the ones that ran.
Nothing here has run on a GPU: the values of the CUDA kernels are the matter of tests/test_kernels_*.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from assertions import assert_bitwise_equal
from cases import wide_exponents
from pretend_cuda import CUDA, Mixed, OnCuda, move, pretend, there
from spawn import Pool
from torch import Tensor

pytest.importorskip("transformers")

from test_parallelize import LENGTHS, MODELS, PLAN, batch_of, sample_ids, stock

import tbik
from tbik import GradientTree, PlanError, TreePlan, collectives, gradient_norm, gradients
from tbik.huggingface import checkpoint
from tbik.vocabulary import VocabParallel


@pytest.fixture
def cuda() -> Iterator[None]:
    with pretend():
        yield


def sent(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to("cuda") if isinstance(value, Tensor) else value for name, value in arguments.items()}


def held(x: Any) -> Tensor:
    """What a result on the device holds; it must be there."""
    assert isinstance(x, OnCuda) and x.device == CUDA
    return x.held


def step(model: Any, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Logits without a graph, loss and gradients by name."""
    with torch.no_grad():
        logits = model(**{n: x for n, x in arguments.items() if n not in ("labels", "num_items_in_batch")}).logits
    loss = model(**arguments).loss
    loss.backward()
    found = {"logits": logits, "loss": loss.detach()}
    found |= {name: p.grad for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return found


def assert_as_on_the_cpu(model: Any, task: Callable[..., dict[str, Tensor]], arguments: dict[str, Any]) -> None:
    expected = task(model, arguments)
    with pretend():
        found = task(move(copy.deepcopy(model)), sent(arguments))
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert_bitwise_equal(held(value), expected[name], name)


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_verify_forward_and_backward(kind: str) -> None:
    """Packed rows, so that one position is not one place."""
    assert_as_on_the_cpu(tbik.parallelize(stock(kind), plan=PLAN), step, batch_of().packed())


@pytest.mark.parametrize("side", ["left", "right"])
def test_verify_padding(side: str) -> None:
    model = tbik.parallelize(stock("qwen3"), plan=PLAN)
    assert_as_on_the_cpu(model, step, batch_of().padded(side))


def test_verify_master_weights_and_dropout() -> None:
    found = stock("llama")
    found.config.attention_dropout = 0.25
    model = tbik.parallelize(found, plan=PLAN, compute_dtype=torch.bfloat16, residual_dropout=0.25).train()

    def train(model: Any, arguments: dict[str, Any]) -> dict[str, Tensor]:
        loss = model(**arguments, dropout=tbik.ops.DropoutKey(3, 5, 0)).loss
        loss.backward()
        return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}

    assert_as_on_the_cpu(model, train, batch_of().packed())


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_verify_generate_with_a_cache(kind: str) -> None:
    """From a batch padded on the left: slots, lengths and page tables are made of the mask."""

    def generate(model: Any, arguments: dict[str, Any]) -> dict[str, Tensor]:
        ids, mask = arguments["input_ids"], arguments["attention_mask"]
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
        return {"tokens": tokens, "alone": model.generate(ids[2:3], max_new_tokens=3, do_sample=False, pad_token_id=0)}

    assert_as_on_the_cpu(tbik.parallelize(stock(kind), plan=PLAN).eval(), generate, batch_of().padded("left"))


def test_verify_some_logits() -> None:
    def some(model: Any, arguments: dict[str, Any]) -> dict[str, Tensor]:
        given = {"input_ids": arguments["input_ids"], "attention_mask": arguments["attention_mask"]}
        columns = torch.tensor([-1, 3])
        with torch.no_grad():
            return {
                "last": model(**given, logits_to_keep=2).logits,
                "listed": model(**given, logits_to_keep=columns).logits,
            }

    assert_as_on_the_cpu(tbik.parallelize(stock("llama"), plan=PLAN).eval(), some, batch_of().padded("right"))


@pytest.mark.parametrize("form", ["cu_seq_lens_q", "position_ids", "attention_mask"])
def test_verify_attention_of_a_stock_model(form: str) -> None:
    """attn_implementation="tbik": torch's layers around our attention."""
    import tbik.huggingface.attention  # noqa: F401

    model = stock("qwen2").eval()
    model.set_attn_implementation("tbik")
    batch = batch_of()
    packed, padded = batch.packed(), batch.padded("left")
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    offsets = torch.tensor(packed["sample_offsets"], dtype=torch.int32)
    arguments: dict[str, Any] = {
        "cu_seq_lens_q": {"input_ids": packed["input_ids"], "position_ids": positions, "cu_seq_lens_q": offsets,
                          "cu_seq_lens_k": offsets},
        "position_ids": {"input_ids": packed["input_ids"], "position_ids": positions},
        "attention_mask": {"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"]},
    }[form]  # fmt: skip

    def forward(model: Any, arguments: dict[str, Any]) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"logits": model(**arguments, use_cache=False).logits}

    assert_as_on_the_cpu(model, forward, arguments)


def test_verify_gradient_tree() -> None:
    """Accumulators, the fan-in of a tied weight's uses and the scalar that starts a backward."""
    model = tbik.parallelize(stock("qwen3-tied"), plan=PLAN)
    ids = sample_ids()

    def accumulate(model: Any, arguments: dict[str, Any]) -> dict[str, Tensor]:
        unused = torch.nn.Parameter(next(iter(model.parameters())).detach()[:2].clone())
        parameters = dict(model.named_parameters()) | {"unused": unused}
        with GradientTree(parameters, samples_per_step=4, plan=PLAN) as tree:
            for sample in ids:
                with tree.micro_step(1) as micro:
                    row = sample[None].to(next(model.parameters()).device)
                    loss = model(row, labels=row, num_items_in_batch=1).loss
                    micro.backward(loss, gradients.upstream(7))
        return {name: p.grad for name, p in parameters.items()}

    assert_as_on_the_cpu(model, accumulate, {})


def test_verify_norm_of_gradients(cuda: None) -> None:
    grads = [wide_exponents((5, 7), torch.float32, seed=seed) for seed in range(3)]
    assert gradient_norm.norm(there(grad) for grad in grads) == gradient_norm.norm(grads) > 0


# --- over ranks -------------------------------------------------------------------------------------------------------


def _on_two_ranks(group: dist.ProcessGroup, kind: str) -> None:
    plan = TreePlan(leaves=12)
    model = tbik.parallelize(stock(kind), group, plan)
    assert_as_on_the_cpu(model, step, batch_of().packed())
    with pretend():
        assert_bitwise_equal(
            held(collectives.all_gather(torch.arange(3.0).to("cuda"), group)), torch.arange(3.0).expand(2, 3), "gather"
        )
        whole = checkpoint.whole(move(model), "lm_head.weight")
    assert_bitwise_equal(held(whole), stock(kind).lm_head.weight.detach(), "lm_head.weight, put together")


@pytest.mark.slow
def test_verify_two_ranks() -> None:
    """Records and gathered bytes by the CPU backend; KV heads that both hold, experts, a vocabulary in shards."""
    with Pool(2, timeout=120.0) as pool:
        for kind in ("qwen3", "qwen3_moe"):
            pool.run(_on_two_ranks, 2, kind)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_verify_tensors_elsewhere_are_refused_by_name(cuda: None) -> None:
    model = move(tbik.parallelize(stock("llama"), plan=PLAN))
    ids = torch.zeros(2, 5, dtype=torch.int64).to("cuda")
    here = torch.ones(2, 5, dtype=torch.int64)
    for name, where in (
        ("attention_mask", "attention_mask"),
        ("labels", "labels"),
        ("position_ids", "position_ids"),
    ):
        with pytest.raises(PlanError, match=rf"{where}: expected on cuda:0, where the ids are, got on cpu; use \.to"):
            model(ids, **{name: here})
    with pytest.raises(PlanError, match="on cpu"):
        model(here)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.cpu(), layer.values.cpu()
        with pytest.raises(PlanError, match=r"holds keys .* on cpu, this call needs .* on cuda:0"):
            model(ids[:, :1], past_key_values=cache)


def test_verify_a_model_on_several_devices_is_refused(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # pretended parameters are of a class of their own, which is refused before their device is asked for
    from tbik.huggingface import parallelize

    monkeypatch.setattr(parallelize, "_require_parameter", lambda name, parameter: None)
    model = stock("llama")
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(
        PlanError, match=r"spread over devices \(device_map: 0, 1\); load it without, or for one device"
    ):
        tbik.parallelize(model, plan=PLAN)
    model.hf_device_map = {"": 0}  # from_pretrained(device_map="cuda")
    move(model.lm_head)
    with pytest.raises(PlanError, match=r"weights are on cpu, cuda:0; move all of it to one device"):
        tbik.parallelize(model, plan=PLAN)


def test_verify_a_model_that_is_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    from tbik.huggingface import parallelize

    monkeypatch.setattr(parallelize, "_require_parameter", lambda name, parameter: None)
    arguments = batch_of().packed()
    expected = step(tbik.parallelize(stock("qwen3"), plan=PLAN), arguments)
    with pretend():
        found = step(tbik.parallelize(move(stock("qwen3")), plan=PLAN), sent(arguments))
        for name, value in found.items():
            assert_bitwise_equal(held(value), expected[name], name)


def test_verify_freezing_is_of_the_cpu(cuda: None) -> None:
    model = move(tbik.parallelize(stock("llama"), plan=PLAN))
    with pytest.raises(PlanError, match=r"is on cuda:0, and packs are for the CPU's kernels; .* model.cpu\(\) first"):
        tbik.freeze(model)


def test_verify_the_device_of_a_vocabulary() -> None:
    shards = VocabParallel(97, plan=PLAN)
    with pytest.raises(PlanError, match="logits is on meta, kernels exist for cpu and cuda"):
        shards.argmax(torch.zeros(2, 97, device="meta"))


def test_verify_mixed_devices_are_seen(cuda: None) -> None:
    """The negative control: without it the tests above show nothing."""
    x, here = torch.zeros(3).to("cuda"), torch.zeros(3)
    for mixed in (lambda: x + here, lambda: torch.cat([x, here]), lambda: tbik.ops.silu_and_mul(x, here)):
        with pytest.raises((Mixed, PlanError)):
            mixed()
    assert (x + torch.tensor(1.0)).device == CUDA  # a scalar may be the CPU's, as on CUDA
    assert torch.arange(3).device.type == "cpu" and torch.arange(3, device="cuda").device == CUDA
    assert x.new_zeros(2).device == CUDA and x.cpu().device.type == "cpu"
