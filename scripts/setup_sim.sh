#!/bin/sh
# Make the simulator's environment and see whether it renders: scripts/setup_sim.sh VENV LOCK
# Rendering on the CPU needs system libraries; they are installed where this may be done, named where not.
set -eu
venv=$1 lock=$2
packages="libegl1 libegl-mesa0 libgl1-mesa-dri libosmesa6"

"$(dirname "$0")/setup.sh" "$venv" "$lock" -e .
rm "$venv/.ready" # not before a frame was rendered

renders() {
    MUJOCO_GL=$1 PYOPENGL_PLATFORM=$1 "$venv/bin/python" -m somaspeed.sim.worker libero_spatial full --check 2>"$venv/check.log"
}

echo "setup: rendering a frame, which compiles a few things the first time"
if ! renders egl; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "setup: installing $packages"
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends $packages; } >"$venv/apt.log" 2>&1 ||
            echo "setup: apt-get failed, see $venv/apt.log" >&2
    fi
    if renders egl; then
        :
    elif renders osmesa; then
        echo "setup: EGL does not work here, OSMesa does: export MUJOCO_GL=osmesa before using the simulator"
    else
        tail -n 3 "$venv/check.log" >&2
        echo "setup: the simulator cannot render; it needs the system packages $packages (apt install $packages)" >&2
        exit 1
    fi
fi
touch "$venv/.ready"
