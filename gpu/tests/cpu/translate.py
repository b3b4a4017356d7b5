"""CUDA C++ to C++ for cpu.cc: launches become calls of cpu::launch, shared memory thread-local statics.

usage: translate.py IN.cu > OUT.cc
"""
import re
import sys

def balanced(text, at):
    """Index behind the bracket that closes the one at `at`."""
    depth = 0
    while True:
        depth += (text[at] in "([{") - (text[at] in ")]}")
        at += 1
        if depth == 0:
            return at


def split_arguments(text):
    parts, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        depth += (ch in "([{") - (ch in ")]}")
        if ch == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return parts + [text[start:]]


def kernel_start(text, end):
    """Where the expression that names the kernel begins: name, name<args>, a.member or (expression)."""
    if text[end - 1] == ")":
        depth = 0
        for i in range(end - 1, -1, -1):
            depth += (text[i] == ")") - (text[i] == "(")
            if depth == 0:
                return i
    return re.search(r"[A-Za-z_][\w.]*(<[^;{}]*>)?$", text[:end]).start()


def launches(text):
    out, at = "", 0
    while (lt := text.find("<<<", at)) >= 0:
        name = kernel_start(text, lt)
        gt = text.index(">>>", lt)
        end = balanced(text, gt + 3)
        grid, block, shared = (split_arguments(text[lt + 3:gt]) + ["0"])[:3]
        out += f"{text[at:name]}cpu::launch(dim3({grid}), dim3({block}), {shared}, [&] {{ ({text[name:lt]}){text[gt + 3:end]}; }})"
        at = end
    return out + text[at:]


def main():
    text = open(sys.argv[1]).read()
    if re.search(r"\basm\b", text):
        sys.exit(f"translate.py: {sys.argv[1]}: assembly outside instructions.cuh")
    text = re.sub(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?(\w+)\s+(\w+)\[\];", r"\1 *\2 = (\1 *)cpu::shared();", text)
    text = re.sub(r"__shared__\s+", "static thread_local ", text)
    print(f'#line 1 "{sys.argv[1]}"')
    print(launches(text))


main()
