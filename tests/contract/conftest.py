"""Contracts may run `tokenmill` in this process, as the chaos tests do: most of a short run is its imports."""

from tests.chaos.conftest import gguf, here, llama, tokenmill

__all__ = ["gguf", "here", "llama", "tokenmill"]
