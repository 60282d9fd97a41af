"""Sections of files: frozen dataclasses whose fields say what a key takes and what it is.

A section reads, checks, writes and documents itself by its fields: `check` reads a mapping and
records every problem with its file, line and key, `as_data` writes it, and `keys_of` lists what the
pages of the documentation say of it. Sections made in code are not checked, so `replace` costs what
it does for any dataclass.

YAML 1.1 reads ``1e6`` as text and ``40_000_000`` as a number, so text that is a decimal number
counts as one; a boolean never does.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from itertools import pairwise
from typing import (
    Annotated,
    Any,
    ClassVar,
    NoReturn,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import (
    CoreSchema,
    ErrorDetails,
    InitErrorDetails,
    PydanticCustomError,
    PydanticKnownError,
    core_schema,
)

from predictor.document import KeyPath, Problems, shown
from predictor.errors import InputError, did_you_mean

_DECIMAL = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]{1,4})?\Z")
_LONGEST = 300
_PROBLEM = "problem"
"""Type of the errors of pydantic that are in our words."""

SPELLINGS = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "tf32x3": "tf32",
    "tensorfloat32": "tf32",
    "tw": "table_wise",
    "cw": "column_wise",
    "rw": "row_wise",
    "dp": "data_parallel",
    "twrw": "table_row_wise",
    "twcw": "table_column_wise",
    "grid": "grid_shard",
    "adagrad": "exact_adagrad",
    "rowwise_adagrad": "exact_row_wise_adagrad",
    "row_wise_adagrad": "exact_row_wise_adagrad",
    "cat": "concat",
    "quant": "fused",
    "quant_uvm": "fused_uvm",
    "quant_uvm_caching": "fused_uvm_caching",
    "fp8": "nfp8",
    "uint8": "int8",
    "dcn": "dcn_v2",
    "dcnv2": "dcn_v2",
}
"""Other names people know the values by; a hint, never accepted in silence."""


def refuse(value: object, rule: str) -> PydanticCustomError:
    """Return the error of a value that breaks ``rule``, a sentence that starts with a verb."""
    return _problem(f"got {shown(value)}; {rule}")


def _problem(text: str) -> PydanticCustomError:
    return PydanticCustomError(_PROBLEM, "{text}", {"text": text})


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return `did_you_mean`, which here also takes other spellings."""
    names = list(allowed)
    spelling = SPELLINGS.get(name.lower())
    if spelling in names:
        return f" (did you mean '{spelling}'?)"
    return did_you_mean(name, names)


def as_number(value: object) -> float | int | None:
    """A finite number from a number or decimal text; None for anything else, booleans too."""
    if isinstance(value, str) and len(value) <= _LONGEST and _DECIMAL.match(value.strip()):
        text = value.strip().replace("_", "")
        value = int(text) if text.lstrip("+-").isdigit() else float(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def whole(minimum: int, maximum: int) -> BeforeValidator:
    """An integer of ``minimum..maximum``; integral floats and scientific notation count."""

    def check(value: object) -> int:
        number = as_number(value)
        if number is None or number != int(number):
            raise refuse(value, f"it must be a whole number, at least {minimum}")
        if not minimum <= number <= maximum:
            raise refuse(value, f"it must be at least {minimum} and at most {maximum}")
        return int(number)

    return _kind(check, f"whole number, {minimum} to {_short(maximum)}")


def real(low: float, high: float, *, above: bool = False) -> BeforeValidator:
    """A number of ``low..high``, both included unless ``above`` leaves out the lower one."""
    words = f"{'more than' if above else 'at least'} {low:g} and at most {high:g}"

    def check(value: object) -> float:
        number = as_number(value)
        if number is None or not low <= number <= high or (above and number == low):
            raise refuse(value, f"it must be a number, {words}")
        return float(number)

    ends = f"{'above' if above else 'from'} {low:g} to {_short(high)}"
    return _kind(check, f"number {ends}")


def choice(allowed: Iterable[str]) -> BeforeValidator:
    """One of some words."""
    names = [str(name) for name in allowed]

    def check(value: object) -> str:
        if isinstance(value, str) and value in names:
            return value
        hint = nearest(value, names) if isinstance(value, str) else ""
        raise refuse(value, f"allowed: {', '.join(names)}{hint}")

    return _kind(check, ", ".join(f"`{name}`" for name in names))


def text(*, forbidden: Mapping[str, str] | None = None) -> BeforeValidator:
    """Non-empty text.

    Args:
        forbidden: characters that must not occur, each with the reason.
    """

    def check(value: object) -> str:
        if not isinstance(value, str):
            hint = "give one word"
            if isinstance(value, bool):
                hint = "YAML reads yes, no, on, off, true, false as booleans unless they are quoted"
            elif isinstance(value, int | float):
                hint = f'write it in quotes: "{value}"'
            raise refuse(value, f"it must be text; {hint}")
        if not value.strip():
            raise refuse(value, "it must not be empty")
        for letter, why in (forbidden or {}).items():
            if letter in value:
                raise refuse(value, f"it must not contain '{letter}': {why}")
        return value

    without = "".join(f" without '{letter}'" for letter in forbidden or ())
    return _kind(check, f"text{without}")


def _kind(check: Callable[[object], Any], words: str) -> BeforeValidator:
    """A validator that says what it allows."""
    check.__doc__ = words
    return BeforeValidator(check)


def _short(number: float) -> str:
    """A bound as people write it: 1,000 or 10^9."""
    power = round(math.log10(number)) if number > 0 else 0
    exact = power > 4 and number == 10**power
    return f"10^{power}" if exact else f"{number:,.10g}"


def form(
    example: str,
    words: Mapping[str, Any],
    sections: Sequence[type[Section]],
    loaded: tuple[type, ...] = (),
) -> PlainValidator:
    """A word, or a mapping of a tag to its section.

    Args:
        example: the forms, as a message shows them.
        words: each with what it stands for.
        sections: each with a tag.
        loaded: types of values that a loader puts in place of the name of their file.
    """
    tags = {section.tag: section for section in sections}

    def check(value: object) -> Any:
        if isinstance(value, (*loaded, *sections)):
            return value
        keys = list(value) if isinstance(value, dict) else [value]
        if isinstance(value, str) and value in words:
            return words[value]
        if isinstance(value, dict) and len(keys) == 1 and keys[0] in tags:
            return read_at(tags[keys[0]], value[keys[0]], (keys[0],))
        hints = (nearest(key, [*words, *tags]) for key in keys if isinstance(key, str))
        raise refuse(value, f"allowed: {example}{next(filter(None, hints), '')}")

    check.__doc__ = example
    return PlainValidator(check)


def _flag(value: object) -> Any:
    """`true`, `false`"""
    if isinstance(value, bool):
        return value
    raise refuse(value, "allowed: true, false")


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """each once"""
    if len(set(values)) != len(values):
        raise refuse(list(values), "it must name each only once")
    return values


SCHEMA_VERSION = 1

MAX_WIDTH = 2**20
MAX_COUNT = 10**9

Width = Annotated[int, whole(1, MAX_WIDTH)]
Count = Annotated[int, whole(1, MAX_COUNT)]
Name = Annotated[str, text()]
FLAG = BeforeValidator(_flag)
Flag = Annotated[bool, FLAG]
DISTINCT = AfterValidator(_distinct)
NOT_EMPTY = Field(min_length=1)


def _unknown(value: object) -> NoReturn:
    raise PydanticKnownError("unexpected_keyword_argument")


NOT_IN_FILE = BeforeValidator(_unknown)
"""Mark of fields that code sets: in a file their names are unknown keys."""


def _version(value: Any) -> int:
    """`1`"""
    if isinstance(value, bool) or value != SCHEMA_VERSION:
        raise refuse(value, f"this shardopt reads schema {SCHEMA_VERSION}: write 'schema: 1'")
    return SCHEMA_VERSION


def named(key: str) -> Any:
    """Give the key of a field that has another name in code."""
    return Field(alias=key)


SchemaVersion = Annotated[int, PlainValidator(_version), named("schema")]


class Section:
    """Base of frozen dataclasses that are mappings with known keys in a file; a key without a value
    counts as left out.

    The text below a field says what its key is, with its unit: on the pages of the documentation,
    and in an error where the key is missing.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    tag: ClassVar[str] = ""
    """Key that this mapping is the value of, or word that it stands for, among other forms."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Keys that a user may expect, each with what to say of it."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(cls._read, handler(source))

    @classmethod
    def _read(cls, raw: object, read: Callable[[Any], Self]) -> Self:
        if isinstance(raw, cls):
            return raw
        keys = keys_of(cls)
        if not isinstance(raw, dict):
            raise refuse(raw, f"it must be a mapping with {', '.join(keys)}")
        try:
            section = read({k: v for k, v in raw.items() if v is not None or k not in keys})
            section.refuse_contradictions()
        except InputError as error:
            raise _problem(str(error)) from None
        except ValidationError as error:
            raise _restated(error, lambda item: _message(item, cls)) from None
        return section

    def refuse_contradictions(self) -> None:
        """Refuse values of a file that are allowed each, but not together."""


@dataclass(frozen=True)
class Key:
    """One key of a section.

    Args:
        section: that has it.
        field: name of the attribute.
        kind: its annotation.
        default: `MISSING` where the key is required.
    """

    section: Any
    field: str
    kind: Any
    default: Any

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def about(self) -> str:
        """Text below the field."""
        return _texts(self.section).get(self.field, "")

    @property
    def allowed(self) -> str:
        """Kind of value that it takes, in a few words."""
        return _allowed(self.kind)


def keys_of(section: type[Section]) -> Mapping[str, Key]:
    """Return the keys of a section by their names in the file."""
    kind: Any = section  # to mypy, a class with subclasses cannot be hashed
    return _keys(kind)


@cache
def _keys(section: Any) -> Mapping[str, Key]:
    hints = get_type_hints(section, include_extras=True)
    keys = {}
    for field in sorted(dataclasses.fields(section), key=lambda f: bool(f.kw_only)):
        notes = _notes(hints[field.name])
        if NOT_IN_FILE in notes:
            continue
        aliases = (note.alias for note in notes if isinstance(note, FieldInfo))
        name = next(filter(None, aliases), field.name)
        made = field.default_factory
        default = field.default if made is MISSING else made()
        keys[name] = Key(section, field.name, hints[field.name], default)
    return keys


@cache
def _texts(section: Any) -> Mapping[str, str]:
    """Return the texts below the fields of a class, which Python itself does not keep."""
    texts: dict[str, str] = {}
    for kind in reversed(section.__mro__[:-1]):
        try:
            source = inspect.getsource(kind)
        except OSError:  # there is no source
            continue
        (tree,) = ast.parse(source).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in pairwise(tree.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return texts


def _notes(kind: Any) -> tuple[Any, ...]:
    return get_args(kind)[1:] if get_origin(kind) is Annotated else ()


def _allowed(kind: Any) -> str:
    rules = [item.func.__doc__ or "" for item in _notes(kind) if hasattr(item, "func")]
    if any(isinstance(item, PlainValidator) for item in _notes(kind)):
        return rules[0]
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    inner = [item for item in get_args(kind) if item not in (type(None), ...)]
    if isinstance(kind, type) and issubclass(kind, Section):
        rules.insert(0, "mapping below")
    elif get_origin(kind) in (tuple, list):
        rules.insert(0, f"list: {_allowed(inner[0])}")
    elif get_origin(kind) is not dict:
        rules += map(_allowed, inner)
    return "; ".join(filter(None, rules))


def as_data(
    section: Section, *, full: bool = False, leave_out: Collection[str] = ()
) -> dict[str, Any]:
    """Return the mapping that `check` reads as this section, as YAML and JSON take it.

    Args:
        full: with keys that are as if they were left out.
        leave_out: keys that somebody else writes.
    """
    keys = keys_of(type(section)).items()
    values = {n: (getattr(section, key.field), key) for n, key in keys if n not in leave_out}
    return {
        name: _plain(value, full=full)
        for name, (value, key) in values.items()
        if full or value != key.default
    }


def _plain(value: Any, *, full: bool) -> Any:
    if isinstance(value, Section):
        data = as_data(value, full=full)
        return {value.tag: data} if value.tag and keys_of(type(value)) else value.tag or data
    if isinstance(value, tuple | list):
        return [_plain(item, full=full) for item in value]
    return str(value) if isinstance(value, str) else value


AnySection = TypeVar("AnySection", bound=Section)


@cache
def _adapter(section: Any) -> TypeAdapter[Any]:
    return TypeAdapter(section)


def check(
    section: type[AnySection], raw: object, path: KeyPath, problems: Problems
) -> AnySection | None:
    """Read a mapping as a section; None when it has problems, which are then recorded."""
    try:
        return read_at(section, raw)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            problems.add((*path, *item["loc"]), item["msg"])
        return None


def read_at(section: type[AnySection], raw: object, path: KeyPath = ()) -> AnySection:
    """Read a mapping as a section.

    Args:
        path: of the mapping in what a validator was given.

    Raises:
        ValidationError: of pydantic, in our words.
    """
    kind: Any = section
    try:
        read: AnySection = _adapter(kind).validate_python(raw)
        return read
    except ValidationError as error:
        raise _restated(error, lambda item: item["msg"], path) from None


def _restated(
    error: ValidationError, message: Callable[[ErrorDetails], str], path: KeyPath = ()
) -> ValidationError:
    """Return an error with other messages, at places below ``path``."""
    return ValidationError.from_exception_data(
        error.title,
        [
            InitErrorDetails(
                type=_problem(message(item)), loc=(*path, *item["loc"]), input=item["input"]
            )
            for item in error.errors(include_url=False)
            if not _lacks_bad_entries_alone(item)
        ],
    )


def _lacks_bad_entries_alone(item: ErrorDetails) -> bool:
    """Return True for a list that is too short only because its bad entries, which have errors of
    their own, do not count."""
    return item["type"] == "too_short" and len(item["input"]) >= item["ctx"]["min_length"]


def _phrase(sentence: str) -> str:
    """Return a sentence as part of another; words such as MiB stay."""
    first, rest = sentence[:1], sentence.split()[0][1:]
    return f"{first.lower() if not rest or rest.islower() else first}{sentence[1:].rstrip('.')}"


def _message(item: ErrorDetails, section: type[Section]) -> str:
    """Say in our words what is wrong with a key of this section."""
    kind, value, key = item["type"], item["input"], str(item["loc"][-1])
    keys = keys_of(section)
    if kind == "missing":
        return f"missing; give {_phrase(keys[key].about)}" if keys[key].about else "missing"
    if kind == "unexpected_keyword_argument":
        unknown_key = f"unknown key{nearest(key, keys)}; known: {', '.join(keys)}"
        return section.refused.get(key, unknown_key)
    if kind in ("tuple_type", "list_type"):
        hint = f"; write [{value}]" if isinstance(value, str | int | float) else ""
        return f"got {shown(value)}; it must be a list{hint}"
    if kind == "too_long":
        return f"the list is too long; give at most {item['ctx']['max_length']}"
    return "got an empty list; give at least one" if kind == "too_short" else item["msg"]
