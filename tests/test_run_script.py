"""`./run`, held to its words with interpreters that only pretend: no package is installed here."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from vramlab.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
TOOLS = "awk cat cksum cp df dirname find mkdir readlink rm sleep uname".split()
SHELLS = [shell for shell in ("dash", "bash", "busybox") if shutil.which(shell)]

# Answers what ./run asks of a Python; notes each call in $CALLS. A "venv" gets a copy of the pretender as its python.
PRETENDER = """#!/bin/sh
printf '%s\\n' "${0##*/} $*" >>"$CALLS"
case "$*" in
    *version_info*) echo "VERSION" ;;
    *ensurepip*) exit HAS_VENV ;;
    *fcntl*) exec "REAL_PYTHON" "$@" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && : >"$3/made-once" ;;
    *"pip install"*) : >"$CALLS.pip"; [ -z "${PIP_SECONDS:-}" ] || exec sleep "$PIP_SECONDS"; exit "${PIP_STATUS:-0}" ;;
    *purelib*) exit "${LOAD_STATUS:-0}" ;;
    *) printf '%s\\n' "prog=${VRAMLAB_PROG:-}" "cwd=$(pwd)"; for word; do printf '<%s>\\n' "$word"; done; exit "${CLI_STATUS:-0}" ;;
esac
"""


class Checkout:
    """A checkout in a path with a space, and a PATH on which there is nothing but a few tools and what a test adds."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.home = folder / "my checkout", folder / "bin", folder / "home"
        self.calls = folder / "calls.txt"
        for made in (self.root, self.bin, self.home):
            made.mkdir()
        for name in ("run", "requirements.lock"):
            shutil.copy2(ROOT / name, self.root / name)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.venv = self.root / ".venv"

    def add_tool(self, name: str, script: str) -> None:
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def add_python(self, name: str, version: str, *, has_venv: bool = True) -> None:
        script = PRETENDER.replace("VERSION", version).replace("HAS_VENV", "0" if has_venv else "1")
        self.add_tool(name, script.replace("REAL_PYTHON", sys.executable))

    def start(self, *words: str, cwd: Path | None = None, shell: str = "", **env: str) -> subprocess.Popen:
        command = ([shell] if shell else []) + [str(self.root / "run") if cwd or shell else "./run", *words]
        if shell == "busybox":
            command.insert(1, "sh")
        clean = {"PATH": str(self.bin), "HOME": str(self.home), "CALLS": str(self.calls)}
        shell_path = shutil.which(shell) if shell else None
        return subprocess.Popen(command, executable=shell_path, cwd=cwd or self.root, env=clean | env, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)

    def run(self, *words: str, **how) -> tuple[int, str, str]:
        process = self.start(*words, **how)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def count(self, part: str) -> int:
        return sum(part in line for line in self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.fixture
def ready(checkout):
    checkout.add_python("python3", "3.11")
    assert checkout.run("--version")[0] == 0
    checkout.calls.unlink()
    return checkout


@pytest.mark.parametrize("shell", ["", *SHELLS])
def test_first_use_says_size_and_minutes_installs_and_hands_over_every_word(checkout, shell):
    checkout.add_python("python3", "3.12")
    status, out, err = checkout.run("workflow", "a file.yaml", "model=resnet 18", "", "*", shell=shell)
    assert status == 0
    assert out.splitlines()[2:] == ["<-P>", "<-m>", "<vramlab>", "<workflow>", "<a file.yaml>", "<model=resnet 18>", "<>", "<*>"]
    assert "6.2 GB" in err and "1 to 5 minutes" in err
    assert checkout.count(f"pip install --disable-pip-version-check --no-input -r {checkout.root}/requirements.lock") == 1


def test_each_shell_reads_the_script():
    for shell in SHELLS:
        words = [shell, "sh", "-n"] if shell == "busybox" else [shell, "-n"]
        subprocess.run([*words, str(ROOT / "run")], check=True)


def test_later_uses_install_nothing_and_say_nothing(ready):
    status, out, err = ready.run("list", "models")
    assert (status, err) == (0, "")
    assert out.splitlines()[-2:] == ["<list>", "<models>"]
    assert ready.count("pip install") == 0


def test_no_word_asks_for_help(ready):
    assert ready.run()[1].splitlines()[-1] == "<--help>"


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
@pytest.mark.parametrize("shell", ["", *SHELLS])
def test_help_makes_nothing_and_needs_no_python(checkout, words, shell):
    status, out, err = checkout.run(*words, shell=shell)
    assert (status, err) == (0, "") and out.startswith("Usage: ./run COMMAND") and not checkout.venv.exists()
    assert checkout.run("doctor", shell=shell)[0] == 3, "another word does need one"


def test_help_is_the_command_lines_where_it_is_installed(ready):
    assert [ready.run(word)[1].splitlines()[-1] for word in ("--help", "-h", "help")] == ["<--help>"] * 3


def commands_of(group: Any, above: str = "") -> Iterator[tuple[str, int]]:
    """(command, how many arguments it needs) of the command line. A group that has groups in it is told in one line."""
    for name, command in group.commands.items():
        if any(hasattr(inner, "commands") for inner in getattr(command, "commands", {}).values()):
            yield f"{above}{name}", 1
        elif hasattr(command, "commands"):
            yield from commands_of(command, f"{above}{name} ")
        else:
            yield f"{above}{name}", sum(p.param_type_name == "argument" and p.required for p in command.params)


def test_help_without_an_installation_names_the_commands_that_there_are(checkout):
    """A command that is new, gone or renamed has its line in `usage` of ./run."""
    told = re.findall(r"^  (\S.*?)(?:  +)(\S.*)$", checkout.run("--help")[1], re.MULTILINE)
    known = dict(commands_of(typer.main.get_command(app)))
    of_the_script = ("workflow", "tests", "clean")
    names = {next((name for name in (*known, *of_the_script) if f"{usage} ".startswith(f"{name} ")), usage): usage for usage, _ in told}
    assert set(names) == {*known, *of_the_script} and len(names) == len(told)
    for name, needed in known.items():
        assert len(re.sub(r"\[.*?\]", "", names[name].removeprefix(name)).split()) == needed, names[name]


def test_hints_can_use_the_form_the_user_called(ready, tmp_path):
    assert ready.run("doctor")[1].splitlines()[0] == "prog=./run"
    out = ready.run("doctor", cwd=tmp_path)[1].splitlines()
    assert out[:2] == [f"prog={ready.root}/run", f"cwd={tmp_path}"]


def test_a_link_to_the_script_finds_the_checkout(ready, tmp_path):
    link = tmp_path / "vl"
    link.symlink_to(ready.root / "run")
    env = {"PATH": str(ready.bin), "CALLS": str(ready.calls), "HOME": str(ready.home)}
    out = subprocess.run([str(link), "doctor"], env=env, capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "<doctor>"


@pytest.mark.parametrize("status", [1, 2, 130])
def test_the_exit_code_is_the_command_lines(ready, status):
    assert ready.run("list", "models", CLI_STATUS=str(status))[0] == status


def test_tests_run_in_the_checkout(ready, tmp_path):
    out = ready.run("tests", "--full", "-k", "a and b", cwd=tmp_path)[1].splitlines()
    assert out[1:] == [f"cwd={ready.root}", "<tests>", "<--full>", "<-k>", "<a and b>"]


@pytest.mark.parametrize("pythons, fix", [
    ({}, "found no python3"),
    ({"python3": "3.10"}, "found Python 3.10 only"),
    ({"python3": "3.9", "python3.11": "3.9"}, "found Python 3.9 only"),
    ({"python3": "3.14"}, "found Python 3.14 only"),
])
def test_no_fitting_python_is_one_sentence_with_the_fix(checkout, pythons, fix):
    for name, version in pythons.items():
        checkout.add_python(name, version)
    status, out, err = checkout.run("workflow", "smoke.yaml")
    assert (status, out, len(err.splitlines())) == (3, "", 1)
    assert fix in err and "install one of them" in err
    assert not checkout.venv.exists()


def test_no_venv_module_names_the_package(checkout):
    checkout.add_python("python3", "3.11", has_venv=False)
    status, _, err = checkout.run("workflow", "smoke.yaml")
    assert (status, len(err.splitlines())) == (3, 1)
    assert "apt install python3-venv" in err
    assert not checkout.venv.exists()


@pytest.mark.parametrize("first", [("3.10", True), ("3.14", True), ("3.11", False)])
def test_a_later_python_on_the_path_is_taken_when_the_first_does_not_do(checkout, first):
    checkout.add_python("python3", first[0], has_venv=first[1])
    checkout.add_python("python3.12", "3.12")
    assert checkout.run("doctor")[0] == 0
    assert checkout.count("python3.12 -m venv") == 1


def test_a_python_that_does_not_start_is_passed_over(checkout):
    checkout.add_tool("python3", "#!/bin/sh\nexit 127\n")
    checkout.add_python("python3.13", "3.13")
    assert checkout.run("doctor")[0] == 0


@pytest.mark.parametrize("system, fix", [
    ("Darwin", "Linux container"), ("MINGW64_NT-10.0", "WSL2"), ("CYGWIN_NT-10.0", "WSL2"), ("FreeBSD", "Linux machine"),
])
def test_other_systems_are_one_sentence_with_the_fix(checkout, system, fix):
    checkout.add_python("python3", "3.12")
    checkout.add_tool("uname", f"#!/bin/sh\necho {system}\n")
    status, _, err = checkout.run("workflow", "smoke.yaml")
    assert (status, len(err.splitlines())) == (3, 1)
    assert fix in err
    assert not checkout.venv.exists()


def test_a_small_disk_is_said_before_anything_is_installed(checkout):
    checkout.add_python("python3", "3.12")
    checkout.add_tool("df", "#!/bin/sh\necho Filesystem 1024-blocks Used Available\necho /dev/x 9000000 3000000 6000000 40% /\n")
    status, _, err = checkout.run("workflow", "smoke.yaml")
    assert status == 3 and "needs 7 GB" in err and "6 GB free" in err
    assert checkout.count("-m venv") == 0


def test_a_failed_installation_is_made_anew_by_the_same_command(checkout):
    checkout.add_python("python3", "3.12")
    status, _, err = checkout.run("doctor", PIP_STATUS="1")
    assert status == 3 and "could not be installed" in err
    (checkout.venv / "half").touch()
    status, out, err = checkout.run("doctor")
    assert status == 0 and out.splitlines()[-1] == "<doctor>"
    assert "did not finish" in err
    assert not (checkout.venv / "half").exists()


def test_packages_that_do_not_load_are_no_installation(checkout):
    checkout.add_python("python3", "3.12")
    status, _, err = checkout.run("doctor", LOAD_STATUS="1")
    assert status == 3 and "do not load" in err
    assert checkout.run("doctor")[0] == 0
    assert checkout.count("pip install") == 2


@pytest.mark.parametrize("sent, status, said", [
    (signal.SIGINT, 130, "Interrupted"), (signal.SIGTERM, 130, "Interrupted"), (signal.SIGKILL, -9, ""),
])
def test_an_interrupted_installation_starts_over(checkout, sent, status, said):
    checkout.add_python("python3", "3.12")
    process = checkout.start("doctor", PIP_SECONDS="30")
    _wait_for_pip(checkout)
    os.killpg(process.pid, sent)
    err = process.communicate(timeout=20)[1]
    assert process.returncode == status and said in err
    (checkout.venv / "half").touch()
    assert checkout.run("doctor")[0] == 0
    assert not (checkout.venv / "half").exists()


def test_two_first_uses_at_once_install_once(checkout):
    checkout.add_python("python3", "3.12")
    first = checkout.start("doctor", PIP_SECONDS="2")
    _wait_for_pip(checkout)
    status, out, err = checkout.run("list", "models")
    assert status == 0 and out.splitlines()[-1] == "<models>"
    assert "waiting" in err
    assert first.wait(20) == 0
    first.communicate()
    assert checkout.count("pip install") == 1


def test_a_pip_that_outlives_the_script_keeps_the_lock(checkout):
    checkout.add_python("python3", "3.12")
    first = checkout.start("doctor", PIP_SECONDS="3")
    _wait_for_pip(checkout)
    os.kill(first.pid, signal.SIGKILL)  # the script alone: its pip goes on
    began = time.monotonic()
    status, _, err = checkout.run("doctor")
    assert status == 0 and "waiting" in err and "did not finish" in err
    assert time.monotonic() - began > 1.5
    first.communicate()


def test_a_new_lock_file_brings_the_venv_up_to_date(ready):
    with open(ready.root / "requirements.lock", "a") as f:
        f.write("# another line\n")
    status, _, err = ready.run("doctor")
    assert status == 0 and "requirements.lock has changed" in err
    assert ready.count("pip install") == 1 and ready.count("-m venv") == 0
    assert ready.run("doctor")[2] == ""


def test_a_venv_whose_python_is_gone_is_made_anew(ready):
    (ready.venv / "bin" / "python").unlink()
    assert ready.run("doctor")[0] == 0
    assert ready.count("-m venv") == 1


def test_a_venv_of_somebody_else_is_completed_never_emptied(checkout):
    checkout.add_python("python3", "3.12")
    (checkout.venv / "bin").mkdir(parents=True)
    shutil.copy(checkout.bin / "python3", checkout.venv / "bin" / "python")
    (checkout.venv / "mine").touch()
    for pip_status in ("1", "0"):
        status, _, err = checkout.run("doctor", PIP_STATUS=pip_status)
        assert status == (3 if pip_status == "1" else 0)
        assert "not made by ./run" in err and (checkout.venv / "mine").exists()
    assert checkout.count("-m venv") == 0


def test_wheels_from_a_folder(checkout, tmp_path):
    checkout.add_python("python3", "3.12")
    wheels = tmp_path / "all wheels"
    assert checkout.run("doctor", VRAMLAB_WHEELS=str(wheels))[0] == 2 and not checkout.venv.exists()
    wheels.mkdir()
    assert checkout.run("doctor", VRAMLAB_WHEELS=str(wheels))[0] == 0
    assert checkout.count(f"--no-index --find-links {wheels}") == 1


def test_clean_deletes_the_cache_and_with_all_the_venv_and_the_results(ready):
    cache, kept = ready.home / ".cache" / "vramlab", ready.home / ".cache" / "other"
    results, mine = ready.root / "results", ready.root / "workflows" / "mine.yaml"
    for path in (cache / "x", kept, results / "r", mine):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert ready.run("clean")[0] == 0
    assert (cache.exists(), results.exists(), ready.venv.exists()) == (False, True, True)
    assert ready.run("clean", "--all")[0] == 0
    assert (results.exists(), ready.venv.exists()) == (False, False)
    assert kept.exists() and mine.exists() and (ready.root / "run").exists()


def test_clean_follows_the_cache_home_and_refuses_other_words(ready, tmp_path):
    cache = tmp_path / "xdg" / "vramlab"
    cache.mkdir(parents=True)
    assert ready.run("clean", "--everything", XDG_CACHE_HOME=str(cache.parent))[0] == 2
    assert cache.exists()
    assert ready.run("clean", XDG_CACHE_HOME=str(cache.parent))[0] == 0
    assert not cache.exists() and cache.parent.exists()


def test_clean_needs_no_python(checkout):
    assert checkout.run("clean", "--all") == (0, "", "")


def test_continuous_integration_calls_the_same_command():
    words = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert words == ['cd "$(dirname "$0")/.." && exec ./run tests']
    assert os.access(ROOT / ".ci" / "run", os.X_OK) and os.access(ROOT / "run", os.X_OK)


def _wait_for_pip(checkout: Checkout, seconds: float = 20.0) -> None:
    """Until the pretended pip sleeps: a signal that meets a shell between fork and exec may be lost."""
    end = time.monotonic() + seconds
    while not (Path(f"{checkout.calls}.pip").exists() and _is_running("sleep", checkout.root)):
        assert time.monotonic() < end, "pip was not called"
        time.sleep(0.02)


def _is_running(name: str, folder: Path) -> bool:
    """True when a process of this name has `folder` as its current directory."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text().strip() == name and (process / "cwd").resolve() == folder:
                return True
        except OSError:  # it has ended meanwhile
            continue
    return False
