"""A scripted server: python -m tokenmill.testing.server --port N [faults]. Speaks the chat dialect and SGLang's own.

As engines do, it runs `slots` generations at once, queues the others, and counts tokens as they come. It stands in for
a real engine only where that cannot be told to misbehave. What it does is in script.py.
"""

import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from tokenmill.testing.replies import chat_reply, generate_reply, text_of
from tokenmill.testing.script import Script, parse
from tokenmill.testing.streams import chunks

STEP_S = 0.2
"""Between two looks at what a generation has come to: streamed pieces, token counters."""

PIECES = 8
"""Of a streamed answer that takes no time, at least."""


class Server:
    """One scripted server. `generations` counts requests to generate, `running` those that have a slot, `queued` those
    that wait for one."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.generations = 0
        self.running = 0
        self.queued = 0
        self.tokens = 0
        self.moves = asyncio.Event()
        self.moves.set()
        self._slots = asyncio.Semaphore(script.slots)
        self._rng = random.Random(script.seed)
        self._aborts: dict[str, asyncio.Event] = {}
        self._began = time.monotonic()
        self._broken = False
        self._bad = False

    def app(self) -> web.Application:
        """Its routes."""
        app = web.Application(client_max_size=1 << 30)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/health_generate", self.health),
                web.get("/v1/models", self.models),
                web.get("/model_info", self.model_info),
                web.get("/server_info", self.server_info),
                web.get("/metrics", self.metrics),
                web.post("/v1/chat/completions", self.chat),
                web.post("/generate", self.generate),
                web.post("/abort_request", self.abort),
            ]
        )
        return app

    @property
    def _warm(self) -> bool:
        return time.monotonic() - self._began >= self.script.warm_s

    # -- pages -------------------------------------------------------------------------------------------------------
    async def health(self, request: web.Request) -> web.Response:
        """200, before it is warm and after `health_fails_after` 503, `health_delay_s` late; whether it works or not."""
        await asyncio.sleep(self.script.health_delay_s)
        fails = 0 <= self.script.health_fails_after < self.generations
        return web.Response(status=200 if self._warm and not fails else 503)

    async def models(self, request: web.Request) -> web.Response:
        """/v1/models, with the nonce as a second name."""
        names = [self.script.model, *([self.script.nonce] if self.script.nonce else [])]
        return web.json_response({"data": [{"id": name, "max_model_len": self.script.context} for name in names]})

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": self.script.model, "weight_version": self.script.nonce})

    async def server_info(self, request: web.Request) -> web.Response:
        """SGLang's page of what it can run."""
        state = {"effective_max_running_requests_per_dp": self.script.slots}
        return web.json_response(
            {
                "version": "0.5.11",
                "context_length": self.script.context,
                "internal_states": [state],
                "seen": {"tokens": self.tokens, "running": self.running, "queued": self.queued},  # for whoever measures
            }
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text, in its own names and in SGLang's. An engine that is stopped runs nothing, as vLLM's says."""
        if self.script.no_metrics:
            return web.Response(status=404)
        live = self.moves.is_set() and not self.script.metrics_freeze
        running, queued = (self.running, self.queued) if live else (0, 0)
        tokens = 0 if self.script.metrics_freeze else self.tokens
        lines = [
            "# TYPE fake:running gauge",
            f"fake:running {running}",
            "# TYPE fake:queued gauge",
            f"fake:queued {queued}",
            "# TYPE fake:tokens counter",
            f"fake:tokens_total {tokens}",
            "# TYPE sglang:num_running_reqs gauge",
            f"sglang:num_running_reqs {running}",
            "# TYPE sglang:num_queue_reqs gauge",
            f"sglang:num_queue_reqs {queued}",
            "# TYPE sglang:generation_tokens counter",
            f"sglang:generation_tokens_total {tokens}",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def abort(self, request: web.Request) -> web.Response:
        name = str((await request.json()).get("rid"))
        self._note({"abort": name, "t": time.monotonic()})
        if name in self._aborts:
            self._aborts[name].set()
        return web.Response()

    # -- generations -------------------------------------------------------------------------------------------------
    async def chat(self, request: web.Request) -> web.StreamResponse:
        """The chat dialect: thinks where the request's switch is on."""
        body = await request.json()
        prompt = str(body["messages"][-1].get("content") or "") if body.get("messages") else ""
        switch = (body.get("chat_template_kwargs") or {}).get("enable_thinking", False)
        return await self._work(request, body, prompt, bool(switch) and not self.script.ignore_thinking, chat_reply)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """SGLang's own dialect: ids in, ids out."""
        body = await request.json()
        prompt = " ".join(map(str, body.get("input_ids") or [body.get("text", "")]))
        thinking = not self.script.ignore_thinking or "regex" in (body.get("sampling_params") or {})
        return await self._work(request, body, prompt, thinking, generate_reply)

    async def _work(
        self, request: web.Request, body: Any, prompt: str, thinking: bool, reply: Any
    ) -> web.StreamResponse:
        """One generation, or the fault that the script has for it."""
        script = self.script
        name = str(body.get("rid") or body.get("request_id") or "")
        self._note(
            {"begin": name, "prompt": prompt[:200], "t": time.monotonic(), "body": body if script.requests else {}}
        )
        self.generations += 1
        number = self.generations
        aborted = self._aborts[name] = asyncio.Event()
        try:
            fault = self._fault(request, prompt)
            if fault is not None:
                return fault
            if body.get("stream") and script.stream == "refused":
                return web.json_response({"error": {"message": "stream_options is not known"}}, status=400)
            async with self._slot():
                if 0 <= script.hang_after < number or self._rng.random() < script.lose:
                    await asyncio.sleep(86400)
                if self._goes_bad():
                    script, thinking = replace(script, text="!" * 2000, finish="length"), False
                if not 0 <= script.mixed_after < number:
                    script = replace(script, mixed_after=-1)
                if body.get("stream") and script.stream == "yes":
                    return await self._stream(request, body, prompt, reply(script, prompt, thinking), aborted)
                async for _ in self._steps(prompt, text_of(script, prompt, thinking), aborted):
                    pass
            if aborted.is_set():
                return web.json_response({"error": {"message": "aborted"}}, status=400)
            if script.accept_length:
                sys.stderr.write(f"Decode batch, #running-req: 1, accept len: {script.accept_length:.2f}\n" * 10)
                sys.stderr.flush()
            self._exit()
            return web.json_response(reply(script, prompt, thinking), dumps=_dumps)
        finally:
            self._aborts.pop(name, None)
            self._note({"end": name, "prompt": prompt[:200], "t": time.monotonic()})

    def _goes_bad(self) -> bool:
        script = self.script
        if self._bad or not 0 <= script.bad_after < self.generations:
            return self._bad
        try:
            if script.bad_once:
                Path(script.bad_once).open("x").close()
        except FileExistsError:
            self.script = replace(script, bad_after=-1)
            return False
        self._bad = True
        return True

    # -- slots, streams, counters
    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        self.queued += 1
        try:
            await self._slots.acquire()
        finally:
            self.queued -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._slots.release()

    async def _steps(
        self, prompt: str, text: str, aborted: asyncio.Event, least: int = 1
    ) -> AsyncIterator[tuple[int, int]]:
        """The generation itself, over its latency: which step of how many is done, until the end or an abort."""
        seconds = self.script.latency_s(prompt, self._rng)
        steps = max(least, math.ceil(seconds / STEP_S))
        tokens = len(text.encode("utf-8", "surrogatepass"))
        for step in range(steps):
            if await _within(aborted, seconds / steps * self._crowded()):
                return
            await self.moves.wait()
            self.tokens += tokens * (step + 1) // steps - tokens * step // steps
            yield step, steps

    def _crowded(self) -> float:
        """How much longer a step takes than that of a generation that runs alone."""
        return (self.running + self.script.half) / (1 + self.script.half) if self.script.half else 1.0

    async def _stream(
        self, request: web.Request, body: Any, prompt: str, reply: Any, aborted: asyncio.Event
    ) -> web.StreamResponse:
        """The chat dialect's answer in pieces; an abort or a death tears it."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        part, last = chunks(reply, bool((body.get("stream_options") or {}).get("include_usage")))
        text = str(reply["choices"][0]["message"])
        async for step, steps in self._steps(prompt, text, aborted, PIECES):
            for chunk in part(step, steps):
                await response.write(f"data: {_dumps(chunk)}\n\n".encode())
        self._exit()
        if not aborted.is_set():
            await response.write("".join(f"data: {_dumps(chunk)}\n\n" for chunk in last).encode())
            await response.write(b"data: [DONE]\n\n")
        return response

    def _exit(self) -> None:
        if 0 <= self.script.exit_after < self.generations:
            os.kill(os.getpid(), signal.SIGKILL)

    def _fault(self, request: web.Request, prompt: str) -> web.StreamResponse | None:
        script = self.script
        if not prompt.strip() and script.die_on_empty:
            os._exit(1)
        if script.too_long and len(prompt) > script.too_long:
            message = f"This model's maximum context length is {script.too_long} tokens."
            return web.json_response({"error": {"message": message}}, status=400)
        if script.refuse or (script.refuse_word and script.refuse_word in prompt):
            return web.json_response({"error": {"message": script.refuse or "refused, as scripted"}}, status=400)
        if self._rng.random() < script.busy:
            return web.json_response({"error": {"message": "The request queue is full."}}, status=503)
        if self._broken or 0 <= script.error_after < self.generations:
            self._broken = True
            if script.then_close and request.transport is not None:
                asyncio.get_running_loop().call_later(0.05, os._exit, 1)
            return web.json_response({"error": {"message": script.error_text}}, status=500)
        return None

    def _note(self, entry: dict[str, Any]) -> None:
        """One line per event into the file that a test reads."""
        if self.script.requests:
            with Path(self.script.requests).open("a", encoding="utf-8") as out:
                out.write(json.dumps({"port": self.script.port, **entry}) + "\n")


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event came within the time; waits that long for it."""
    if seconds <= 0:
        await asyncio.sleep(0)
        return event.is_set()
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _dumps(value: Any) -> str:
    """Half surrogate pairs go out escaped, as some servers send them."""
    return json.dumps(value, ensure_ascii=True)


async def serve(script: Script) -> None:
    """Runs until SIGTERM. Refuses a port that is taken, and drops what nobody waits for, as engines do."""
    server = Server(script)
    runner = web.AppRunner(
        server.app(),
        access_log=None,
        keepalive_timeout=script.close_idle_s,
        handler_cancellation=not script.ignore_close,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", script.port, reuse_address=True, backlog=4096).start()
    except OSError as error:
        sys.stderr.write(f"[Errno {error.errno}] error while attempting to bind on address: address already in use\n")
        sys.exit(1)
    sys.stderr.write(f"Uvicorn running on http://127.0.0.1:{script.port}\n")
    sys.stderr.flush()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if not script.ignore_sigterm:
        loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, server.moves.clear)
    loop.add_signal_handler(signal.SIGUSR2, server.moves.set)
    await stop.wait()
    await runner.cleanup()


# -- faults of the start -----------------------------------------------------------------------------------------------
def _start_fault(script: Script) -> int | None:
    """Does what its start is to suffer; an exit code where that is its end."""
    if script.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if script.double_fork:
        words = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
        launcher = (
            f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {words!r}], start_new_session=True)"
        )
        subprocess.run([sys.executable, "-c", launcher], check=True)
    hit = _is_hit(script)
    lines = Path(script.log_file).read_text(encoding="utf-8").splitlines() if script.log_file else []
    for line in lines[: script.exit_after_line if hit and script.exit_after_line >= 0 else None]:
        sys.stderr.write(line + "\n")
    sys.stderr.flush()
    if not hit:
        return None
    if script.silent or script.zombies:
        if script.zombies:
            for _ in range(2):
                os.posix_spawn("/bin/false", ["false"], os.environ)
        _note_fault(script)
        time.sleep(3600)
    oom = script.mem_fraction_static > script.capture_oom_above > 0
    if not (oom or script.exit_after_line >= 0 or script.while_there):
        return None
    oom_words = "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 96.00 MiB."
    sys.stderr.write((oom_words if oom else script.last_words.replace("\\n", "\n")) + "\n")
    sys.stderr.flush()
    _note_fault(script)
    if script.exit_code < 0:
        os.kill(os.getpid(), -script.exit_code)
    return script.exit_code or 1


def _is_hit(script: Script) -> bool:
    """Whether this server in this life is one that the script's faults are meant for."""
    meant = script.only in (-1, script.number)
    fresh = not script.once or not Path(script.once).exists()
    there = not script.while_there or Path(script.while_there).exists()
    return meant and fresh and there


def _note_fault(script: Script) -> None:
    if script.once:
        Path(script.once).write_text(str(time.time()), encoding="ascii")


def main(argv: list[str]) -> int:
    """Does what the script says of the start, then serves."""
    script = parse(argv)
    code = _start_fault(script)
    if code is not None:
        return code
    for line in script.log.split("|") if script.log else ():
        sys.stderr.write(line + "\n")
    sys.stderr.flush()
    if script.child:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    time.sleep(script.start_delay_s)
    if script.exit_at_start:
        return script.exit_code
    asyncio.run(serve(script))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
