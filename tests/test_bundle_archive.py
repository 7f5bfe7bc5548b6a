"""What strangers may send: archives, JSON and signatures, each refusal by the name of its rule, with nothing left behind."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from genuine import genuine_bundle

from vramlab.crowd import check
from vramlab.crowd.archive import pack, unpack
from vramlab.crowd.canonical import read_strict, to_canonical
from vramlab.crowd.layout import LIMITS, Limits
from vramlab.crowd.signing import is_signed, key_id_of, make_key, own_key
from vramlab.errors import BundleRefused, EnvironmentUnable

CELL = "cells/0123456789abcdef/record.json"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    return genuine_bundle(tmp_path_factory.mktemp("bundle"), key=make_key())


@pytest.fixture(scope="module")
def members(bundle) -> dict[str, bytes]:
    return {p.relative_to(bundle).as_posix(): p.read_bytes() for p in sorted(bundle.rglob("*")) if p.is_file()}


def archive_of(members: dict[str, bytes], more: Callable[[tarfile.TarFile], None] = lambda tar: None, **options) -> bytes:
    """An archive as anybody's tar makes it, with more entries at the end."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz", **options) as tar:
        for name, data in members.items():
            add(tar, name, data)
        more(tar)
    return raw.getvalue()


def add(tar: tarfile.TarFile, name: str, data: bytes = b"{}", **fields) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    for key, value in fields.items():
        setattr(entry, key, value)
    tar.addfile(entry, io.BytesIO(data))


def refusal(data: bytes, store: Path, limits: Limits = LIMITS) -> str:
    """The rule that refuses an archive; the store is as it was."""
    before = sorted(store.rglob("*"))
    with pytest.raises(BundleRefused) as refused:
        unpack(data, store / "bundles", limits)
    assert [p for p in store.rglob("*") if p.name != "bundles"] == before
    return refused.value.rule


def test_a_bundle_survives_the_way_there(bundle, tmp_path):
    data = pack(bundle)
    taken = unpack(data, tmp_path)
    assert taken == tmp_path / bundle.name and pack(taken) == data
    assert {p.relative_to(taken): p.read_bytes() for p in taken.rglob("*") if p.is_file()} == {
        p.relative_to(bundle): p.read_bytes() for p in bundle.rglob("*") if p.is_file()}
    assert check(taken).is_accepted


def test_an_archive_of_another_tar_is_read(members, tmp_path):
    """The control of all refusals below: the same way of making an archive, with nothing wrong in it."""
    assert check(unpack(archive_of(members), tmp_path)).is_accepted


ENTRIES = {
    "parent": ("path", lambda tar: add(tar, "cells/../../../evil.json")),
    "absolute": ("path", lambda tar: add(tar, "/etc/evil.json")),
    "backslash": ("path", lambda tar: add(tar, "cells\\..\\evil.json")),
    "drive": ("path", lambda tar: add(tar, "C:evil.json")),
    "other name": ("layout", lambda tar: add(tar, "setup.py")),
    "hidden": ("layout", lambda tar: add(tar, "cells/0123456789abcdef/.bashrc")),
    "newline": ("layout", lambda tar: add(tar, CELL + "\n")),
    "dot": ("layout", lambda tar: add(tar, "./run.json")),
    "upper case": ("layout", lambda tar: add(tar, CELL.upper())),
    "symlink": ("symlink", lambda tar: add(tar, CELL, b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")),
    "symlinked folder": ("symlink", lambda tar: add(tar, "cells", b"", type=tarfile.SYMTYPE, linkname="/etc")),
    "hard link": ("hard-link", lambda tar: add(tar, CELL, b"", type=tarfile.LNKTYPE, linkname="manifest.json")),
    "character device": ("device", lambda tar: add(tar, CELL, b"", type=tarfile.CHRTYPE)),
    "block device": ("device", lambda tar: add(tar, CELL, b"", type=tarfile.BLKTYPE)),
    "pipe": ("device", lambda tar: add(tar, CELL, b"", type=tarfile.FIFOTYPE)),
    "folder": ("layout", lambda tar: add(tar, "evil", b"", type=tarfile.DIRTYPE)),
    "unknown kind": ("archive", lambda tar: add(tar, CELL, b"", type=b"Z")),
    "twice": ("duplicate-file", lambda tar: add(tar, "run.json", b"{}")),
}


@pytest.mark.parametrize("what", ENTRIES)
def test_an_entry_that_no_bundle_has_is_refused(members, tmp_path, what):
    rule, more = ENTRIES[what]
    assert refusal(archive_of(members, more), tmp_path) == rule


def test_extended_headers_are_refused(members, tmp_path):
    extended = archive_of(members, lambda tar: add(tar, CELL, pax_headers={"comment": "x"}), format=tarfile.PAX_FORMAT)
    assert refusal(extended, tmp_path) == "archive"


@pytest.mark.parametrize(("spoil", "rule"), [
    (lambda data: data + b"more", "archive"), (lambda data: data + gzip.compress(b"more"), "archive"), (lambda data: data[:-9], "archive"),
    (lambda data: data[:len(data) // 2], "archive"), (lambda data: b"", "archive"), (lambda data: b"PK\3\4 no gzip", "archive"),
    (lambda data: gzip.compress(b"no tar" * 1000), "archive"), (lambda data: gzip.compress(b""), "archive"),
    (lambda data: gzip.compress(gzip.decompress(data) + b"x" * 1024), "archive"),
])
def test_what_is_no_whole_archive_is_refused(members, tmp_path, spoil, rule):
    assert refusal(spoil(archive_of(members)), tmp_path) == rule


def test_zip_bombs_are_refused_before_they_unpack(members, tmp_path):
    """By ratio, and by sum: 256 MiB of zeros, which pack to 256 KiB; a second at most, whatever is in it."""
    began = time.monotonic()
    bomb = gzip.compress(bytes(2**28), compresslevel=9)
    packed = time.monotonic() - began
    assert refusal(bomb, tmp_path) in ("zip-bomb", "archive")
    huge = archive_of(members, lambda tar: add(tar, CELL, bytes(2**25)))
    assert refusal(huge, tmp_path) == "file-size"
    many = archive_of(members, lambda tar: [add(tar, f"cells/{i:016x}/record.json", bytes(2**20)) for i in range(40)])
    assert refusal(many, tmp_path) == "zip-bomb"
    assert refusal(many, tmp_path, Limits(ratio=1e9, total_bytes=2**22, files=10)) in ("zip-bomb", "file-count")
    assert time.monotonic() - began < packed + 10


def test_too_many_files_and_too_large_archives_are_refused(members, tmp_path):
    many = archive_of(members, lambda tar: [add(tar, f"cells/{i:016x}/record.json") for i in range(50)])
    assert refusal(many, tmp_path, Limits(files=40)) == "file-count"
    assert refusal(many, tmp_path, Limits(archive_bytes=1000)) == "archive-size"


def test_an_archive_without_a_manifest_is_no_bundle(members, tmp_path):
    assert refusal(archive_of({k: v for k, v in members.items() if k != "manifest.json"}), tmp_path) == "manifest-missing"


@pytest.mark.parametrize("name", ["../" * 4 + "x", "/etc", "A" * 32, "a" * 31, "", None, 7, "a" * 31 + "\n"])
def test_the_manifest_names_no_folder_outside(members, tmp_path, name):
    spoilt = members | {"manifest.json": json.dumps(json.loads(members["manifest.json"]) | {"bundle": name}).encode()}
    assert refusal(archive_of(spoilt), tmp_path) == "manifest"


def test_a_bundle_that_is_there_is_not_overwritten(members, tmp_path):
    taken = unpack(archive_of(members), tmp_path)
    (taken / "run.json").write_text("kept")
    with pytest.raises(BundleRefused) as refused:
        unpack(archive_of(members), tmp_path)
    assert refused.value.rule == "bundle-exists" and (taken / "run.json").read_text() == "kept"


# --- JSON -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "rule"), [
    (b'{"a": 1, "a": 1}', "json-duplicate-key"), (b'{"a": {"b": 1, "b": 2}}', "json-duplicate-key"),
    (b"[NaN]", "json-not-finite"), (b"[Infinity]", "json-not-finite"), (b"[-Infinity]", "json-not-finite"), (b"[1e999]", "json-not-finite"),
    (b"[9223372036854775808]", "json-integer"), (b"[" + b"9" * 5000 + b"]", "json-integer"),
    (b"[" * 65 + b"1" + b"]" * 65, "json-depth"), (b"[" * 200_000, "json-depth"), (b'{"a":' * 200_000, "json-depth"),
    (b'["\\ud800"]', "json-text"), (b'{"\\udfff": 1}', "json-text"), (b'["\\u0000"]', "json-text"),
    (b"[\xff]", "json-syntax"), (b"", "json-syntax"), (b"{", "json-syntax"), (b"{} {}", "json-syntax"), (b"\xef\xbb\xbf{}", "json-syntax"),
    (b"[01]", "json-syntax"), (b"['a']", "json-syntax"), (b"[1,]", "json-syntax"), (b'["' + b"x" * 2**24 + b'"]', "json-size"),
])
def test_json_that_is_read_two_ways_or_never_ends_is_refused(text, rule):
    with pytest.raises(BundleRefused) as refused:
        read_strict(text, "a.json")
    assert refused.value.rule == rule and refused.value.where == "a.json"


@pytest.mark.parametrize("text", [b"[" * 64 + b"1" + b"]" * 64, b"[9223372036854775807, -9223372036854775808, 1e-999, 0.1]",
                                  '["ä 中 \U0001f600"]'.encode(), b'["\\ud83d\\ude00"]', b' {"a": [], "b": {}} '])
def test_json_that_is_sound_is_read(text):
    assert read_strict(text) == json.loads(text)


@pytest.mark.parametrize(("body", "text"), [  # RFC 8785, section 3.2.2 and appendix B
    ({"b": 1, "a": [True, None]}, b'{"a":[true,null],"b":1}'),
    ([333333333.33333329, 1e30, 4.50, 2e-3, 1e-27], b"[333333333.3333333,1e+30,4.5,0.002,1e-27]"),
    ({"\u20ac": 1, "\r": 2, "\ufb33": 3, "1": 4, "\U0001f600": 5, "\u0080": 6, "\u00f6": 7},
     '{"\\r":2,"1":4,"\u0080":6,"\u00f6":7,"\u20ac":1,"\U0001f600":5,"\ufb33":3}'.encode()),
    (-0.0, b"0"), (1e21, b"1e+21"), (1e20, b"100000000000000000000"),
])
def test_canonical_json_is_rfc_8785(body, text):
    assert to_canonical(body) == text


@pytest.mark.parametrize("body", [float("nan"), float("inf"), 2**53, {1: 2}, {"a": object()}])
def test_what_has_no_canonical_form_is_an_error(body):
    with pytest.raises(ValueError):
        to_canonical(body)


# --- signatures -----------------------------------------------------------------------------------------------------------
def test_a_key_is_made_on_first_use_and_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    first = own_key()
    (path,) = (tmp_path / "vramlab").iterdir()
    assert own_key().public_key == first.public_key and path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o077 == 0
    assert "_private" not in repr(first) and len(first.key_id) == 16


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o602, 0o620, 0o777])
def test_a_key_that_others_can_read_is_refused(tmp_path, mode):
    own_key(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(EnvironmentUnable, match="others can read"):
        own_key(tmp_path / "key")


def test_what_is_no_key_is_refused_and_stays(tmp_path):
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    other = generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for text, said in ((b"", "no private key"), (b"-----BEGIN PRIVATE KEY-----\nAAAA\n", "no private key"), (other, "no Ed25519 key")):
        (tmp_path / "key").write_bytes(text)
        (tmp_path / "key").chmod(0o600)
        with pytest.raises(EnvironmentUnable, match=said):
            own_key(tmp_path / "key")
        assert (tmp_path / "key").read_bytes() == text
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EnvironmentUnable, match="cannot be used"):
        own_key(tmp_path / "link")


def test_a_signature_holds_for_one_body_one_key_and_one_purpose():
    """RFC 8032 says what a signature is: verified here by the library's own call, not by ours."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    key, other, body = make_key(), make_key(), {"b": [1, 2.5, None], "a": "ä"}
    block = key.signature_block(body, "bundle")
    message = b"vramlab bundle\n" + '{"a":"ä","b":[1,2.5,null]}'.encode()
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(key.public_key)).verify(bytes.fromhex(block["signature"]), message)
    assert is_signed({"a": "ä", "b": [1, 2.5, None]}, block, "bundle")
    swapped = block | {"public_key": other.public_key, "key_id": key_id_of(other.public_key)}
    flipped = block["signature"][:-1] + ("0" if block["signature"][-1] != "0" else "1")
    bad = [swapped, block | {"key_id": other.key_id}, block | {"signature": flipped}, block | {"algorithm": "none"},
           block | {"signature": "0" * 128}, block | {"signature": ""}, block | {"signature": 7}, block | {"public_key": "0" * 64},
           block | {"extra": 1}, {}, None, [], "x",
           {k: v for k, v in block.items() if k != "key_id"}, block | {"signature": block["signature"].upper()}]
    assert [is_signed(body, b, "bundle") for b in bad] == [False] * len(bad)
    assert not is_signed(body | {"a": "a"}, block, "bundle") and not is_signed(body, block, "mark")
    assert not is_signed({"x": float("nan")}, block, "bundle")
