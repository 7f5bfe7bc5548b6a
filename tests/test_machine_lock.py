"""One measuring lock a machine: the same for every user and home, and whatever another user has put in its place is left as it is."""

from __future__ import annotations

import codecs
import multiprocessing
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vramlab.claiming import holder_of, locked
from vramlab.errors import EnvironmentUnable
from vramlab.machine_lock import lock_path, open_for_all

NOBODY = 65534


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder like /tmp, which other users reach too."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


def as_another_user(work: Callable[[], None]) -> multiprocessing.Process:
    """Started in a process of its own: under root as somebody else, else as oneself."""
    def begin() -> None:
        codecs.lookup("ascii")  # while the interpreter's own files can still be read
        if os.geteuid() == 0:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        work()

    process = multiprocessing.get_context("fork").Process(target=begin)
    process.start()
    return process


def test_home_cache_and_temporary_folders_of_a_user_decide_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("VRAMLAB_LOCK_DIR")
    found = set()
    for user in ("ada", "ben"):
        for name in ("HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "TMPDIR"):
            monkeypatch.setenv(name, str(tmp_path / user))
        monkeypatch.setattr(tempfile, "tempdir", None)
        found.add(lock_path())
    assert len(found) == 1 and tmp_path not in found.pop().parents


def test_the_first_folder_that_is_open_to_all_has_it(tmp_path, monkeypatch):
    monkeypatch.delenv("VRAMLAB_LOCK_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    modes = {"absent": None, "mine": 0o755, "not-sticky": 0o777, "shared": 0o1777, "shared-too": 0o1777}
    for name, mode in modes.items():
        if mode:
            (tmp_path / name).mkdir()
            (tmp_path / name).chmod(mode)
    folders = [tmp_path / name for name in modes]
    assert lock_path(folders).parent == tmp_path / "shared"
    assert lock_path(folders[:3]).parent == tmp_path / "cache" / "vramlab"
    monkeypatch.setenv("VRAMLAB_LOCK_DIR", str(tmp_path / "mine"))
    assert lock_path(folders).parent == tmp_path / "mine"


def test_two_users_never_hold_it_at_once_and_each_sees_who_does(open_folder):
    lock, waited = open_folder / "lock", []

    def hold() -> None:
        os.umask(0o077)
        with locked(lock, what="run small/ab12", opener=open_for_all):
            time.sleep(1.5)

    other = as_another_user(hold)
    while not holder_of(lock):
        assert other.is_alive()
        time.sleep(0.01)
    assert stat.S_IMODE(lock.stat().st_mode) == 0o666
    with locked(lock, on_wait=lambda: waited.append(holder_of(lock)), what="mine", opener=open_for_all):
        assert holder_of(lock).endswith("mine")
    other.join(10)
    assert other.exitcode == 0 and waited and f"process {other.pid} on" in waited[0] and waited[0].endswith("run small/ab12")


@pytest.mark.parametrize("planted", ["symlink", "dangling symlink", "hard link", "fifo", "folder"])
def test_what_is_no_lock_is_refused_and_left_as_it_is(tmp_path, planted):
    lock, victim = tmp_path / "lock", tmp_path / "victim"
    victim.write_text("precious")
    {"symlink": lambda: lock.symlink_to(victim), "dangling symlink": lambda: lock.symlink_to(tmp_path / "new"),
     "hard link": lambda: lock.hardlink_to(victim), "fifo": lambda: os.mkfifo(lock), "folder": lock.mkdir}[planted]()
    with pytest.raises(EnvironmentUnable, match="lock (is no plain file|is another file).* VRAMLAB_LOCK_DIR"):
        with locked(lock, what="x", opener=open_for_all):
            pass
    assert victim.read_text() == "precious" and not (tmp_path / "new").exists()


def test_one_that_another_user_keeps_closed_is_told(open_folder):
    lock, said = open_folder / "lock", open_folder / "said"
    lock.touch()
    lock.chmod(0o600 if os.geteuid() == 0 else 0)

    def ask() -> None:
        try:
            with locked(lock, opener=open_for_all):
                said.write_text("held")
        except EnvironmentUnable as refusal:
            said.write_text(str(refusal))

    as_another_user(ask).join(30)
    assert "cannot be opened (Permission denied)" in said.read_text() and "VRAMLAB_LOCK_DIR" in said.read_text()
