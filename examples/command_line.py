"""A command line from a dataclass: each field is a flag, and the docstring under it is the flag's help."""

from __future__ import annotations

import argparse
import ast
import inspect
from dataclasses import fields
from itertools import pairwise
from typing import TypeVar

A = TypeVar("A")


def parse(args: type[A]) -> A:
    """Returns an `args` filled from the command line; `--total-steps` sets the field `total_steps`.

    Args:
        args: A dataclass whose fields all have defaults of type bool, int, float or str; `--no-flag` unsets a bool.
    """
    parser = argparse.ArgumentParser(
        description=inspect.getdoc(args), formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    docs = _docs_under_fields(args)
    for field in fields(args):  # type: ignore[arg-type]
        flag = "--" + field.name.replace("_", "-")
        kind = argparse.BooleanOptionalAction if isinstance(field.default, bool) else None
        options = {"action": kind} if kind else {"type": type(field.default)}
        parser.add_argument(flag, default=field.default, help=docs.get(field.name), **options)
    return args(**vars(parser.parse_args()))


def _docs_under_fields(args: type) -> dict[str, str]:
    body = ast.parse(inspect.getsource(args)).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: doc.value.value
        for field, doc in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }
