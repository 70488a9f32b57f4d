"""The checks of tools/check_text.py, each against a fault planted in a small tree. `make text` runs
them over the whole tree."""

import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
pytest.importorskip("lizard")
check_text = pytest.importorskip("check_text")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Writes files of a small tree that the checks then read."""
    monkeypatch.setattr(check_text, "ROOT", tmp_path)

    def write(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


@pytest.mark.parametrize(
    "statement, n",
    [
        ("return (x = y, true);", 1),
        ("return a && (x = y, true);", 1),
        ("return a ? b : c ? d : e;", 1),
        ("return a ? (b ? c : d) : e;", 1),
        ("return f(x, y);", 0),
        ("return f(a ? b : c, d ? e : g);", 0),
        ("for (i = 0, j = 1; i < j; i++, j--) { x; }", 0),
        ("int (*fn)(int, int) = (int (*)(int, int))p;", 0),
        ("s = (struct point){ 1, 2 };", 0),
        ('f("a, (b, c) ? d : e ? f : g");', 0),
        ("/* a, (b, c) ? d : e ? f : g */", 0),
        ("x = a ? b : c;\n    y = d ? e : f;", 0),
    ],
)
def test_two_things_in_one_statement_are_found(statement, n):
    text = "int f(void)\n{\n    " + statement + "\n}\n"
    assert len(list(check_text.commas_and_nested("x.c", text))) == n


def test_a_long_line_is_found(tree):
    tree(src__base__x_DOT_c="/* " + "a" * 98 + " */\nint x;\n")
    assert [f.line for f in check_text.long_lines()] == [1]


def long_function(comment, n=70):
    body = "".join(f"    x += {i};\n" for i in range(n))
    return f"int before;\n\n{comment}int f(int x)\n{{\n{body}    return x;\n}}\n"


def test_a_long_function_needs_a_reason(tree):
    tree(src__base__x_DOT_c=long_function("/* Adds up. */\n"))
    assert [f.line for f in check_text.unexplained_functions()] == [4]
    tree(src__base__x_DOT_c=long_function("/* Whole because each line is a case. */\n"))
    assert check_text.unexplained_functions() == []
    (f,) = check_text.large_functions(["src/base/x.c"])
    assert f.reason == "Whole because each line is a case."


def test_a_complex_function_needs_a_reason(tree):
    tree(src__base__x_DOT_c=long_function("", n=0).replace("return x", "return x" + " && x" * 25))
    assert "complexity" in str(check_text.unexplained_functions()[0])


def test_comments_that_name_what_is_gone_are_found(tree):
    tree(
        src__base__x_DOT_c="/* As gone.c does; y.c and base/y.h; koila__gone and koila__here. */\n",
        src__base__y_DOT_c="void koila__here(void);\n",
        src__base__y_DOT_h="/* train.py:12, torch/nn/x.py, koila__h* but not koila__q*. */\n",
        python__koila___z_DOT_py='"""See _lost.py and _z.py."""\n# koila__lost\n',
    )
    found = {str(f) for f in check_text.stale_in_tree()}
    assert found == {
        "src/base/x.c:1: gone.c does not exist",
        "src/base/x.c:1: koila__gone does not exist",
        "src/base/y.h:1: koila__q* does not exist",
        "python/koila/_z.py:1: _lost.py does not exist",
        "python/koila/_z.py:2: koila__lost does not exist",
    }


def test_notes_have_one_definition_and_stand_in_the_index(tree):
    tree(
        src__base__x_DOT_c=(
            "/* x.c\n *\n * Note [A]. It is so.\n */\n/* See Note [A] and Note [B]. */\n"
        ),
        src__base__y_DOT_c="/* Note [A]. Once more. */\n/* Note [C]. It is\n * so. */\n",
        ARCHITECTURE_DOT_md="- Note [A]: `src/base/x.c`\n- Note [D]: `src/base/x.c`\n",
    )
    found = {str(f) for f in check_text.broken_notes()}
    assert found == {
        "src/base/x.c:5: Note [B] is defined nowhere",
        "src/base/y.c:0: Note [A] is defined in src/base/x.c already",
        "ARCHITECTURE.md:0: the index lacks Note [C]: `src/base/y.c`",
        "ARCHITECTURE.md:0: the index has Note [D], which does not exist",
    }


@pytest.mark.skipif(
    not all(shutil.which(check_text.tool(name)) for name in ("clang-format", "ruff")),
    reason="needs clang-format and ruff",
)
def test_text_that_a_formatter_would_change_is_found(tree, tmp_path):
    for config in (".clang-format", "pyproject.toml"):
        shutil.copy(ROOT / config, tmp_path / config)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    tree(src__base__x_DOT_c="int x;\n", python__koila__y_DOT_py="x = 1\n")
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    assert check_text.unformatted() == []
    tree(src__base__x_DOT_c="int  x;\n", python__koila__y_DOT_py="x  =  1\n")
    assert len(check_text.unformatted()) == 2
