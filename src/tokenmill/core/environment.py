"""What a machine ran with, as a message and as a row of environment.jsonl; and in what two machines differ. Pure."""

import msgspec


class Environment(msgspec.Struct, frozen=True):
    """`t` is when it was first seen, Unix time. `gpus` are the cards that the run may use, "7 × NVIDIA H200, 139 GiB";
    memory in bytes. `node` is whose it is where a run has several: empty is the machine that the run was started on."""

    t: float
    tokenmill: str
    python: str
    engine: str
    engine_version: str
    system: str
    kernel: str
    processor: str
    cores: int
    memory: int
    driver: str = ""
    cuda: str = ""
    gpus: tuple[str, ...] = ()
    node: str = ""

    @property
    def parts(self) -> dict[str, str]:
        """By what answers may differ, and times do: each part in words. The processor counts where it does the work."""
        works = {"cards": " and ".join(self.gpus)} if self.gpus else {"processor": f"{self.cores} × {self.processor}"}
        engine = f"{self.engine} {self.engine_version}".rstrip()
        return {**works, "engine": engine, "driver": self.driver, "tokenmill": self.tokenmill}

    @property
    def made_of(self) -> str:
        """Its cards, engine and driver, in words."""
        parts = self.parts
        cards = parts.get("cards") or f"no GPUs, {parts['processor']}"
        return "; ".join(filter(None, (cards, parts["engine"], f"driver {self.driver}" if self.driver else "")))


def unlike(one: Environment, other: Environment) -> str:
    """In what `one` differs from `other`, in words; empty where in nothing."""
    own, its = one.parts, other.parts
    names = [*own, *(name for name in its if name not in own)]
    return "; ".join(
        f"{name} {own.get(name) or 'none'}, not {its.get(name) or 'none'}"
        for name in names
        if own.get(name, "") != its.get(name, "")
    )
