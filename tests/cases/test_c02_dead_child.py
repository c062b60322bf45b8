"""C02: an engine that dies at import is known in seconds, with exit code and words; not at the start timeout."""

import time

from tests.harness import Case


def test_a_server_that_dies_at_import_is_named_within_seconds(case: Case) -> None:
    words = "import torch|ImportError: libcudart.so.13: cannot open shared object file"
    args = {"log": words, "start-delay-s": 1.0, "exit-at-start": True, "exit-code": 1}
    case.write(engine={"args": args}, fleet={"start_timeout": "600s"})
    began = time.monotonic()
    assert case.run() == 4
    assert time.monotonic() - began < 10
    assert "exit code 1" in case.output()
    assert "libcudart.so.13" in case.output()
    assert case.records() == []
