"""What a scripted server answers, in each dialect: pure."""

from typing import Any

from tokenmill.testing.script import Script, is_canary


def chat_reply(script: Script, prompt: str, thinking: bool) -> Any:
    """The chat dialect's answer, with token ids where the script has them."""
    text, thought, answer = text_of(script, prompt, thinking), script.thought(prompt), script.answer(prompt)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking and script.mode in ("reasoning_content", "reasoning"):
        message |= {"content": answer, script.mode: thought or None}
    if thinking and script.mode == "all_in_reasoning":
        message |= {"content": None, "reasoning_content": f"{thought} {answer}"}
    if thinking and script.mode == "hidden" and not is_canary(prompt):
        message |= {"content": answer}
    ids, read = ids_of(text, script), [*(script.prompt_mark + prompt).encode("utf-8", "surrogatepass")]
    usage = {"prompt_tokens": len(read), "completion_tokens": len(ids) - (script.ids == "uncounted")}
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": script.finish}
    top: dict[str, Any] = {"choices": [choice], "usage": usage}
    if not script.no_ids and script.mode == "inline":
        choice["token_ids"] = ids_of(f"{text[:9]} is another text", script) if script.ids == "another's" else ids
        top["prompt_token_ids"] = read
    return top


def generate_reply(script: Script, prompt: str, thinking: bool) -> Any:
    """SGLang's own dialect's answer."""
    text = text_of(script, prompt, thinking)
    ids = ids_of(text, script)
    counts = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(ids)}
    meta = {"finish_reason": {"type": script.finish}, **counts}
    return {"text": text, "output_ids": ids, "meta_info": meta}


def text_of(script: Script, prompt: str, thinking: bool) -> str:
    """A whole output, its thought inline."""
    answer = script.answer(prompt)
    if not thinking:
        return answer
    thought = script.thought(prompt)
    return f"<think>\n{thought}\n</think>\n\n{answer}" if thought else f"<think>\n\n</think>\n\n{answer}"


def ids_of(text: str, script: Script) -> list[int]:
    """Its bytes, and the end token where it stopped by itself; backwards where answers are mixed up."""
    ids = list(text.encode("utf-8", "surrogatepass"))
    if script.mixed_after >= 0:
        ids.reverse()
    return [*ids, script.end_id] if script.finish == "stop" else ids
