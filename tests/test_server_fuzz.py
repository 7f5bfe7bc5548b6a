"""The API against its own OpenAPI document: whatever the document allows or forbids, no answer is a fault of ours or of another form.

A few requests an endpoint in every run; a hundred each of the document's form and as many of another with --full.
"""

from __future__ import annotations

import pytest
import schemathesis
from crowd_made import measured, served
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance, negative_data_rejection, response_schema_conformance, status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance, negative_data_rejection]


@schemathesis.serializer("application/gzip")
def any_bytes(context, value) -> bytes:
    """A body that is no archive, as a rule."""
    return getattr(value, "data", value) if isinstance(getattr(value, "data", value), bytes) else str(value).encode()


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    often = {"bundles_per_minute": 10**6, "requests_per_minute": 10**7, "failures_per_minute": 10**6}
    with served(tmp_path_factory.mktemp("fuzzed"), **often) as server:
        server.submit("root", measured(1, gpu="V100"))
        yield server


def ask_everything(server, requests: int, mode: GenerationMode, **how) -> list[str]:
    """So many requests of every endpoint, as an administrator: the token lets them through to the endpoint's own work. What went wrong."""
    document = schemathesis.openapi.from_asgi("/api/v1/openapi.json", server.web.app)
    document.config.generation.update(with_security_parameters=False)  # the token is given below, whatever a case has in its place
    headers, faults, asked = {"Authorization": f"Bearer {server.tokens['root']}"}, [], 0
    for found in document.get_all_operations():
        operation = found.ok()
        if not operation.path.startswith("/api/v1/") or mode is GenerationMode.NEGATIVE and not can_be_wrong(operation):
            continue
        asked += 1

        @settings(max_examples=requests, deadline=None, suppress_health_check=list(HealthCheck), database=None, **how)
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case):
            case.call_and_validate(headers=headers, checks=CHECKS)

        try:
            ask()
        except (FailureGroup, Exception) as error:  # every endpoint's fault is told, not only the first one's
            faults.append(f"{operation.method} {operation.path}: {error}"[:1500])
    assert asked > 10
    return faults


def can_be_wrong(operation) -> bool:
    """Whether there is anything in a request that can be of another form."""
    return bool(list(operation.path_parameters) or list(operation.query) or (operation.body and operation.path != "/api/v1/bundles"))


MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


@pytest.mark.parametrize("mode", MODES)
def test_the_api_keeps_its_document(fuzzed, mode):
    assert ask_everything(fuzzed, 6, mode, derandomize=True) == []
    assert fuzzed.get("results", include_unverified=True) is not None


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_api_keeps_its_document_over_many_requests(fuzzed, mode):
    assert ask_everything(fuzzed, 100, mode) == []
    assert fuzzed.get("results", include_unverified=True) is not None


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
