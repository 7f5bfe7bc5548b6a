"""What an error says, word for word, and that it survives the way from one process to another."""

from __future__ import annotations

import pickle

import pytest

from vramlab.errors import PlanInfeasible, sized


@pytest.mark.parametrize(("nbytes", "eager", "words"), [
    (1, None, "1 byte"), (1023, None, "1,023 bytes"), (1536, None, "1,536 bytes (1.5 KiB)"),
    (306_820_920, None, "306,820,920 bytes (292.6 MiB)"),
    (306_820_920, 613_641_840, "306,820,920 bytes (292.6 MiB, 50.0 % of eager's peak)"),
    (12 * 2**30, None, "12,884,901,888 bytes (12 GiB)"), (600, 1000, "600 bytes (60.0 % of eager's peak)"),
])
def test_bytes_stand_exact_and_as_a_person_reads_them(nbytes, eager, words):
    assert sized(nbytes, eager) == words


def test_a_refusal_tells_both_budgets_both_ways():
    refusal = PlanInfeasible(method="delta", budget_bytes=300 * 2**20, smallest_bytes=330 * 2**20, op="#7 aten.mm.default (fc)")
    said = str(refusal)
    assert said == ("method 'delta' cannot keep this step within 314,572,800 bytes (300 MiB); the smallest budget found that it can reach "
                    "is 346,030,080 bytes (330 MiB); there #7 aten.mm.default (fc) binds")
    told = refusal.told(eager_peak_bytes=600 * 2**20, note="More")
    assert str(told) == ("method 'delta' cannot keep this step within 314,572,800 bytes (300 MiB, 50.0 % of eager's peak); the smallest "
                         "budget found that it can reach is 346,030,080 bytes (330 MiB, 55.0 % of eager's peak); there "
                         "#7 aten.mm.default (fc) binds. More")
    assert str(refusal) == said, "the first stays as it is"
    stuck = PlanInfeasible(method="delta", budget_bytes=5, smallest_bytes=None, op="#7")
    assert str(stuck) == "method 'delta' cannot keep this step within 5 bytes; it got stuck at #7"
    for error in (refusal, told, stuck):
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), vars(again)) == (str(error), vars(error))
