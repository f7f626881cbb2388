"""`somaspeed-bench report`: comparison, scaling and FLOP documents as one self-contained page, and its pictures."""

from __future__ import annotations

import argparse
import base64
import html
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dataio.atomic import write_bytes
from somaspeed.bench.documents import Comparison, Comparisons, Document, Hardware, Phase, Scaling, read_document
from somaspeed.config import ConfigError

# Dense bf16 TFLOP/s of one device, by a part of its name; the makers' figures.
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "A40": 149.7,
    "A6000": 154.8,
    "L4": 121.0,
    "4090": 165.2,
    "A10": 125.0,
}
LONG = 30  # characters of a remark that gets a wide column of its own
STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; color: #20242c; background: #fff;
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: .5rem 0; } h2 { font-size: 1.2rem; margin: 2rem 0 .25rem; }
h2, h3, .note { break-after: avoid; } tr { break-inside: avoid; } p, li { max-width: 46rem; }
.note { color: #5a6270; margin: .25rem 0 1rem; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); gap: 1.25rem;
           align-items: start; }
figure { margin: 0; break-inside: avoid; } figure img { width: 100%; height: auto; display: block; }
figcaption { color: #5a6270; font-size: .9rem; }
.wide { overflow-x: auto; background: linear-gradient(to right, #fff 2rem, #fff0) left / 2rem 100% no-repeat local,
        linear-gradient(to left, #fff 2rem, #fff0) right / 2rem 100% no-repeat local,
        linear-gradient(to right, #20242c30, #fff0) left / .6rem 100% no-repeat,
        linear-gradient(to left, #20242c30, #fff0) right / .6rem 100% no-repeat; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .95rem; }
th, td { padding: .3rem .7rem .3rem 0; text-align: left; border-bottom: 1px solid #e4e7ec; vertical-align: top; }
th { font-weight: 600; } td.n, th.n { text-align: right; } td.error { color: #a3232f; }
@media screen { td.long { min-width: 18rem; } }
pre { background: #f4f6f8; padding: .6rem .8rem; overflow-x: auto; font-size: .82rem; white-space: pre-wrap;
      overflow-wrap: anywhere; }
@media (max-width: 30rem) { table { font-size: .8rem; } th, td { padding-right: .5rem; } }
@media print { body { max-width: none; padding: 0; font-size: 11pt; } .figures { grid-template-columns: 1fr 1fr; }
               pre { font-size: 8pt; } .wide { overflow: visible; background: none; break-inside: avoid; } }
"""


class Source(NamedTuple):
    """One document that the report shows, under the name of its file."""

    label: str
    document: Document


class Picture(NamedTuple):
    """A drawn figure: file name without extension, caption, and both renderings."""

    name: str
    caption: str
    svg: bytes
    png: bytes


def add_command(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("report", help="documents as one page with pictures")
    command.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="documents of compare, scaling and flops --json, own or published, side by side in this order",
    )
    command.add_argument("--out", required=True, type=Path, metavar="FILE.html", help="the page; PNGs go beside it")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page and its PNGs. Returns 0. Raises DataError for a file that is no document, ConfigError."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("the report needs matplotlib: pip install 'somaspeed[report]'") from None
    sources, flops = read_sources(arguments.files)
    pictures = list(draw(sources, flops))
    for picture in pictures:
        write_bytes(arguments.out.with_name(f"{arguments.out.stem}_{picture.name}.png"), picture.png)
    write_bytes(arguments.out, page(sources, flops, pictures).encode())
    print(f"{arguments.out} and {len(pictures)} pictures beside it")
    return 0


def read_sources(files: list[Path]) -> tuple[list[Source], list[dict[str, Any]]]:
    """The comparison and scaling documents, and the FLOP documents, in the order given. Raises DataError."""
    sources: list[Source] = []
    flops: list[dict[str, Any]] = []
    for path in files:
        counted = flop_document(path)
        if counted:
            flops.append(counted)
        else:
            taken = [source.label for source in sources]
            label = path.stem if path.stem not in taken else f"{path.parent.name}/{path.stem}"
            sources.append(Source(label, read_document(path)))
    return sources, flops


def flop_document(path: Path) -> dict[str, Any] | None:
    """The document of `somaspeed-bench flops --json`, None where the file is another."""
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    needed = {"policy", "size", "native", "somaspeed", "somaspeed_cached"}
    return raw if isinstance(raw, dict) and needed <= raw.keys() else None


def draw(sources: list[Source], flops: list[dict[str, Any]]) -> Iterator[Picture]:
    """Every picture for which there is data."""
    from somaspeed.bench import figures

    def picture(name: str, caption: str, function: Any, data: Any) -> Picture:
        return Picture(name, caption, *figures.render(function, data))

    for label, document in sources:
        name = label.replace("/", "-")
        if isinstance(document, Scaling):
            models = {model: rows for model, rows in document.models.items() if rows}
            if models:
                yield picture(f"{name}_scaling", f"Scaling: {label}", figures.scaling, models)
            continue
        comparisons = document.comparisons
        if comparisons:
            yield picture(f"{name}_throughput", f"Throughput: {label}", figures.throughput, comparisons)
        if any(phase.seconds for c in comparisons for phase in (c.native, c.somaspeed)):
            yield picture(f"{name}_phases", f"Where the time goes: {label}", figures.breakdown, comparisons)
        if any(c.native.losses and c.somaspeed.losses for c in comparisons):
            yield picture(f"{name}_losses", f"Training loss: {label}", figures.losses, comparisons)
    if flops:
        yield picture("flops", "Counted FLOPs per sample", figures.flops, flops)


def page(sources: list[Source], flops: list[dict[str, Any]], pictures: list[Picture]) -> str:
    """The whole page."""
    body = [
        "<h1>SomaSpeed: measured training throughput</h1>",
        '<p class="note">Native is the upstream trainer on the same devices in the same run. A ratio is the steady '
        "rate of somaspeed over that of native: Σ global batch ÷ Σ time of the slowest rank's updates, after the "
        "first updates.</p>",
        results_table(sources, flops),
    ]
    for label, document in sources:
        own = [p for p in pictures if p.caption.endswith(f": {label}")]
        body.append(f"<h2>{html.escape(label)}</h2>{document_note(document)}{figure_grid(own)}")
        body.append(hardware_and_commands(document))
    if flops:
        body.append("<h2>FLOPs per sample</h2>" + figure_grid([p for p in pictures if p.name == "flops"]))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>SomaSpeed report</title>'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def figure_grid(pictures: list[Picture]) -> str:
    def one(picture: Picture) -> str:
        source = f"data:image/svg+xml;base64,{base64.b64encode(picture.svg).decode()}"
        caption = html.escape(picture.caption)
        return f'<figure><img alt="{caption}" src="{source}"><figcaption>{caption}</figcaption></figure>'

    return f'<div class="figures">{"".join(map(one, pictures))}</div>'


def table(header: list[str], rows: list[list[str]], numeric: int = 0) -> str:
    """An HTML table; columns from `numeric` on are numbers. Cells are text; `!` in front marks an error."""

    def cell(tag: str, column: int, text: str) -> str:
        if text.startswith("!"):
            kind = ' class="error long"' if len(text) > LONG else ' class="error"'
        else:
            kind = ' class="n"' if numeric and column >= numeric else ""
        return f"<{tag}{kind}>{html.escape(text.removeprefix('!'))}</{tag}>"

    lines = ["".join(cell("th", n, text) for n, text in enumerate(header))]
    lines += ["".join(cell("td", n, text) for n, text in enumerate(row)) for row in rows]
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def results_table(sources: list[Source], flops: list[dict[str, Any]]) -> str:
    """Every comparison of every document, one line each."""
    counted = {document["policy"]: document["somaspeed"] for document in flops if document["size"] == "full"}
    rows = []
    for label, document in sources:
        if not isinstance(document, Comparisons):
            continue
        for c in document.comparisons:
            peak = peak_tflops(document.hardware)
            rate = c.somaspeed.rate
            share = rate * counted[c.model] / c.world_size / peak if rate and peak and c.model in counted else None
            ratio = f"{c.speedup:.2f}×" if c.speedup else "–"
            rows.append(
                [
                    label,
                    c.model,
                    ratio,
                    rate_text(c.native),
                    rate_text(c.somaspeed),
                    f"{rate / c.world_size:.4g}" if rate else "–",
                    str(c.world_size),
                    f"{share:.0%}" if share else "–",
                ]
            )
    if not rows:
        return ""
    head = ["document", "model", "ratio", "native/s", "somaspeed/s", "per device", "devices", "of peak"]
    return table(head, rows, numeric=2)


def rate_text(phase: Phase) -> str:
    return f"{phase.rate:.4g}" if phase.rate else "!did not run"


def peak_tflops(hardware: Hardware) -> float | None:
    """What one device can do in dense bf16, None for a device that is not in the table."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in hardware.gpu), None)


def document_note(document: Document) -> str:
    """How the document was measured, in a line."""
    if isinstance(document, Scaling):
        return f'<p class="note">{html.escape(document.measurement)}</p>'
    measurement = document.measurement
    text = (
        f"{measurement.phase_budget_seconds:g} s per phase, set-up included; the first "
        f"{measurement.discard_first_updates} updates discarded; {measurement.aggregation}. "
        f"{measurement.scope[:1].upper()}{measurement.scope[1:]}."
    )
    return f'<p class="note">{html.escape(text)}</p>'


def hardware_and_commands(document: Document) -> str:
    """What it ran on, the runs' batches, memory and errors, and the exact commands."""
    parts = []
    if document.hardware:
        parts.append("<h3>Hardware</h3>" + hardware_table(document))
    if isinstance(document, Comparisons):
        head = ["run", "variant", "batch", "updates", "set-up s", "peak GiB", "finite losses", "remark"]
        parts.append("<h3>Runs</h3>" + table(head, [run_row(*run) for run in runs(document.comparisons)]))
        commands = [shlex.join(phase.command) for _, phase in runs(document.comparisons) if phase.command]
    else:
        commands = [shlex.join(row.command) for rows in document.models.values() for row in rows if row.command]
    if commands:
        parts.append(f"<h3>Commands</h3><pre>{html.escape(chr(10).join(commands))}</pre>")
    return "".join(parts)


def hardware_table(document: Document) -> str:
    hardware = document.hardware
    assert hardware is not None
    memory = f", {hardware.memory_mib_per_gpu} MiB each" if hardware.memory_mib_per_gpu else ""
    rows = [
        ["devices", f"{hardware.gpus} × {hardware.gpu}{memory}" if hardware.gpus else f"CPU: {hardware.gpu}"],
        ["host", f"{hardware.allocated_cpu_threads} threads, {hardware.allocated_host_memory_gib} GiB"],
    ]
    if isinstance(document, Comparisons):
        for c in document.comparisons:
            links = sorted({link for row in c.gpu_links for link in row} - {"X"})
            text = f"driver {c.driver_version or 'none'}; links {', '.join(links) or 'none'}"
            if c.parameters and c.trainable_parameters:
                text += f"; {c.parameters:,} parameters, {c.trainable_parameters:,} trainable"
            rows.append([c.model, text])
        phases = [phase for _, phase in runs(document.comparisons)]
        packages = {f"{name} {version}": None for phase in phases for name, version in phase.versions.items()}
        if packages:
            rows.append(["packages", ", ".join(packages)])
    return table(["part", ""], rows)


def runs(comparisons: list[Comparison]) -> Iterator[tuple[str, Phase]]:
    """Every run of every comparison, with a name."""
    for c in comparisons:
        if c.native_published:
            yield f"{c.model} native, as published", c.native_published
        yield f"{c.model} native", c.native
        for probe in c.native_variants:
            yield f"{c.model} native, probe", probe
        yield f"{c.model} somaspeed", c.somaspeed
        if c.equal_batch:
            yield f"{c.model} somaspeed, same batch", c.equal_batch.somaspeed


def run_row(name: str, phase: Phase) -> list[str]:
    if phase.summary is None:
        return [name, phase.variant or "", str(phase.global_batch), "–", "", "", "", f"!{phase.error}"]
    summary = phase.summary
    return [
        name,
        phase.variant or "",
        str(phase.global_batch),
        f"{summary.completed_steps:,}",
        f"{summary.setup_seconds:.0f}",
        f"{phase.peak_allocated_gib:.1f}",
        f"{phase.finite_loss_updates:,}",
        f"!{phase.error or phase.warning}" if phase.error or phase.warning else "",
    ]
