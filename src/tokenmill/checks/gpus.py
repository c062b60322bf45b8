"""The GPUs: are there as many as asked for, and free?"""

from collections.abc import Iterator

from tokenmill.checks.base import Context, Finding
from tokenmill.machine import gpus, processes

USED_GPU = 2 * 10**9
"""Bytes of GPU memory in use by others that are worth a word: a desktop takes less, a forgotten server more."""


def check_gpus(context: Context) -> Iterator[Finding]:
    """As many GPUs as asked for are there, and nobody else uses them."""
    fleet = context.config.fleet
    if fleet.gpus == "none" or context.config.engine.addresses:
        return
    chosen = gpus.choose(context.gpus, fleet.gpus)
    if len(chosen) < fleet.gpus_per_server:
        words = f"fleet.gpus_per_server = {fleet.gpus_per_server}, and {len(chosen)} GPUs may be used"
        yield Finding("gpus", "fail", "", words)
    mine = {entry.process.pid for entry in context.ours}
    mine |= {pid for entry in context.ours for pid in processes.members(entry.group, entry.nonce)}
    for gpu in chosen:
        foreign = [pid for pid in gpu.pids if pid not in mine]
        if gpu.memory_used > USED_GPU and not mine.intersection(gpu.pids):
            who = ", ".join(map(processes.describe, foreign)) or "no visible process"
            words = f"{gpu.memory_used / 1e9:.1f} of {gpu.memory_total / 1e9:.1f} GB are in use by {who}"
            yield Finding("gpus", "warn", f"GPU {gpu.index}", words, "nvidia-smi")
    yield Finding("gpus", "ok", "", f"{len(chosen)} × {chosen[0].name}")
