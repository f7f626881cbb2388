"""Pushing to the Hub against a stub of its client: what is uploaded, the model card, and errors before and after."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import httpx
import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import LocalTokenNotFoundError

from somaspeed import hub, train
from somaspeed.hub import Hub, HubError, UploadError
from somaspeed.policies.pi05 import PI05
from tests.conftest import ROOT

CONFIG = ROOT / "configs" / "pi05" / "somaspeed-tiny.toml"
REPOSITORY = "someone/pi05-mine"


class StubApi:
    """In place of `HfApi`: remembers the calls and what lay in the folder; `failing` names calls that raise."""

    def __init__(self, **failing: Exception):
        self.failing, self.calls, self.files = failing, [], {}

    def call(self, name: str, *arguments, **settings):
        self.calls.append((name, arguments, settings))
        if name in self.failing:
            raise self.failing[name]

    def whoami(self):
        self.call("whoami")
        return {"name": "someone"}

    def create_repo(self, *arguments, **settings):
        self.call("create_repo", *arguments, **settings)

    def upload_folder(self, *, folder_path, **settings):
        root = Path(folder_path)
        self.files = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        self.call("upload_folder", **settings)

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


@pytest.fixture
def stub(monkeypatch):
    def install(**failing: Exception) -> StubApi:
        api = StubApi(**failing)
        monkeypatch.setattr(hub, "HfApi", lambda: api)
        return api

    return install


@pytest.fixture
def directory(tmp_path) -> Path:
    """The policy directory of a checkpoint, with the files of its run."""
    run = tmp_path / "runs" / "mine"
    place = run / "checkpoints" / "000300" / "pretrained_model"
    (place / "tokenizer").mkdir(parents=True)
    (place.parent / "training_state").mkdir()
    (place.parent / "training_state" / "optimizer-000-of-001.safetensors").write_bytes(b"moments")
    origin = {"step": 300, "samples": 52_970, "model.path": "lerobot/pi05_libero_base", "model.size": "full"}
    (place / "somaspeed.json").write_text(json.dumps(origin))
    (place / "config.json").write_text(json.dumps({"type": "pi05"}))
    (place / "model.safetensors").write_bytes(b"weights")
    (place / "policy_preprocessor.json").write_text(json.dumps({"tokenizer_name": str(place / "tokenizer")}))
    (place / "tokenizer" / "tokenizer.json").write_text("{}")
    lines = [{"step": 100, "loss": 0.9, "held_out_loss": 0.8}, {"step": 300, "loss": 0.5}, {"step": 310, "loss": 9.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {"completed_steps": 300, "measured_steps": 295, "samples_per_second_steady": 123.4}
    (run / "summary.json").write_text(json.dumps(summary | {"peak_allocated_gib": 20.25}))
    (run / "checkpoints" / "last").symlink_to("000300")
    return place


def test_the_policy_directory_is_uploaded_and_nothing_else(directory):
    api = StubApi()
    target = Hub(REPOSITORY, private=True, dataset="lerobot/libero", api=api)
    target.check()
    assert target.push(directory) == f"https://huggingface.co/{REPOSITORY}"
    assert api.names == ["whoami", "create_repo", "upload_folder"]
    assert api.calls[1][1:] == ((REPOSITORY,), {"private": True, "repo_type": "model", "exist_ok": True})
    assert api.calls[2][2] == {"repo_id": REPOSITORY, "repo_type": "model", "commit_message": "Step 300"}
    assert set(api.files) == {
        "README.md", "config.json", "model.safetensors", "policy_preprocessor.json", "somaspeed.json",
        "tokenizer/tokenizer.json",
    }  # fmt: skip
    assert api.files["model.safetensors"] == b"weights"
    assert json.loads(api.files["policy_preprocessor.json"]) == {"tokenizer_name": "tokenizer"}, "no place of ours"
    assert str(directory) in (directory / "policy_preprocessor.json").read_text(), "the checkpoint stays as it was"
    assert not (directory / "README.md").exists()


def test_the_card_has_lerobots_metadata_and_what_was_measured(directory):
    text = hub.card(directory, REPOSITORY, "lerobot/libero")
    card = ModelCard(text)
    data = card.data.to_dict()
    assert (data["library_name"], data["pipeline_tag"], data["model_name"]) == ("lerobot", "robotics", "pi05")
    assert (data["base_model"], data["datasets"]) == ("lerobot/pi05_libero_base", "lerobot/libero")
    assert {"lerobot", "robotics", "pi05"} <= set(data["tags"])
    for fact in (
        "base: lerobot/pi05_libero_base", "data: lerobot/libero, 52,970 frames", "updates: 300",
        "training loss: 0.5 at update 300", "held-out loss: 0.8 at update 100", "rate: 123.4 samples per second steady",
        f'snapshot_download("{REPOSITORY}")',
    ):  # fmt: skip
        assert fact in text, fact


def test_the_card_states_nothing_that_is_not_known(directory, tmp_path):
    run = directory.parents[2]
    (run / "summary.json").write_text(json.dumps({"completed_steps": 400, "measured_steps": 395}))
    (run / "metrics.jsonl").unlink()
    local = tmp_path / "bases" / "pi05"
    local.mkdir(parents=True)
    (directory / "somaspeed.json").write_text(json.dumps({"step": 300, "samples": 7, "model.path": str(local)}))
    text = hub.card(directory, REPOSITORY, str(tmp_path / "data" / "drawer"))
    data = ModelCard(text).data.to_dict()
    assert "base_model" not in data and "datasets" not in data and str(tmp_path) not in text
    assert "base: a local checkpoint" in text and "data: drawer, 7 frames" in text
    assert "loss:" not in text and "rate:" not in text, "the summary is that of another step"
    (directory / "somaspeed.json").unlink()
    assert "updates" not in hub.card(directory, REPOSITORY, "").partition("## Load it")[0]


def test_a_card_in_the_directory_is_kept(directory):
    (directory / "README.md").write_text("mine")
    api = StubApi()
    Hub(REPOSITORY, api=api).push(directory)
    assert api.files["README.md"] == b"mine"


@pytest.mark.parametrize("name", ["mine", "a/b/c", "some one/x", "someone/--"])
def test_a_bad_name_is_refused_without_asking(name):
    api = StubApi()
    with pytest.raises(HubError, match="USER/NAME|no name of a Hub repository"):
        Hub(name, api=api).check()
    assert api.calls == []


def http_error(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://huggingface.co/api/repos/create")
    return httpx.HTTPStatusError(f"{status} Forbidden", request=request, response=httpx.Response(status))


def test_without_credentials_it_says_how_to_get_them():
    with pytest.raises(HubError, match="(?s)no token.*hf auth login.*HF_TOKEN"):
        Hub(REPOSITORY, api=StubApi(whoami=LocalTokenNotFoundError("no token"))).check()
    with pytest.raises(HubError, match="(?s)cannot be made.*403.*hf auth login.*HF_TOKEN"):
        Hub(REPOSITORY, api=StubApi(create_repo=http_error(403))).check()
    api = StubApi()
    Hub(REPOSITORY, api=api).check(create=False)
    assert api.names == ["whoami"], "a check makes nothing"


def test_a_failed_upload_names_the_command_that_repeats_it(directory, stub, capsys):
    target = Hub(REPOSITORY, private=True, dataset="my data", api=StubApi(upload_folder=http_error(500)))
    with pytest.raises(UploadError, match="500 Forbidden") as raised:
        target.push(directory)
    command = str(raised.value).rpartition("Repeat the push with: ")[2]
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "somaspeed.hub"] and str(directory) in words and "--private" in words
    api = stub()
    assert hub.main(words[3:]) == 0
    assert api.names == ["whoami", "create_repo", "upload_folder"] and "data: my data" in str(api.files["README.md"])
    assert REPOSITORY in capsys.readouterr().out
    stub(upload_folder=http_error(500))
    assert hub.main(words[3:]) == 4
    assert hub.main(["--checkpoint", str(directory.parents[3]), "--repository", REPOSITORY]) == 2
    assert "no LeRobot policy directory there" in capsys.readouterr().err


@pytest.mark.parametrize("levels", [0, 1, 3])
def test_a_run_a_checkpoint_or_a_policy_directory_can_be_named(directory, levels):
    place = directory if levels == 0 else directory.parents[levels - 1]
    assert hub.policy_directory(place) == directory


def command(shards: Path, output: Path, *extra: str) -> list[str]:
    short = ["training.steps=2", "training.microbatch=2", "training.log_every=1", "data.held_out=0"]
    return ["--config", str(CONFIG), "--shards", str(shards), f"output={output}", *short, *extra]


def test_training_pushes_its_last_checkpoint(sample_dir, tmp_path, stub, capsys):
    api = stub()
    run = ["--push-to-hub", REPOSITORY, "--private", *command(sample_dir, tmp_path / "run", "training.save_every=1")]
    assert train.main(run) == 0
    assert api.names == ["whoami", "create_repo", "upload_folder"]
    assert f"https://huggingface.co/{REPOSITORY}" in capsys.readouterr().out
    saved = tmp_path / "run" / "checkpoints" / "000002" / "pretrained_model" / "model.safetensors"
    assert api.files["model.safetensors"] == saved.read_bytes()
    assert not [name for name in api.files if "optimizer" in name or "training_state" in name]
    assert not [name for name, data in api.files.items() if str(tmp_path).encode() in data]
    text = api.files["README.md"].decode()
    assert "base: random weights" in text and "updates: 2" in text and "cannot express" in text

    failing = stub(upload_folder=http_error(500))
    assert train.main(["--push-to-hub", REPOSITORY, *command(sample_dir, tmp_path / "run", "--resume")]) == 4
    assert failing.names[-1] == "upload_folder" and saved.exists()
    error = capsys.readouterr().err
    assert error.startswith("somaspeed-train: error: the upload") and "python -m somaspeed.hub --checkpoint" in error


@pytest.mark.parametrize("call", ["whoami", "create_repo"])
def test_credentials_are_checked_before_weights_are_read(sample_dir, tmp_path, stub, monkeypatch, capsys, call):
    monkeypatch.setattr(PI05, "load", lambda self: pytest.fail("weights were read"))
    stub(**{call: http_error(401)})
    assert train.main(["--push-to-hub", REPOSITORY, *command(sample_dir, tmp_path / "run")]) == 2
    assert "hf auth login" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_check_asks_but_makes_nothing(sample_dir, tmp_path, stub):
    api = stub()
    assert train.main(["--check", "--push-to-hub", REPOSITORY, *command(sample_dir, tmp_path / "run")]) == 0
    assert api.names == ["whoami"]


def test_nothing_is_pushed_unasked(sample_dir, tmp_path, stub):
    api = stub()
    assert train.main(["--check", *command(sample_dir, tmp_path / "run")]) == 0
    assert api.calls == []
    with pytest.raises(SystemExit):
        train.main(["--private", *command(sample_dir, tmp_path / "run")])


def test_a_run_that_was_told_to_end_is_not_pushed(directory, stub, sample, capsys):
    from types import SimpleNamespace

    api = StubApi()
    train.push(Hub(REPOSITORY, api=api), directory.parents[2], SimpleNamespace(stop_reason="signal"), sample)
    assert api.calls == [] and "python -m somaspeed.hub --checkpoint" in capsys.readouterr().out
