"""The LIBERO simulator, in processes of its own environment.

`protocol`, `rollout` and `pool` need the standard library, numpy and msgspec alone and run anywhere; `libero`, `oracle`
and `worker` run where LIBERO is installed (`make sim`). Nothing here imports torch or LeRobot.
"""
