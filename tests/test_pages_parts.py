"""What the pages are made of, piece by piece: exports, addresses, types of the API's document, papers."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from vramlab.collection import Library
from vramlab.crowd.server.exports import COLUMNS, atom_feed, csv_lines, json_pieces, result_row
from vramlab.crowd.server.pages.catalogue import read_catalogue
from vramlab.crowd.server.pages.openapi import read_operations, read_schemas, type_in_words
from vramlab.crowd.server.pages.words import device_in_words, is_address, leaves, value_in_words
from vramlab.crowd.server.tables import Result

CARD = """uid: "{uid}"
version: 1
kind: planner
title: T
decides: D
paper: {paper}
takes_budget: true
fidelity: F
claims: [{claim}]
"""


@pytest.mark.parametrize("text, written", [("=1+1", "'=1+1"), ("+1", "'+1"), ("-1", "'-1"), ("@SUM(A1)", "'@SUM(A1)"),
                                           ("\t=1", "'\t=1"), (" =1", "' =1"), ("\uff1d1", "'\uff1d1"), ("\u3000@x", "'\u3000@x"),
                                           ("'=1", "''=1"),
                                           ("plain", "plain"), ("a=1", "a=1"), ("", "")])
def test_no_text_is_a_formula_in_a_spreadsheet(text, written):
    lines = "".join(csv_lines(["name", "value"], [{"name": text, "value": -0.5}]))
    assert list(csv.reader(io.StringIO(lines))) == [["name", "value"], [written, "-0.5"]]  # numbers stay numbers


def test_quotes_commas_and_new_lines_stay_in_their_cell():
    nasty = 'a "b", c\nd'
    assert list(csv.reader(io.StringIO("".join(csv_lines(["x"], [{"x": nasty}]))))) == [["x"], [nasty]]


@pytest.mark.parametrize("rows", [[], [{"a": 1}], [{"a": None}, {"a": "</script>"}]])
def test_json_that_is_written_a_row_at_a_time_is_json(rows):
    for heading in ({}, {"address": "http://x"}):
        assert json.loads("".join(json_pieces(heading, "rows", rows))) == {**heading, "rows": rows}


def test_a_feed_of_control_characters_and_markup_is_still_xml():
    row = SimpleNamespace(id=1, device="a\x00\x1b<b>&", is_simulated=False, state="checked", method="m\ufffe", model="]]>",
                          submitted_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), account=SimpleNamespace(name="ada"), batch_size=None,
                          budget="", outcome="ok")
    feed = ElementTree.fromstring(atom_feed([row], "http://x", "t<"))
    entry = feed.find("{http://www.w3.org/2005/Atom}entry")
    assert entry.find("{http://www.w3.org/2005/Atom}title").text == "m\ufffd on ]]>, a\ufffd\ufffd<b>&: checked"
    assert entry.find("{http://www.w3.org/2005/Atom}updated").text == "2026-01-02T03:04:05Z"
    empty = ElementTree.fromstring(atom_feed([], "http://x", "t"))
    assert empty.find("{http://www.w3.org/2005/Atom}updated").text == "1970-01-01T00:00:00Z"


def test_every_column_of_an_export_is_one_of_a_result():
    """Those that are not columns of the table under the same name are named here."""
    renamed = {"result", "bundle", "numbers", "is_unverified", "submitter", "simulated_moved_bytes"}
    assert set(COLUMNS) - renamed <= {column.name for column in Result.__table__.columns}
    row = SimpleNamespace(**{c.name: None for c in Result.__table__.columns})
    row.id, row.state, row.is_simulated, row.submitted_at, row.moved_bytes = 7, "received", True, datetime(2026, 1, 1, tzinfo=UTC), 5
    row.bundle, row.account = SimpleNamespace(name="b"), SimpleNamespace(name="ada")
    found = result_row(row)
    assert list(found) == list(COLUMNS)
    assert (found["result"], found["numbers"], found["is_unverified"], found["simulated_moved_bytes"]) == (7, "simulated", True, 5)


@pytest.mark.parametrize("text, verdict", [
    ("https://example.org/a?b=c", True), ("http://example.org", True), ("javascript:alert(1)", False),
    ("JAVASCRIPT:alert(1)//http://x", False),
    ("data:text/html,x", False), ("//example.org", False), ('https://x" onclick="y', False),
    ("https://x\njavascript:1", False), ("", False), (None, False),
])
def test_only_http_addresses_become_links(text, verdict):
    assert is_address(text) is verdict


@pytest.mark.parametrize("value, unit, text", [(5 * 2**30, "bytes", "5.000 GiB"), (None, "bytes", "–"), (0.1234, "seconds", "123 ms"),
                                               (0.241, "share", "24.1\u00a0%"), (-0.5, "share", "-50.0\u00a0%"),
                                               (96, "count", "96"), (0, "count", "0")])
def test_values_in_words(value, unit, text):
    assert value_in_words(value, unit) == text


def test_a_simulated_device_says_so_once():
    assert device_in_words("simulated v100", True) == device_in_words("v100", True) == "simulated v100"
    assert device_in_words("v100", False) == "v100"


def test_leaves_of_nested_data():
    assert leaves({"a": {"b": 1, "c": {"d": None}}, "e": [1, 2]}) == [("a.b", "1"), ("a.c.d", "–"), ("e", "[1, 2]")]


@pytest.mark.parametrize("schema, text", [
    ({"type": "integer"}, "integer"), ({"$ref": "#/components/schemas/Finding"}, "Finding"), ({}, ""),
    ({"enum": ["a", "b"]}, "one of a, b"),
    ({"type": "array", "items": {"$ref": "#/components/schemas/X"}}, "list of X"), ({"type": "array", "items": {}}, "list"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string or null"),
    ({"type": "string", "format": "date-time"}, "string (date-time)"),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, "object of integer"),
    ({"type": "object", "additionalProperties": {}}, "object"), ({"type": ["string", "null"]}, "string or null"), ({"const": 1}, "1"),
])
def test_types_of_the_document_in_words(schema, text):
    assert type_in_words(schema) == text


def test_operations_and_types_are_read_from_a_document():
    made_answer = {"description": "made", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/R"}}}}
    body = {"content": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}}}
    post = {"operationId": "make", "summary": "S", "security": [{"bearer": []}], "requestBody": body, "responses": {"201": made_answer}}
    shared = [{"name": "id", "in": "path", "required": True, "schema": {"type": "integer"}}]
    schemas = {"R": {"description": "D", "properties": {"a": {"type": "string"}}, "required": ["a"]}}
    document = {"paths": {"/x/{id}": {"parameters": shared, "post": post}}, "components": {"schemas": schemas}}
    made, = read_operations(document)
    assert (made.method, made.path, made.needs_token) == ("POST", "/x/{id}", True)
    assert made.bodies == (("application/gzip", "string (binary)"),)
    assert made.answers == (("201", "made", "R"),) and (made.parameters[0].name, made.parameters[0].is_required) == ("id", True)
    schema, = read_schemas(document)
    assert (schema.name, schema.fields[0].name, schema.fields[0].is_required) == ("R", "a", True)


def test_one_paper_of_two_cards_is_one_entry(tmp_path):
    """By its DOI, whatever case; a card that cannot be read spoils only itself."""
    papers = {"one": '{title: A Title, authors: [Ann Bee], venue: V, year: 2020, doi: 10.1/X, url: "https://x.example"}',
              "two": "{title: Another Title, authors: [Ann Bee], venue: V, year: 2020, doi: 10.1/x}",
              "three": "{title: A Title, authors: [Ann Bee], venue: V, year: 2020}", "four": "null"}
    for number, (name, paper) in enumerate(papers.items()):
        (tmp_path / "methods" / name).mkdir(parents=True)
        (tmp_path / "methods" / name / "method.py").write_text("def build(): ...\n")
        (tmp_path / "methods" / name / "card.yaml").write_text(CARD.format(uid=f"{number:016x}", paper=paper, claim=f"claim-{name}"))
    (tmp_path / "methods" / "broken").mkdir()
    (tmp_path / "methods" / "broken" / "card.yaml").write_text("uid: nonsense\n")
    found = read_catalogue(Library([tmp_path]))
    by_methods = {frozenset(facts.name for facts in entry.methods): entry for entry in found.values()}
    assert set(by_methods) == {frozenset({"one", "two"}), frozenset({"three"})}
    assert by_methods[frozenset({"one", "two"})].claims == ("claim-one", "claim-two")
    assert by_methods[frozenset({"one", "two"})].link == "https://x.example" and by_methods[frozenset({"three"})].link is None
    assert len(found) == 2  # two keys, though author, year and first word are the same
