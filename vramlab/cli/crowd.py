"""Bundles on the command line: pack and give away a run, check what others gave."""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vramlab.cli.words import command, harmless, print_json, table
from vramlab.counted import count_of
from vramlab.errors import BundleRefused, SubmissionRefused, WorkflowError
from vramlab.report.words import bytes_in_words, join_words
from vramlab.run_folder import resolve_run

if TYPE_CHECKING:
    from vramlab.crowd import Packed, Report
    from vramlab.crowd.client import Server

REFUSED = 4
_BUNDLE = re.compile(r"[0-9a-f]{32}")
_GZIP = b"\x1f\x8b"


def submit(name: str, to: str, results: Path, *, is_dry: bool = False, supersedes: str | None = None) -> int:
    """Pack a run, say what is given away and what was taken out of it, check it, and send it to a server or write it below a folder. Exit
    code 4 when it is refused; what our own check refuses is neither sent nor written."""
    from vramlab.crowd import pack_run

    if supersedes is not None and not _BUNDLE.fullmatch(supersedes):
        raise WorkflowError(f"--supersedes {supersedes}: a bundle's name is 32 hex digits")
    if "://" in to:
        from vramlab.crowd.client import Server

        server = Server(to, tell=_tell)
        if not is_dry:
            server.token()  # a wrong address or no token is told before anything is packed
    run = resolve_run(name, results)
    try:
        packed = pack_run(run.folder, supersedes=supersedes)
        print("\n".join(_what_leaves(packed)))
        if is_dry or "://" in to:
            report = _rehearse(packed)
            if is_dry or not report.is_accepted:
                return _of_a_rehearsal(report, is_dry)
        return _send(packed, server) if "://" in to else _put_down(packed, Path(to))
    except SubmissionRefused as error:
        _tell("\n  ".join(["refused:", *error.problems]))
        return error.exit_code


def _tell(words: str) -> None:
    print(harmless(words), file=sys.stderr)


def _put_down(packed: Packed, to: Path) -> int:
    from vramlab.crowd import check

    is_new = packed.write(to, check)
    print(f"{'written' if is_new else 'was there already'}: {packed.place(to)}")
    return 0


def _send(packed: Packed, server: Server) -> int:
    receipt = server.submit(packed)
    said = "sent" if receipt.is_new else f"the server has it already{f', of {receipt.account}' if receipt.account else ''}"
    print(harmless(f"{said}: {receipt.state}, {receipt.url}"))
    for finding in receipt.findings:
        print(harmless(f"{finding.get('severity')}  [{finding.get('rule')}]  {finding.get('where')}  {finding.get('message')}"))
    return 0


def pull(url: str, to: Path, workflow: str | None, *, include_unverified: bool) -> int:
    """Bring a server's bundles down, each checked here; exit code 4 when one is refused."""
    from vramlab.crowd.client import Server

    counts = Counter[str]()
    server = Server(url, tell=_tell)
    for pulled in server.pull(to, workflow=workflow, include_unverified=include_unverified):
        said = "refused" if pulled.refusal else "new" if pulled.is_new else "there already"
        counts[said] += 1
        mark = "" if pulled.is_marked else ", without the server's mark"
        print(harmless(f"{said}: {pulled.refusal or f'{pulled.path} ({pulled.state}{mark})'}"), flush=True)
    none = f"there is none{'' if include_unverified else '; --unverified brings those down that nobody has checked'}"
    print(f"{count_of(counts.total(), 'bundle')}: {', '.join(f'{n} {said}' for said, n in counts.items()) or none}")
    if counts.total() > counts["refused"]:
        print(f"read them with {command('report', 'run', 'BUNDLE', '--output-dir', str(to))}")
    return REFUSED if counts["refused"] else 0


def _what_leaves(packed: Packed) -> Iterator[str]:
    yield table(("bytes", "file"), [(f"{len(data):,}", name) for name, data in sorted(packed.contents.items())], right=("bytes",))
    for path, fields in packed.scrubbed.items():
        yield f"taken out of {path}: {', '.join(fields)}"
    if not packed.scrubbed:
        yield "taken out: nothing; no host or user name, path or UUID was found in it"
    yield f"bundle {packed.name}: {count_of(len(packed.contents), 'file')}, {bytes_in_words(packed.nbytes)}"


def _rehearse(packed: Packed) -> Report:
    """Our own check of what would be given away."""
    from vramlab.crowd import check

    with tempfile.TemporaryDirectory(prefix="vramlab-") as room:
        packed.write(Path(room))
        return check(packed.place(Path(room)))


def _of_a_rehearsal(report: Report, is_dry: bool) -> int:
    end = "a dry run: nothing was sent or written" if is_dry else "nothing was sent"
    print("\n".join([*_told(report), end]), file=sys.stdout if is_dry else sys.stderr)
    return 0 if report.is_accepted else REFUSED


def check_bundles(path: Path, *, as_json: bool, replan_seconds: float = 0.0) -> int:
    """Check a bundle's folder or its archive, or every bundle that `crowd-submit --to` put below a folder. `replan_seconds`: the most for
    one cell in which its method plans again; 0 for no such rule.

    Exit code 0: accepted; 4: a rule refuses one; 2: there is no bundle.
    """
    from vramlab.crowd import MANIFEST_FILE, check

    if path.is_file():
        reports = {path: _check_archive(path, replan_seconds)}
    else:
        is_bundle = (path / MANIFEST_FILE).is_file()
        below = [found.parent for pattern in ("*", "*/*") for found in path.glob(f"{pattern}/{MANIFEST_FILE}")]
        inside = [path] if is_bundle else sorted(below)
        if not inside:
            raise WorkflowError(f"{path} is no bundle: there is no {'manifest.json in it' if path.is_dir() else 'such folder or file'}")
        reports = {bundle: check(bundle, replan_seconds=replan_seconds) for bundle in inside}
    if as_json:
        bodies = [report.to_json() | {"path": str(bundle)} for bundle, report in reports.items()]
        print_json(bodies[0] if len(bodies) == 1 else bodies)
    else:
        print("\n".join(line for bundle, report in reports.items() for line in [f"{bundle}", *_told(report)]))
    return 0 if all(report.is_accepted for report in reports.values()) else REFUSED


def _check_archive(path: Path, replan_seconds: float) -> Report:
    """WorkflowError where the file is no gzip at all; what breaks a rule of archives is a finding."""
    from vramlab.crowd import Finding, Report, check
    from vramlab.crowd.archive import unpack

    data = path.read_bytes()
    if not data.startswith(_GZIP):
        raise WorkflowError(f"{path} is no bundle: neither a folder nor a .tar.gz archive")
    with tempfile.TemporaryDirectory(prefix="vramlab-") as room:
        try:
            return check(unpack(data, Path(room)), replan_seconds=replan_seconds)
        except BundleRefused as refusal:
            return Report(bundle=None, findings=(Finding.of(refusal),))


def _told(report: Report) -> Iterator[str]:
    for finding in report.findings:
        yield harmless(f"{finding.severity}  [{finding.rule}]  {finding.where}  {finding.message}")
    looked = sum(report.examined.values())
    asked = f"{count_of(len(report.examined), 'rule')} asked of {count_of(looked, 'thing')}"
    from vramlab.crowd.findings import Severity

    by_severity = Counter(finding.severity for finding in report.findings)
    found = join_words(count_of(by_severity[severity], str(severity)) for severity in Severity)
    said = "accepted" if report.is_accepted else "refused"
    yield f"{said}: {asked}; {found}"
