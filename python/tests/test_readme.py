"""README's Python runs as it stands, but for the device, on cases of the standard set."""

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltaproof
from deltaproof import running
from kernels import inputs, kda

HERE = Path(__file__).parent
README = next(
    (x for x in (HERE / "README.md", HERE.parent.parent / "README.md") if x.is_file()), None
)
pytestmark = pytest.mark.skipif(README is None, reason="no README.md beside these tests")


def block(first: str) -> str:
    """The indented block that begins with that line, without its indentation."""
    text = README.read_text(encoding="utf-8") if README else ""
    found = re.search(rf"^    {re.escape(first)}.*\n(?:(?:    .*)?\n)*", text, re.M)
    assert found, first
    return re.sub(r"^    ", "", found[0], flags=re.M)


def test_what_the_readme_shows_of_python_judges_right_and_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "case_paths", lambda *_: ["t65", "packed-ones"])
    text = block("import deltaproof")
    assert ', device="cuda"' in text
    x = {n: y.astype(np.float32) for n, y in inputs().items()}

    def late(**given: Any) -> Any:
        o, state = kda(**given)
        return np.roll(o, 1, 0), state

    for kernel, right in ((kda, True), (late, False)):

        def my_kernel(
            q: Any,
            k: Any,
            v: Any,
            g: Any,
            beta: Any,
            initial_state: Any = None,
            kernel: Any = kernel,
        ) -> Any:
            return kernel(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)

        scope: dict[str, Any] = {**x, "my_kernel": my_kernel}
        exec(text.replace(', device="cuda"', ""), scope)
        for name in ("test_my_kernel", "test_on_hard_inputs"):
            if right:
                scope[name]()
            else:
                with pytest.raises(AssertionError):
                    scope[name]()


def test_operators_that_the_readme_imports_are_there() -> None:
    wanted = set(re.findall(r"\w+", " ".join(re.findall(r"import (.*)", block("# from fla.ops")))))
    source = Path(deltaproof.__file__).parent / "ops" / "__init__.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    have = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert wanted and wanted <= have, wanted - have
