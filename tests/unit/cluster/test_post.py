"""A node's process in Ray: it ends by itself, since nobody else would end a detached actor."""

import subprocess
import sys


def test_one_that_no_head_begins_ends() -> None:
    words = "import time; from tokenmill.cluster.post import Post; Post(0.1); time.sleep(40)"
    assert subprocess.run([sys.executable, "-c", words], timeout=30, check=False).returncode == 0
