"""Linear and mixed-integer programs, written term by term and solved by HiGHS (through scipy). Pure data; no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

OPTIMAL, LIMIT, INFEASIBLE = 0, 1, 2  # statuses of scipy.optimize.milp that are answers
ROUNDING = 1e-5  # by which a point may be off; HiGHS itself allows 1e-6


@dataclass(frozen=True)
class Affine:
    """A constant plus a sum of coefficient x column."""

    terms: Mapping[int, float] = field(default_factory=dict)
    constant: float = 0.0

    def __add__(self, other: Affine | float) -> Affine:
        if not isinstance(other, Affine):
            return Affine(self.terms, self.constant + other)
        terms = dict(self.terms)
        for column, by in other.terms.items():
            terms[column] = terms.get(column, 0.0) + by
        return Affine(terms, self.constant + other.constant)

    __radd__ = __add__

    def __mul__(self, by: float) -> Affine:
        return Affine({column: c * by for column, c in self.terms.items()}, self.constant * by)

    __rmul__ = __mul__

    def __sub__(self, other: Affine | float) -> Affine:
        return self + other * -1

    def __rsub__(self, other: float) -> Affine:
        return self * -1 + other

    def at(self, values: np.ndarray) -> float:
        """Its value where the columns have these."""
        return self.constant + sum(by * float(values[column]) for column, by in self.terms.items())


ZERO = Affine()


def total(parts: Iterable[Affine | float]) -> Affine:
    """The sum, in time linear in its terms."""
    terms: dict[int, float] = {}
    constant = 0.0
    for part in parts:
        if not isinstance(part, Affine):
            constant += part
            continue
        constant += part.constant
        for column, by in part.terms.items():
            terms[column] = terms.get(column, 0.0) + by
    return Affine(terms, constant)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the solver says. `values` [columns] are of the best point found, None without one; no point's objective is below `bound`."""

    status: int  # OPTIMAL, LIMIT or INFEASIBLE
    objective: float  # inf without a point
    bound: float
    values: np.ndarray | None


class Program:
    """Columns, rows and an objective to minimise."""

    def __init__(self) -> None:
        self._low: list[float] = []
        self._high: list[float] = []
        self._is_integer: list[bool] = []
        self._rows: list[tuple[Mapping[int, float], float]] = []  # terms . columns <= the number

    def column(self, low: float = 0.0, high: float = 1.0, *, is_integer: bool = False) -> Affine:
        """A new column within these bounds."""
        self._low.append(low)
        self._high.append(high)
        self._is_integer.append(is_integer)
        return Affine({len(self._low) - 1: 1.0})

    def binary(self) -> Affine:
        """A new column that is 0 or 1."""
        return self.column(is_integer=True)

    def at_most(self, left: Affine | float, right: Affine | float) -> None:
        """A row: left <= right."""
        both = left - right if isinstance(left, Affine) else ZERO + left - right
        self._rows.append((both.terms, -both.constant))

    @property
    def columns(self) -> int:
        """How many there are."""
        return len(self._low)

    def minimise(self, objective: Affine, *, time_limit_seconds: float | None = None, relative_gap: float = 0.0) -> Answer:
        """The least value of the objective. RuntimeError where the solver gives no answer at all (unbounded, numerical trouble)."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # a third of a second to load
        from scipy.sparse import csr_array

        if not self.columns:  # scipy wants one
            is_empty = any(right < 0 for _, right in self._rows)
            if is_empty:
                return Answer(status=INFEASIBLE, objective=math.inf, bound=math.inf, values=None)
            return Answer(status=OPTIMAL, objective=objective.constant, bound=objective.constant, values=np.zeros(0))
        cost = np.zeros(self.columns)
        for column, by in objective.terms.items():
            cost[column] += by
        counts = [len(terms) for terms, _ in self._rows]
        matrix = csr_array((np.array([by for terms, _ in self._rows for by in terms.values()], np.float64),
                            np.array([column for terms, _ in self._rows for column in terms], np.int64),
                            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)), shape=(len(self._rows), self.columns))
        options = {"mip_rel_gap": relative_gap} | ({} if time_limit_seconds is None else {"time_limit": time_limit_seconds})
        found = milp(cost, integrality=np.array(self._is_integer, np.int8), bounds=Bounds(self._low, self._high),
                     constraints=[LinearConstraint(matrix, -np.inf, [right for _, right in self._rows])] if self._rows else [],
                     options=options)
        if found.status not in (OPTIMAL, LIMIT, INFEASIBLE):
            raise RuntimeError(f"HiGHS gives no answer: {found.message}")
        if found.x is not None and not self._allows(found.x, matrix):
            if found.status == OPTIMAL:
                raise RuntimeError("HiGHS calls a point the best that breaks a row")
            found.x = None  # stopped by the clock, it may hand out a point that is none
        return self._answer(found, objective.constant)

    def _allows(self, values: np.ndarray, matrix) -> bool:
        """Is the point whole where it has to be, and within bounds and rows, up to rounding?"""
        whole = values[np.array(self._is_integer, np.bool_)]
        if np.any(np.abs(whole - np.round(whole)) > ROUNDING) or np.any(values < np.array(self._low) - ROUNDING):
            return False
        right = np.array([number for _, number in self._rows])
        return bool(np.all(values <= np.array(self._high) + ROUNDING) and np.all(matrix @ values <= right + ROUNDING * (1 + np.abs(right))))

    def _answer(self, found, constant: float) -> Answer:
        if found.status == INFEASIBLE:
            return Answer(status=INFEASIBLE, objective=math.inf, bound=math.inf, values=None)
        value = math.inf if found.x is None else float(found.fun) + constant
        dual = getattr(found, "mip_dual_bound", None)
        known = value if found.status == OPTIMAL and not any(self._is_integer) else -math.inf if dual is None else float(dual) + constant
        return Answer(status=found.status, objective=value, bound=min(known, value), values=found.x)
