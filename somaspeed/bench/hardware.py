"""What a measurement ran on: devices, driver, links between devices, processor and memory."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

import torch

from somaspeed.bench.documents import Hardware

ALONE = [["X"]]  # the link matrix where there is nothing to ask, as for a single device


def devices() -> int:
    """How many devices a run takes by default: every accelerator, or one process on the CPU."""
    return torch.cuda.device_count() or 1


def hardware(world: int) -> Hardware:
    """The machine, as the documents describe it."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30
    threads = len(os.sched_getaffinity(0))
    if not torch.cuda.is_available():
        return Hardware(0, processor_name(), None, True, threads, memory_gib)
    total = torch.cuda.get_device_properties(0).total_memory
    return Hardware(world, torch.cuda.get_device_name(0), total // 2**20, True, threads, memory_gib)


def processor_name() -> str:
    """The processor's model, as the system calls it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def nvidia_smi(*arguments: str) -> str | None:
    """The output of nvidia-smi; None where it is not installed or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def driver_version() -> str | None:
    """The NVIDIA driver's version, None without one."""
    output = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return output.splitlines()[0].strip() if output and output.strip() else None


def gpu_links(world: int) -> list[list[str]]:
    """How the first `world` devices are linked, [world][world], in nvidia-smi's words (NV4, PXB, SYS, …)."""
    output = nvidia_smi("topo", "-m")
    return parse_links(output, world) if output else ALONE


def parse_links(topology: str, world: int) -> list[list[str]]:
    """The device-to-device part of `nvidia-smi topo -m`; `ALONE` when it has no such part."""
    rows = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", topology).splitlines():
        cells = line.split()
        if cells and re.fullmatch(r"GPU\d+", cells[0]) and "X" in cells[1:]:
            rows.append(cells[1:])
    count = min(world, len(rows))
    return [row[:count] for row in rows[:count]] or ALONE
