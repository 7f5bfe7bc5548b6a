"""What an address asks, read so that nothing reaches the database which it could choke on."""

from __future__ import annotations

from fastapi import HTTPException, Request

LONGEST = 300  # no name is longer
LARGEST = 2**63 - 1


def text_asked(request: Request, name: str) -> str:
    """One text, "" without it. 400 for one with a NUL, which PostgreSQL knows none of, or longer than any name."""
    return plain_text(request.query_params.get(name, ""))


def plain_text(text: str) -> str:
    """The text, where a name could be so. 400 otherwise."""
    if "\0" in text or len(text) > LONGEST:
        raise HTTPException(400, "That is no name.")
    return text


def number_asked(request: Request, name: str) -> int | None:
    """One whole number from 0 on, None without it. 400 for anything else."""
    text = request.query_params.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= LARGEST):
        raise HTTPException(400, f"{name} is a whole number.")
    return int(text)


def result_number(text: str) -> int:
    """A result's number in an address. 404 for what can be none."""
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 0 < int(text) <= LARGEST):
        raise HTTPException(404, f"There is no result {text[:40]!r}.")
    return int(text)


def device_asked(request: Request) -> tuple[str, bool | None]:
    """(name, whether it is simulated) of `measured:NAME` or `simulated:NAME`; ("", None) without it. 400 for anything else."""
    text = text_asked(request, "device")
    if not text:
        return "", None
    how, _, name = text.partition(":")
    if how not in ("measured", "simulated") or not name:
        raise HTTPException(400, "A device is asked for as measured:NAME or simulated:NAME.")
    return (f"simulated {name}", True) if how == "simulated" else (name, False)


def device_word(name: str, is_simulated: bool) -> str:
    """Inverse of `device_asked`. The name of a simulated device says already that it is one."""
    return f"simulated:{name.removeprefix('simulated ')}" if is_simulated else f"measured:{name}"
