"""An inspection for a person: the verdict and its reasons first, then figures, then examples as they are, escaped."""

from collections.abc import Iterator
from textwrap import wrap

from tokenmill.inspecting.verdict import Inspection

BAR = 30
WIDTH = 100


def shown(found: Inspection) -> Iterator[str]:
    """The lines."""
    yield f"{found.verdict.upper()}: {found.rows:,} rows"
    for text in (*found.reasons, *(f"note: {note}" for note in found.notes)):
        yield from wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
    yield ""
    for label, count in found.labels.items():
        yield f"  {label:24}{count:>12,}  {count / found.rows:.1%}"
    for name, values in _percentiles(found):
        yield f"  {name:24}p1 {values['p1']:,}  p50 {values['p50']:,}  p99 {values['p99']:,}"
    if found.closed_thoughts is not None:
        yield f"  {'closed thoughts':24}{found.closed_thoughts:.1%}"
    for cut, figures in (found.clipped or {}).items():
        yield f"  {f'supervised behind {int(cut):,}':24}{figures['tokens']:.1%} of the tokens, {figures['rows']:,} rows"
    if found.vocabulary:
        seen = f"{found.vocabulary['top_32k']:.1%} of {found.vocabulary['tokens']:,} tokens"
        yield f"  {'in the top 32k':24}{seen}, {found.vocabulary['distinct']:,} different ones"
    if any(found.duplicates.values()):
        yield f"  {'repeated':24}" + "  ".join(f"{name} {count:,}" for name, count in found.duplicates.items())
    yield from _histogram(found)
    for example in found.examples:
        yield f"  {example.label}  {example.id}: {example.text!r}"


def _percentiles(found: Inspection) -> list[tuple[str, dict[str, int]]]:
    rows = (
        ("supervised tokens", found.supervised_tokens),
        ("tokens of thoughts", found.thought_tokens),
        ("tokens of answers", found.answer_tokens),
        ("tokens of rows", found.lengths),
        ("characters", found.characters),
    )
    return [(name, values) for name, values in rows if values]


def _histogram(found: Inspection) -> Iterator[str]:
    bins = (found.supervised_tokens or {}).get("histogram", {})
    most = max(bins.values(), default=0)
    if most:
        yield "  supervised tokens a row"
    for name, count in bins.items():
        if count:
            yield f"    {name:>10}  {count:>12,}  {'█' * max(1, round(BAR * count / most))}"
