"""Closed-loop evaluation with a simulator process that needs no simulator: episodes, crashes, resuming, statistics."""

from __future__ import annotations

import io
import json
import struct
import sys
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dataio.manifest import DataError
from somaspeed.evaluate import cli, report
from somaspeed.evaluate.blind import Demonstrations, Replay, StateRegressor
from somaspeed.evaluate.interval import wilson
from somaspeed.evaluate.trials import Outcome, Records, Settings, plan, play
from somaspeed.sim import protocol
from somaspeed.sim.pool import Pool, PoolError, next_job, simulator_command
from somaspeed.sim.protocol import Act, Begin, Finished, Observation
from somaspeed.sim.rollout import Rollout
from somaspeed.sim.seeds import episode_seed
from somaspeed.train import main as train
from tests.conftest import ROOT
from tests.somaspeed.fake_sim import INITS, Point

COMMAND = [sys.executable, str(ROOT / "tests" / "somaspeed" / "fake_sim.py")]
SETTINGS = Settings("fake", "0", "test", 2, 4, None, 4, 0, 0, {})


class OneStep:
    """Moves by one every step, two steps a chunk; task and seed leave a trace in the actions it took."""

    def __init__(self, blind: bool = False) -> None:
        self.seeds: list[int] = []
        self.blind = blind

    def act(self, task, seen, seed):
        assert (
            set(seen.images) == (set() if self.blind else {"image", "image2"})
            and seen.state.shape == (8,)
            and task in (0, 1)
        )
        self.seeds.append(seed)
        actions = np.zeros((2, 7), np.float32)
        actions[:, 0] = 1
        return actions


def run(
    output: Path, episodes: int = 3, workers: int = 2, reply_seconds: float = 60, videos: int = 0, blind: bool = False
) -> tuple:
    """Outcomes, what was said of dead processes, and the driver."""
    said: list[str] = []
    driver = OneStep(blind)
    with Pool(COMMAND, workers, said.append, reply_seconds) as pool:
        trials = plan({0: INITS, 1: INITS}, episodes, 0, seed=0)
        outcomes = play(trials, driver, Records(output, SETTINGS), pool, 4, videos, lambda outcome: None)
    return outcomes, said, driver


def ends(outcomes: list[Outcome]) -> list[tuple]:
    return [(o.task, o.episode, o.init, o.success, o.steps) for o in outcomes]


def test_success_at_the_last_allowed_step_counts():
    one = np.zeros((1, 7))
    one[0, 0] = 1
    for init, success in ((3, True), (4, False)):  # four steps are needed, and five
        rollout = Rollout(Point(0), Begin(0, init, 0, max_steps=4))
        rollout.observe()
        reply = rollout.act(Act(np.repeat(one, 3, axis=0)))
        assert isinstance(reply, Observation) and reply.steps == 3
        reply = rollout.act(Act(np.repeat(one, 3, axis=0)))
        assert isinstance(reply, Finished) and (reply.success, reply.steps) == (success, 4)


def test_a_film_has_the_first_frame_every_second_and_the_last():
    rollout = Rollout(Point(0), Begin(0, 2, 0, max_steps=9, film_every=2))
    step = np.eye(1, 7)
    film = [rollout.observe().film, *(rollout.act(Act(step)).film for _ in range(3))]
    assert [None if part is None else len(part) for part in film] == [1, None, 1, 1]
    assert film[0].shape == (1, 256, 256, 3)


def test_blind_drivers_are_shown_no_images(tmp_path):
    sighted, blind = run(tmp_path / "sighted")[0], run(tmp_path / "blind", blind=True)[0]
    assert ends(sighted) == ends(blind)


def test_actions_that_are_not_numbers_are_refused():
    rollout = Rollout(Point(0), Begin(0, 0, 0, max_steps=4))
    for bad in (np.full((1, 7), np.nan), np.zeros(7), np.zeros((0, 7))):
        with pytest.raises(ValueError, match="finite"):
            rollout.act(Act(bad))


def test_episodes_are_played_recorded_and_filmed(tmp_path):
    outcomes, said, driver = run(tmp_path, episodes=INITS, videos=1)
    expected = [(task, n, n, n < 4, min(n + 1, 4)) for task in (0, 1) for n in range(INITS)]
    assert ends(outcomes) == expected and not said
    assert len(set(driver.seeds)) == len(driver.seeds), "every look has its own seed"
    lines = (tmp_path / "episodes.jsonl").read_text().splitlines()
    assert len(lines) == 10 and set(json.loads(lines[0])) == set(Outcome.__struct_fields__)
    videos = sorted(path.name for path in (tmp_path / "videos").iterdir())
    assert videos == ["task00_episode000_success.mp4", "task01_episode000_success.mp4"]
    assert b"ftyp" in (tmp_path / "videos" / videos[0]).read_bytes()[:16]


def test_the_same_seed_gives_the_same_episodes_whatever_the_workers(tmp_path):
    one, _, driver = run(tmp_path / "one", workers=1)
    two, _, other = run(tmp_path / "two", workers=2)
    assert ends(one) == ends(two) and sorted(driver.seeds) == sorted(other.seeds)
    assert episode_seed(0, 1, 2) != episode_seed(0, 2, 1) != episode_seed(1, 1, 2)


def test_resuming_plays_only_what_is_missing(tmp_path):
    run(tmp_path, episodes=2)
    path = tmp_path / "episodes.jsonl"
    path.write_bytes(path.read_bytes()[:-20])  # a kill cuts the last line
    kept = [line for line in path.read_bytes().splitlines()[:-1]]
    outcomes, _, driver = run(tmp_path, episodes=3)
    assert len(outcomes) == 6 and path.read_bytes().splitlines()[:3] == kept
    assert len(path.read_bytes().splitlines()) == 6
    _, _, idle = run(tmp_path, episodes=3)
    assert driver.seeds and not idle.seeds
    with pytest.raises(DataError, match="max_steps = 4, now it is 5"):
        Records(tmp_path, Settings("fake", "0", "test", 2, 4, None, 5, 0, 0, {}))


def test_a_process_that_dies_is_reported_and_its_episode_run_again(tmp_path, monkeypatch):
    healthy, _, _ = run(tmp_path / "healthy")
    monkeypatch.setenv("FAKE_SIM", f"die-once:{tmp_path / 'died'}")
    outcomes, said, _ = run(tmp_path / "dying")
    assert ends(outcomes) == ends(healthy)
    assert len(said) == 1 and "exit status 7" in said[0] and "segmentation fault" in said[0] and "task=1" in said[0]


@pytest.mark.parametrize(
    ("fault", "words"),
    [("die", "died 3 times"), ("raise", "physics exploded"), ("hang", "said nothing for"), ("mute", "no such suite")],
)
def test_what_never_works_ends_the_run_with_its_reason(tmp_path, monkeypatch, fault, words):
    monkeypatch.setenv("FAKE_SIM", fault)
    with pytest.raises(PoolError) as error:
        run(tmp_path, episodes=1, workers=1, reply_seconds=1 if fault == "hang" else 60)
    assert words in str(error.value)


def test_processes_stay_with_their_task():
    waiting = {0: deque([1, 2]), 1: deque([3, 4, 5])}
    assert next_job(waiting, 0) == 1, "the task of its scene first"
    assert next_job(waiting, -1) == 3, "else that with most left"
    waiting = {0: deque(), 1: deque()}
    assert next_job(waiting, 0) is None


def test_messages_survive_the_pipe_and_strangers_do_not():
    stream = io.BytesIO()
    images = {"image": np.arange(12, dtype=np.uint8).reshape(2, 2, 3)[::-1]}
    protocol.send(stream, Observation(images, np.ones(8, np.float32), 3))
    protocol.send(stream, Finished(True, 4))
    raw = stream.getvalue()
    stream.seek(0)
    first = protocol.receive_reply(stream)
    assert isinstance(first, Observation) and first.steps == 3 and first.state.dtype == np.float32
    assert np.array_equal(first.images["image"], images["image"])
    assert protocol.receive_reply(stream) == Finished(True, 4) and protocol.receive_reply(stream) is None
    for bad in (raw[:-1], raw[:5], b"[robosuite WARNING] no macros", struct.pack("<Q", 3) + b"\x93\x01\x02"):
        stream = io.BytesIO(bad)
        with pytest.raises(protocol.ProtocolError):
            while protocol.receive_reply(stream) is not None:
                pass


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (28, 40, 0.5457, 0.8193), (0, 0, 0.0, 1.0)],
)
def test_wilson(successes, trials, low, high):
    assert wilson(successes, trials) == pytest.approx((low, high), abs=1e-4)


def test_the_document_counts_per_task():
    outcomes = [
        Outcome(0, 0, 0, 1, True, 90, 1.0),
        Outcome(0, 1, 1, 2, False, 280, 1.0),
        Outcome(3, 0, 0, 3, True, 70, 1.0),
    ]
    document = report.document("checkpoint", SETTINGS, list("abcd"), outcomes, crashes=2)
    assert (document["successes"], document["episodes"], document["simulator_crashes"]) == (2, 3, 2)
    rows = [(row["task"], row["language"], row["successes"], row["episodes"]) for row in document["tasks"]]
    assert rows == [(0, "a", 1, 2), (3, "d", 1, 1)] and document["mean_steps_of_successes"] == 80


def test_the_command_end_to_end(sample_dir, tmp_path, monkeypatch, capsys):
    """A checkpoint of the toy size, loaded as it is stored, in the simulator that needs no simulator."""
    output = tmp_path / "run"
    config = str(ROOT / "configs" / "pi05" / "somaspeed-tiny.toml")
    short = ["training.steps=1", "training.microbatch=2", "training.warmup_steps=0", "data.held_out=0"]
    assert train(["--config", config, "--shards", str(sample_dir), f"output={output}", *short]) == 0
    monkeypatch.setattr(cli, "simulator_command", lambda suite, rendering: COMMAND)
    arguments = ["--checkpoint", str(output), "--suite", "fake", "--tasks", "1", "--episodes", "2", "--max-steps", "4"]
    arguments += ["--n-action-steps", "2", "--flow-steps", "2", "--json", str(tmp_path / "result.json")]
    assert cli.main(arguments) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    settings = result["settings"]
    assert [settings[key] for key in ("n_action_steps", "chunk_size", "flow_steps", "seed")] == [2, 50, 2, 0]
    assert settings["versions"]["fake"] == "1" and settings["versions"]["lerobot"] == "0.6.1"
    assert [row["episodes"] for row in result["tasks"]] == [2] and len(result["outcomes"]) == 2
    printed = capsys.readouterr().out
    assert "95 % interval" in printed and "2 actions of chunks of 50, 2 flow steps" in printed
    again = [*arguments, "--output", str(tmp_path / "again"), "--against", "untrained"]
    assert cli.main(again) == 0 and "all, with random weights" in capsys.readouterr().out
    again = json.loads((tmp_path / "result.json").read_text())
    assert [{**o, "seconds": 0} for o in again["outcomes"]] == [{**o, "seconds": 0} for o in result["outcomes"]]
    assert cli.main([*arguments, "--seed", "1"]) == 2 and "seed = 0, now it is 1" in capsys.readouterr().err
    assert cli.main([*arguments[:4], "--tasks", "7"]) == 2 and "tasks 0 to 1" in capsys.readouterr().err
    late = [*arguments, "--output", str(tmp_path / "late"), "--first-init"]
    assert cli.main([*late, "5"]) == 2 and "5 stored initial states, 0 to 4" in capsys.readouterr().err
    assert cli.main([*late, "4"]) == 0 and "begin again at 0" in capsys.readouterr().out
    weights = output / "checkpoints" / "last" / "pretrained_model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert cli.main([*arguments, "--output", str(tmp_path / "cut")]) == 2
    assert "not a readable safetensors file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argument", ["--seed=-1", "--first-init=-3", "--episodes=0", "--tasks=0-3", "--device=abacus", "--videos=-1"]
)
def test_arguments_that_cannot_be_are_refused(argument, capsys):
    with pytest.raises(SystemExit) as end:
        cli.parse_arguments(["--checkpoint", "x", argument])
    assert end.value.code == 2 and argument.split("=")[0] in capsys.readouterr().err


def test_an_evaluation_goes_on_only_with_the_same_demonstrations_and_whole_records(tmp_path):
    with_demonstrations = msgspec.structs.replace(SETTINGS, demonstrations="abc")
    Records(tmp_path, with_demonstrations)
    with pytest.raises(DataError, match="demonstrations = abc"):
        Records(tmp_path, SETTINGS)
    (tmp_path / "episodes.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="episodes.jsonl: not readable"):
        Records(tmp_path, with_demonstrations)
    (tmp_path / "evaluation.json").write_text("[")
    with pytest.raises(DataError, match="evaluation.json: not readable"):
        Records(tmp_path, with_demonstrations)


def test_blind_drivers_know_the_demonstrations_and_nothing_else(sample):
    language = sample.manifest.tasks[int(sample.task[0])]
    demonstrations = Demonstrations(sample, {4: language}, steps=5)
    rows = np.flatnonzero((sample.task == sample.task[0]) & (sample.episode == sample.episode[0]))
    actions, states = sample.columns["action"][rows], sample.columns["observation.state"][rows]

    def seen(steps: int, state: np.ndarray) -> Observation:
        return Observation({}, state, steps)

    replay, regressor = Replay(demonstrations), StateRegressor(demonstrations)
    assert replay.blind and regressor.blind
    assert np.array_equal(replay.act(4, seen(10, states[0]), 0), actions[10:15])
    late = replay.act(4, seen(len(rows) + 50, states[0]), 0)
    assert np.array_equal(late, np.repeat(actions[-1:], 5, axis=0))
    guesses = np.stack([regressor.act(4, seen(0, state), 0) for state in states])
    truth = np.stack([demonstrations.after(4, row) for row in range(len(states))])
    left = ((guesses - truth) ** 2).mean() / ((truth - truth.mean(axis=(0, 1))) ** 2).mean()
    assert guesses.shape == (len(states), 5, 7) and left < 0.3, "a fraction of the variance"
    assert np.array_equal(StateRegressor(demonstrations).act(4, seen(0, states[3]), 9), guesses[3])
    with pytest.raises(DataError, match="no demonstration of 'dance'"):
        Demonstrations(sample, {0: "dance"}, steps=5)


def test_without_a_simulator_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setenv("SOMASPEED_SIM_PYTHON", "/nowhere/python")
    with pytest.raises(PoolError, match="make sim"):
        simulator_command("libero_spatial")
