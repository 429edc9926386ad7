"""A serving engine of another product in a process of its own: prompts in, tokens and log-probability bits out.

    with EngineProcess(EngineSettings("vllm", folder, tp=2, mode="tbik", plan=plan)) as engine:
        engine.ranks                                      what every rank says about itself: plan, shards, bytes sent
        answers, seconds = engine.generate(prompts, new_tokens=12)

The process is `python -m MODULE` of the interpreter that has the product; it need not be this one. Lines of JSON go
through its stdin and stdout, the product's own log goes to a file whose last lines are in every error.
No orphans: the process leads a session of its own, which is ended as a whole on close; where this process dies first,
the engine sees the end of its stdin and kills the session itself. No unbounded wait: start_s until it is ready,
reply_s for each answer.
Names of products stand here as text only; their code is imported in the engine's process, by integrations/.
Errors: PlanError where the product is missing or refuses; TransportError, TransportTimeout where it dies or is silent.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from tbik.errors import PlanError, TransportError, TransportTimeout
from tbik.plan import TreePlan

ROOT = Path(__file__).parent.parent
START_S = 600.0
REPLY_S = 300.0
_LOG_LINES = 12
_LOOK_S = 0.5
_GRACE_S = 6.0


class Product(NamedTuple):
    """module: what its process runs. package: what that imports. venv: where `install` puts it, beside the sources.

    `install` leaves a file .PACKAGE-is-set-up in the venv when it is whole.
    """

    module: str
    package: str
    venv: str
    install: str
    variable: str


PRODUCTS = {"vllm": Product("tbik_vllm.engine", "vllm", ".venv-vllm", "make vllm", "TBIK_VLLM_PYTHON")}


class Answer(NamedTuple):
    """What an engine gave to one prompt; bits are those of fp32 log-probabilities, 8 hexadecimal digits.

    tokens: chosen. bits: of each chosen token. top_ids, top_bits: the likeliest at each step, descending, ties to the
    lower id. cached: tokens of the prompt that came from the prefix cache.
    """

    tokens: list[int]
    bits: list[str]
    top_ids: list[list[int]]
    top_bits: list[list[str]]
    cached: int


@dataclass(frozen=True)
class EngineSettings:
    """How an engine is started.

    mode: "tbik" (its switch on, with `plan`), "allreduce" (its collectives alone) or "stock" (untouched).
    dtype: of activations, and of weights unless the engine stores them otherwise. longest: positions that a prompt and
    its answer may need. chunk: most prompt tokens per step, None for the engine's own. server: requests go through its
    HTTP server, all at once. temperature 0 is greedy. threads: OpenMP threads of each rank.
    """

    product: str
    folder: str
    tp: int
    mode: str
    plan: TreePlan
    dtype: str = "bfloat16"
    longest: int = 256
    max_sequences: int = 16
    chunk: int | None = None
    prefix_cache: bool = False
    server: bool = False
    threads: int = 1
    temperature: float = 0.0
    top_p: float = 1.0


def interpreter(name: str) -> str:
    """The Python that has the product: $TBIK_..._PYTHON, this one, or that of its venv beside the sources or here.

    Errors: PlanError with the command that installs it.
    """
    product = _product(name)
    chosen = os.environ.get(product.variable)
    if chosen is not None:
        if not os.access(chosen, os.X_OK):
            raise PlanError(f"{product.variable}: expected the path of an interpreter, got {chosen!r}")
        return chosen
    if any((Path(place) / product.package / "__init__.py").is_file() for place in sys.path if place):
        return sys.executable
    for folder in (ROOT, Path.cwd()):
        if (folder / product.venv / f".{product.package}-is-set-up").is_file():
            return str(folder / product.venv / "bin" / "python")
    raise PlanError(
        f"engine {name}: found no package {product.package} in {sys.executable} and no {product.venv}; install it "
        f"with: {product.install}, or name an interpreter that has it in {product.variable}"
    )


def _product(name: str) -> Product:
    if name not in PRODUCTS:
        raise PlanError(f"--engine: expected one of {', '.join(PRODUCTS)}, got {name!r}")
    return PRODUCTS[name]


class EngineProcess:
    """One engine, started by the constructor. ranks: per rank, what `python -m MODULE` reported when it was ready.

    processor_s: processor time that its first process took for the last answers; at TP 1 there is no other.
    Errors: see the module; the process and its children are gone when one is raised.
    """

    def __init__(self, settings: EngineSettings, *, start_s: float = START_S, reply_s: float = REPLY_S) -> None:
        product = _product(settings.product)
        self._name = f"{settings.product}, {settings.mode}, TP={settings.tp}"
        self._reply_s = reply_s
        self._folder = Path(tempfile.mkdtemp(prefix="tbik-engine-"))
        self.processor_s = float("nan")
        self._pending = b""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            with open(self._folder / "log", "wb") as log:
                self._process = subprocess.Popen(
                    [interpreter(settings.product), "-m", product.module],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=self._folder,
                    env=_environment(),
                    start_new_session=True,
                )
            job = {**asdict(settings), "plan": settings.plan.key(), "scratch": str(self._folder)}
            self._send(job)
            self.ranks: list[dict[str, Any]] = self._receive("ready", start_s)["ranks"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, top: int = 5, seeds: Sequence[int] | None = None
    ) -> tuple[list[Answer], float]:
        """Serves the prompts together; (answers in their order, seconds). seeds: of the requests, if sampled."""
        command = {
            "do": "generate",
            "prompts": [list(prompt) for prompt in prompts],
            "new_tokens": new_tokens,
            "top": top,
            "seeds": list(range(len(prompts))) if seeds is None else list(seeds),
        }
        self._send(command)
        reply = self._receive("answers", self._reply_s)
        self.processor_s = float(reply.get("processor_s", "nan"))
        return [Answer(**answer) for answer in reply["answers"]], float(reply["seconds"])

    def report(self) -> list[dict[str, Any]]:
        """What every rank says about itself now; bytes_sent counts since the last report."""
        self._send({"do": "report"})
        ranks: list[dict[str, Any]] = self._receive("ready", self._reply_s)["ranks"]
        return ranks

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What `method` of the engine's workers returns, one per rank."""
        self._send({"do": "call", "method": method, "arguments": list(arguments)})
        results: list[Any] = self._receive("results", self._reply_s)["results"]
        return results

    def close(self) -> None:
        """Ends the session: politely, so that shared memory is unlinked, then by force; waits for the process."""
        process, self._process = self._process, None
        if process is not None:
            # its own children may outlive it, so it is the group that is ended, even where the process is gone
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                deadline = time.monotonic() + _GRACE_S
                while time.monotonic() < deadline:
                    process.poll()
                    os.killpg(process.pid, 0)
                    time.sleep(0.02)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def log(self) -> str:
        """The product's own log so far."""
        return (self._folder / "log").read_text(errors="replace")

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None, "the engine was closed"
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._raise_for_the_dead()

    def _receive(self, kind: str, limit_s: float) -> dict[str, Any]:
        """The next message, which must be of this kind."""
        deadline = time.monotonic() + limit_s
        message = json.loads(self._line(deadline, limit_s))
        if message["kind"] == "refused":
            raise PlanError(f"engine {self._name}: {message['text']}")
        refusal = re.search(r"PlanError: (.*)", self.log()) if message["kind"] != kind else None
        if refusal is not None:  # of a process that the engine started
            raise PlanError(f"engine {self._name}: {refusal[1]}")
        if message["kind"] != kind:
            raise TransportError(f"engine {self._name}: {message.get('text', message['kind'])}\n{self._last_words()}")
        return dict(message)

    def _line(self, deadline: float, limit_s: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None, "the engine was closed"
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                # a child may hold the output open when the process is gone, so its end is looked for too
                ended = self._process.poll() is not None
                if not selector.select(min(_LOOK_S, max(0.0, deadline - time.monotonic()))):
                    if ended:
                        self._raise_for_the_dead()
                    if time.monotonic() >= deadline:
                        raise TransportTimeout(
                            f"engine {self._name}: no word for {limit_s:.0f} s; stopped it\n{self._last_words()}"
                        )
                    continue
                part = os.read(self._process.stdout.fileno(), 1 << 20)
                if not part:
                    self._raise_for_the_dead()
                self._pending += part
        line, self._pending = self._pending.split(b"\n", 1)
        return line

    def _raise_for_the_dead(self) -> None:
        assert self._process is not None
        try:
            code: int | None = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            code = None
        how = "closed its output" if code is None else f"exited with code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        raise TransportError(f"engine {self._name}: the process {how}\n{self._last_words()}")

    def _last_words(self) -> str:
        """The lines of the log that name an error, else its last lines."""
        lines = [line for line in self.log().splitlines() if line.strip()]
        named = [line for line in lines if "Error" in line and "Traceback" not in line]
        return "\n".join((named or lines)[-_LOG_LINES:])


def _environment() -> dict[str, str]:
    """This process's, with the sources' folders where the engine's interpreter finds them: same tbik on both sides."""
    places = [str(ROOT), str(ROOT / "integrations")] if (ROOT / "integrations").is_dir() else []
    path = [*places, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
