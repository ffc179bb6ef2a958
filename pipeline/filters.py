"""The text of ``--where`` -> a ``pyarrow.compute.Expression`` -> the rows of a file that pass it.

    pos = 'n' and (year >= 1990 or source in ('wn', 'wiki')) and not title like '%draft%' and url is not null

A condition is ``column OPERATOR value`` with ``= != < <= > >=``; ``column [not] in (value, …)``; ``column [not] like
'pattern'``, where ``%`` stands for any characters and ``_`` for one; ``column is [not] null``; or a boolean column
alone. ``not`` binds stronger than ``and``, ``and`` stronger than ``or``; words are not case-sensitive, names are. A
name that is no plain word stands in double quotes, a dotted one reaches into a struct. Dates and times are quoted, as
ISO 8601.

A value takes the type of its column. As in SQL a comparison with null is unknown, also within ``not``, and an unknown
row does not pass. What is parsed is never evaluated as Python.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.config import nearest
from pipeline.errors import ConfigError

MAX_DIGITS = 40
"""More than any integer column holds."""
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
WORDS = ("and", "or", "not", "in", "is", "null", "like", "true", "false")
MAX_DEPTH = 50
MAX_CONDITIONS = 1_000  # Arrow walks an expression by recursion
TOKEN = re.compile(
    r"""(?P<text>'(?:[^']|'')*')
    |   (?P<quoted>"(?:[^"]|"")*")
    |   (?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?!\w))
    |   (?P<name>[^\W\d][\w.]*)
    |   (?P<sign><=|>=|<>|!=|==|[=<>(),])""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Filter:
    """A condition on rows.

    Attributes:
        expression: for a table whose ``columns`` have the types of the schema that it was parsed for.
        columns: the top-level columns it reads, with their types.
    """

    expression: pc.Expression
    columns: pa.Schema


def rows_that_pass(condition: Filter, parquet: pq.ParquetFile) -> NDArray[np.int64]:
    """(m,) ascending rows of a file; only the columns of the condition are read."""
    found, row = [np.empty(0, dtype=np.int64)], 0
    for batch in parquet.iter_batches(columns=condition.columns.names):
        # Cast, because a column that is all null in one file has no type there.
        table = pa.Table.from_batches([batch]).select(condition.columns.names).cast(condition.columns)
        rows = pa.array(np.arange(row, row + batch.num_rows))
        found.append(table.append_column("", rows).filter(condition.expression).column("").to_numpy())
        row += batch.num_rows
    return np.concatenate(found)


class _Token(NamedTuple):
    kind: str
    text: str
    at: int

    @property
    def word(self) -> str:
        """What it is if it is a keyword or a sign."""
        return self.text.lower() if self.kind in ("name", "sign") else ""


class _Column(NamedTuple):
    name: str
    field: pc.Expression
    type: pa.DataType


def parse_filter(text: str, schema: pa.Schema) -> Filter:
    """The filter that ``text`` stands for.

    Args:
        text: a condition as above.
        schema: columns it may name, with their types.

    Raises:
        ConfigError: it is no condition, names an unknown column, or a value does not fit its column; says where.
    """
    return _Parser(text, schema).parse()


class _Parser:
    def __init__(self, text: str, schema: pa.Schema) -> None:
        self._text, self._schema = text, schema
        self._tokens = self._split()
        self._at = self._depth = self._conditions = 0
        self._columns: dict[str, None] = {}

    def parse(self) -> Filter:
        expression = self._either()
        if self._next.kind != "end":
            self._fail(self._next, "expected 'and', 'or' or the end")
        return Filter(expression, pa.schema([self._schema.field(name) for name in self._columns]))

    # -- words -------------------------------------------------------------------------------------------------------

    def _split(self) -> list[_Token]:
        tokens, at = [], 0
        while at < len(self._text):
            if self._text[at].isspace():
                at += 1
            elif found := TOKEN.match(self._text, at):
                tokens.append(_Token(str(found.lastgroup), found[0], at))
                at = found.end()
            else:
                rest = _Token("", self._text[at], at)
                self._fail(rest, "expected its end: a quote that closes it" if rest.text in "'\"" else "no such sign")
        return [*tokens, _Token("end", "", at)]

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        self._at += 1
        return self._tokens[self._at - 1]

    def _accept(self, *words: str) -> bool:
        """Step over these words if they come next."""
        if [token.word for token in self._tokens[self._at : self._at + len(words)]] != list(words):
            return False
        self._at += len(words)
        return True

    def _expect(self, word: str) -> None:
        if not self._accept(word):
            self._fail(self._next, f"expected '{word}'")

    def _fail(self, token: _Token, why: str) -> NoReturn:
        found = f"found {token.text}" if token.text else "it ends"
        raise ConfigError(f"--where {self._text}: {found} at character {token.at + 1}; {why}")

    # -- conditions --------------------------------------------------------------------------------------------------

    def _either(self) -> pc.Expression:
        found = [self._both()]
        while self._accept("or"):
            found.append(self._both())
        return functools.reduce(operator.or_, found)

    def _both(self) -> pc.Expression:
        found = [self._negated()]
        while self._accept("and"):
            found.append(self._negated())
        return functools.reduce(operator.and_, found)

    def _negated(self) -> pc.Expression:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(self._next, f"expected at most {MAX_DEPTH} within each other")
        if self._accept("not"):
            found = ~self._negated()
        elif self._accept("("):
            found = self._either()
            self._expect(")")
        else:
            found = self._condition()
        self._depth -= 1
        return found

    def _condition(self) -> pc.Expression:
        self._conditions += 1
        if self._conditions > MAX_CONDITIONS:
            self._fail(self._next, f"expected at most {MAX_CONDITIONS:,} conditions; 'in' takes many values at once")
        start, column = self._next, self._column()
        token = self._next
        if self._accept("is"):
            negated = self._accept("not")
            self._expect("null")
            return column.field.is_valid() if negated else column.field.is_null()
        if token.word in COMPARISONS:
            self._take()
            return COMPARISONS[token.word](column.field, pc.scalar(self._value(column)))
        for negated, words in ((False, ()), (True, ("not",))):
            if self._accept(*words, "in"):
                return _maybe_not(self._membership(column), negated)
            if self._accept(*words, "like"):
                return _maybe_not(self._likeness(column), negated)
        if pa.types.is_boolean(column.type):
            return column.field
        why = f"expected = != < <= > >= in, like or is null after {start.text}"
        return self._fail(token, why)

    def _column(self) -> _Column:
        token = self._take()
        if token.kind not in ("name", "quoted") or (token.kind == "name" and token.word in WORDS):
            self._fail(token, "expected a column")
        name = token.text[1:-1].replace('""', '"') if token.kind == "quoted" else token.text
        head, *path = [name] if name in self._schema.names else name.split(".")
        if head not in self._schema.names:
            known = self._schema.names
            self._fail(token, f"no such column; {nearest(name, known)}" if known else "there are no columns")
        kind = self._schema.field(head).type
        for part in path:
            if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
                self._fail(token, f"{head} is {kind} and has no field {part}")
            kind = kind.field(part).type
        self._columns[head] = None
        return _Column(name, pc.field(head, *path) if path else pc.field(head), kind)

    def _membership(self, column: _Column) -> pc.Expression:
        self._expect("(")
        values = [self._value(column)]
        while self._accept(","):
            values.append(self._value(column))
        self._expect(")")
        among = pa.array([value.as_py() for value in values], column.type)
        # Arrow calls null a non-member; here it must stay unknown, or 'not in' would let it pass.
        unknown = pc.scalar(pa.scalar(None, pa.bool_()))
        return pc.if_else(column.field.is_valid(), column.field.isin(among), unknown)

    def _likeness(self, column: _Column) -> pc.Expression:
        if not pa.types.is_string(column.type):
            self._fail(self._next, f"{column.name} is {column.type}; 'like' is for text")
        return pc.match_like(column.field, self._value(column).as_py())

    # -- values ------------------------------------------------------------------------------------------------------

    def _value(self, column: _Column) -> pa.Scalar:
        token = self._take()
        if token.word == "null":
            self._fail(token, f"expected {column.name} is null, or is not null")
        if token.kind not in ("text", "quoted", "number") and token.word not in ("true", "false"):
            self._fail(token, "expected a value: 'text', a number, true or false")
        try:
            return _scalar(token, column.type)
        except (pa.ArrowException, ArithmeticError, ValueError, TypeError):
            self._fail(token, f"{column.name} is {column.type}; expected {_example(column.type)}")


def _maybe_not(expression: pc.Expression, negated: bool) -> pc.Expression:
    return ~expression if negated else expression


def _scalar(token: _Token, kind: pa.DataType) -> pa.Scalar:
    if token.kind == "number":
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
            raise TypeError("a number")
        if pa.types.is_integer(kind):
            number = Decimal(token.text)
            if number.adjusted() > MAX_DIGITS:  # the whole number of 1e999999 takes minutes to write out
                raise ValueError("too large")
            if number != int(number):
                raise ValueError("a fraction")
            return pa.scalar(int(number), kind)
        return pa.scalar(float(token.text) if pa.types.is_floating(kind) else Decimal(token.text), kind)
    if token.kind == "name":
        if not pa.types.is_boolean(kind):
            raise TypeError("a truth value")
        return pa.scalar(token.word == "true")
    quote = token.text[0]
    text = token.text[1:-1].replace(quote * 2, quote)
    if pa.types.is_string(kind):
        return pa.scalar(text)
    if pa.types.is_binary(kind):
        return pa.scalar(text.encode())
    if not pa.types.is_temporal(kind):
        raise TypeError("text")
    if pa.types.is_timestamp(kind) and kind.tz is not None and not re.search(r"(Z|[+-]\d\d:?\d\d)$", text):
        return pc.assume_timezone(pa.scalar(text).cast(pa.timestamp(kind.unit)), kind.tz)
    return pa.scalar(text).cast(kind)


def _example(kind: pa.DataType) -> str:
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return "text in single quotes"
    if pa.types.is_boolean(kind):
        return "true or false"
    if pa.types.is_integer(kind):
        return "a whole number in its range"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "a number"
    if pa.types.is_date(kind):
        return "a date such as '2026-12-31'"
    if pa.types.is_timestamp(kind):
        return "a time such as '2026-12-31 23:59:00'"
    if pa.types.is_time(kind):
        return "a time such as '23:59:00'"
    return "only 'is null' or 'is not null'"
