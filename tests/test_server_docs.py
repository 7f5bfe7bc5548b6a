"""docs/server.md names only what there is: commands with their options, settings with their defaults, addresses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from served import visiting
from vramlab.cli.app import app as command_line
from vramlab.crowd.server.app import create_app
from vramlab.crowd.server.settings import PREFIX, Settings

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "server.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL))
CALLS = [found.strip() for found in re.findall(r"\./run (.*)", BLOCKS)]


def fault(line: str) -> str:
    """What is wrong with the words behind ./run; "" when nothing is."""
    words = shlex.split(line.split(" > ")[0])
    command = typer.main.get_command(command_line)
    if words[0] == "workflow":  # as the file ./run has it
        words.insert(0, "run")
    while words and hasattr(command, "commands"):
        if words[0] not in command.commands:
            return f"no command {words[0]!r}"
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    unknown = [word for word in words if word.startswith("--") and word not in known]
    return f"no option {unknown}" if unknown else ""


def test_there_are_commands_to_look_at():
    assert len(CALLS) > 12 and {"serve", "crowd-submit", "crowd-pull", "server"} <= {line.split()[0] for line in CALLS}


@pytest.mark.parametrize("line", CALLS)
def test_every_command_is_one(line):
    assert fault(line) == ""


@pytest.mark.parametrize("line", ["serv --data-dir ae", "serve --data ae", "server token make chairs", "crowd-submit smoke --into x"])
def test_a_wrong_command_would_be_seen(line):
    assert fault(line)


def test_tokens_are_kept_from_others_and_from_each_other():
    """Whatever writes a token follows `umask 077` in its block; chairs show their own; no token goes to a plain address."""
    blocks = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    writing = [block for block in blocks if re.search(r"token create .* > ", block)]
    assert len(writing) == 2 and all(block.startswith("umask 077\n") for block in writing)
    flagging = [line for line in BLOCKS.splitlines() if re.search(r"/(flag|clear)$", line)]
    assert len(flagging) == 2 and all("$CHAIRS_TOKEN" in line and "$VRAMLAB_TOKEN" not in line for line in flagging)
    assert not [line for line in BLOCKS.splitlines() if "http://" in line]


def test_every_setting_is_one_with_the_default_that_is_told():
    told = re.findall(rf"`{PREFIX}(\w+)`", TEXT)
    fields = Settings.__dataclass_fields__
    assert told and all(name.lower() in fields for name in told)
    row = next(line for line in TEXT.splitlines() if "BUNDLES_PER_DAY" in line and line.startswith("|"))
    assert f"{fields['bundles_per_day'].default:,} bundles" in row and fields["bytes_per_day"].default == 2 * 2**30 and "2 GiB" in row
    for name, text in (("max_archive_bytes", "10 MiB"), ("failures_per_minute", "10"), ("title", "vramlab results")):
        row = next(line for line in TEXT.splitlines() if f"{PREFIX}{name.upper()}" in line and line.startswith("|"))
        default = fields[name].default
        assert row.rstrip(" |").endswith(text) and text == (f"{default // 2**20} MiB" if name.endswith("bytes") else str(default))
    row = next(line for line in TEXT.splitlines() if "PEAK_TOLERANCE" in line and line.startswith("|"))
    assert row.rstrip(" |").endswith(f"{fields['peak_tolerance_share'].default}, {fields['ratio_tolerance_share'].default:g}")


def test_the_proxy_lets_through_what_the_server_takes_and_says_who_asks():
    block = next(block for block in re.findall(r"```nginx\n(.*?)```", TEXT, re.DOTALL))
    size = re.search(r"client_max_body_size (\d+)m;", block)
    assert int(size[1]) * 2**20 == Settings.__dataclass_fields__["max_archive_bytes"].default
    assert "X-Forwarded-For $remote_addr;" in block, "not what a client says of itself"


def test_every_address_is_one(tmp_path):
    told = set(re.findall(r"https://ae\.example\.org(/[\w/.-]+)", TEXT) + re.findall(r"`(/[\w.]+)`", TEXT))
    assert {"/feed.atom", "/api", "/api/v1/bundles/BUNDLE/flag"} <= told
    app = create_app(Settings(data_dir=tmp_path))
    of_api = {path for path in told if path.startswith("/api/")}
    assert {path.replace("BUNDLE", "{bundle}") for path in of_api} <= set(app.openapi()["paths"])
    with visiting(app) as client:
        assert [path for path in told - of_api if client.get(path).status_code != 200] == []
