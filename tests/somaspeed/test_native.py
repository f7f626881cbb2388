"""The baselines: upstream's own losses under our stopwatch, the time limit, the order, errors that say what to do."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lerobot.scripts.lerobot_train as lerobot_train
import msgspec
import numpy as np
import pytest
import torch
from transformers import Trainer

from dataio.order import Stream
from somaspeed.config import load_config
from somaspeed.native import BACKENDS, faster_variants, huggingface
from somaspeed.native.__main__ import main
from somaspeed.native.lerobot import our_order
from somaspeed.native.stopwatch import NATIVE_PHASES, NativeSummary
from tests.conftest import ROOT
from tests.dataio.tiny_lerobot import write_dataset
from tests.somaspeed.ranks import on_ranks
from tests.somaspeed.upstream_cases import pi05_losses

STEPS = 5
SHORT = [f"training.steps={STEPS}", "training.microbatch=2", "training.log_every=1", "training.threads=1"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("source") / "set", lengths=(7, 6))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def config_file(policy: str) -> Path:
    return ROOT / "configs" / policy / "native-tiny.toml"


def command(policy: str, dataset: Path, output: Path, *extra: str) -> list[str]:
    files = ["--config", str(config_file(policy)), "--dataset", str(dataset)]
    return [*files, f"output={output}", *SHORT, *extra]


def records(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def summary(output: Path) -> NativeSummary:
    return msgspec.json.decode((output / "summary.json").read_bytes(), type=NativeSummary)


def test_losses_are_those_of_lerobots_own_script(dataset, tmp_path):
    expected = pi05_losses(dataset, tmp_path / "upstream", STEPS)
    other_seed = pi05_losses(dataset, tmp_path / "other", 1, seed=43)
    assert main(command("pi05", dataset, tmp_path / "ours")) == 0
    found = [record["loss"] for record in records(tmp_path / "ours")]
    assert len(found) == STEPS and found == expected
    assert found[0] != other_seed[0], "the comparison can fail"

    written = summary(tmp_path / "ours")
    assert (written.completed_steps, written.stop_reason, written.skipped_updates) == (STEPS, "completed", 0)
    assert written.backend == "native-pi05-lerobot-accelerate" and written.versions["lerobot"] == "0.6.1"
    assert 0 < written.trainable_parameters < written.parameters
    for record in records(tmp_path / "ours"):
        assert set(record["seconds"]) == set(NATIVE_PHASES)
        step = 2 / record["samples_per_second"]
        assert sum(record["seconds"].values()) == pytest.approx(step, rel=0.1), "the phases fill the step"


def on_two_ranks(*words: str) -> str:
    """What `python …` prints under torchrun with two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_two_ranks_give_the_losses_of_lerobots_own_script_on_two_ranks(dataset, tmp_path):
    """The mean over ranks; and the loss of one rank alone is another."""
    expected = on_ranks(2, "tests.somaspeed.upstream_cases:on_a_rank", dataset, tmp_path / "upstream", STEPS)[0].result
    on_ranks(2, "somaspeed.native.__main__:main", command("pi05", dataset, tmp_path / "ours"))
    assert [record["loss"] for record in records(tmp_path / "ours")] == expected and len(expected) == STEPS
    written = summary(tmp_path / "ours")
    assert (written.ranks, written.completed_steps) == (2, STEPS)
    assert written.samples_per_second_end_to_end == pytest.approx(4 * STEPS / written.wall_seconds)
    assert expected[0] != pi05_losses(dataset, tmp_path / "alone", 1)[0], "the comparison can fail"


def test_the_trainer_runs_on_two_ranks(dataset, tmp_path):
    on_ranks(2, "somaspeed.native.__main__:main", command("groot", dataset, tmp_path / "out", "training.steps=3"))
    losses = [record["loss"] for record in records(tmp_path / "out")]
    assert len(losses) == 3 and np.isfinite(losses).all() and summary(tmp_path / "out").ranks == 2


def test_molmoact2_runs_upstreams_code_on_random_weights(dataset, tmp_path):
    assert main(command("molmoact2", dataset, tmp_path / "out")) == 0
    losses = [record["loss"] for record in records(tmp_path / "out")]
    assert len(losses) == STEPS and np.isfinite(losses).all() and len(set(losses)) == STEPS


def test_groot_losses_are_those_of_a_trainer_without_stopwatch(dataset, tmp_path, monkeypatch):
    """The same Trainer, with nothing overridden but the loss's key, on the same seed."""
    monkeypatch.setattr(huggingface, "deepspeed_installed", lambda: False)
    assert main(command("groot", dataset, tmp_path / "marked")) == 0
    marked = records(tmp_path / "marked")
    assert summary(tmp_path / "marked").backend == "native-gr00t-hf-trainer-ddp", "the name says it is plain DDP"

    losses = []

    class Plain(Trainer):
        def __init__(self, *, problem, stopwatch, args, order):
            self.problem = problem
            collate = torch.utils.data.default_collate
            super().__init__(problem.model, args, train_dataset=problem.dataset, data_collator=collate)
            self.model_accepts_loss_kwargs = False

        def compute_loss(self, model, inputs, **_):
            loss = model(self.problem.inputs(inputs))["loss"]
            losses.append(loss.item())
            return loss

    monkeypatch.setattr(huggingface, "MarkedTrainer", Plain)
    main(command("groot", dataset, tmp_path / "plain"))
    assert [record["loss"] for record in marked] == pytest.approx(losses, abs=0) and len(losses) == STEPS
    assert all(np.isfinite(record["grad_norm"]) and record["grad_norm"] > 0 for record in marked)


def test_zero2_gives_the_losses_of_plain_data_parallel(dataset, tmp_path):
    """In processes of their own: DeepSpeed keeps its settings for the life of one."""
    pytest.importorskip("deepspeed")
    on_two_ranks("-m", "somaspeed.native", *command("groot", dataset, tmp_path / "sharded"))
    assert summary(tmp_path / "sharded").backend == "native-gr00t-hf-trainer-zero2"
    plain = "from somaspeed.native import huggingface as h, __main__ as m; h.deepspeed_installed = lambda: False; "
    (tmp_path / "plain.py").write_text(f"{plain}import sys; sys.exit(m.main(sys.argv[1:]))")
    on_two_ranks(str(tmp_path / "plain.py"), *command("groot", dataset, tmp_path / "plain"))
    found, expected = (records(tmp_path / name) for name in ("sharded", "plain"))
    for key in ("loss", "grad_norm"):
        assert [record[key] for record in found] == pytest.approx([record[key] for record in expected], rel=1e-5)


def test_the_time_limit_stops_the_upstream_loop(dataset, tmp_path):
    assert main(command("pi05", dataset, tmp_path / "out", "training.max_seconds=0.01")) == 0
    written = summary(tmp_path / "out")
    assert (written.completed_steps, written.bounded_early_stop, written.stop_reason) == (1, True, "time_limit")
    assert written.measured_steps == 0 and written.samples_per_second_steady == 0


def test_our_order_is_the_loaders():
    sampler = our_order([0, 7], [7, 13], seed=3, shuffle=True, drop_n_last_frames=0)
    found = list(itertools.islice(iter(sampler), 30))
    assert len(sampler) == 13 and found == Stream(13, 3).at(0, 30)[2].tolist()
    assert sorted(found[:13]) == list(range(13)) and found[:13] != found[13:26]


def test_same_order_gives_lerobot_our_batches(dataset, tmp_path, monkeypatch):
    seen = []
    cycle = lerobot_train.cycle

    def recorded(loader):
        for batch in cycle(loader):
            seen.extend(batch["index"].tolist())
            yield batch

    monkeypatch.setattr(lerobot_train, "cycle", recorded)
    assert main(["--order", "somaspeed", *command("pi05", dataset, tmp_path / "out", "training.steps=8")]) == 0
    assert seen == Stream(13, 42).at(0, 16)[2].tolist(), "over the end of the epoch too"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["backend=native-pi05-lerobot"], "did you mean 'native-pi05-lerobot-accelerate'"),
        (["backend=somaspeed"], "is no baseline of model.name = 'pi05'"),
        (["training.global_batch=8"], "does not accumulate"),
        (["data.held_out=0.1"], "train on every episode"),
        (["model.size=tinny"], "did you mean 'tiny'"),
        (["model.empty_camera=1"], "did you mean 'empty_cameras'"),
    ],
)
def test_what_cannot_be_run_is_refused(dataset, tmp_path, capsys, extra, message):
    assert main(command("pi05", dataset, tmp_path / "out", *extra)) == 2
    assert message in capsys.readouterr().err


def test_a_dataset_that_is_not_there(tmp_path, capsys):
    assert main(command("pi05", tmp_path / "none", tmp_path / "out")) == 2
    assert "scripts/export_dataset.py makes one" in capsys.readouterr().err


def test_same_order_gives_groot_our_batches(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "deepspeed_installed", lambda: False)
    seen = []
    prepare = huggingface.MarkedTrainer._prepare_inputs

    def recorded(self, inputs):
        seen.extend(inputs["index"].tolist())
        return prepare(self, inputs)

    monkeypatch.setattr(huggingface.MarkedTrainer, "_prepare_inputs", recorded)
    assert main(["--order", "somaspeed", *command("groot", dataset, tmp_path / "out", "training.steps=8")]) == 0
    assert seen == Stream(13, 42).at(0, 16)[2].tolist(), "over the end of the epoch too"


@pytest.mark.parametrize("policy", ["pi05", "groot", "molmoact2"])
@pytest.mark.parametrize("suffix", ["", "-tiny"])
def test_shipped_configurations_name_their_baseline(policy, suffix):
    config = load_config(ROOT / "configs" / policy / f"native{suffix}.toml")
    assert BACKENDS[config.backend].policy == config.model.name == policy
    for overrides in faster_variants(config).values():
        load_config(ROOT / "configs" / policy / f"native{suffix}.toml", overrides)


def test_faster_variants_leave_out_what_the_recipe_does_not_use():
    def config(**options):
        return SimpleNamespace(model=SimpleNamespace(options=options))

    assert faster_variants(config()) == {}
    assert list(faster_variants(config(gradient_checkpointing=True))) == ["no checkpointing"]
    everything = faster_variants(config(gradient_checkpointing=True, empty_cameras=1, compile_model=True))
    assert everything["no checkpointing, no empty slot, not compiled"] == [
        "model.gradient_checkpointing=false", "model.empty_cameras=0", "model.compile_model=false"
    ]  # fmt: skip
