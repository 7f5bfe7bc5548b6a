"""Archives that are broken on purpose or by the line, at the client's check and at the server: a clear refusal, and nothing has changed."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from genuine import genuine_bundle
from test_bundle_archive import CELL, add, archive_of, refusal
from test_server_security import lasting, packed_body, unharmed  # noqa: F401  fixtures

from vramlab.cli import main
from vramlab.crowd import check
from vramlab.crowd.archive import pack, unpack
from vramlab.crowd.signing import make_key
from vramlab.errors import BundleRefused

LOOK_ALIKES = ["m\u0430nifest.json", "run\u2024json", "cells/\uff10123456789abcdef/record.json", "\u212a.json", "run.json\u200b",
               "r\u00fcn.json", "cells\u2215x/record.json", "\u202enosj.nur", "run.json ", " run.json", "RUN.JSON", "run.\u017fon"]


@pytest.fixture(scope="module")
def body(tmp_path_factory) -> bytes:
    return pack(genuine_bundle(tmp_path_factory.mktemp("bundle"), key=make_key()))


@pytest.fixture(scope="module")
def files(body) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(body), mode="r:gz") as tar:
        return {entry.name: tar.extractfile(entry).read() for entry in tar}


def header(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    """A block as no tar program writes it."""
    block = bytearray(512)
    block[:len(name)] = name
    block[100:108], block[108:116], block[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    block[124:136], block[136:148], block[148:156] = size, b"00000000000\0", b" " * 8
    block[156:157], block[257:265] = kind, b"ustar\x0000"
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def binary(number: int) -> bytes:
    """A size in GNU's way, which can be below zero and beyond any disk."""
    return bytes([0xFF if number < 0 else 0x80]) + (number & (2**88 - 1)).to_bytes(11, "big")


def with_block(block: bytes, after: bytes = b"") -> Callable[[dict[str, bytes]], bytes]:
    """An archive that begins with this block."""
    def make(files: dict[str, bytes]) -> bytes:
        return gzip.compress(block + after + gzip.decompress(archive_of(files)), mtime=0)
    return make


def zipped(files: dict[str, bytes]) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return raw.getvalue()


def more(name: str, **fields) -> Callable[[dict[str, bytes]], bytes]:
    return lambda files: archive_of(files, lambda tar: add(tar, name, **fields))


MALFORMED: dict[str, tuple[str, Callable[[dict[str, bytes]], bytes]]] = {
    "a zip": ("archive", zipped), "half a zip": ("archive", lambda files: zipped(files)[:500]),
    "bzip2": ("archive", lambda files: b"BZh91AY&SY" + b"x" * 100), "xz": ("archive", lambda files: b"\xfd7zXZ\0" + b"x" * 100),
    "zlib without gzip": ("archive", lambda files: zlib.compress(gzip.decompress(archive_of(files)))),
    "a bare tar": ("archive", lambda files: gzip.decompress(archive_of(files))),
    "gzip within gzip": ("archive", lambda files: gzip.compress(archive_of(files))),
    "zeros behind": ("archive", lambda files: archive_of(files) + bytes(512)),
    "a word behind": ("archive", lambda files: archive_of(files) + b"x"),
    "itself behind": ("archive", lambda files: archive_of(files) * 2),
    "words behind the last block": ("archive", lambda files: gzip.compress(gzip.decompress(archive_of(files)) + b"x" * 512)),
    "a file twice": ("duplicate-file", more("run.json")), "the manifest twice": ("duplicate-file", more("manifest.json")),
    "a NUL in a name": ("duplicate-file", with_block(header(b"run.json\0.exe", b"%011o\0" % 0))),  # where it ends
    "a NUL in an extended header": ("path", more("x" * 99, pax_headers={"path": "run.json\0.exe"})),
    "a backslash": ("path", more("cells\\x.json")), "a drive": ("path", more("C:run.json")),
    "a drive's root": ("path", more("d:/run.json")),
    "a share": ("path", more("\\\\host\\share")), "a size below zero": ("archive", with_block(header(CELL.encode(), binary(-1)))),
    "a size far below zero": ("archive", with_block(header(CELL.encode(), binary(-(2**40))))),
    "a block back": ("archive", with_block(header(CELL.encode(), binary(-512)))),
    "a size beyond 64 bits": ("file-size", with_block(header(CELL.encode(), binary(2**80)))),
    "an exbibyte": ("file-size", with_block(header(CELL.encode(), binary(2**60)))),
    "a sparse file of an exbibyte": ("archive", with_block(header(CELL.encode(), b"%011o\0" % 0, b"S"))),
    "a folder of an exbibyte": ("layout", with_block(header(b"cells/", binary(2**60), b"5"))),
    "a long name without end": ("archive", with_block(header(b"././@LongLink", binary(2**60), b"L"))),
    "headers without end": ("archive", with_block(header(b"x", binary(2**60), b"x"))),
    "a wrong checksum": ("archive", with_block(header(CELL.encode(), b"%011o\0" % 0)[:-1] + b"x")),
    "a size that is no number": ("archive", with_block(header(CELL.encode(), b"many bytes\0\0"))),
} | {f"the look-alike {name!a}": ("layout", more(name)) for name in LOOK_ALIKES}
MAY_BE = {"layout": {"layout", "archive", "path"}}  # a name beyond ASCII comes in an extended header, which is refused first


@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_malformed_is_refused_by_the_client_and_by_the_server(files, tmp_path, unharmed, what):  # noqa: F811
    rule, make = MALFORMED[what]
    data, allowed = make(files), MAY_BE.get(rule, {rule})
    assert refusal(data, tmp_path) in allowed
    answer = unharmed.post("ada", data)
    assert answer.status_code == 422 and {f["rule"] for f in answer.json()["findings"]} <= allowed, answer.text


def test_what_is_whole_is_taken(files, tmp_path):
    """The control of all of them."""
    assert check(unpack(archive_of(files), tmp_path)).is_accepted


def regions(data: bytes) -> list[int]:
    """Every byte of the header and the trailer, and some of each part between."""
    return [*range(64), *range(64, len(data) - 32, max(1, len(data) // 97)), *range(len(data) - 32, len(data))]


def test_an_archive_that_is_cut_anywhere_is_refused(body, tmp_path):
    assert {refusal(body[:cut], tmp_path) for cut in regions(body)} == {"archive"}


def test_an_archive_with_a_byte_that_changed_is_refused(body, tmp_path):
    """Its own checksum tells, wherever it is, unless the same content is packed in other words."""
    content, same = gzip.decompress(body), 0
    for at in regions(body)[10:]:
        changed = body[:at] + bytes([body[at] ^ 0x10]) + body[at + 1:]
        if opened(changed) == content:
            same += 1
        else:
            assert refusal(changed, tmp_path) in ("archive", "zip-bomb"), at
    assert same < 10


def opened(data: bytes) -> bytes | None:
    """What Python's own gzip makes of it."""
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error):
        return None


def test_the_tar_within_that_is_cut_anywhere_is_refused(files, tmp_path):
    """By the archive's rules, or, where it ends between two files, by those of the bundle that misses some."""
    raw = gzip.decompress(archive_of(files))
    end = len(raw.rstrip(b"\0"))
    cuts = [cut + extra for cut in range(0, end, 512)[::7] for extra in (0, 100) if cut + extra < end]
    rules = {rule for number, cut in enumerate(cuts) for rule in rules_of(gzip.compress(raw[:cut], 1), tmp_path / str(number))}
    assert rules == {"archive", "files", "manifest-missing"}, rules


def rules_of(data: bytes, into: Path) -> set[str]:
    try:
        report = check(unpack(data, into))
    except BundleRefused as refused:
        return {refused.rule}
    assert not report.is_accepted
    return {finding.rule for finding in report.errors}


def test_the_server_is_unharmed_by_an_archive_that_is_cut(unharmed):  # noqa: F811
    data = packed_body(unharmed)
    for cut in regions(data)[::9]:
        answer = unharmed.post("ada", data[:cut])
        assert answer.status_code == 422 and [f["rule"] for f in answer.json()["findings"]] == ["archive"], cut


@pytest.mark.parametrize(("name", "make", "code", "said"), [
    ("b.zip", zipped, 2, "is no bundle"), ("b.tar", lambda files: gzip.decompress(archive_of(files)), 2, "is no bundle"),
    ("b.tar.gz", lambda files: archive_of(files)[:900], 4, "[archive]"), ("empty.tar.gz", lambda files: b"", 2, "is no bundle"),
    ("twice.tar.gz", more("run.json"), 4, "[duplicate-file]"),
])
def test_the_command_line_says_what_is_wrong(files, tmp_path: Path, capsys, name, make, code, said):
    (tmp_path / name).write_bytes(make(files))
    assert main(["check", "bundle", str(tmp_path / name)]) == code
    told = capsys.readouterr()
    assert said in told.out + told.err and "Traceback" not in told.out + told.err
