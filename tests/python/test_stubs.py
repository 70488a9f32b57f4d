"""The stub of the extension names what the extension has, and the public face is what the contract says."""

import ast
import importlib
import importlib.util
import inspect
import pathlib

import pytest
import torch

import koila
from koila import _core

STUB = pathlib.Path(koila.__file__).with_name("_core.pyi")


def test_the_package_says_that_it_is_typed():
    assert pathlib.Path(koila.__file__).with_name("py.typed").exists()


def test_stub_and_module_have_the_same_names():
    tree = ast.parse(STUB.read_text(encoding="utf-8"))
    stub = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    stub |= {n.target.id for n in tree.body if isinstance(n, ast.AnnAssign)}
    module = {n for n in dir(_core) if not (n.startswith("__") and n != "__version__")}
    assert stub - {n for n in stub if n.startswith("_") and n != "__version__"} == module - {n for n in module if n.startswith("_") and n != "__version__"}


CONTRACT = """lazy LazyTensor run budget set_budget micro_batch last_plan explain strict Plan
    KoilaError OutOfMemory GatherError StaleValueError UnsupportedError""".split()


@pytest.mark.parametrize("name", CONTRACT)
def test_the_contract_s_names_are_there(name):
    assert name in koila.__all__ and getattr(koila, name).__doc__


def test_all_is_true():
    assert all(hasattr(koila, n) for n in koila.__all__) and len(set(koila.__all__)) == len(koila.__all__)


def test_errors_derive_as_promised():
    for name in ("OutOfMemory", "GatherError", "StaleValueError", "UnsupportedError"):
        assert issubclass(getattr(koila, name), koila.KoilaError)
    assert issubclass(koila.OutOfMemory, torch.OutOfMemoryError)
    assert issubclass(koila.LazyTensor, torch.Tensor)


def test_what_users_need_is_keyword_only_past_the_subject():
    assert inspect.signature(koila.lazy).parameters["batch"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("name", ["_lazy", "_budget", "_plan"])
def test_the_docstrings_examples_run(name):
    import doctest

    result = doctest.testmod(importlib.import_module(f"koila.{name}"), extraglobs={"lazy": koila.lazy, "budget": koila.budget})
    assert result.failed == 0 and (result.attempted or name == "_plan")  # which has no example yet


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_mypy_strict():
    from mypy import api

    out, err, rc = api.run(["--strict", str(STUB.parent)])
    assert rc == 0, out
