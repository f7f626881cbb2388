"""The report: published and own documents side by side, self-contained, with every run, error and command."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from PIL import Image

from somaspeed.bench import figures
from somaspeed.bench.cli import main
from somaspeed.bench.documents import Comparisons, EqualBatch, read_document, speedup, write_document
from somaspeed.bench.report import flop_document, peak_tflops
from tests.conftest import ROOT

REFERENCE = ROOT / "tests" / "reference"
FLOPS = {"policy": "pi05", "size": "full", "native": 16.7, "somaspeed": 2.75, "somaspeed_cached": 0.108}


def own_document(path: Path) -> Path:
    """A document of ours: with commands, losses, phase times, a probe, an equal batch and a failed phase."""
    document = read_document(REFERENCE / "comparisons.json")
    assert isinstance(document, Comparisons)
    document.hardware.gpu = "NVIDIA A40"
    for comparison in document.comparisons:
        comparison.native.command = ["python", "-m", "somaspeed.native", "--config", "a name.toml"]
        comparison.native.versions = {"lerobot": "0.6.1"}
        comparison.native.seconds = {"data_wait": 0.3, "prepare": 0.1, "forward": 0.2, "backward": 0.4, "update": 0.1}
        comparison.somaspeed.seconds = {"data_wait": 0.0, "prepare": 0.1, "prefix": 0.5, "expert": 0.3, "update": 0.0}
        for phase in (comparison.native, comparison.somaspeed):
            phase.losses = [(step, 2.0 / step) for step in range(1, 30)]
    *_, pi05 = document.comparisons
    pi05.equal_batch = EqualBatch(msgspec.structs.replace(pi05.somaspeed, global_batch=64), pi05.speedup)
    pi05.native_published = pi05.native
    pi05.native_variants = [msgspec.structs.replace(pi05.native, variant="no <ckpt>")]
    pi05.somaspeed.warning = "only 7 updates measured"
    molmoact2 = document.comparisons[0]
    molmoact2.native = msgspec.structs.replace(molmoact2.native, summary=None, error="out of memory: <tried> 2 GiB")
    molmoact2.speedup = speedup(molmoact2.native, molmoact2.somaspeed)
    write_document(path, document)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    place = tmp_path_factory.mktemp("documents")
    (place / "flops.json").write_text(json.dumps(FLOPS))
    own = own_document(place / "own.json")
    return [REFERENCE / "comparisons.json", REFERENCE / "scaling.json", own, place / "flops.json"]


@pytest.fixture(scope="module")
def written(files, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("report") / "report.html"
    assert main(["report", *map(str, files), "--out", str(out)]) == 0
    return out


class Outline(HTMLParser):
    """What a page holds and refers to."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.references, self.texts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.references += [value for key, value in attributes if key in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, "the tags are nested"

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_holds_everything_itself(written):
    outline = Outline(written.read_text())
    assert outline.open == [] and len(outline.references) == 6
    assert all(reference.startswith("data:image/svg+xml;base64,") for reference in outline.references)
    pictures = [base64.b64decode(reference.partition(",")[2]).decode() for reference in outline.references]
    assert "9.31×" in pictures[0] and "2.78×" in pictures[0] and "82.3 %" in pictures[1]
    assert "did not run" in pictures[2] and not re.search(r'(href|src)="http', "".join(pictures))
    assert "155× fewer" in pictures[-1]
    text = " ".join(outline.texts)
    remarks = ("out of memory: <tried> 2 GiB", "no <ckpt>", "NV4, PXB, SYS", "only 7 updates measured")
    shown = ("comparisons", "own", "2.42×", "0.6.1", *remarks)
    for expected in shown:
        assert expected in text, expected
    assert "python -m somaspeed.native --config 'a name.toml'" in text, "commands can be pasted"
    assert "25%" in text, "share of peak: 108.5 samples/s × 2.75 TFLOP on eight A40"


def test_the_pictures_are_files_too(written):
    names = sorted(path.name for path in written.parent.glob("*.png"))
    assert names == [
        "report_comparisons_throughput.png", "report_flops.png", "report_own_losses.png", "report_own_phases.png",
        "report_own_throughput.png", "report_scaling_scaling.png",
    ]  # fmt: skip
    for name in names:
        with Image.open(written.parent / name) as picture:
            colours = picture.convert("RGB").resize((200, 200)).getcolors(40_000)
            assert picture.width == 1080 and len(colours) > 20, name


def test_the_same_documents_give_the_same_page(written, files, tmp_path):
    again = tmp_path / "again" / "report.html"
    assert main(["report", *map(str, files), "--out", str(again)]) == 0
    assert again.read_bytes() == written.read_bytes()


def test_what_is_no_document_is_refused(tmp_path, capsys):
    (tmp_path / "x.json").write_text('{"policy": "pi05"}')
    assert main(["report", str(tmp_path / "x.json"), "--out", str(tmp_path / "o.html")]) == 2
    assert "neither a comparison" in capsys.readouterr().err and not (tmp_path / "o.html").exists()
    assert flop_document(tmp_path / "none.json") is None


def test_peak_is_known_by_the_devices_name():
    hardware = read_document(REFERENCE / "comparisons.json").hardware
    assert peak_tflops(hardware) is None
    for name, peak in (("NVIDIA H200", 989.0), ("NVIDIA A40", 149.7), ("NVIDIA A100-SXM4-40GB", 312.0)):
        hardware.gpu = name
        assert peak_tflops(hardware) == peak


def test_numbers_are_short():
    assert [figures.number(value) for value in (1234.5, 108.5, 45.28, 4.865, 0.108)] == [
        "1,234", "108", "45.3", "4.87", "0.108"
    ]  # fmt: skip


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it_without_errors(written, tmp_path, width):
    shot = tmp_path / "shot.png"
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--window-size={width},3000", f"--screenshot={shot}", written.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "CONSOLE" not in done.stderr
    with Image.open(shot) as picture:
        colours = dict((colour, count) for count, colour in picture.convert("RGB").getcolors(1_000_000))
        green = tuple(int(figures.OURS[i : i + 2], 16) for i in (1, 3, 5))
        assert picture.width == width and colours.get(green, 0) > 1000, "the bars are visible"
