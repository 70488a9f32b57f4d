"""KOILA=0, KOILA_MICRO_BATCH, and what koila says to a name or a value that it does not know."""

import importlib
import warnings

import pytest

import koila
from helpers import run_python

STEP = """
    import threading, torch, koila
    def step(n=8):
        w = torch.ones(2, requires_grad=True)
        (koila.lazy(torch.ones(n, 2)) * w).sum().backward()
        return koila.last_plan().micro_batch
"""


def test_with_koila_0_nothing_of_torch_is_replaced_and_values_come_back_untouched():
    out = run_python(
        """
        import torch
        from torch.autograd import graph
        before = graph._engine_run_backward, torch.Tensor.numpy, torch.zeros
        import koila
        from torch.utils.data import DataLoader
        x, y, loader = torch.ones(64, 2), torch.ones(64), DataLoader([1])
        assert koila.lazy(x) is x and koila.lazy(x, y)[1] is y and koila.lazy(loader) is loader
        assert koila.lazy({"x": x}, batch={"x": 1})["x"] is x
        assert x.run() is x and x.torch() is x and koila.run((x,))[0] is x
        model = koila.opaque(torch.nn.Linear(2, 1))
        with koila.budget("1KiB"), koila.micro_batch(3), koila.strict(), koila.axes("batch"):
            assert torch.ones(10_000).sum() == 10_000
            model(koila.lazy(x)).sum().backward()
        koila.set_budget("1KiB")
        torch.ones(10_000)
        assert all(p.grad is not None for p in model.parameters())
        assert before == (graph._engine_run_backward, torch.Tensor.numpy, torch.zeros)
        assert koila.last_plan() is None and koila.plans() == []
        for f in (lambda: koila.explain(x), lambda: koila.plan(lambda x: x.sum(), x)):
            try:
                f()
            except koila.UnsupportedError as e:
                print(e)
        """,
        env={"KOILA": "0", "KOILA_BUDGET": "1KiB", "KOILA_MICRO_BATCH": "2"},
    )
    assert out.splitlines() == [
        "explain(<1 value>): koila is switched off. Unset KOILA, which is 0, for it",
        "plan(): koila is switched off. Unset KOILA, which is 0, for it",
    ]


def test_a_plain_tensor_has_no_run_and_no_torch_where_koila_is_neither_off_nor_aside():
    out = run_python(
        STEP
        + """
    step()
    print(hasattr(torch.Tensor, "run"), hasattr(torch.Tensor, "torch"))
    """
    )
    assert out.split() == ["False", "False"]


def test_the_rows_of_the_environment_hold_in_all_threads_wherever_none_are_entered():
    out = run_python(
        STEP
        + """
    print(step())
    with koila.micro_batch(5):
        print(step())
    with koila.micro_batch(None):
        print(step())
    thread = threading.Thread(target=lambda: print(step()))
    thread.start()
    thread.join()
    print(koila.plan(lambda x: x.sum(), torch.ones(8, 2)).micro_batch, step())
    """,
        env={"KOILA_MICRO_BATCH": "3"},
    )
    assert out.split() == ["3", "5", "8", "3", "8", "3"]


def test_the_environment_asks_for_the_fastest_size_wherever_no_other_is_entered():
    out = run_python(
        STEP
        + """
    def is_tried():
        return any(step(64) < 64 for _ in range(12))
    print(is_tried())
    for size in (64, None, "fewest"):
        with koila.micro_batch(size):
            print(is_tried())
    """,
        env={"KOILA_MICRO_BATCH": "fastest"},
    )
    assert out.split() == ["True", "False", "False", "False"]


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("KOILA", "no", 'expected "0"'),
        ("KOILA_MICRO_BATCH", "0", "at least 1"),
        ("KOILA_MICRO_BATCH", "1.5", "at least 1"),
        ("KOILA_MICRO_BATCH", "fastset", "Did you mean 'fastest'?"),
    ],
)
def test_a_bad_value_in_the_environment_is_refused_at_import_by_the_variables_name(
    name, text, said
):
    p = run_python("import koila", check=False, env={name: text})
    last = p.stderr.splitlines()[-1]
    assert p.returncode == 1 and last.startswith(f"ValueError: {name}={text}: ") and said in last


@pytest.mark.parametrize("amount", [2, "2", 999, {"cpu": 2}])
def test_so_few_bytes_are_doubted_with_what_was_meant(amount):
    with pytest.warns(UserWarning, match='Did you mean "(2GiB|999MiB)"') as told:
        koila.budget(amount)
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match="Did you mean"):
        koila.set_budget(amount)
    koila.set_budget(None)


@pytest.mark.parametrize("amount", ["2B", 1000, 0.5, "0.5", 1.0, None, "50%", "2kB"])
def test_an_amount_that_was_meant_is_not_doubted(amount):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        koila.budget(amount)


@pytest.mark.parametrize(
    "call, meant",
    [
        (lambda: koila.micro_batch("fast"), "fastest"),
        (lambda: koila.axes("bach"), "batch"),
        (lambda: koila.host_memory("Off"), "off"),
    ],
)
def test_a_misspelt_value_of_a_setting_is_answered(call, meant):
    with pytest.raises(ValueError, match=f"Did you mean '{meant}'\\?"):
        call()


@pytest.mark.parametrize(
    "name, meant", [("microbatch", "micro_batch"), ("Lazy", "lazy"), ("set_buget", "set_budget")]
)
def test_a_misspelt_name_is_answered_as_attribute_and_as_import(name, meant):
    with pytest.raises(AttributeError, match=f"Did you mean '{meant}'\\?"):
        getattr(koila, name)
    with pytest.raises(ImportError, match=f"Did you mean '{meant}'\\?"):
        exec(f"from koila import {name}")
    assert not hasattr(koila, name)


# The names that `import koila` had in 0.1.1, and its modules, but for those that go on as they are.
OF_0_1 = """EagerTensor BatchedPair BatchInfo Runnable RunnableTensor TensorMixin Evaluation
    LazyFunction CallBack MetaData PrePass PrePassFunc constants eager errors gpus interfaces
    prepasses shapes""".split()


@pytest.mark.parametrize("name", OF_0_1)
def test_a_name_of_koila_0_1_says_how_it_is_said_now(name):
    for program in (f"from koila import {name}", f"import koila.{name}", f"koila.{name}"):
        with pytest.raises((ImportError, AttributeError), match=r"koila 0\.1\. Now: "):
            exec(program, {"koila": koila})


def test_a_name_that_resembles_nothing_is_python_s_own_error():
    with pytest.raises(ImportError, match="^cannot import name 'quux' from 'koila'"):
        from koila import quux  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="^No module named 'koila.quux'"):
        importlib.import_module("koila.quux")
    with pytest.raises(AttributeError, match="^module 'koila' has no attribute 'quux'$"):
        koila.quux


def test_a_misspelt_name_of_memlab_is_answered():
    from koila import memlab

    with pytest.raises(AttributeError, match=r"Did you mean 'MemReporter'\?"):
        memlab.Memreporter
