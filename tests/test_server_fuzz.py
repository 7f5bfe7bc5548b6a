"""The API against its own OpenAPI document: whatever the document allows or forbids, no answer is a fault of ours or of another form.

A few requests an endpoint in every run, five hundred each (10,000 in all) with --full.
"""

from __future__ import annotations

import pytest
import schemathesis
from crowd_made import measured, served
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance, negative_data_rejection, response_schema_conformance, status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance, negative_data_rejection]
CALM = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    often = {"bundles_per_minute": 10**6, "requests_per_minute": 10**7, "failures_per_minute": 10**6}
    with served(tmp_path_factory.mktemp("fuzzed"), **often) as server:
        server.submit("root", measured(1, gpu="V100"))
        yield server


@pytest.fixture
def document(fuzzed):
    return schemathesis.openapi.from_asgi("/api/v1/openapi.json", fuzzed.web.app)


schema = schemathesis.pytest.from_fixture("document")


@schema.include(path_regex="^/api/v1/").parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=CALM, derandomize=True, database=None)
def test_the_api_keeps_its_document(case, fuzzed):
    ask(case, fuzzed)


@pytest.mark.slow
@schema.include(path_regex="^/api/v1/").parametrize()
@settings(max_examples=500, deadline=None, suppress_health_check=CALM, database=None)
def test_the_api_keeps_its_document_over_many_requests(case, fuzzed):
    ask(case, fuzzed)


def ask(case, server) -> None:
    """As an administrator: every endpoint lets the request through to its own work."""
    headers = {"Authorization": f"Bearer {server.tokens['root']}"}
    case.call_and_validate(headers=headers, checks=CHECKS)
    assert server.get("results", include_unverified=True, state=None) is not None


def test_a_document_that_is_not_kept_is_told():
    """Negative control: an endpoint that answers what it does not say."""
    from fastapi import FastAPI

    app = FastAPI(openapi_url="/openapi.json")

    @app.get("/number")
    def number() -> int:
        from fastapi.responses import JSONResponse

        return JSONResponse({"no": "number"})

    case = schemathesis.openapi.from_asgi("/openapi.json", app)["/number"]["GET"].Case()
    with pytest.raises(FailureGroup):
        case.call_and_validate(checks=CHECKS)
