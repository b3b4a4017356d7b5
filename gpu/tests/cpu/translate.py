"""CUDA C++ to C++ for cpu.cc: launches become calls of cpu::launch, shared memory thread-local
statics.

usage: translate.py IN.cu > OUT.cc
"""

import re
import sys


def balanced(text: str, at: int) -> int:
    """Index behind the bracket that closes the one at `at`."""
    depth = 0
    while True:
        depth += (text[at] in "([{") - (text[at] in ")]}")
        at += 1
        if depth == 0:
            return at


def split_arguments(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        depth += (ch in "([{") - (ch in ")]}")
        if ch == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return parts + [text[start:]]


def kernel_start(text: str, end: int) -> int:
    """Where the expression that names the kernel begins: name, name<args>, a.member or
    (expression)."""
    if text[end - 1] == ")":
        depth = 0
        for i in range(end - 1, -1, -1):
            depth += (text[i] == ")") - (text[i] == "(")
            if depth == 0:
                return i
    return re.search(r"[A-Za-z_][\w.]*(<[^;{}]*>)?$", text[:end]).start()


def launches(text: str) -> str:
    out, at = "", 0
    while (lt := text.find("<<<", at)) >= 0:
        name = kernel_start(text, lt)
        gt = text.index(">>>", lt)
        end = balanced(text, gt + 3)
        grid, block, shared = (split_arguments(text[lt + 3 : gt]) + ["0"])[:3]
        call = f"cpu::kernel({text[name:lt]}){text[gt + 3 : end]}"
        out += text[at:name]
        out += f"cpu::launch(dim3({grid}), dim3({block}), {shared}, {call})"
        at = end
    return out + text[at:]


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as f:
        text = f.read()
    if re.search(r"\basm\b", text):
        sys.exit(f"translate.py: {sys.argv[1]}: assembly outside instructions.cuh")
    text = re.sub(
        r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?(\w+)\s+(\w+)\[\];",
        r"\1 *\2 = (\1 *)cpu::shared();",
        text,
    )
    text = re.sub(r"__shared__\s+", "static thread_local ", text)
    print(f'#line 1 "{sys.argv[1]}"')
    print(launches(text))


main()
