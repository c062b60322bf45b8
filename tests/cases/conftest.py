"""Cases may run `tokenmill` in this process, as the chaos tests do: most of a short run is its imports."""

from tests.chaos.conftest import here, tokenmill

__all__ = ["here", "tokenmill"]
