"""Bundles on the command line: pack and give away a run, check what others gave."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vramlab.cli.words import print_json, table
from vramlab.errors import BundleRefused, SubmissionRefused, WorkflowError
from vramlab.report.words import bytes_in_words, count_of
from vramlab.run_folder import resolve_run

if TYPE_CHECKING:
    from vramlab.crowd import Packed, Report

REFUSED = 4
_GZIP = b"\x1f\x8b"


def submit(name: str, to: str, results: Path, *, is_dry: bool = False, supersedes: str | None = None) -> int:
    """Pack a run, say what is given away and what was taken out of it, check it, and write it below a folder. Exit code 4 when it is
    refused; then nothing is written."""
    from vramlab.crowd import check, pack_run

    run = resolve_run(name, results)
    try:
        packed = pack_run(run.folder, supersedes=supersedes)
        print("\n".join(_what_leaves(packed)))
        if is_dry:
            return _rehearse(packed)
        is_new = packed.write(Path(to), check)
    except SubmissionRefused as error:
        print("refused:", *error.problems, sep="\n  ", file=sys.stderr)
        return error.exit_code
    print(f"{'written' if is_new else 'was there already'}: {packed.place(Path(to))}")
    return 0


def _what_leaves(packed: Packed) -> Iterator[str]:
    yield table(("bytes", "file"), [(f"{len(data):,}", name) for name, data in sorted(packed.contents.items())], right=("bytes",))
    for path, fields in packed.scrubbed.items():
        yield f"taken out of {path}: {', '.join(fields)}"
    yield f"bundle {packed.name}: {count_of(len(packed.contents), 'file')}, {bytes_in_words(packed.nbytes)}"


def _rehearse(packed: Packed) -> int:
    """Everything but giving it away."""
    from vramlab.crowd import check

    with tempfile.TemporaryDirectory(prefix="vramlab-") as room:
        packed.write(Path(room))
        report = check(packed.place(Path(room)))
    print("\n".join(_told(report)))
    print("a dry run: nothing was sent or written")
    return 0 if report.is_accepted else REFUSED


def check_bundles(path: Path, *, as_json: bool) -> int:
    """Check a bundle's folder or its archive, or every bundle that `crowd-submit --to` put below a folder.

    Exit code 0: accepted; 4: a rule refuses one; 2: there is no bundle.
    """
    from vramlab.crowd import MANIFEST_FILE, check

    if path.is_file():
        reports = {path: _check_archive(path)}
    else:
        is_bundle = (path / MANIFEST_FILE).is_file()
        inside = [path] if is_bundle else sorted(found.parent for found in path.glob(f"*/*/{MANIFEST_FILE}"))
        if not inside:
            raise WorkflowError(f"{path} is no bundle: there is no {'manifest.json in it' if path.is_dir() else 'such folder or file'}")
        reports = {bundle: check(bundle) for bundle in inside}
    if as_json:
        bodies = [report.to_json() | {"path": str(bundle)} for bundle, report in reports.items()]
        print_json(bodies[0] if len(bodies) == 1 else bodies)
    else:
        print("\n".join(line for bundle, report in reports.items() for line in [f"{bundle}", *_told(report)]))
    return 0 if all(report.is_accepted for report in reports.values()) else REFUSED


def _check_archive(path: Path) -> Report:
    """WorkflowError where the file is no gzip at all; what breaks a rule of archives is a finding."""
    from vramlab.crowd import Finding, Report, check
    from vramlab.crowd.archive import unpack

    data = path.read_bytes()
    if not data.startswith(_GZIP):
        raise WorkflowError(f"{path} is no bundle: neither a folder nor a .tar.gz archive")
    with tempfile.TemporaryDirectory(prefix="vramlab-") as room:
        try:
            return check(unpack(data, Path(room)))
        except BundleRefused as refusal:
            return Report(bundle=None, findings=(Finding.of(refusal),))


def _told(report: Report) -> Iterator[str]:
    for finding in report.findings:
        yield f"{finding.severity}  [{finding.rule}]  {finding.where}  {finding.message}"
    looked = sum(report.examined.values())
    asked = f"{count_of(len(report.examined), 'rule')} asked of {count_of(looked, 'thing')}"
    others = len(report.findings) - len(report.errors)
    said = "accepted" if report.is_accepted else "refused"
    yield f"{said}: {asked}; {count_of(len(report.errors), 'error')}, {others} warnings and notes"
