"""One vLLM engine as a process that speaks lines of JSON: what `tbik verify --engine vllm` and bench/serve.py start.

    python -m tbik_vllm.engine     stdin: the settings, then commands     stdout: one reply each     stderr: vLLM's log

    {"do": "generate", "prompts": [[ids]], "new_tokens": n, "top": k, "seeds": [s]} -> {"kind": "answers", ...}
    {"do": "report"}                                                                -> {"kind": "ready", "ranks": [...]}
    {"do": "call", "method": name, "arguments": [...]}                              -> {"kind": "results", ...}

Settings are the fields of tbik.engines.EngineSettings. vLLM is imported after the environment that it reads is set.
Log-probabilities are raw ones (logprobs_mode="raw_logprobs": log-softmax of the logits, before temperature, top-k and
top-p); vLLM's processed ones are renormalised over the tokens that stay and say nothing about numerics.
The end of stdin ends the process and every process of its session.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import pydantic

from tbik.errors import TbikError
from tbik_vllm.forking import start_processes_by_fork

LOGPROBS_MODE = "raw_logprobs"
REPORT = "tbik_vllm.worker_report.WorkerReport"
SWITCHES = {"tbik": "full", "allreduce": "allreduce"}
TOKEN_ID = "token_id:"
REQUEST_S = 600.0  # of one HTTP request; the parent's own deadline is shorter


class Engine(Protocol):
    def generate(self, command: dict[str, Any]) -> list[dict[str, Any]]: ...

    def call(self, method: str, arguments: list[Any]) -> list[Any]: ...


def main() -> None:
    # vLLM and what it starts print to stdout; replies get a descriptor of their own, which children do not inherit
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def reply(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")

    job = json.loads(sys.stdin.readline())
    commands: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read_commands, args=(commands,), daemon=True).start()
    try:
        set_environment(job)
        engine: Engine = Server(job) if job["server"] else InProcess(job)
        reply(kind="ready", ranks=engine.call("tbik_report", []))
        while True:
            command = commands.get()
            if command["do"] == "generate":
                start, start_cpu = time.monotonic(), time.process_time()
                answers = engine.generate(command)
                seconds, processor_s = time.monotonic() - start, time.process_time() - start_cpu
                reply(kind="answers", answers=answers, seconds=seconds, processor_s=processor_s)
            elif command["do"] == "call":
                reply(kind="results", results=engine.call(command["method"], command["arguments"]))
            else:
                reply(kind="ready", ranks=engine.call("tbik_report", []))
    except BaseException as error:
        traceback.print_exc()
        cause = _refusal(error) or error
        reply(kind="refused" if isinstance(cause, TbikError) else "failed", text=f"{type(cause).__name__}: {cause}")
        time.sleep(60.0)  # the parent reads this and kills the session; alone, the process ends
        raise


def _refusal(error: BaseException) -> TbikError | None:
    """tbik's own error, also where pydantic has wrapped it: a PlanError is a ValueError to vLLM's config classes."""
    if isinstance(error, TbikError):
        return error
    if isinstance(error, pydantic.ValidationError):
        causes = (details.get("ctx", {}).get("error") for details in error.errors())
        return next((cause for cause in causes if isinstance(cause, TbikError)), None)
    return None


def _read_commands(commands: queue.Queue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def set_environment(job: dict[str, Any]) -> None:
    """What vLLM reads from the environment, here and in its workers; nothing of it changes how numbers are added."""
    for name in ("TBIK", "TBIK_PLAN", "TBIK_VLLM"):
        os.environ.pop(name, None)
    if job["mode"] != "stock":
        os.environ |= {"TBIK": "1", "TBIK_PLAN": job["plan"], "TBIK_VLLM": SWITCHES[job["mode"]]}
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(job["threads"]),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" asks for a NUMA node per rank
        "VLLM_SERVER_DEV_MODE": "1",  # collective_rpc over HTTP
        # the scheduler in this process, and at TP=1 the worker too: each process more imports vLLM for seconds
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if job["server"] else "0",
    }
    # The first request for log-probabilities would compile C++ for half a minute; warm-up serves compiled graphs only
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # as vLLM sets it, before anything is imported


def _is_alone(job: dict[str, Any]) -> bool:
    return job["tp"] == 1 and not job["server"]


def engine_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """vLLM's engine arguments, by their Python names."""
    sequences = job["max_sequences"] if job["chunk"] is None else min(job["max_sequences"], job["chunk"])
    arguments = {
        "tensor_parallel_size": job["tp"],
        "dtype": job["dtype"],
        "enforce_eager": True,
        "max_model_len": job["longest"],
        "max_num_seqs": sequences,
        "enable_prefix_caching": job["prefix_cache"],
        "distributed_executor_backend": "uni" if _is_alone(job) else "mp",
        "seed": 0,
        "logprobs_mode": LOGPROBS_MODE,
        "generation_config": "vllm",  # none of the checkpoint's own sampling defaults
        "worker_extension_cls": REPORT,
        "kv_cache_memory_bytes": _kv_bytes(job, sequences),
    }
    if job["chunk"] is not None:
        arguments |= {"enable_chunked_prefill": True, "max_num_batched_tokens": job["chunk"]}
    return arguments


def _kv_bytes(job: dict[str, Any], sequences: int) -> int:
    """Room for all sequences at full length and a block more each, 64 MiB at least: the default asks for whole GiB."""
    config = json.loads((Path(job["folder"]) / "config.json").read_text())
    config = config.get("text_config") or config
    heads = config["num_attention_heads"]
    kv_heads = -(-(config.get("num_key_value_heads") or heads) // job["tp"])
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    itemsize = 4 if job["dtype"] == "float32" else 2
    per_token = 2 * config["num_hidden_layers"] * kv_heads * head_dim * itemsize
    return max(64 << 20, per_token * sequences * (job["longest"] + 256))


# --- inside this process ----------------------------------------------------------------------------------------------


class InProcess:
    """vllm.LLM."""

    def __init__(self, job: dict[str, Any]) -> None:
        if job["tp"] > 1:
            start_processes_by_fork()
        from vllm import LLM

        self._job = job
        # prompts and answers are token ids
        self._llm = LLM(model=job["folder"], skip_tokenizer_init=True, disable_log_stats=True, **engine_arguments(job))

    def generate(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        sampled = self._job["temperature"] > 0
        parameters = [
            SamplingParams(
                temperature=self._job["temperature"],
                top_p=self._job["top_p"],
                seed=seed if sampled else None,
                max_tokens=command["new_tokens"],
                logprobs=command["top"] or None,
                ignore_eos=True,
                detokenize=False,
            )
            for seed in command["seeds"]
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in command["prompts"]]
        outputs = self._llm.generate(prompts, parameters, use_tqdm=False)
        answers = []
        for output in outputs:
            completion = output.outputs[0]
            steps = [{i: entry.logprob for i, entry in step.items()} for step in completion.logprobs or ()]
            answers.append(_answer(list(completion.token_ids), steps, command["top"], output.num_cached_tokens or 0))
        return answers

    def call(self, method: str, arguments: list[Any]) -> list[Any]:
        return self._llm.collective_rpc(method, timeout=REQUEST_S, args=tuple(arguments))


def _answer(tokens: list[int], steps: list[dict[int, float]], top: int, cached: int) -> dict[str, Any]:
    """steps: id -> log-probability of the likeliest ids and the chosen one."""
    likeliest = [sorted(step.items(), key=lambda entry: (-entry[1], entry[0]))[:top] for step in steps]
    return {
        "tokens": tokens,
        "bits": [_bits(step[token]) for step, token in zip(steps, tokens)],
        "top_ids": [[i for i, _ in step] for step in likeliest],
        "top_bits": [[_bits(value) for _, value in step] for step in likeliest],
        "cached": cached,
    }


def _bits(value: float) -> str:
    """Of an fp32 number that was printed or passed on as a double, which is exact both ways."""
    return struct.pack(">f", value).hex()


# --- through HTTP -----------------------------------------------------------------------------------------------------


class Server:
    """vLLM's OpenAI server; requests of one command are sent at once, each on its own connection."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._folder = _with_tokenizer(Path(job["folder"]), Path(job["scratch"]))
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._folder)]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--enable-prompt-tokens-details"]
        for name, value in engine_arguments(job).items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                command.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                command += [f"--{flag}", str(value)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        while not self._healthy():
            if self._process.poll() is not None:
                raise RuntimeError(f"the server exited with code {self._process.returncode}")
            time.sleep(0.2)  # the parent has the deadline

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_S)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"POST {path}: {response.status}: {text[:2000]}")
        return json.loads(text)

    def generate(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        together = threading.Barrier(len(command["prompts"]))

        def request(prompt: list[int], seed: int) -> dict[str, Any]:
            body = {
                "model": str(self._folder),
                "prompt": prompt,
                "max_tokens": command["new_tokens"],
                "temperature": self._job["temperature"],
                "top_p": self._job["top_p"],
                "logprobs": command["top"] or None,
                "ignore_eos": True,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            }
            if self._job["temperature"] > 0:
                body["seed"] = seed
            together.wait(REQUEST_S)
            result = self._post("/v1/completions", body)
            choice = result["choices"][0]
            steps = []
            for step in (choice["logprobs"] or {}).get("top_logprobs") or ():
                steps.append({int(name.removeprefix(TOKEN_ID)): value for name, value in step.items()})
            details = result["usage"].get("prompt_tokens_details") or {}
            return _answer(choice["token_ids"], steps, command["top"], details.get("cached_tokens") or 0)

        with ThreadPoolExecutor(len(command["prompts"])) as pool:
            return list(pool.map(request, command["prompts"], command["seeds"]))

    def call(self, method: str, arguments: list[Any]) -> list[Any]:
        results: list[Any] = self._post("/collective_rpc", {"method": method, "args": arguments})["results"]
        return results


def _with_tokenizer(folder: Path, scratch: Path) -> Path:
    """The folder, or one like it with a tokenizer of made-up words: the server does not start without any."""
    if (folder / "tokenizer.json").is_file():
        return folder
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config") or config
    words = {"<unk>": 0, **{f"w{i}": i for i in range(1, config["vocab_size"])}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    copy = scratch / "model"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).symlink_to(file.resolve())
    tokenizer.save(str(copy / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (copy / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")
    return copy


if __name__ == "__main__":
    main()
