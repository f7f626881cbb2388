"""`somaspeed-bench loader`: the document, and the ratios that the data path is built for, with generous floors."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dataio.manifest import DataError
from somaspeed.bench import loader
from somaspeed.bench.cli import main
from somaspeed.bench.feeds import Task
from somaspeed.bench.loader import Turn, cpu_seconds, measure, project, summarise, turn


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory, sample_dir: Path) -> dict[str, Any]:
    """One short run on the sample's first shard, against LeRobot's video and webdataset."""
    file = tmp_path_factory.mktemp("bench") / "loader.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "FRAMES", 1)
        arguments = ["--shards", str(sample_dir), "--seconds", "0.5", "--repeats", "2", "--workers", "1"]
        against = ["--against", "lerobot-video,webdataset"]
        assert main(["loader", *arguments, *against, "--batch", "16", "--json", str(file)]) == 0
    return json.loads(file.read_text())


@pytest.mark.throughput
def test_the_document_has_every_row(document: dict[str, Any]) -> None:
    rows = [document[name] for name in ("somaspeed", "ceiling", "frame_cache", "headspace")]
    rows += [document["ceiling"]["decode"], document["ceiling"]["read"], *document["against"].values()]
    assert set(document["against"]) == {"lerobot-video", "webdataset"}
    for row in rows:
        for figure in ("samples_per_second", "cpu_ms_per_sample"):
            assert 0 < row[f"minimum_{figure}"] <= row[figure] <= row[f"maximum_{figure}"]
    need = document["projection"]["groot"]
    assert need["somaspeed"] == pytest.approx(690 * document["somaspeed"]["cpu_ms_per_sample"] / 1000)


@pytest.mark.throughput
def test_ratios(document: dict[str, Any]) -> None:
    """Half of what is aimed at: 1/8 and 1/1.5 for the encoded path, 1/100 for the frame cache, 75 % of the ceiling."""
    cost = {name: document[name]["cpu_ms_per_sample"] for name in ("somaspeed", "frame_cache", "headspace")}
    peers = {name: row["cpu_ms_per_sample"] for name, row in document["against"].items()}
    assert cost["somaspeed"] < peers["lerobot-video"] / 4
    assert cost["somaspeed"] < peers["webdataset"]
    assert cost["frame_cache"] < peers["lerobot-video"] / 25
    assert cost["headspace"] < cost["somaspeed"] / 4
    assert document["of_ceiling"] > 0.4
    assert document["projection"]["groot"]["somaspeed"] < loader.HOST_THREADS / 2


def test_figures_follow_from_the_turns() -> None:
    turns = {"a": [Turn(100, 2.0, 1.0), Turn(100, 1.0, 3.0), Turn(100, 4.0, 2.0)]}
    row = summarise(turns)["a"]
    for figure, values in {"samples_per_second": (25, 50, 100), "cpu_ms_per_sample": (10, 20, 30)}.items():
        assert (row[f"minimum_{figure}"], row[figure], row[f"maximum_{figure}"]) == values
    assert project({"a": row, "decode": row})["molmoact2"] == {"samples_per_second": 137, "a": 137 * 0.02}


def test_a_turn_counts_batches_and_cpu_of_children() -> None:
    def burn() -> int:
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass
        return 3

    taken = turn(burn, 0.1)
    assert taken.samples % 3 == 0 and taken.samples >= 3 and taken.seconds >= 0.1
    assert taken.cpu_seconds >= taken.samples / 3 * 0.02 - 0.02
    before = cpu_seconds()
    child = psutil.Popen(["python3", "-c", "x = 0\nfor i in range(6000000): x += i"])
    child.wait()
    assert cpu_seconds() - before > 0.05


def test_a_feed_that_fails_says_why(tmp_path: Path) -> None:
    task = Task(str(tmp_path), 4, 2, 1, "cpu", str(tmp_path))
    with pytest.raises(DataError, match=r"read: DataError: .*no manifest\.json"):
        measure(["read"], task, 0.1, 1)


def test_bad_arguments_are_refused(sample_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["loader", "--shards", str(sample_dir), "--against", "webdatset"]) == 2
    assert "did you mean 'webdataset'" in capsys.readouterr().err
    assert main(["loader", "--shards", str(sample_dir), "--seconds", "0"]) == 2
    assert "--seconds must be above 0" in capsys.readouterr().err
