"""Numbers out of a Prometheus page: only the asked names are parsed, since a whole page takes 10 ms."""

import math

from prometheus_client.parser import text_string_to_metric_families


def values(page: str, *names: str) -> dict[str, float]:
    """Sample name → value, summed over label sets; names that do not stand on the page are left out."""
    lines = [line for line in page.splitlines() if line.startswith(names)]
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                if sample.name in names and math.isfinite(sample.value):
                    found[sample.name] = found.get(sample.name, 0.0) + float(sample.value)
    except ValueError:
        return {}  # a page that was cut or garbled: the next one is two seconds away
    return found
