"""A mount that behaves like an object store's: python -m tests.objectstore BACKING POINT. Raw /dev/fuse, root, Linux.

What is written is a new file from its first byte to its last, and it is there for others once it is closed. Everything
else that a disk does is refused: rename, link, append, a write at another place, truncate, opening for writing what
exists, locks, shared writable maps. A file named `fault` beside the backing folder makes writes fail with the errno in
it.
"""

import ctypes
import errno
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

DEVICE = Path("/dev/fuse")
KIND = "fuse.objectstore"
MAX_WRITE = 1 << 20

_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("<QQQQII")
_OPENED = struct.Struct("<QIi")
_IO = struct.Struct("<QQIIQII")
ROOT = 1
DIRECT_IO = 1
BIG_WRITES, POSIX_LOCKS, FLOCK_LOCKS, MAX_PAGES = 1 << 5, 1 << 1, 1 << 10, 1 << 22


class RefusedError(OSError):
    """An operation that an object store has not."""


class ObjectStore:
    """Answers the kernel's requests, one after the other, from a backing folder. `asked` is the file of a node."""

    def __init__(self, device: int, backing: Path) -> None:
        self.device = device
        self.backing = backing
        self.paths = {ROOT: backing}
        self.nodes = {backing: ROOT}
        self.uploads: dict[int, tuple[Path, int, int]] = {}
        self.next_handle = 1
        self.refused = self.backing.with_name("refused")

    def serve(self) -> None:
        """Until it is unmounted."""
        while True:
            try:
                request = os.read(self.device, MAX_WRITE + 8192)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                raise
            _, code, unique, node, *_ = _IN.unpack_from(request)
            if code in (2, 36, 42):  # forget, interrupt: no answer
                continue
            try:
                body, status = self.answer(code, node, request[_IN.size :]), 0
            except OSError as error:
                body, status = b"", -(error.errno or errno.EIO)
                if isinstance(error, RefusedError):
                    with self.refused.open("a") as out:
                        out.write(f"{error.strerror}\n")
            try:
                os.write(self.device, _OUT.pack(_OUT.size + len(body), status, unique) + body)
            except OSError as error:
                if error.errno != errno.ENOENT:  # it was interrupted meanwhile
                    raise

    def answer(self, code: int, node: int, data: bytes) -> bytes:
        """The answer's body; raises OSError for an error."""
        known: dict[int, Callable[[int, bytes], bytes]] = {
            1: self.look_up,
            3: lambda node, data: struct.pack("<QII", 0, 0, 0) + self.attr(node),
            4: self.set_attr,
            9: self.make_folder,
            10: lambda node, data: self.unlink(node, data),
            14: self.open,
            15: self.read,
            16: self.write,
            17: lambda node, data: struct.pack("<QQQQQIIII24x", 0, 0, 0, 0, 0, 4096, 255, 4096, 0),
            18: self.release,
            20: lambda node, data: b"",
            25: lambda node, data: b"",
            26: self.init,
            27: lambda node, data: _OPENED.pack(0, 0, 0),
            28: self.read_folder,
            29: lambda node, data: b"",
            34: lambda node, data: b"",
            35: self.create,
        }
        refused = {5: "readlink", 6: "symlink", 8: "mknod", 12: "rename", 13: "link", 31: "lock", 32: "lock"}
        refused |= {11: "rmdir", 33: "lock", 43: "fallocate", 45: "rename", 47: "copy_file_range"}
        if code in refused:
            raise RefusedError(errno.EOPNOTSUPP, refused[code])
        if code not in known:
            raise OSError(errno.ENOSYS, "")
        return known[code](node, data)

    def init(self, node: int, data: bytes) -> bytes:
        flags = BIG_WRITES | POSIX_LOCKS | FLOCK_LOCKS | MAX_PAGES
        limits = (16, 12, MAX_WRITE, 1, MAX_WRITE // 4096)
        return struct.pack("<IIIIHHIIH", 7, 31, 0, flags, *limits).ljust(64, b"\0")

    # -- names ---------------------------------------------------------------------------------------------------------
    def entry(self, path: Path) -> bytes:
        node = self.nodes.setdefault(path, len(self.paths) + 1)
        self.paths[node] = path
        return _ENTRY.pack(node, 0, 0, 0, 0, 0) + self.attr(node)

    def attr(self, node: int) -> bytes:
        path = self.paths[node]
        try:
            found = path.stat()
        except FileNotFoundError:
            found = _upload(path).stat()
        kind = stat.S_IFDIR | 0o755 if stat.S_ISDIR(found.st_mode) else stat.S_IFREG | 0o644
        times = [int(found.st_mtime)] * 3
        return _ATTR.pack(node, found.st_size, found.st_blocks, *times, 0, 0, 0, kind, 1, 0, 0, 0, 4096, 0)

    def child(self, node: int, data: bytes) -> Path:
        return self.paths[node] / os.fsdecode(data.partition(b"\0")[0])

    def look_up(self, node: int, data: bytes) -> bytes:
        path = self.child(node, data)
        path.stat()
        return self.entry(path)

    def read_folder(self, node: int, data: bytes) -> bytes:
        _, offset, size, *_ = _IO.unpack_from(data)
        out = b""
        names = sorted(path.name for path in self.paths[node].iterdir() if not path.name.startswith(".upload-"))
        for number, name in enumerate([".", "..", *names][offset:], offset + 1):
            raw = os.fsencode(name)
            row = struct.pack("<QQII", 1, number, len(raw), 0) + raw
            row += b"\0" * (-len(row) % 8)
            if len(out) + len(row) > size:
                break
            out += row
        return out

    def make_folder(self, node: int, data: bytes) -> bytes:
        path = self.child(node, data[8:])
        path.mkdir()
        return self.entry(path)

    def unlink(self, node: int, data: bytes) -> bytes:
        path = self.child(node, data)
        path.unlink()
        self.nodes.pop(path, None)
        return b""

    def set_attr(self, node: int, data: bytes) -> bytes:
        if struct.unpack_from("<I", data)[0] & (1 << 3):
            raise RefusedError(errno.EPERM, "truncate")
        return struct.pack("<QII", 0, 0, 0) + self.attr(node)

    # -- content -------------------------------------------------------------------------------------------------------
    def create(self, node: int, data: bytes) -> bytes:
        self.fail_if_told()
        if struct.unpack_from("<I", data)[0] & os.O_APPEND:
            raise RefusedError(errno.EOPNOTSUPP, "append")
        path = self.child(node, data[16:])
        handle = os.open(_upload(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self.next_handle += 1
        self.uploads[self.next_handle] = (path, handle, 0)
        return self.entry(path) + _OPENED.pack(self.next_handle, DIRECT_IO, 0)

    def open(self, node: int, data: bytes) -> bytes:
        if struct.unpack_from("<I", data)[0] & (os.O_WRONLY | os.O_RDWR | os.O_APPEND):
            raise RefusedError(errno.EPERM, "write to what exists")
        return _OPENED.pack(0, DIRECT_IO, 0)

    def read(self, node: int, data: bytes) -> bytes:
        _, offset, size, *_ = _IO.unpack_from(data)
        with self.paths[node].open("rb") as file:
            return os.pread(file.fileno(), size, offset)

    def write(self, node: int, data: bytes) -> bytes:
        self.fail_if_told()
        number, offset, size, *_ = _IO.unpack_from(data)
        path, handle, end = self.uploads[number]
        if offset != end:
            raise RefusedError(errno.EPERM, "write at another place")
        written = os.write(handle, data[_IO.size : _IO.size + size])
        self.uploads[number] = (path, handle, end + written)
        return struct.pack("<II", written, 0)

    def release(self, node: int, data: bytes) -> bytes:
        number = struct.unpack_from("<Q", data)[0]
        if number in self.uploads:
            path, handle, _ = self.uploads.pop(number)
            os.close(handle)
            _upload(path).rename(path)
        return b""

    def fail_if_told(self) -> None:
        fault = self.backing.with_name("fault")
        if fault.exists():
            raise OSError(int(fault.read_text()), "")


def _upload(path: Path) -> Path:
    return path.with_name(f".upload-{path.name}")


def main(backing: Path, point: Path) -> None:
    """Mounts, says so, and serves."""
    device = os.open(DEVICE, os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"objectstore", os.fsencode(point), KIND.encode(), 0, options.encode()):
        raise OSError(ctypes.get_errno(), f"mount: {os.strerror(ctypes.get_errno())}")
    print("mounted", flush=True)
    ObjectStore(device, backing).serve()


@contextmanager
def mounted(folder: Path) -> Iterator["Mount"]:
    """The mount for a scope, its process and its folders in `folder`. Raises OSError where it cannot be mounted."""
    backing, point = folder / "objects", folder / "bucket"
    backing.mkdir(parents=True)
    point.mkdir()
    words = [sys.executable, "-m", "tests.objectstore", str(backing), str(point)]
    process = subprocess.Popen(
        words,
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"mounted\n":
            raise OSError(process.communicate()[1].decode())
        yield Mount(point, backing, process)
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=False, capture_output=True)
        process.kill()
        process.communicate()


class Mount:
    """`point` is where it is mounted, `objects` what it holds, read past the mount."""

    def __init__(self, point: Path, objects: Path, process: "subprocess.Popen[bytes]") -> None:
        self.point = point
        self.objects = objects
        self.process = process
        self._fault = objects.with_name("fault")

    def fail(self, number: int) -> None:
        """Writes fail with this errno from now on; 0: they do not."""
        if number:
            self._fault.write_text(str(number))
        else:
            self._fault.unlink(missing_ok=True)

    def refused(self) -> list[str]:
        """What was asked of it that it has not."""
        path = self.objects.with_name("refused")
        return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
