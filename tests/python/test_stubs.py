"""The stub of the extension names what the extension has, and the public face is what the contract
says."""

import ast
import importlib
import importlib.util
import inspect
import pathlib
import re

import pytest
import torch

import koila
from koila import _core

ROOT = pathlib.Path(__file__).parents[2]
STUB = pathlib.Path(koila.__file__).with_name("_core.pyi")


def test_the_package_says_that_it_is_typed():
    assert pathlib.Path(koila.__file__).with_name("py.typed").exists()


def test_stub_and_module_have_the_same_names():
    tree = ast.parse(STUB.read_text(encoding="utf-8"))
    stub = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    stub |= {n.target.id for n in tree.body if isinstance(n, ast.AnnAssign)}
    module = {n for n in dir(_core) if not (n.startswith("__") and n != "__version__")}
    assert stub - {n for n in stub if n.startswith("_") and n != "__version__"} == module - {
        n for n in module if n.startswith("_") and n != "__version__"
    }


def test_stub_and_module_have_the_same_members_in_their_classes():
    tree = ast.parse(STUB.read_text(encoding="utf-8"))
    for c in (n for n in tree.body if isinstance(n, ast.ClassDef)):
        stub = {n.target.id if isinstance(n, ast.AnnAssign) else n.name for n in c.body}
        assert {n for n in stub if n[:1] != "_"} == {
            n for n in dir(getattr(_core, c.name)) if n[:1] != "_"
        }, c.name
        assert all(hasattr(getattr(_core, c.name), n) for n in stub)


def _said(doc):
    """`name(a, b=1): what it does` -> ("name", 2); None where a docstring says no such thing."""
    found = re.match(r"(\w+)\((.*?)\)(?::| ->|$)", doc or "", re.S)
    return found and (
        found[1],
        len([p for p in re.sub(r"\[.*?\]|\(.*?\)", "_", found[2]).split(",") if p.strip()]),
    )


def _agree(f, doc):
    """Has `f` of the stub as many parameters as the docstring of the function says? None: it does
    not say."""
    n, said = len(f.args.posonlyargs + f.args.args), _said(doc)
    return n - len(f.args.defaults) <= said[1] <= n if said and said[0] == f.name else None


def test_stub_and_docstrings_name_as_many_parameters():
    answers = {
        f.name: _agree(f, getattr(_core, f.name).__doc__)
        for f in ast.parse(STUB.read_text(encoding="utf-8")).body
        if isinstance(f, ast.FunctionDef)
    }
    assert [name for name, answer in answers.items() if answer is False] == [] and sum(
        map(bool, answers.values())
    ) > 40
    planted = ast.parse("def f(a, b=1, /): ...").body[0]
    assert [
        _agree(planted, d)
        for d in ("f(): x", "f(a): x", "f(a, [b, c]) -> y", "f(a, b, c): x", "of f")
    ] == [False, True, True, False, None]


CONTRACT = """lazy LazyTensor run budget set_budget micro_batch last_plan plans explain strict Plan
    KoilaError OutOfMemory GatherError StaleValueError UnsupportedError""".split()


@pytest.mark.parametrize("name", CONTRACT)
def test_the_contract_s_names_are_there(name):
    assert name in koila.__all__ and getattr(koila, name).__doc__


def test_all_is_true():
    assert all(hasattr(koila, n) for n in koila.__all__) and len(set(koila.__all__)) == len(
        koila.__all__
    )


def test_errors_derive_as_promised():
    for name in ("OutOfMemory", "GatherError", "StaleValueError", "UnsupportedError"):
        assert issubclass(getattr(koila, name), koila.KoilaError)
    assert issubclass(koila.OutOfMemory, torch.OutOfMemoryError)
    assert issubclass(koila.LazyTensor, torch.Tensor)


def test_what_users_need_is_keyword_only_past_the_subject():
    assert inspect.signature(koila.lazy).parameters["batch"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="read with 2.13's types")
def test_mypy_strict_finds_nothing_in_the_package_and_in_a_users_program_what_it_should():
    from mypy import api

    out, err, rc = api.run(
        [
            "--strict",
            "--config-file",
            str(ROOT / "pyproject.toml"),
            str(ROOT / "python/koila"),
            str(ROOT / "python/koila_command.py"),
            str(ROOT / "python/koila_pytest.py"),
            str(ROOT / "tests/python/typing_api.py"),
        ]
    )
    assert rc == 0, out + err
