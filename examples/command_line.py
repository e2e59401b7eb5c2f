"""A command line from a dataclass: each field is a flag, and the docstring under it is the flag's help."""

from __future__ import annotations

import argparse
import ast
import inspect
from dataclasses import Field, fields, is_dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

A = TypeVar("A")


def parse(args: type[A]) -> A:
    """Returns an `args` filled from the command line; `--total-steps` sets the field `total_steps`.

    Args:
        args: A dataclass whose fields all have defaults of type bool, int, float or str; `--no-flag` unsets a bool. An
            int is at least 1, or 0 where that is its default, or what is the field's `metadata={"least": ...}`.
    """
    parser = argparse.ArgumentParser(
        description=inspect.getdoc(args), formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    docs = {name: text for kind in reversed(args.__mro__) for name, text in _docs_under_fields(kind).items()}
    for field in fields(args):  # type: ignore[arg-type]
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, default=field.default, help=docs.get(field.name), **_options(field))
    return args(**vars(parser.parse_args()))


def _options(field: Field[Any]) -> dict[str, Any]:
    kind = type(field.default)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": partial(_at_least, field.metadata.get("least", min(field.default, 1))) if kind is int else kind}


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} given, expected a whole number of at least {least}")
    return number


def _docs_under_fields(kind: type) -> dict[str, str]:
    if not is_dataclass(kind):
        return {}
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: doc.value.value
        for field, doc in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }
