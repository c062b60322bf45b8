"""Why the gate stopped a run: label shares, three examples as they are, the likely cause, and how to go on."""

from collections import Counter
from itertools import islice
from pathlib import Path

from tokenmill import dataset
from tokenmill.config import Config, rules_of
from tokenmill.core import causes, judge
from tokenmill.core.causes import Scene
from tokenmill.core.gate import Alarm
from tokenmill.core.judge import CLOSE, Rules
from tokenmill.core.records import FAILURES, PROMPT_FAULTS, Record
from tokenmill.core.rendering import Rendering
from tokenmill.engines.base import normal
from tokenmill.machine import modelfiles

UNKNOWN = Rendering()
SHOWN = 3
SHOWN_CHARS = 300

MARGIN = 0.05
"""Above the share that was seen: later cohorts differ a little."""

LOOKED_AT = 2000
"""Stored records among which examples are looked for, a few seconds of reading: what stops a run is not rare."""

NEVERTHELESS = "to go on nevertheless: "
"""Before the command at the message's end: the report finds it there."""


class Examples:
    """The first few bad records of each label, for messages and the report."""

    def __init__(self) -> None:
        self.by_label: dict[str, list[Record]] = {}

    def add(self, record: Record, labels: tuple[str, ...]) -> None:
        """Takes note of it. A turn that was broken off shows nothing: the one before it does."""
        for label in labels if "broken_off" not in labels else ():
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


def explain(alarm: Alarm, examples: Examples, config: Config, command: str, known: Rendering = UNKNOWN) -> str:
    """The whole message of a gate stop; `command` is the one that started the run, `known` how it renders prompts."""
    key = f"gate.max_{alarm.what}"
    shares = Counter(alarm.labels)
    worst = [label for label, _ in shares.most_common() if label in _counted(alarm, config)]
    lines = [
        f"the gate stopped the run: of the {alarm.size} completions of cohort {alarm.cohort}, {alarm.bad} are "
        f"{alarm.what} ({key} = {alarm.allowed:g})",
        "  labels: " + ", ".join(f"{label} {count} of {alarm.ended}" for label, count in shares.most_common()),
    ]
    lines += [f"  {record.key}: {', '.join(record.labels)}: {_shown(record)}" for record in examples.of(worst)]
    scene = scene_of(config, known)
    alike = [label for label in worst if shares[label] == shares[worst[0]]]  # often of the same records
    told = (causes.likely(label, scene, examples.by_label.get(label, ())) for label in alike)
    cause = next(filter(None, told), "")
    if cause:
        lines.append(f"  likely cause: {cause}")
    share = min(1.0, round(alarm.bad / max(alarm.ended, 1) + MARGIN, 2))
    lines.append(f"  {NEVERTHELESS}{command} --set {key}={share:g}")
    return "\n".join(lines)


def _counted(alarm: Alarm, config: Config) -> frozenset[str]:
    """The labels for which records count as what the alarm is about: the others are not why the run stopped."""
    match alarm.what:
        case "failed":
            return FAILURES - PROMPT_FAULTS
        case "truncated":
            return judge.TRUNCATED
    return rules_of(config).reject


def _shown(record: Record) -> str:
    if record.error:
        return record.error[: 2 * SHOWN_CHARS]
    text = record.text
    if len(text) > SHOWN_CHARS:
        text = f"{text[: SHOWN_CHARS // 2]} … {text[-SHOWN_CHARS // 2 :]}"
    return f"{record.finish_reason}, {record.output_tokens} tokens: {text!r}"


def scene_of(config: Config, known: Rendering) -> Scene:
    """What is known of a run besides its outputs; `known` is how its prompts are rendered."""
    args = {normal(name) for name in config.engine.args}
    return Scene(
        config.generation.max_tokens,
        parser="reasoning-parser" in args,
        template=known.template,
        prompt=known.prompt,
        has_tag=_has_tag(Path(config.model.path)) if config.model.path else None,
    )


def _has_tag(model: Path) -> bool | None:
    if not (model / "tokenizer.json").is_file():
        return None
    return CLOSE in modelfiles.added_tokens(model, CLOSE)
