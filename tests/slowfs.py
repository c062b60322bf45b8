"""A real file system that is slow: python -m tests.slowfs SOURCE MOUNT [--latency-ms 4] [--fail-reads N]

Serves a folder read-only through /dev/fuse, each read so much later, many at once: like an object store's mount.
Speaks the kernel's protocol itself (include/uapi/linux/fuse.h, version 7.31): a FUSE library would be one more need,
and Python's own would serve one request at a time. Needs root. Prints "mounted" when it serves.
"""

import argparse
import ctypes
import errno
import mmap
import os
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
KIND = "fuse.slowfs"
THREADS = 48
"""Requests served at once; more than a copier's streams."""

REQUEST_BYTES = 1 << 14
"""Small requests only come: the mount is read-only."""

HEADER = struct.Struct("<IIQQIIII")
REPLY = struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
LOOKUP, FORGET, GETATTR, READLINK, OPEN, READ, STATFS, RELEASE = 1, 2, 3, 5, 14, 15, 17, 18
FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT, BATCH_FORGET = 25, 26, 27, 28, 29, 36, 42
ASYNC_READ, PARALLEL_DIROPS, MAX_PAGES = 1 << 0, 1 << 18, 1 << 22
MOST_PAGES = 256
"""Of one request: 1 MiB, what libfuse asks for as well; the kernel's read-ahead of 128 KiB decides where it is less."""
VALID_S = 0
"""Seconds that the kernel may keep attributes: a change of the folder is seen at once."""


class SlowFs:
    """One mount's state: which node is which path, and what is to go wrong."""

    def __init__(self, source: Path, latency_s: float, fail_reads: int, cap_mb_s: float) -> None:
        self._paths = {1: source}
        self._numbers = {source: 1}
        self._files: dict[int, mmap.mmap | bytes] = {}
        self._latency_s, self._fail_reads, self._cap = latency_s, fail_reads, cap_mb_s * 1e6
        self._free_at = 0.0
        self._lock = threading.Lock()

    def serve(self, device: int) -> None:
        """One of many threads; ends when the mount does."""
        room = memoryview(bytearray(REQUEST_BYTES))
        while True:
            try:
                request = room[: os.readv(device, [room])]
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue  # the request was interrupted
                return  # ENODEV: unmounted
            _, code, unique, node, *_ = HEADER.unpack_from(request)
            try:
                answer = self._answer(code, node, request[HEADER.size :])
                failed = 0
            except OSError as error:
                answer, failed = b"", error.errno or errno.EIO
            if answer is not None:
                try:
                    os.writev(device, [REPLY.pack(REPLY.size + len(answer), -failed, unique), answer])
                except OSError as error:
                    if error.errno != errno.ENOENT:  # whoever asked has been killed
                        return

    def _answer(self, code: int, node: int, body: memoryview) -> "bytes | memoryview | None":
        match code:
            case _ if code in (FORGET, BATCH_FORGET, INTERRUPT):
                return None
            case _ if code == INIT:
                # version, readahead, flags, background, congestion, write size, time granularity, pages, padding
                major, minor, readahead, _ = struct.unpack_from("<IIII", body)
                flags = ASYNC_READ | PARALLEL_DIROPS | MAX_PAGES
                return struct.pack(
                    "<IIIIHHIIHHI28x", major, min(minor, 31), readahead, flags, 64, 48, 4096, 1, MOST_PAGES, 0, 0
                )
            case _ if code == LOOKUP:
                path = self._paths[node] / os.fsdecode(bytes(body).rstrip(b"\0"))
                return struct.pack("<QQQQII", self._number(path), 0, VALID_S, VALID_S, 0, 0) + self._attributes(path)
            case _ if code == GETATTR:
                return struct.pack("<QII", VALID_S, 0, 0) + self._attributes(self._paths[node])
            case _ if code == READLINK:
                return os.fsencode(self._paths[node].readlink())
            case _ if code in (OPEN, OPENDIR):
                if code == OPEN:
                    self._map(node)
                return struct.pack("<QII", node, 0, 0)
            case _ if code == READ:
                _, offset, size = struct.unpack_from("<QQI", body)
                return self._read(node, offset, size)
            case _ if code == READDIR:
                _, offset, size = struct.unpack_from("<QQI", body)
                return self._entries(self._paths[node], offset, size)
            case _ if code == STATFS:
                return struct.pack("<QQQQQIIII24x", 1 << 30, 1 << 29, 1 << 29, 1 << 20, 1 << 19, 4096, 255, 4096, 0)
            case _ if code in (RELEASE, RELEASEDIR, FLUSH):
                return b""
        raise OSError(errno.ENOSYS, "not served")

    def _number(self, path: Path) -> int:
        os.lstat(path)
        with self._lock:
            number = self._numbers.setdefault(path, len(self._numbers) + 1)
            self._paths[number] = path
            return number

    def _attributes(self, path: Path) -> bytes:
        found = os.lstat(path)
        ns = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
        return ATTRIBUTES.pack(
            self._numbers.get(path, 1),
            found.st_size,
            (found.st_size + 511) // 512,
            *(moment // 10**9 for moment in ns),
            *(moment % 10**9 for moment in ns),
            found.st_mode & ~0o222,
            1,
            *(os.getuid(), os.getgid(), 0, 4096, 0),
        )

    def _map(self, node: int) -> None:
        """A file's bytes, anew at every open: it may have changed."""
        with self._paths[node].open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._files[node] = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b""

    def _read(self, node: int, offset: int, size: int) -> memoryview:
        time.sleep(self._latency_s + self._queue(size))
        with self._lock:
            failing = self._fail_reads > 0
            self._fail_reads -= failing
        if failing:
            raise OSError(errno.EIO, "as asked for")
        return memoryview(self._files[node])[offset : offset + size]

    def _queue(self, size: int) -> float:
        """Seconds until the link has carried what others asked for before."""
        if not self._cap:
            return 0.0
        with self._lock:
            moment = time.monotonic()
            self._free_at = max(self._free_at, moment) + size / self._cap
            return self._free_at - moment

    def _entries(self, folder: Path, offset: int, size: int) -> bytes:
        out = b""
        for position, name in enumerate(sorted(os.listdir(folder))[offset:], offset + 1):  # noqa: PTH208
            kind = stat.S_IFMT(os.lstat(folder / name).st_mode) >> 12
            raw = os.fsencode(name)
            entry = struct.pack("<QQII", self._number(folder / name), position, len(raw), kind) + raw
            entry += b"\0" * (-len(entry) % 8)
            if len(out) + len(entry) > size:
                break
            out += entry
        return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.slowfs")
    parser.add_argument("source", type=Path)
    parser.add_argument("mount", type=Path)
    parser.add_argument("--latency-ms", type=float, default=4.0)
    parser.add_argument("--fail-reads", type=int, default=0, help="the first so many reads fail")
    parser.add_argument("--cap-mb-s", type=float, default=0.0, help="all reads together; 0: no cap")
    args = parser.parse_args()
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    words = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},default_permissions"
    if libc.mount(b"slowfs", os.fsencode(args.mount), KIND.encode(), 1 | 2 | 4, words.encode()):  # ro, nosuid, nodev
        raise SystemExit(f"mount: {os.strerror(ctypes.get_errno())}")
    system = SlowFs(args.source.resolve(), args.latency_ms / 1000, args.fail_reads, args.cap_mb_s)
    threads = [threading.Thread(target=system.serve, args=(device,), daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    print("mounted", flush=True)
    for thread in threads:
        thread.join()


@contextmanager
def mounted(source: Path, mount: Path, *flags: str) -> Iterator[Path]:
    """The folder through a slow mount, for the scope; raises RuntimeError where /dev/fuse does not work."""
    mount.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.slowfs", str(source), str(mount), *flags],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        if (said := process.stdout.readline().strip()) != "mounted":
            raise RuntimeError(f"/dev/fuse is there, but no file system can be mounted: {said}{process.stdout.read()}")
        yield mount
    finally:
        ctypes.CDLL(None).umount2(os.fsencode(mount), 2)  # MNT_DETACH: whatever is still open
        process.kill()
        process.wait()
        process.stdout.close()


def server_of(mount: Path) -> int:
    """The process that serves a mount: stopped, it hangs."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"tests.slowfs" in b" ".join(words) and os.fsencode(mount) in words:
            return int(entry.parent.name)
    raise LookupError(f"{mount} has no server")


if __name__ == "__main__":
    main()
