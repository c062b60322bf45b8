"""Speculative decoding: does the checkpoint carry the head that the flags ask for, does the drafter fit the model?"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenmill.checks.base import Context, Finding
from tokenmill.core import speculation
from tokenmill.core.speculation import Draft
from tokenmill.engines.base import normal
from tokenmill.errors import PreflightError
from tokenmill.machine import modelfiles, wholeness

WITHOUT = "leave the speculative flags out, or use a checkpoint that fits"


def check_draft(context: Context) -> Iterator[Finding]:
    """The model carries the draft head that the flags ask for, or the draft model that they name fits."""
    model = Path(context.config.model.path)
    args = {normal(name): value for name, value in context.config.engine.args.items()}
    draft = speculation.wanted(args)
    if draft is None or not model.is_dir():
        return
    try:
        target = _text_config(modelfiles.read_json(model / "config.json"))
        if draft.own_head:
            yield _own_head(context, draft, model, target)
        elif draft.path:
            yield from _draft_model(draft, model, target, args)
        elif draft.needs_model:
            words = f"{draft.algorithm} needs a draft model, and the flags name none"
            yield Finding("draft", "fail", draft.algorithm, words, "engine.args speculative-draft-model-path")
    except PreflightError as error:
        yield Finding("draft", "unknown", str(model), str(error))


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Of a vision model only the text part speculates."""
    return {**config, **(config.get("text_config") or {})}


def _own_head(context: Context, draft: Draft, model: Path, target: Mapping[str, Any]) -> Finding:
    found = wholeness.read(model)
    names = {*found.index, *found.shapes}
    if not names:
        return Finding("draft", "unknown", str(model), f"{model}: no safetensors to look for a draft head in")
    if speculation.has_head(names, target.get("num_hidden_layers")):
        return Finding("draft", "ok", str(model), f"it carries the draft head that {draft.algorithm} uses")
    refuses = context.config.engine.kind == "vllm" and not target.get("quantization_config")
    what = "vLLM ends after loading" if refuses else "every draft would be refused, and it runs slower than without"
    words = f"{model} carries no draft head (mtp.* tensors), and the flags ask for {draft.algorithm}: {what}"
    return Finding("draft", "fail" if refuses else "warn", str(model), words, WITHOUT)


def _draft_model(draft: Draft, model: Path, target: Mapping[str, Any], args: Mapping[str, Any]) -> Iterator[Finding]:
    path = Path(draft.path)
    if not path.exists() and not path.is_absolute():
        yield Finding("draft", "unknown", draft.path, f"{draft.path} is no folder here: the engine fetches it")
        return
    faults = [fault for fault in wholeness.faults(path) if fault.grave]
    for fault in faults:
        yield Finding("draft", "fail", str(fault.place), f"draft model: {fault}", "finish its download")
    if faults or path.is_file():
        return
    own = _text_config(modelfiles.read_json(path / "config.json"))
    tensors = frozenset(wholeness.read(path).shapes)
    misfits = speculation.misfits(draft, own, target, tensors)
    mine, theirs = modelfiles.vocabulary(path), modelfiles.vocabulary(model)
    if clash := speculation.clash(mine, theirs):
        own_hash, hash_ = map(modelfiles.vocabulary_fingerprint, (mine, theirs))
        misfits.append(f"its tokens {own_hash} are not the model's {hash_}: {clash}")
    for misfit in misfits:
        yield Finding("draft", "fail", draft.path, f"draft model {draft.path} does not fit: {misfit}", WITHOUT)
    context = args.get("context-length") or args.get("max-model-len")
    longest = own.get("max_position_embeddings")
    if isinstance(context, int) and isinstance(longest, int) and longest < context:
        words = f"draft model {draft.path} knows {longest} positions, the context has {context}: no draft fits beyond"
        yield Finding("draft", "warn", draft.path, words, WITHOUT)
    if not misfits:
        yield Finding("draft", "ok", draft.path, f"class and vocabulary fit {draft.algorithm} and the model")
