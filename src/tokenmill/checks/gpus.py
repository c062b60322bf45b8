"""The GPUs: as many as asked for, alike, healthy, free, and counted as CUDA counts them?"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence

from tokenmill import launch
from tokenmill.checks.base import Context, Finding, Level
from tokenmill.engines.base import normal
from tokenmill.machine import gpus, group, kernellog, processes
from tokenmill.machine.gpus import Gpu

USED_GPU = 2 * 10**9
"""Bytes of GPU memory in use by others that are worth a word: a desktop takes less, a forgotten server more."""

LESS_POWER = 0.9
"""A power limit below this share of the card's usual one was set by somebody, and costs speed."""


def check_gpus(context: Context) -> Iterator[Finding]:
    """As many GPUs as asked for are there, alike, in good health, and nobody else uses them."""
    fleet = context.config.fleet
    if context.config.gpus == "none":
        return
    chosen = gpus.choose(context.gpus, fleet.gpus)
    if len(chosen) < fleet.gpus_per_server:
        words = f"fleet.gpus_per_server = {fleet.gpus_per_server}, and {len(chosen)} GPUs may be used"
        yield Finding("gpus", "fail", "", words)
        return
    yield from _usable(context, chosen)
    yield from _number(context, chosen)
    yield from _alike(chosen)
    yield from _order(context, chosen)
    for gpu in chosen:
        yield from _health(gpu)
    yield from _kernel_log(context, chosen)
    yield from _idle(context, chosen)
    yield Finding("gpus", "ok", "", f"{len(chosen)} × {chosen[0].name}, driver {chosen[0].driver or 'unknown'}")


def _usable(context: Context, chosen: Sequence[Gpu]) -> Iterator[Finding]:
    """Cards that nothing should be started on: left out by the run, as long as enough are left."""
    min_ready = context.config.fleet.min_ready
    places = launch.places(context.config, chosen)
    kept, left_out = launch.without(places, chosen, min_ready)
    for gpu in chosen:
        if why := gpus.trouble(gpu):
            tail = f"the run leaves it out and goes on with {len(kept)} of {len(places)} servers"
            if not left_out:
                tail = f"without it fewer than fleet.min_ready = {min_ready} servers would be left"
            level: Level = "warn" if left_out else "fail"
            yield Finding("gpus", level, gpu.label, f"{gpu.label} ({gpu.name}): {why}; {tail}", _see(gpu))


def _see(gpu: Gpu) -> str:
    return f"nvidia-smi -q -i {gpu.index}"


def _number(context: Context, chosen: Sequence[Gpu]) -> Iterator[Finding]:
    """More servers than groups of cards share them."""
    fleet = context.config.fleet
    groups = len(chosen) // fleet.gpus_per_server
    if fleet.servers > groups:
        count = "1 GPU" if len(chosen) == 1 else f"{len(chosen)} GPUs"
        words = f"fleet.servers = {fleet.servers} on {count}: some would share a card and its memory"
        yield Finding("gpus", "warn", "", words, f"fleet.servers = {groups}")
    elif not fleet.servers and (idle := len(chosen) % fleet.gpus_per_server):
        words = f"{idle} of {len(chosen)} GPUs stay idle: fleet.gpus_per_server = {fleet.gpus_per_server}"
        yield Finding("gpus", "warn", "", words, "name the GPUs in fleet.gpus")


def _alike(chosen: Sequence[Gpu]) -> Iterator[Finding]:
    """Unlike cards make unlike servers: the same flags leave one of them without memory, or slow."""
    kinds = Counter((gpu.name, round(gpu.memory_total / 1e9)) for gpu in chosen if not gpu.lost)
    if len(kinds) > 1:
        usual, _ = kinds.most_common(1)[0]
        others = [gpu for gpu in chosen if not gpu.lost and (gpu.name, round(gpu.memory_total / 1e9)) != usual]
        named = ", ".join(f"{gpu.label} is a {gpu.name} with {gpu.memory_total / 1e9:.0f} GB" for gpu in others)
        words = f"the cards are not alike: most are a {usual[0]} with {usual[1]} GB, {named}"
        yield Finding("gpus", "warn", others[0].label, words, "name like ones in fleet.gpus")
    modes = {gpu.mig for gpu in chosen if not gpu.lost and gpu.mig is not None}
    if len(modes) > 1:
        sliced = ", ".join(sorted({str(gpu.index) for gpu in chosen if gpu.mig}))
        yield Finding("gpus", "warn", sliced, f"GPU {sliced} is in MIG mode, the others are whole", "nvidia-smi -L")


def _order(context: Context, chosen: Sequence[Gpu]) -> Iterator[Finding]:
    """Numbers in the shell's CUDA_VISIBLE_DEVICES mean CUDA's own order there, fastest first unless it is told."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    by_number = any(part.strip().isdigit() for part in variable.split(","))
    pci = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if context.config.fleet.gpus == "all" and by_number and not pci and len({gpu.name for gpu in context.gpus}) > 1:
        words = f"CUDA_VISIBLE_DEVICES = {variable} counts fastest first in this shell; tokenmill counts in PCI order"
        fix = f"fleet.gpus = {[gpu.uuid for gpu in chosen]}"
        yield Finding("gpus", "warn", variable, f"{words}, as nvidia-smi does, and the cards are not alike", fix)
    buses = [kernellog.address(gpu.bus) for gpu in context.gpus if gpu.bus and not gpu.is_slice]
    if buses != sorted(buses):
        words = "NVML does not count the cards in PCI order, as CUDA will: numbers may mean other cards"
        yield Finding("gpus", "warn", "", words, f"fleet.gpus = {[gpu.uuid for gpu in chosen]}")


def _health(gpu: Gpu) -> Iterator[Finding]:
    """What does not stop a card, and should be known."""
    if gpu.ecc_errors:
        words = f"{gpu.label}: {gpu.ecc_errors} memory errors that ECC could not correct since the driver was loaded"
        yield Finding("gpus", "warn", gpu.label, words, _see(gpu))
    if gpu.remap_pending:
        words = f"{gpu.label}: a row of its memory is replaced at the next reset; until then it may fail again"
        yield Finding("gpus", "warn", gpu.label, words, f"nvidia-smi --gpu-reset -i {gpu.index}")
    if gpu.throttled:
        words = f"{gpu.label}: its clocks are held down by {', '.join(gpu.throttled)}"
        yield Finding("gpus", "warn", gpu.label, words, f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i {gpu.index}")
    if gpu.power_limit and gpu.power_default and gpu.power_limit < LESS_POWER * gpu.power_default:
        words = f"{gpu.label}: its power is limited to {gpu.power_limit / 1e3:.0f} W of {gpu.power_default / 1e3:.0f} W"
        yield Finding("gpus", "warn", gpu.label, words, f"nvidia-smi -i {gpu.index} -pl {gpu.power_default // 1000}")


def _kernel_log(context: Context, chosen: Sequence[Gpu]) -> Iterator[Finding]:
    log = context.read_kernel_log()
    if log is None:
        words = "the kernel's log cannot be read: whether a card has had an Xid error is not known"
        yield Finding("gpus", "unknown", "", words, "sudo dmesg | grep -i xid")
        return
    cards = {kernellog.address(gpu.bus): gpu for gpu in chosen if gpu.bus}
    for (bus, number), count in Counter((xid.bus, xid.number) for xid in kernellog.xids(log)).items():
        if gpu := cards.get(bus):
            times = f", {count} times" if count > 1 else ""
            words = f"{gpu.label}: Xid {number} in the kernel's log{times}: {kernellog.MEANINGS[number]}"
            yield Finding("gpus", "warn", gpu.label, words, "sudo dmesg | grep -i xid")


def _idle(context: Context, chosen: Sequence[Gpu]) -> Iterator[Finding]:
    """Whose memory it is. Where our own servers live on a card nobody else is looked for: in a container NVML tells
    the host's pids, and ours would seem a stranger's."""
    table, mine = group.Table(), {entry.process.pid for entry in context.ours}
    mine |= {each.pid for entry in context.ours for each in group.look(entry.processes, table, group.FRESH_S).living}
    ours = {part for entry in context.ours for part in entry.gpu.split(",")}
    refused: list[Gpu] = []
    for gpu in chosen:
        if str(gpu.cuda_id) in ours or mine.intersection(gpu.pids) or gpu.memory_used <= USED_GPU:
            continue
        used = f"{gpu.label}: {gpu.memory_used / 1e9:.1f} of {gpu.memory_total / 1e9:.1f} GB are in use by"
        values = {"used": gpu.memory_used, "total": gpu.memory_total, "pids": list(gpu.pids)}
        blocked = _refuses(context, gpu)
        refused += [gpu] if blocked else []
        if gpu.pids:
            words = f"{used} {', '.join(map(processes.describe, gpu.pids))}"
            fix = f"ps -fp {','.join(map(str, gpu.pids))}"
        else:
            words = f"{used} no process that can be seen from here: one in another container, or one that died in the"
            words += " driver"
            fix = f"nvidia-smi -i {gpu.index}; fuser -v /dev/nvidia{gpu.index}"
        yield Finding("gpus", "warn", gpu.label, words + blocked, fix, values)
    if len(refused) == len(chosen):
        words = "the engine would refuse every card: others hold their memory"
        yield Finding("gpus", "fail", "", words, "wait for them, or lower engine.args gpu-memory-utilization")


VLLM_SHARE = 0.92
"""vLLM's own gpu-memory-utilization (config/cache.py of 0.33)."""


def _refuses(context: Context, gpu: Gpu) -> str:
    """vLLM ends where less than its share of the whole card is free (worker/utils.py); SGLang takes what is there."""
    if context.config.engine.kind != "vllm":
        return ""
    args = {normal(name): value for name, value in context.config.engine.args.items()}
    share = args.get("gpu-memory-utilization", VLLM_SHARE)
    free = gpu.memory_total - gpu.memory_used
    if not isinstance(share, int | float) or free >= share * gpu.memory_total:
        return ""
    return f"; vLLM wants {share * gpu.memory_total / 1e9:.1f} GB free and will end"
