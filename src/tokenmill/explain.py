"""Why the gate stopped a run: label shares, three examples as they are, the likely cause, and how to go on."""

from collections import Counter
from itertools import islice
from pathlib import Path

from tokenmill import dataset
from tokenmill.config import Config
from tokenmill.core import judge
from tokenmill.core.gate import Alarm
from tokenmill.core.judge import Rules
from tokenmill.core.records import Record

SHOWN = 3
SHOWN_CHARS = 300

MARGIN = 0.05
"""Above the share that was seen: later cohorts differ a little."""

LOOKED_AT = 2000
"""Stored records among which examples are looked for, a few seconds of reading: what stops a run is not rare."""


class Examples:
    """The first few bad records of each label, for messages and the report."""

    def __init__(self) -> None:
        self.by_label: dict[str, list[Record]] = {}

    def add(self, record: Record, labels: tuple[str, ...]) -> None:
        for label in labels:
            kept = self.by_label.setdefault(label, [])
            if len(kept) < SHOWN:
                kept.append(record)

    def fill(self, data: Path, rules: Rules) -> None:
        """Looks for examples among stored records: after a restart none has passed by yet."""
        for record in islice(dataset.records(data), LOOKED_AT):
            self.add(record, judge.judged(record, rules)[1])

    def of(self, labels: list[str]) -> list[Record]:
        """Examples of these labels, the first label's first."""
        found: dict[str, Record] = {}
        for label in labels:
            for record in self.by_label.get(label, []):
                found.setdefault(record.key, record)
        return list(found.values())[:SHOWN]


def explain(alarm: Alarm, examples: Examples, config: Config, command: str) -> str:
    """The whole message of a gate stop; `command` is the one that started the run."""
    key = f"gate.max_{alarm.what}"
    shares = Counter(alarm.labels)
    worst = [label for label, _ in shares.most_common()]
    lines = [
        f"the gate stopped the run: of the {alarm.size} completions of cohort {alarm.cohort}, {alarm.bad} are "
        f"{alarm.what} ({key} = {alarm.allowed:g})",
        "  labels: " + ", ".join(f"{label} {count} of {alarm.ended}" for label, count in shares.most_common()),
    ]
    lines += [f"  {record.key}: {', '.join(record.labels)}: {_shown(record)}" for record in examples.of(worst)]
    cause = likely_cause(worst[0] if worst else "", config)
    if cause:
        lines.append(f"  likely cause: {cause}")
    share = min(1.0, round(alarm.bad / max(alarm.ended, 1) + MARGIN, 2))
    lines.append(f"  to go on nevertheless: {command} --set {key}={share:g}")
    return "\n".join(lines)


def _shown(record: Record) -> str:
    if record.error:
        return record.error[: 2 * SHOWN_CHARS]
    text = record.text
    if len(text) > SHOWN_CHARS:
        text = f"{text[: SHOWN_CHARS // 2]} … {text[-SHOWN_CHARS // 2 :]}"
    return f"{record.finish_reason}, {record.output_tokens} tokens: {text!r}"


def likely_cause(label: str, config: Config) -> str:
    """What most often lies behind a label, in words of the config."""
    generation = config.generation
    parser = "reasoning-parser" in config.engine.args
    match label:
        case "empty_reasoning":
            return (
                "thinking is on, but the outputs hold no thought: the chat template or the server ignores "
                "enable_thinking, or the model does not reason (then generation.thinking = false)"
            )
        case "empty_answer":
            return "the server's reasoning parser takes the whole output for the thought" + (
                "; leave engine.args reasoning-parser out" if parser else ""
            )
        case "truncated_in_thinking" | "truncated_in_answer":
            return f"generation.max_tokens = {generation.max_tokens} is too small for this model"
        case "repetition":
            return "the model loops: greedy or cold sampling does that to reasoning models; see temperature and top_p"
        case "foreign_mode":
            return "thinking is off, but the model thinks: its chat template ignores enable_thinking = false"
        case "ids_disagree":
            return (
                "token ids, text and counts of an answer do not fit each other: the server changes the text behind its "
                "ids (a parser, a stop string in generation.extra), or it mixes answers up"
            )
        case "missing_end_token":
            return "the engine stops at something else than the model's end token: a stop string in generation.extra?"
        case "request_refused":
            return "the server refuses the requests; its words are above: a field of generation.extra, or max_tokens?"
        case "aborted":
            return "requests fail or run into generation.timeout again and again; see the servers' logs"
    return ""
