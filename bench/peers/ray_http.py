"""ray.data.llm's HTTP processor at its defaults, with Ray Data's checkpoints. Called as openai_pool.py is.

It has one address, and no setting for requests at once.
"""

import sys
from pathlib import Path
from typing import Any

from ray.data import DataContext
from ray.data.checkpoint import CheckpointConfig
from ray.data.llm import HttpRequestProcessorConfig, build_processor

import ray

STORE_BYTES = 1_000_000_000


def asked(row: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "user", "content": row["messages"][0]["content"]}
    return {"id": row["id"], "payload": {"model": "fake", "messages": [message], "max_tokens": 8192}}


def answered(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "text": row["http_response"]["choices"][0]["message"]["content"]}


def main(prompts: Path, out: Path, port: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=STORE_BYTES, log_to_driver=False)
    DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column="id", checkpoint_path=str(out / "checkpoint"), delete_checkpoint_on_success=False
    )
    config = HttpRequestProcessorConfig(url=f"http://127.0.0.1:{port}/v1/chat/completions", concurrency=1)
    process = build_processor(config, preprocess=asked, postprocess=answered)
    process(ray.data.read_json(str(prompts), lines=True)).write_json(str(out / "done"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
