"""The modules of python/koila form no circle, and no import hides in a function to dodge one."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "python" / "koila"


def modules_of(folder, package):
    """{module name: file}. A package goes by its own name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name, path, modules):
    """[(module, is it inside a function?, line)] of every import of a module of the package."""
    inside = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inside.update(map(id, ast.walk(node)))
    home = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = home.split(".")[: len(home.split(".")) - node.level + 1] if node.level else []
            start = ".".join([*above, *([node.module] if node.module else [])])
            each = [f"{start}.{alias.name}" for alias in node.names]
            wanted = [m if m in modules else start for m in each]
        else:
            continue
        # A package among them is what gives the name `_core`, which is C and imports nothing back.
        found += [
            (m, id(node) in inside, node.lineno)
            for m in wanted
            if m in modules and not (home.startswith(m) and modules[m].name == "__init__.py")
        ]
    return found


def graph_of(modules):
    return {n: {m for m, _, _ in imports_of(n, p, modules)} - {n} for n, p in modules.items()}


def circle_in(graph):
    """The modules of one circle in order, or None."""
    done, path = set(), []

    def walk(name):
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return None
        path.append(name)
        for other in sorted(graph[name]):
            circle = walk(other)
            if circle:
                return circle
        done.add(path.pop())
        return None

    for name in sorted(graph):
        circle = walk(name)
        if circle:
            return circle
    return None


MODULES = modules_of(PACKAGE, "koila")


def test_the_modules_form_no_circle():
    graph = graph_of(MODULES)
    assert "koila._torch" in graph["koila._calls"] and "koila._undo" in graph["koila._plan"]
    assert "koila.memlab.tensors" in graph["koila.memlab.snapshots"]
    assert circle_in(graph) is None


@pytest.mark.parametrize(
    "text",
    [
        "from . import b\n",
        "from .b import name\n",
        "import p.b\n",
        "from p import b\n",
        "def f():\n    from . import b\n",
        "def f():\n    from .b import name\n",
    ],
)
def test_a_planted_circle_is_found(tmp_path, text):
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "b.py").write_text("from .sub.c import name\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "__init__.py").write_text("")
    (tmp_path / "sub" / "c.py").write_text("from .. import other\n")
    assert circle_in(graph_of(modules_of(tmp_path, "p"))) is None
    (tmp_path / "sub" / "c.py").write_text("from ..a import name\n")
    assert circle_in(graph_of(modules_of(tmp_path, "p"))) == ["p.a", "p.b", "p.sub.c"]


def test_imports_of_koila_stand_at_the_top():
    hidden = {
        name: [line for _, inside, line in imports_of(name, path, MODULES) if inside]
        for name, path in MODULES.items()
    }
    assert {name: lines for name, lines in hidden.items() if lines} == {}
