"""What torch's own error says where it was koila that refused the memory."""

import threading

import pytest
import torch

import koila
from helpers import run_python

PLAIN = "Error code 12 (Cannot allocate memory)"


def refused(n_bytes=64 << 20):
    with pytest.raises(RuntimeError, match="can't allocate memory") as error:
        torch.empty(n_bytes, dtype=torch.uint8)
    return str(error.value)


def test_a_plain_allocation_that_a_budget_refuses_names_koila_the_budget_and_what_to_do():
    with koila.budget("48MiB"):
        text = refused()
    assert "koila refused it" in text and "of the 48.0 MiB of koila's budget" in text
    assert "KOILA_BUDGET gives more" in text and "koila.lazy()" in text
    assert text.count("you tried to allocate 67108864 bytes. Error code 12 (Cannot") == 1


def test_an_allocation_that_the_machine_refuses_does_not_name_koila():
    with koila.budget("48MiB"):
        refused()
    assert refused(1 << 60).rstrip().endswith(PLAIN)


def test_each_thread_is_told_its_own_limit():
    told = {}

    def ask(name):
        with koila.budget(name):
            told[name] = refused()

    threads = [threading.Thread(target=ask, args=(f"{n}MiB",)) for n in (40, 50, 60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(f"of the {name[:2]}.0 MiB" in text for name, text in told.items()) and len(told) == 3


CODE = """
    import koila
    koila.lazy
    import torch
    {before}
    try:
        torch.empty(1 << 27, dtype=torch.uint8)
    except RuntimeError as e:
        print(str(e))
"""


@pytest.mark.parametrize(
    "before, environment, said",
    [
        ("koila.set_budget('50MiB')", {}, "of the 50.0 MiB of koila's budget"),
        ("", {"KOILA_BUDGET": "50MiB"}, "of the 50.0 MiB of koila's budget"),
        (
            "koila._core.cpu_bytes_uninstall(); koila._core.cpu_bytes_install(); "
            "koila.set_budget('50MiB')",
            {},
            "of the 50.0 MiB of koila's budget",
        ),
    ],
)
def test_the_budget_of_the_process_is_told_too(before, environment, said):
    out = run_python(CODE.format(before=before), env=environment)
    assert said in out and "koila refused it" in out


def test_a_limit_of_resident_memory_is_told_as_such():
    out = run_python(
        CODE.format(
            before="held = koila._core.resident()['with_files']; "
            "koila.set_budget(held + (32 << 20), resident=True)"
        )
    )
    assert "would pass its limit of resident memory" in out


def test_torch_is_told_by_the_other_way_of_counting_too():
    out = run_python(
        """
        import torch, ctypes
        from koila import _core
        assert _core.cpu_bytes_install("B") == "B"
        _core.cpu_bytes_set_limit(1 << 20)
        try:
            torch.empty(1 << 27, dtype=torch.uint8)
        except RuntimeError as e:
            print(e)
        """
    )
    assert "torch holds 0.0 of the 1.0 MiB of koila's budget" in out
