"""What is installed against what the engine's distribution and its kernels declare: the upgrade that nobody asked for.

An installer moves torch for the sake of one package and says nothing; what was compiled against the old one still
imports, and fails at the first request, or never and slowly (cases C35).
"""

from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from tokenmill.checks.base import Context, Finding
from tokenmill.launch import python_of
from tokenmill.machine.gpus import Gpu
from tokenmill.machine.packages import PINNING, Package

REFUSED = frozenset({"sglang-kernel", "sgl-kernel", "flashinfer-python"})
"""SGLang compares these at its start and ends (engine.py: "is installed with version …, which is less than the minimum
required version"); what else does not fit may work."""

SKIPS_IT = "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"

BLACKWELL_CUDA = Version("12.8")
"""The first CUDA that compiles for compute capability 10.0 and 12.0."""

OLDEST_FOR_13 = (7, 5)
"""CUDA 13 compiles for nothing older than Turing."""


def check_needs(context: Context, package: Package) -> Iterator[Finding]:
    """Every declared need is met, and torch's CUDA fits the driver and the cards."""
    python, missing = python_of(context.config), list[str]()
    for owner, requirements in package.needs.items():
        for need, version in unmet(requirements, package, extras=owner == context.engine.package):
            if not version and owner != context.engine.package:
                continue  # a part of a part that the engine may never use
            wanted = f"{need.name}{need.specifier}"
            ends = context.config.engine.kind == "sglang" and need.name in REFUSED
            ends = ends and owner == context.engine.package and _is_older(need, version)
            ends = ends and SKIPS_IT not in context.config.engine.env
            if not version and not ends:
                missing.append(wanted)
                continue
            words = f"{owner} asks for {wanted}, and {version or 'nothing'} is installed"
            yield Finding("engine", "fail" if ends else "warn", python, words, _install(python, wanted))
    if missing:
        none = "nothing" if len(missing) == 1 else "none of them"
        words = f"{context.engine.package} asks for {', '.join(missing)}, and {none} is installed"
        yield Finding("engine", "warn", python, words, _install(python, *missing))
    yield from _cuda(context, package, context.cards)


def _install(python: str, *wanted: str) -> str:
    quoted = " ".join(f"'{each}'" for each in wanted)
    return f"{python} -m pip install {quoted}"


def unmet(requirements: list[str], package: Package, *, extras: bool = True) -> Iterator[tuple[Requirement, str]]:
    """Requirements that what is installed does not meet, with the version that is there (empty: none).

    What only an extra asks for may be missing, and where extras disagree one of them has to be content. Of extras only
    kernels count: the rest are the tools of those who work on the package.
    """
    parsed = list(_parsed(requirements))
    plain = [need for need in parsed if _applies(need, package, "")]
    for need in plain:
        version = _version(package, need.name)
        if not version or not _meets(need, version):
            yield need, version
    settled = {canonicalize_name(need.name) for need in plain}
    optional: dict[str, list[Requirement]] = {}
    for need in parsed if extras else ():
        name = canonicalize_name(need.name)
        wanted = any(_applies(need, package, part) for part in _extras(need))
        if name in PINNING and name not in settled and wanted and _version(package, need.name):
            optional.setdefault(name, []).append(need)
    for needs in optional.values():
        version = _version(package, needs[0].name)
        if not any(_meets(need, version) for need in needs):
            yield needs[0], version


def _parsed(requirements: list[str]) -> Iterator[Requirement]:
    for text in requirements:
        try:
            yield Requirement(text)
        except InvalidRequirement:
            continue  # a build's own spelling; pip has accepted it


def _extras(need: Requirement) -> set[str]:
    """The extras that a condition speaks of."""
    text = str(need.marker or "")
    return {part.split('"')[1] for part in text.replace("'", '"').split("extra ==")[1:] if '"' in part}


def _applies(need: Requirement, package: Package, extra: str) -> bool:
    return need.marker is None or need.marker.evaluate({**package.markers, "extra": extra})


def _version(package: Package, name: str) -> str:
    wanted = canonicalize_name(name)
    return next((version for other, version in package.installed.items() if canonicalize_name(other) == wanted), "")


def _meets(need: Requirement, version: str) -> bool:
    """2.11.0+cu130 meets ==2.11.0: a local tag says how it was built, not what it is."""
    try:
        return need.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def _is_older(need: Requirement, version: str) -> bool:
    wanted = [
        Version(part.version)
        for part in need.specifier
        if part.operator in ("==", ">=", "~=") and "*" not in part.version
    ]
    return not version or any(Version(version) < least for least in wanted)


def _cuda(context: Context, package: Package, cards: list[Gpu]) -> Iterator[Finding]:
    if not package.cuda or not cards:
        return
    built, subject = Version(package.cuda), f"torch {_version(package, 'torch')}"
    reach = next((card.cuda for card in cards if card.cuda), None)
    if reach and built.major > reach[0]:
        words = f"{subject} was built for CUDA {built}, the driver {cards[0].driver} reaches CUDA {reach[0]}.{reach[1]}"
        fix = "update the driver, or install a torch for its CUDA"
        yield Finding("engine", "warn" if context.cuda_compat else "fail", subject, words, fix)
    for capability in sorted({card.capability for card in cards if card.capability}):
        too_new = capability >= (10, 0) and built < BLACKWELL_CUDA
        too_old = capability < OLDEST_FOR_13 and built.major >= 13
        if too_new or too_old:
            words = f"{subject} was built for CUDA {built}, which has no kernels for compute capability"
            words += f" {capability[0]}.{capability[1]} ({cards[0].name})"
            yield Finding("engine", "warn", subject, words, "install a torch for these cards")
