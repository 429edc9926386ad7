"""The report of a verification as one HTML file without outside parts: headline, table, plot, bytes, plan.

Reads the dictionary of tbik.verify.run (the content of --json) and nothing else: an old JSON file can be drawn again.
Errors: PlanError where the dictionary lacks what is drawn.
"""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tbik.errors import PlanError

INK, MUTED, GRID, TBIK = "#1d2433", "#5d6778", "#dfe3ea", "#0b7a53"
TP_COLOURS = ("#c2410c", "#7c3aed", "#0369a1", "#be185d", "#a16207", "#4d7c0f", "#475569")
DIGEST_COLOURS = (
    "#fed7aa", "#ddd6fe", "#bae6fd", "#fbcfe8", "#fde68a", "#d9f99d", "#cbd5e1", "#fecaca", "#a5f3fc", "#e9d5ff",
    "#bbf7d0", "#e7e5e4",
)  # fmt: skip

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  color: #1d2433; background: #f6f7f9; margin: 0; }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
header p { color: #5d6778; margin: 0.25rem 0 0; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 1.15rem; margin: 0 0 0.75rem; }
section { background: #fff; border: 1px solid #dfe3ea; border-radius: 10px; padding: 1.25rem 1.4rem;
  margin-top: 1.25rem; }
.verdicts { display: grid; grid-template-columns: repeat(auto-fit, minmax(16rem, 1fr)); gap: 1rem; margin-top: 1.5rem; }
.verdict { background: #fff; border: 1px solid #dfe3ea; border-left: 6px solid #94a3b8; border-radius: 10px;
  padding: 1rem 1.25rem; }
.verdict b { display: block; font-size: 2.6rem; line-height: 1.1; font-weight: 650; }
.verdict span { color: #5d6778; }
.verdict.good { border-left-color: #0b7a53; } .verdict.good b { color: #0b7a53; }
.verdict.other { border-left-color: #c2410c; } .verdict.other b { color: #c2410c; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.34rem 0.6rem; border-bottom: 1px solid #e8ebf0; vertical-align: top; }
th { color: #5d6778; font-weight: 600; }
td.n, th.n { text-align: right; }
.scroll { overflow-x: auto; }
code, .digest { font: 0.86em/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.digest { padding: 0.08rem 0.4rem; border-radius: 5px; white-space: nowrap; }
pre { background: #f1f3f6; border-radius: 8px; padding: 0.8rem 1rem; white-space: pre-wrap; margin: 0.5rem 0;
  font: 0.86rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.text { white-space: pre-wrap; margin: 0; }
mark { background: #ffd8b5; border-radius: 3px; }
figure { margin: 0; } figure svg { width: 100%; height: auto; display: block; }
figcaption, .note { color: #5d6778; font-size: 0.9rem; }
.failed { border-left: 6px solid #b91c1c; }
"""


def write(report: Mapping[str, Any], path: Path | str) -> Path:
    """Write the page; it replaces an older one whole or not at all."""
    path = Path(path)
    page = build(report)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        file.write(page)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
    return path


def build(report: Mapping[str, Any]) -> str:
    """The page as text."""
    try:
        body = "".join(_sections(report))
    except KeyError as error:
        raise PlanError(f"report: the verification lacks {error}; expected the JSON of this tbik version") from error
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>tbik: {html.escape(headline(report))}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body><main>{body}</main></body>\n</html>\n"
    )


def headline(report: Mapping[str, Any]) -> str:
    """`tbik: 1 unique output of 12; stock: 7 unique outputs of 12`."""
    if report.get("kind") == "rl":
        sums = {mode: sum(row["differing_bit_patterns"] for row in rows) for mode, rows in report["steps"].items()}
        totals = {mode: sum(row["tokens"] for row in rows) for mode, rows in report["steps"].items()}
        return "; ".join(f"{mode}: {n} of {totals[mode]} log-probabilities differ" for mode, n in sums.items())
    parts = [f"{mode}: {count} {_what_is_unique(report, mode, count)}" for mode, count in report["unique"].items()]
    return "; ".join(parts)


def _what_is_unique(report: Mapping[str, Any], mode: str, count: int) -> str:
    """`unique outputs of 12`, or of a training run `unique digests of 12`."""
    total = report.get("configurations_by_mode", {}).get(mode, report["configurations"])
    noun = "digest" if report.get("kind") == "training" else "output"
    return f"unique {noun}{'' if count == 1 else 's'} of {total}"


def _sections(report: Mapping[str, Any]) -> Iterable[str]:
    if report.get("kind") == "training":
        yield from _training_sections(report)
        return
    if report.get("kind") == "rl":
        yield from _rl_sections(report)
        return
    yield _header(report)
    yield _verdicts(report)
    yield _reasons(report)
    yield _section("What was run", _what_was_run(report))
    yield _section("How far the log-probabilities move", _figure(report))
    yield _section("Every configuration", _table(report))
    if any("text" in record for record in report["records"]):
        yield _section("What prompt 0 was answered", _texts(report))
    if "against" in report:
        yield _section("Trainer against sampler", _against(report["against"]))
    if "gradients" in report:
        yield _section("Gradients", _gradients(report["gradients"]))
    yield _section("It really shards", _bytes(report))
    yield _section("The plan", _plan(report))
    yield _section("Environment", _pairs(report["environment"]))
    yield _section("Repeat it", _repeat(report))


def _reasons(report: Mapping[str, Any]) -> str:
    if report["claim"]:
        return ""
    items = "".join(f"<li>{html.escape(reason)}</li>" for reason in report["reasons"])
    return f'<section class="failed"><h2>The claim does not hold</h2><ul>{items}</ul></section>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"


def _row(cells: Iterable[tuple[str, str]], tag: str = "td") -> str:
    """A table row of (kind, content): kind "n" is a number, aligned right, "" anything else."""
    return "<tr>" + "".join(f'<{tag} class="{kind}">{content}</{tag}>' for kind, content in cells) + "</tr>"


def _grid(head: Sequence[tuple[str, str]], rows: Iterable[str]) -> str:
    return f'<div class="scroll"><table><thead>{_row(head, "th")}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _header(report: Mapping[str, Any]) -> str:
    verdict = (
        "Same prompt, same bits, whatever the layout" if report["claim"] else "The bits were not shown to be equal"
    )
    return (
        f"<header><h1>{verdict}</h1><p>{html.escape(_model_name(report))}, {html.escape(report['job']['dtype'])}, "
        f"greedy decoding of {report['job']['new_tokens']} tokens; {report['seconds']:.0f} s</p></header>"
    )


def _verdicts(report: Mapping[str, Any]) -> str:
    cards = []
    for mode, count in report["unique"].items():
        kind = "good" if mode == "tbik" and count == 1 else "other"
        training = report.get("kind") == "training"
        delta = report["max_abs_dloss" if training else "max_abs_dlogprob"][mode]
        moved = "the loss" if training else "a log-probability"
        cards.append(
            f'<div class="verdict {kind}"><b>{count}</b>{_what_is_unique(report, mode, count)} with {mode} layers<br>'
            f"<span>largest change of {moved}: {_number(delta)}</span></div>"
        )
    return f'<div class="verdicts">{"".join(cards)}</div>'


def _what_was_run(report: Mapping[str, Any]) -> str:
    job = report["job"]
    companions = ", ".join(str(n) for n in report["prompt_lengths"][1:]) or "none"
    if job.get("engine"):
        return _what_an_engine_ran(report)
    text = (
        f"<p>One prompt of {report['prompt_lengths'][0]} tokens was served at tensor-parallel sizes "
        f"{_list(job['tp_sizes'])} and in batches of {_list(job['batch_sizes'])}, beside companions of {companions} "
        "tokens. Each rank is a process with its own shard of the weights; they talk over gloo. Compared is, at every "
        "step, the chosen token, the five most likely tokens with the bits of their fp32 log-probabilities, and a "
        "digest of the whole fp32 log-probability row. An output is unique if any of that differs.</p>"
    )
    if "stock" in report["unique"]:
        text += (
            "<p>The control, <em>stock</em>, is the same program with torch's linear and torch.distributed's "
            "all-reduce in the model dtype. Norms, rope, attention, activation and log-softmax are shared, so it shows "
            "what the linears and the all-reduce alone do.</p>"
        )
    if report.get("prompt"):
        text += f'<pre class="text">{html.escape(report["prompt"])}</pre>'
    return text


def _what_an_engine_ran(report: Mapping[str, Any]) -> str:
    job, engine = report["job"], report["job"]["engine"]
    settings = ", ".join(f"{name} {value}" for name, value in engine.items() if name != "product")
    lengths = ", ".join(str(n) for n in report["prompt_lengths"])
    text = (
        f"<p>{html.escape(report['environment'].get('engine', engine['product']))} served prompts of {lengths} tokens "
        f"at tensor-parallel sizes {_list(job['tp_sizes'])}, in groups of {_list(job['batch_sizes'])} "
        f"({html.escape(settings)}): with tbik's plug-in, and stock. Compared are the tokens of every answer and, at "
        "every step, the five most likely tokens with the bits of their raw fp32 log-probabilities. An output is "
        "unique if any of that differs.</p>"
    )
    if report.get("prompt"):
        text += f'<pre class="text">{html.escape(report["prompt"])}</pre>'
    return text


def _against(against: Mapping[str, Any]) -> str:
    """The trainer's log-probabilities beside the engine's."""
    head = [("", "layers"), ("n", "TP"), ("n", "batch"), ("n", "sampled tokens"), ("n", "differing bit patterns")]
    head += [("n", "max |&Delta; logprob|")]
    rows = []
    for row in against["by_configuration"]:
        numbers = [row["tp"], row["batch"], row["tokens"], row["differing_bit_patterns"]]
        cells = [
            ("", row["mode"]),
            *(("n", str(number)) for number in numbers),
            ("n", _number(row["max_abs_dlogprob"])),
        ]
        rows.append(_row(cells))
    kind = " bf16 weights, everything else fp32 (LayerCast)." if against["layercast"] else ""
    return _grid(head, rows) + (
        '<p class="note">The fp32 log-probability of every sampled token: a Hugging Face model on one rank, in one '
        f"forward over prompt and answer, against the engine. One plan on both sides.{kind} Raw log-probabilities: "
        "after temperature and top-p they are renormalised, "
        f"which alone would change {against.get('renormalised_would_differ', 0)} of them.</p>"
    )


def _gradients(gradients: Mapping[str, Any]) -> str:
    """The digest of a step's gradients in every layout."""
    head = [("", "layers"), ("n", "TP"), ("n", "micro-steps"), ("n", "samples each"), ("", "gradients"), ("", "loss")]
    rows = [
        _row(
            [
                ("", row["mode"]),
                *(("n", str(row[name])) for name in ("tp", "micro_steps", "samples_per_micro_step")),
                ("", f"<code>{row['gradients']}</code>"),
                ("", f"<code>{row['loss']}</code>"),
            ]
        )
        for row in gradients["records"]
    ]
    return _grid(head, rows) + (
        f'<p class="note">One step over {gradients["samples"]} samples: the digest of every parameter gradient, of '
        "whole tensors whatever the sharding, and the bits of the token sum. Stock: the model as transformers gives it "
        "on one rank, its micro-batches padded and added by autograd.</p>"
    )


def _table(report: Mapping[str, Any]) -> str:
    colours = _digest_colours(report)
    head = [("", "layers"), ("n", "TP"), ("n", "batch"), ("", "output"), ("n", "max |&Delta; logprob|")]
    head += [("n", "first other token"), ("", "ranks agree")]
    rows = []
    for record in report["records"]:
        digest, differs = record["digest"], record["first_differing_token"]
        cells = [
            ("", record["mode"]),
            ("n", str(record["tp"])),
            ("n", str(record["batch"])),
            ("", f'<span class="digest" style="background:{colours[digest]}">{digest}</span>'),
            ("n", _number(record["max_abs_dlogprob"])),
            ("n", "none" if differs is None else str(differs)),
            ("", "yes" if record["ranks_agree"] else "NO"),
        ]
        rows.append(_row(cells))
    return _grid(head, rows) + (
        '<p class="note">Compared with the first configuration of the same layers, over the positions with the same '
        "tokens before them. Equal colours are equal outputs.</p>"
    )


def _digest_colours(report: Mapping[str, Any]) -> dict[str, str]:
    colours: dict[str, str] = {}
    others = 0
    for record in report["records"]:
        if record["digest"] in colours:
            continue
        if record["mode"] == "tbik" and report["unique"]["tbik"] == 1:
            colours[record["digest"]] = "#c9f0df"
        else:
            colours[record["digest"]] = DIGEST_COLOURS[others % len(DIGEST_COLOURS)]
            others += 1
    return colours


def _texts(report: Mapping[str, Any]) -> str:
    groups: dict[tuple[str, str], list[str]] = {}
    for record in report["records"]:
        name = f"TP={record['tp']}, batch {record['batch']}"
        groups.setdefault((record["mode"], record["text"]), []).append(name)
    first = report["records"][0]["text"]
    total = report["configurations"]
    rows = []
    for (mode, text), names in groups.items():
        length = next((i for i, (a, b) in enumerate(zip(first, text)) if a != b), min(len(first), len(text)))
        same, rest = html.escape(text[:length]), html.escape(text[length:])
        shown = same + (f"<mark>{rest}</mark>" if rest else "")
        where = f"all {total}" if len(names) == total else html.escape("; ".join(names))
        rows.append(_row([("", mode), ("", f'<p class="text">{shown}</p>'), ("", where)]))
    return _grid([("", "layers"), ("", "text"), ("", "configurations")], rows)


def _bytes(report: Mapping[str, Any]) -> str:
    head = [("n", "TP"), ("n", "rank"), ("n", "parameters, MiB"), ("n", "of the model"), ("n", "at most")]
    head += [("n", "sent with tbik layers, MiB")]
    rows = []
    for tp, entry in report["per_rank"]["by_tp"].items():
        for rank, held in enumerate(entry["parameter_bytes"]):
            cells = [
                str(tp) if rank == 0 else "",
                str(rank),
                f"{held / 2**20:.2f}",
                f"{100 * entry['parameter_fraction'][rank]:.1f} %",
                f"{100 * entry['limit_fraction'][rank]:.1f} %",
                f"{entry['bytes_sent'][rank] / 2**20:.2f}",
            ]
            rows.append(_row([("n", cell) for cell in cells]))
    return _grid(head, rows) + (
        '<p class="note">At most: (1/TP, or the share of the largest whole number of heads, + what another rank holds '
        "too) &times; 1.1.</p>"
    )


def _plan(report: Mapping[str, Any]) -> str:
    return (
        f"<p>Fingerprint <code>{html.escape(report['plan']['fingerprint'])}</code>. Two runs whose plans have this "
        "fingerprint promise the same bits.</p>"
        f"<pre>{html.escape(report['plan']['key'])}</pre>"
    )


def _pairs(values: Mapping[str, Any]) -> str:
    texts = {key: _list(value) if isinstance(value, list) else str(value) for key, value in values.items()}
    rows = "".join(f"<tr><th>{html.escape(key)}</th><td>{html.escape(text)}</td></tr>" for key, text in texts.items())
    return f"<table><tbody>{rows}</tbody></table>"


def _repeat(report: Mapping[str, Any]) -> str:
    return f"<pre>{html.escape(command(report))}</pre>"


def command(report: Mapping[str, Any]) -> str:
    """The command line that repeats the run."""
    job = report["job"]
    sizes, batches = (",".join(map(str, job[key])) for key in ("tp_sizes", "batch_sizes"))
    options = ""
    if job.get("engine"):
        engine = dict(job["engine"])
        options = f" --engine {engine.pop('product')}"
        for name, value in engine.items():
            if value is True:
                options += f" --{name.replace('_', '-')}"
            elif value is not None and value is not False:
                options += f" --{name.replace('_', '-')} {value}"
        options += f" --against {job['against']}" if job.get("against") else ""
    options += " --gradients" if job.get("gradients") else ""
    leaf = json.loads(report["plan"]["key"]).get("leaf", "fma")
    options += f" --leaf {leaf}" if leaf != "fma" else ""
    return (
        f"tbik verify --model {_model_name(report)} --tp {sizes} --batch {batches} --dtype {job['dtype']} "
        f"--new-tokens {job['new_tokens']} --layers {','.join(job['modes'])}{options} --report tbik-report.html"
    )


# --- training ---------------------------------------------------------------------------------------------------------


def _training_sections(report: Mapping[str, Any]) -> Iterable[str]:
    job = report["job"]
    verdict = "Same data, same weights, whatever the layout" if report["claim"] else "The weights were not shown equal"
    yield (
        f"<header><h1>{verdict}</h1><p>{html.escape(_model_name(report))}, {html.escape(job['dtype'])} compute, fp32 "
        f"weights, {job['steps']} AdamW steps of {job['samples_per_step']} samples; {report['seconds']:.0f} s"
        "</p></header>"
    )
    yield _verdicts(report)
    yield _reasons(report)
    yield _section("Every layout", _training_table(report))
    svg = lines_svg(
        [
            (record["mode"], f"{record['mode']}, {record['layout']}", record["losses"])
            for record in report["records"]
            if record["resumed_from"] is None
        ],
        "step",
        "loss per token",
    )
    yield _section("Losses", f"<figure>{svg}</figure>")
    yield _section("The plan", _plan(report))
    yield _section("Environment", _pairs(report["environment"]))


def _rl_sections(report: Mapping[str, Any]) -> Iterable[str]:
    job, steps = report["job"], report["steps"]
    verdict = "The trainer computes the sampler's bits" if report["claim"] else "The bits were not shown to be equal"
    yield (
        f"<header><h1>{verdict}</h1><p>{job['steps']} GRPO steps of {job['prompts'] * job['group']} answers; sampler: "
        f"{html.escape(job['engine'])} at TP={job['tp']}, bf16; trainer: FSDP2 on {job['trainer_ranks']} ranks, fp32 "
        f"weights, bf16 compute; {report['seconds']:.0f} s</p></header>"
    )
    yield _reasons(report)
    for title, key, label, log in (
        ("Log-probabilities whose bits differ between trainer and sampler", "differing_bit_patterns", "tokens", False),
        ("KL of sampler and trainer", "kl", "KL", True),
        ("Reward", "reward", "share of wanted tokens", False),
    ):
        lines = [(mode, mode, [row[key] for row in rows]) for mode, rows in steps.items()]
        yield _section(title, f"<figure>{lines_svg(lines, 'step', label, log)}</figure>")
    head = [("", "way"), ("n", "step"), ("n", "differing"), ("n", "tokens"), ("n", "KL"), ("n", "reward")]
    head += [("", "trainer's weights"), ("", "sampler's weights")]
    rows = [
        _row(
            [
                ("", mode),
                ("n", str(row["step"])),
                ("n", str(row["differing_bit_patterns"])),
                ("n", str(row["tokens"])),
                ("n", _number(row["kl"])),
                ("n", f"{row['reward']:.3f}"),
                ("", f'<span class="digest">{row["trainer_weights"]}</span>'),
                ("", f'<span class="digest">{row["sampler_weights"]}</span>'),
            ]
        )
        for mode, of_mode in steps.items()
        for row in of_mode
    ]
    yield _section("Every step", _grid(head, rows))
    yield _section("The plan", _plan(report))
    yield _section("Environment", _pairs(report["environment"]))


def _training_table(report: Mapping[str, Any]) -> str:
    colours = _digest_colours(report)
    head = [("", "way"), ("", "layout"), ("", "weights"), ("n", "first other step"), ("n", "max |&Delta; loss|")]
    head += [("n", "last loss"), ("n", "largest rank, MiB of parameters"), ("", "ranks agree")]
    rows = []
    for record in report["records"]:
        digest, other, before = record["digest"], record["first_differing_step"], record["resumed_from"]
        cells = [
            ("", record["mode"]),
            ("", html.escape(record["layout"] if before is None else f"{before}, killed, then {record['layout']}")),
            ("", f'<span class="digest" style="background:{colours[digest]}">{digest}</span>'),
            ("n", "none" if other is None else str(other)),
            ("n", _number(record["max_abs_dloss"])),
            ("n", f"{record['losses'][-1]:.4f}"),
            ("n", f"{max(record['parameter_bytes']) / 2**20:.2f}"),
            ("", "yes" if record["ranks_agree"] else "NO"),
        ]
        rows.append(_row(cells))
    return _grid(head, rows) + '<p class="note">Compared with the first layout of the same way.</p>'


def lines_svg(lines: Sequence[tuple[str, str, Sequence[float]]], x_label: str, y_label: str, log: bool = False) -> str:
    """(mode, label, values per step) -> an <svg> element. log: a logarithmic axis with zero at the bottom."""
    with _canvas() as (figure, axes):
        if log:
            positive = [value for _, _, values in lines for value in values if 0 < value < float("inf")]
            axes.set_yscale("symlog", linthresh=10.0 ** _floor_exponent(min(positive, default=1.0)), linscale=0.35)
        for number, (mode, label, values) in enumerate(lines):
            colour = TBIK if mode == "tbik" else TP_COLOURS[number % len(TP_COLOURS)]
            axes.plot(values, color=colour, linewidth=2.0 if mode == "tbik" else 1.0, label=label, clip_on=False)
        axes.set_xlabel(x_label, color=MUTED)
        axes.set_ylabel(y_label, color=MUTED)
        if len(lines) <= 16:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelcolor=INK, fontsize=9)
        return _svg_of(figure)


@contextlib.contextmanager
def _canvas() -> Iterator[tuple[Any, Any]]:
    """A figure and its axes in the style of the report."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tbik", "font.family": "sans-serif"}):
        figure = Figure(figsize=(9.2, 3.9), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.grid(True, axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=MUTED, length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(GRID)
        yield figure, axes


def _svg_of(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


# --- figures ----------------------------------------------------------------------------------------------------------


def _figure(report: Mapping[str, Any]) -> str:
    total = report["configurations"]
    return (
        f"<figure>{plot_svg(report)}<figcaption>Largest change of any log-probability in the vocabulary, per position, "
        "against the first configuration of the same layers. Thin lines: one batch size; thick: the largest of a TP "
        f"size; a cross: from here on the tokens differ too. The tbik line is {total} configurations.</figcaption>"
        "</figure>"
    )


def plot_svg(report: Mapping[str, Any]) -> str:
    """max |delta logprob| against position, log scale with zero at the bottom, as an <svg> element."""
    records = report["records"]
    positive = [d for r in records for d in r["dlogprob_by_position"] if 0 < d < float("inf")]
    smallest, largest = (min(positive), max(positive)) if positive else (1e-6, 1e-3)
    with _canvas() as (figure, axes):
        floor = 10.0 ** _floor_exponent(smallest)
        axes.set_yscale("symlog", linthresh=floor, linscale=0.35)
        axes.set_ylim(-0.25 * floor, 3 * largest)
        stock = [r for r in records if r["mode"] == "stock"]
        for index, tp in enumerate(dict.fromkeys(r["tp"] for r in stock)):
            _plot_size(
                axes, [r for r in stock if r["tp"] == tp], f"stock, TP={tp}", TP_COLOURS[index % len(TP_COLOURS)]
            )
        mine = [r for r in records if r["mode"] == "tbik"]
        if mine:
            _plot_size(axes, mine, "tbik, every configuration", TBIK)
        axes.set_xlabel("position of the new token", color=MUTED)
        axes.set_ylabel("max |Δ logprob|", color=MUTED)
        axes.set_xticks(range(report["job"]["new_tokens"]))
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, labelcolor=INK, fontsize=9)
        return _svg_of(figure)


def _plot_size(axes: Any, records: Sequence[Mapping[str, Any]], label: str, colour: str) -> None:
    if len(records) > 1:
        for record in records:
            axes.plot(record["dlogprob_by_position"], color=colour, linewidth=0.7, alpha=0.45)
    length = max(len(r["dlogprob_by_position"]) for r in records)
    largest = [
        max(r["dlogprob_by_position"][i] for r in records if i < len(r["dlogprob_by_position"])) for i in range(length)
    ]
    axes.plot(largest, color=colour, linewidth=2.2, marker="o", markersize=4, label=label, clip_on=False, zorder=3)
    for record in records:
        at = record["first_differing_token"]
        if at is not None:
            axes.plot(at, record["dlogprob_by_position"][at], "x", color=colour, markersize=9, mew=2, zorder=4)


def _floor_exponent(value: float) -> int:
    exponent = 0
    while 10.0**exponent > value:
        exponent -= 1
    return exponent


def _model_name(report: Mapping[str, Any]) -> str:
    return str(report["model"])


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.2g}"


def _list(values: Iterable[Any]) -> str:
    return ", ".join(str(value) for value in values)
