"""A plan as a page for a terminal: at most 80 columns, a fact a line."""

from collections.abc import Callable, Iterator
from textwrap import wrap

from tokenmill.plain import duration
from tokenmill.planning.answer import Plan, Range

WIDTH, LABEL = 80, 18

Show = Callable[[float], str]

_DISK = {
    "journal": "open journals",
    "parquet": "sealed Parquet",
    "ram_disk": "RAM disk, staged model",
    "staged_model": "staged model",
}


def lines(plan: Plan) -> list[str]:
    """The page."""
    return [*_servers(plan), "", *_work(plan), "", *_room(plan), "", *_changes(plan)]


def _row(label: str, text: str) -> Iterator[str]:
    first, *rest = wrap(text, WIDTH - LABEL) or [""]
    yield f"{label:{LABEL}}{first}".rstrip()
    yield from (f"{'':{LABEL}}{line}" for line in rest)


def _servers(plan: Plan) -> Iterator[str]:
    each = f"{plan.running_per_server:,} at once on each, limited by {plan.limited_by}"
    if plan.nodes_from:
        yield from _row("nodes", plan.nodes_from)
    able = [node for node in plan.nodes if not node.trouble]
    yield from _row("servers", f"{plan.servers:,}" + (f" on {len(able):,} nodes" if plan.nodes else ""))
    for node in able:
        words = f"node {node.node}: {node.servers}, {node.cards}, {node.running_per_server:,} at once on each"
        yield from _row("", words)
    yield from _row("requests", f"{each}; {plan.running_per_server * plan.servers:,} in all")
    if plan.waiting_per_server:
        asked = plan.running_per_server + plan.waiting_per_server
        yield from _row("", f"{asked:,} are asked for: {plan.waiting_per_server:,} of them would only wait")
    if plan.context is not None:
        cache = f"; the cache holds {plan.kv_tokens_per_server:,} tokens" if plan.kv_tokens_per_server else ""
        yield from _row("context", f"{plan.context:,} tokens a request{cache}")


def _work(plan: Plan) -> Iterator[str]:
    done = plan.completions - plan.pending
    words = f"{plan.completions:,} asked for" + (f", {done:,} have a record" if done else "")
    yield from _row("completions", words)
    if plan.prompt_tokens is not None:
        spread = " / ".join(f"{plan.prompt_tokens[name]:,}" for name in ("p1", "p50", "p99"))
        yield from _row("prompt tokens", f"{spread} (p1 / p50 / p99, {plan.prompt_tokens_from})")
    tokens = _between(plan.tokens, _large) if plan.tokens else "not known"
    yield from _row("tokens to come", f"{tokens}: {plan.tokens_from}")
    hours = _between(plan.hours, lambda hours: duration(hours * 3600)) if plan.hours else "not known"
    yield from _row("time", f"{hours}: {plan.hours_from}")


def _room(plan: Plan) -> Iterator[str]:
    taken = [(name, size) for name, size in plan.disk_bytes.items() if size]
    for number, (name, size) in enumerate(taken):
        yield from _row("disk, at most" if number == 0 else "", f"{_bytes(size):>9}  {_told(name)}")
    yield from _row("disk, free", f"{_bytes(plan.disk_free_bytes):>9}  where the run folder is")
    if plan.lost_with_the_machine_s is None:
        lost = "all of it: output.copy_to is not set"
    else:
        lost = f"at most {duration(plan.lost_with_the_machine_s)} of work"
    yield from _row("machine lost", lost)
    if plan.hidden_states_bytes is not None:
        size_words = _between(plan.hidden_states_bytes, _bytes)
        yield from _row("hidden states", f"{size_words} if they were stored (5 layers, every token): they are not")


def _changes(plan: Plan) -> Iterator[str]:
    yield "what would help most" if plan.changes else "no change is known that would help"
    for number, change in enumerate(plan.changes, 1):
        first, *rest = wrap(change, WIDTH - 4)
        yield f" {number}. {first}"
        yield from (f"    {line}" for line in rest)
    for note in plan.notes:
        yield from wrap(f"note: {note}", WIDTH, subsequent_indent="      ")


def _told(name: str) -> str:
    return _DISK.get(name) or f"export {name.removeprefix('export_')}"


def _between(found: Range, shown: Show) -> str:
    low, high = shown(found.low), shown(found.high)
    return low if low == high else f"{low} to {high}"


def _large(count: float) -> str:
    for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:,.1f} {name}"
    return f"{count:,.0f}"


def _bytes(count: float) -> str:
    for size, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= size:
            return f"{count / size:,.1f} {name}"
    return f"{count / 1e3:,.0f} kB"
