"""datatrove's inference runner on an endpoint, its checkpoints on. Called as openai_pool.py is.

One task has one endpoint, so all slots are the first port's.
"""

import sys
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

CHUNK = 500
"""Documents to a checkpoint's file."""


def adapted(reader: Any, data: dict[str, Any], path: str, number: int | str) -> dict[str, Any]:
    return {"text": data["messages"][0]["content"], "id": data["id"]}


async def rollout(document: Any, generate: Any) -> Any:
    return await generate({"messages": [{"role": "user", "content": document.text}], "max_tokens": 8192})


def main(prompts: Path, out: Path, port: int, slots: int) -> None:
    config = InferenceConfig(
        server_type="endpoint",
        model_name_or_path="fake",
        endpoint_url=f"http://127.0.0.1:{port}",
        max_concurrent_generations=slots,
        metric_interval=3600,
    )
    writer = JsonlWriter(str(out / "done"), output_filename="${rank}_chunk_${chunk_index}.jsonl", compression=None)
    reader = JsonlReader(str(prompts.parent), glob_pattern=prompts.name, adapter=adapted)
    runner = InferenceRunner(
        rollout, config, writer, checkpoints_local_dir=str(out / "chunks"), records_per_chunk=CHUNK
    )
    LocalPipelineExecutor([reader, runner], logging_dir=str(out / "logs")).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[5]))
