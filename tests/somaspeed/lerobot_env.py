"""A checkpoint in LeRobot's own LIBERO environment: `python lerobot_env.py CHECKPOINT SEED`, JSON on standard output.

The environment's packages are those of the simulator's virtual environment, appended to the path of this one. Its
stored initial states lie in another kind of file than LeRobot expects, so they are asked of the suite.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

for _name, _value in (("MUJOCO_GL", "egl"), ("PYOPENGL_PLATFORM", "egl"), ("OPENBLAS_NUM_THREADS", "1")):
    os.environ.setdefault(_name, _value)
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402

ROOT = Path(__file__).parents[2]
EPISODE_STEPS = 12


def main(checkpoint: str, seed: int) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, str(ROOT))
    sys.path.append(str(next((ROOT / ".venv-sim" / "lib").glob("python*/site-packages"))))
    import lerobot.envs.libero as upstream
    from lerobot.envs.configs import LiberoEnv
    from lerobot.envs.factory import make_env
    from lerobot.envs.utils import preprocess_observation
    from lerobot.processor import PolicyProcessorPipeline
    from lerobot.processor.env_processor import LiberoProcessorStep
    from lerobot.scripts.lerobot_eval import rollout

    from somaspeed.actor import Actor

    upstream.get_task_init_states = lambda suite, task, is_libero_plus=False: suite.get_task_init_states(task)
    settings = LiberoEnv(
        task="libero_spatial",
        task_ids=[0],
        observation_height=256,
        observation_width=256,
        episode_length=EPISODE_STEPS,
    )
    environment = make_env(settings, n_envs=1, use_async_envs=False)["libero_spatial"][0]
    actor = Actor(Path(checkpoint), torch.device("cpu"))
    raw, _ = environment.reset(seed=[seed])
    language = environment.call("task_description")[0]
    observation = LiberoProcessorStep().observation(preprocess_observation(raw)) | {"task": [language]}
    torch.manual_seed(seed)
    theirs = actor.postprocessor(actor.policy.select_action(actor.preprocessor(dict(observation))))
    images = {
        name: (observation[f"observation.images.{name}"][0] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        for name in ("image", "image2")
    }
    state = observation["observation.state"][0].numpy()
    actor.policy.reset()
    played = rollout(
        environment,
        actor.policy,
        PolicyProcessorPipeline([LiberoProcessorStep()]),
        PolicyProcessorPipeline([]),
        actor.preprocessor,
        actor.postprocessor,
        seeds=[seed],
    )
    out.write(
        json.dumps(
            {
                "language": language,
                "state": state.tolist(),
                "theirs": theirs[0].tolist(),
                "ours": actor.act(images, state, language, seed)[0].tolist(),
                "images": {name: image[::16, ::16].tolist() for name, image in images.items()},
                "steps": len(played["action"][0]),
                "actions": played["action"][0].tolist(),
            }
        )
    )
    out.close()
    os._exit(0)  # the renderer complains about a context that is gone


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
