"""The probe against what Python and the system say themselves; and that it gives nobody away."""

from __future__ import annotations

import getpass
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from fake_nvml import UUID, FakeNvml

from vramlab import environment
from vramlab.nvml import Nvml

ROOT = Path(__file__).parent.parent


def test_it_states_what_this_python_and_this_machine_are():
    found = environment.probe(with_installed=True)
    torch_version = subprocess.run([sys.executable, "-m", "pip", "show", "torch"], capture_output=True, text=True).stdout
    assert found["software"]["python"] == platform.python_version()
    assert f"Version: {found['software']['packages']['torch']}\n" in torch_version
    assert any(line.startswith("pytest==") for line in found["software"]["installed"])
    assert found["cpu"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert found["cpu"]["memory_bytes"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    json.dumps(found, allow_nan=False)


def test_torch_is_never_imported():
    code = "import sys; from vramlab.environment import probe; probe(); print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert answer.stdout.strip() == "False", answer.stderr


def test_every_null_has_a_reason():
    def nulls(value, path=""):
        if isinstance(value, dict):
            for key, inner in value.items():
                if key != "missing":
                    yield from nulls(inner, f"{path}.{key}".strip("."))
        elif value is None:
            yield path

    found = environment.probe()
    optional = {"software.torch_build.cuda", "software.torch_build.hip", "git.changes_sha256"}  # None is the answer there
    unexplained = [p for p in nulls(found) if p not in optional and not p.startswith("software.packages") and p not in found["missing"]]
    assert unexplained == []


def test_host_and_user_are_hashed_with_a_salt(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "a-most-telling-host-name")
    monkeypatch.setattr(getpass, "getuser", lambda: "a-most-telling-user-name")
    found = environment.probe_system({})
    assert "a-most-telling" not in json.dumps(found)
    assert found["host_hash"] == environment.hash_identity("a-most-telling-host-name") != found["user_hash"]
    monkeypatch.setattr(environment, "_salt", lambda: "another machine's salt")
    assert environment.probe_system({})["host_hash"] != found["host_hash"]


def test_the_salt_is_made_once_where_the_system_has_no_machine_id(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Path, "is_file", lambda path: False if str(path) == "/etc/machine-id" else os.path.isfile(path))
    environment._salt.cache_clear()
    first = environment.hash_identity("host")
    environment._salt.cache_clear()
    assert environment.hash_identity("host") == first and len((tmp_path / "vramlab" / "salt").read_text()) == 32
    environment._salt.cache_clear()


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@example.org", *words],
                          capture_output=True, text=True, check=True).stdout.strip()


def test_git_says_the_commit_and_whether_files_differ_from_it(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "first")
    missing: dict[str, str] = {}
    clean = environment.probe_git(tmp_path.resolve(), missing)
    assert clean == {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False, "changes_sha256": None} and not missing
    (tmp_path / "a").write_text("2")
    changed = environment.probe_git(tmp_path.resolve(), missing)
    (tmp_path / "a").write_text("3")
    assert changed["dirty"] and changed["changes_sha256"] != environment.probe_git(tmp_path.resolve(), missing)["changes_sha256"]


def test_git_does_not_answer_for_a_folder_inside_somebody_elses_checkout(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "inner").mkdir()
    missing: dict[str, str] = {}
    assert environment.probe_git((tmp_path / "inner").resolve(), missing) is None and "git" in missing


def test_variables_that_matter_are_kept_and_secrets_are_not(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("NVIDIA_API_KEY", "hush")
    monkeypatch.setenv("HOME_SWEET_HOME", "x")
    found = environment.probe_variables()
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "hush" not in str(found) and "HOME_SWEET_HOME" not in found


def test_a_gpu_is_described_without_its_uuid():
    described = Nvml.open(FakeNvml(refuse=("nvmlDeviceGetMigMode",))).describe(0)
    assert described["name"] == "Tesla V100-SXM2-32GB" and described["memory_bytes"] == 8300
    assert (described["compute_capability"], described["power_limit_watts"], described["pcie_width"]) == ("7.0", 300.0, 16)
    assert UUID not in str(described) and described["uuid_hash"] == environment.hash_identity(UUID)
    assert described["mig_mode"] is None and described["missing"] == {"mig_mode": "nvmlDeviceGetMigMode: Not Supported"}
