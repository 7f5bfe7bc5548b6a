"""artifact.yaml: what only an artifact's authors can answer of the checklists, in a file beside the workflow.

    schema: 1
    workflows: [resnet50-delta]           # those it speaks for; all in its folder when left out
    answers:
      neurips:                            # a checklist's id
        N9:                               # an item's id
          answer: "Yes"                   # one of the checklist's answers
          why: one sentence or more
          see: [https://example.org/ethics, ../README.md]      # addresses, or files from the folder of artifact.yaml; may be left out

What stands here is shown as the authors' word. No rule reads it: it is no evidence, and where evidence answers an item, evidence stands.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Iterator, Literal, Mapping, Sequence

from pydantic import BeforeValidator, Field

from vramlab.collection import ARTIFACT_FILE, Library
from vramlab.report.checklists import UNANSWERED, AuthorAnswer, Checklist, load_checklists
from vramlab.runs import Run
from vramlab.schema import Strict, shown, validate
from vramlab.workflow_schema import check_schema
from vramlab.yaml_nodes import Node, Problem, key_place, nearest, offer, plain, raise_problems, read_yaml

Said = Annotated[str, Field(pattern=r"\S")]
Answers = Mapping[tuple[str, str], AuthorAnswer]  # (checklist's id, item's id) -> answer


class Entry(Strict):
    """One item's answer."""

    answer: str
    why: Said
    see: list[str] = []


class ArtifactFile(Strict):
    """The whole file."""

    version: Annotated[Literal[1], BeforeValidator(check_schema)] = Field(alias="schema")
    workflows: list[str] | None = None
    answers: dict[str, dict[str, Entry]]


def answers_of(run: Run, library: Library) -> Answers:
    """The authors' answers for a run's workflow; none where no artifact.yaml lies beside it. WorkflowError as `read_answers`."""
    name = str(run.workflow.get("name"))
    for workflow in _workflow_files(run, name, library):
        if (path := workflow.parent / ARTIFACT_FILE).is_file():
            return read_answers(path, name, load_checklists(library.report_files("checklists/*.yaml")))
    return {}


def check_beside(workflow: Path, name: str, library: Library) -> None:
    """WorkflowError lists what is wrong with the artifact.yaml beside a workflow, if there is one."""
    if (path := workflow.parent / ARTIFACT_FILE).is_file():
        read_answers(path, name, load_checklists(library.report_files("checklists/*.yaml")))


def _workflow_files(run: Run, name: str, library: Library) -> list[Path]:
    """Where the run's workflow lies: as it was given, else by its name in a collection."""
    given = Path(str(run.workflow.get("path") or ""))
    return [*([given] if given.is_file() else []), *library.workflow_paths.get(name, ())]


def read_answers(path: Path, workflow: str, checklists: Sequence[Checklist]) -> Answers:
    """What the file says of one workflow. WorkflowError lists every problem as file:line:column: what."""
    root = read_yaml(path)
    found, problems = validate(ArtifactFile, root)
    raise_problems([*problems, *_unknown_workflows(root, path), *_problems(root.get("answers"), path, checklists)])
    if found.workflows is not None and workflow not in found.workflows:
        return {}
    return {(checklist, item): AuthorAnswer(value=entry.answer, why=" ".join(entry.why.split()), see=tuple(entry.see))
            for checklist, entries in found.answers.items() for item, entry in entries.items()}


def _unknown_workflows(root: Node, path: Path) -> Iterator[Problem]:
    node = root.get("workflows")
    beside = {found.stem for found in path.parent.glob("*.y*ml")} - {path.stem}
    for entry in node.items() if node else ():
        if isinstance(entry.value, str) and entry.value not in beside:
            yield Problem(entry.mark, f"there is no workflow {entry.value!r} beside this file"
                                      f"{offer(entry.value, sorted(beside), 'there are')}")


def _problems(answers: Node | None, path: Path, checklists: Sequence[Checklist]) -> Iterator[Problem]:
    """What the schema cannot know: the checklists, their items and answers."""
    known = {checklist.id: checklist for checklist in checklists}
    for name, entries in _children(answers):
        if name not in known:
            yield Problem(key_place(entries), f"there is no checklist {name!r}{offer(name, known, 'there are')}")
            continue
        items = {item.id for item in known[name].items}
        for item, entry in _children(entries):
            if item not in items:
                yield Problem(key_place(entry), f"checklist {name} has no item {item!r}{nearest(item, items)}")
            else:
                yield from _entry_problems(entry, path, known[name])


def _entry_problems(entry: Node, path: Path, checklist: Checklist) -> Iterator[Problem]:
    answer, allowed = entry.get("answer"), [value for value in checklist.answers if value != UNANSWERED]
    if answer is not None and isinstance(answer.value, str) and answer.value not in allowed:
        yield Problem(answer.mark, f"answer: {shown(plain(answer))} is not allowed{offer(answer.value, allowed)}")
    see = entry.get("see")
    for node in see.items() if see else ():
        if isinstance(node.value, str) and (fault := _fault_of_pointer(node.value, path.parent)):
            yield Problem(node.mark, f"see: {fault}")


def _fault_of_pointer(text: str, folder: Path) -> str:
    """Why a pointer leads nowhere; "" when it may lead somewhere. Nothing is fetched."""
    if is_address(text):
        return ""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:|/", text) or "\\" in text:
        return f"{shown(text)} is not allowed; write an address that begins with https:// or a file from this folder"
    if (folder / text).is_file():
        return ""
    near = (folder / text).parent
    beside = [str(PurePosixPath(text).parent / found.name) for found in near.iterdir()] if near.is_dir() else []
    return f"there is no file {text} beside this one{nearest(text, beside)}"


def is_address(text: str) -> bool:
    """Whether a pointer is an address, which the report makes a link."""
    return bool(re.fullmatch(r"https?://[^\s<>\"]+", text))


def _children(node: Node | None) -> list[tuple[str, Node]]:
    return list(node.value.items()) if node is not None and isinstance(node.value, dict) else []
