"""How many servers, and how many requests each really runs at once. Numbers in, numbers out."""


def servers_for(gpus: int, gpus_per_server: int, asked: int) -> int:
    """The number of servers: as asked, or one per group of GPUs."""
    return asked or max(1, gpus // gpus_per_server)


def running(engine_says: int | None, asked: int | None, *, sure: bool) -> int:
    """Requests to keep in flight at one server.

    More than the engine runs at once only queue there, hide a stall, and lose more at a crash; so what it is sure of
    is a ceiling for what was asked.
    """
    if asked is None:
        return engine_says or 1
    return min(asked, engine_says) if engine_says and sure else asked
