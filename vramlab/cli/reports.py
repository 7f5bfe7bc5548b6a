"""What a run's records become: report.html, tables and figures for a paper, a crate for an archive, and a page that follows the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Sequence

from vramlab.collection import Library, find_collections
from vramlab.errors import WorkflowError
from vramlab.run_folder import resolve_run
from vramlab.runs import report_folder
from vramlab.yaml_nodes import offer

FORMATS = ("html", "pdf", "latex", "csv", "ro-crate")


def report(runs: Sequence[str], results: Path, extra: Sequence[Path], kinds: Sequence[str] = (), *,
           authors: Sequence[str] = (), licence: str = "") -> int:
    """Write report.html of each run, and what else is asked for, and print the paths. WorkflowError for a format that is none."""
    for kind in kinds:
        if kind not in FORMATS:
            raise WorkflowError(f"--format {kind!r} is not allowed{offer(kind, FORMATS)}")
    if (authors or licence) and "ro-crate" not in kinds:
        raise WorkflowError("--author and --licence stand in the crate's metadata: they go with --format ro-crate")
    folders = [resolve_run(name, results).folder for name in runs]  # all of them first: a wrong name leaves nothing half done
    if "ro-crate" in kinds and (bundles := [folder for folder in folders if report_folder(folder) != folder]):
        raise WorkflowError(f"{bundles[0]} is a bundle, into which nothing is written that its manifest does not name: make the crate in a "
                            "copy of the folder without manifest.json")
    from vramlab.report import render
    from vramlab.report.crate import Rights, write_crate

    rights, collections = Rights(authors=tuple(authors), licence=licence), tuple(extra)
    for folder in folders:
        print(render(folder, collections))
        if "csv" in kinds:
            from vramlab.report.cells_csv import write_cells

            print(*write_cells(folder), sep="\n")
        if "pdf" in kinds:
            from vramlab.report.pdf import write_pdf

            print(write_pdf(folder, Library(find_collections(collections))))
        if "latex" in kinds:
            from vramlab.report.latex import write_latex

            print(*write_latex(folder, Library(find_collections(collections))), sep="\n")
        if "ro-crate" in kinds:
            print(write_crate(folder, Library(find_collections(collections)), rights))
    return 0


def view(name: str, results: Path, extra: Sequence[Path], port: int) -> int:
    """Serve a run's report on the loopback address until Ctrl-C, or until it is told to end otherwise.

    On idle processor time only: pages are made beside a run whose step times may be measured just now.
    """
    from vramlab.report.page import page
    from vramlab.report.view import Server, Viewer
    from vramlab.runs import load_run

    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    library = Library(find_collections(extra))
    viewer = Viewer(resolve_run(name, results).folder, lambda folder: page(load_run(folder), library))
    viewer.state()  # a run that cannot be read is told now, not in the browser
    with Server(viewer, port) as server:
        for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts what runs in its background with Ctrl-C ignored
            signal.signal(number, signal.default_int_handler)
        print(f"{server.url}  Ctrl-C ends it.", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print()
    return 0
