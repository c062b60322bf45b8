"""What a report says: all figures, as report.json has them and as the page is drawn from."""

import msgspec

from tokenmill.core.efficiency import Efficiency
from tokenmill.core.environment import Environment
from tokenmill.reporting.course import Course
from tokenmill.reporting.examples import Kind
from tokenmill.reporting.figures import Counts, LabelCount, Masks, NodeFigures, Outlier, ServerFigures, Spread
from tokenmill.reporting.notices import FindingRow, Notice
from tokenmill.settings import Settings


class Step(msgspec.Struct, frozen=True):
    """Something to do next: a command to paste, and what for."""

    command: str
    why: str


class Report(msgspec.Struct, frozen=True):
    """All figures. Times are Unix seconds; shares from 0 to 1; `good` is what `verdict`, one sentence, says.

    `on_s` are the seconds in which the run was on, from `began` to `ended`. Schema: docs/report.md.
    """

    run: str
    written: float
    tokenmill: str
    state: str
    verdict: str
    good: bool
    trouble: str
    notable: list[str]
    unknown: list[str]
    next: list[Step]
    asked: int | None
    counts: Counts
    began: float | None
    ended: float | None
    on_s: float
    output_tokens: int
    thought_tokens: int
    finish_reasons: dict[str, int]
    thought: Spread | None
    answer: Spread | None
    prompt: Spread | None
    masks: Masks
    labels: list[LabelCount]
    nodes: list[NodeFigures]
    servers: list[ServerFigures]
    outliers: list[Outlier]
    limits: dict[str, float]
    course: Course
    efficiency: Efficiency | None
    findings: list[FindingRow]
    warnings: list[Notice]
    warnings_left_out: int
    examples: list[Kind]
    environment: list[Environment]
    settings: list[Settings]
    config: str
