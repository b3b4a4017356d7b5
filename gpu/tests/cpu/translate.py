"""CUDA C++ to C++ for cpu.cc: launches become calls of cpu::launch, shared memory thread-local statics, mma instructions functions.

usage: translate.py IN.cu > OUT.cc
"""
import re
import sys

INSTRUCTIONS = {"tf32_rna": "return cpu::tf32_rna(x);", "mma_tf32": "cpu::mma_tf32(c, a, b);", "mma_bf16": "cpu::mma_bf16(c, a, b);"}


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


def instructions(text):
    for name, body in INSTRUCTIONS.items():
        text = re.sub(rf"(__device__ __forceinline__ \w+ {name}\([^)]*\)\s*)\{{.*?\n\}}", lambda m: m[1] + "{ " + body + " }", text, flags=re.S)
    if re.search(r"\basm\b", text):
        sys.exit(f"translate.py: {sys.argv[1]}: an instruction without a counterpart")
    return text


def main():
    text = instructions(open(sys.argv[1]).read())
    text = re.sub(r"extern\s+__shared__\s+(\w+)\s+(\w+)\[\];", r"\1 *\2 = (\1 *)cpu::shared();", text)
    text = re.sub(r"__shared__\s+", "static thread_local ", text)
    print(f'#line 1 "{sys.argv[1]}"')
    print(launches(text))


main()
