"""First round: what lies there, whose it is, and that no byte has changed."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from vramlab.crowd.canonical import to_canonical
from vramlab.crowd.manifest import FORMAT_VERSION, Manifest, bundle_name, is_truly_signed
from vramlab.crowd.rules.asking import Examination, Fault, Round, rule
from vramlab.crowd.rules.forms import faults_of
from vramlab.errors import BundleRefused
from vramlab.runs import MANIFEST_FILE


@rule(Round.WRAPPING, "layout", "only plain files of the layout, none too large")
def _layout(e: Examination) -> Iterator[Fault]:
    e.count(len(e.contents.files))  # raises by the rule that is broken: path, layout, symlink, hard-link, device, file-size, ...
    yield from ()


@rule(Round.WRAPPING, "manifest", "a manifest of the known format, in canonical JSON")
def _manifest(e: Examination) -> Iterator[Fault]:
    manifest = e.contents.manifest
    e.count()
    if manifest.get("format") != FORMAT_VERSION:
        stated = repr(manifest.get("format"))[:40]
        yield f"{MANIFEST_FILE}:format", f"format {stated}; this vramlab reads {FORMAT_VERSION}"
        return
    try:
        Manifest.model_validate(manifest)
    except ValidationError as error:
        yield from faults_of(error, MANIFEST_FILE)
        return
    try:
        is_canonical = to_canonical(manifest) == e.contents.read(MANIFEST_FILE)
    except ValueError as error:
        yield MANIFEST_FILE, str(error)
        return
    if not is_canonical:
        yield MANIFEST_FILE, "is not in canonical form (RFC 8785): what is signed is not what is read"


@rule(Round.WRAPPING, "files", "every file is named by the manifest, with its bytes and SHA-256, and every named one is there")
def _files(e: Examination) -> Iterator[Fault]:
    named = _named(e)
    for name, entry in named.items():
        e.count()
        if name not in e.contents.files:
            yield name, "is missing"
        elif e.contents.files[name] != entry["bytes"] or e.contents.sha256(name) != entry["sha256"]:
            yield name, "has changed since the manifest was written"
    yield from ((name, "is not named by the manifest") for name in sorted(set(e.contents.files) - set(named) - {MANIFEST_FILE}))


@rule(Round.WRAPPING, "bundle-name", "the bundle's name is the hash of its files, and its folder has that name")
def _bundle_name(e: Examination) -> Iterator[Fault]:
    stated, files = e.contents.bundle, list(_named(e).values())
    e.count()
    if bundle_name(files) != stated:
        yield f"{MANIFEST_FILE}:bundle", f"the files hash to {bundle_name(files)}, not to {stated}"
    if e.contents.folder.resolve().name != stated:
        yield "", f"the bundle {stated} lies in a folder of another name"


@rule(Round.WRAPPING, "signature", "the key that the manifest names has signed it")
def _signature(e: Examination) -> Iterator[Fault]:
    e.count()
    if not is_truly_signed(e.contents.manifest):
        yield f"{MANIFEST_FILE}:signature", "does not sign this manifest"


def _named(e: Examination) -> dict[str, dict]:
    """The manifest's entries by path. BundleRefused where there are none to speak of."""
    entries = e.contents.manifest.get("files")
    if not isinstance(entries, list) or not all(isinstance(x, dict) and {"path", "bytes", "sha256"} <= set(x) for x in entries):
        raise BundleRefused("manifest", f"{MANIFEST_FILE}:files", "is no list of files")
    named = {str(entry["path"]): entry for entry in entries}
    if len(named) < len(entries) or MANIFEST_FILE in named:
        raise BundleRefused("manifest", f"{MANIFEST_FILE}:files", "names a file twice, or itself")
    return named
