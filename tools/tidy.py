#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the tree against the rules that a compiler does not know; run as the test "tidy".

The rules: who may include whom, each op complete, line budgets of the reading path, lengths of files, functions and
lines, calls that a guest in someone else's process must not make, leftover markers, licence lines, explicit source
lists, a purpose for each folder. Prints one line a fault, "file:line: rule", and exits 1 if there is any.
"""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED_FOLDERS = {"build", "shared", "__pycache__", "data", "node_modules", "target"}
CODE = {".h", ".c", ".cc", ".cu", ".cuh", ".inc", ".hpp"}
SCRIPTS = {".py", ".sh", ".cmake", ".map"}
MAX_COLUMNS = 120
MAX_FUNCTION_LINES = 70
MAX_FILE_LINES = {".cu": 700, ".cuh": 700}
MAX_FILE_LINES_DEFAULT = 400
# Files whose nature is a list: the public header is one page for the reader who needs all of it.
FILE_LINES = {"include/moelora.h": 1000}

# The reading path of a newcomer (ARCHITECTURE.md): a change that breaks a budget moves something out.
SPINE = {
    "README.md": 150,
    "ARCHITECTURE.md": 250,
    "runtime/api/request_flow.cc": 240,
    "runtime/engine/engine.cc": 240,
    "runtime/engine/scheduler.h": 100,
    "runtime/engine/scheduler.cc": 280,
    "runtime/engine/step_input.h": 90,
    "runtime/engine/token_stream.h": 160,
    "runtime/model/model.cc": 150,
    "runtime/model/moe_block.cc": 150,
    "runtime/model/attention_block.cc": 110,
    "kernels/kernels.h": 60,
    "kernels/moe/moe_gate_up.h": 60,
    "kernels/moe/moe_gate_up_cpu.cc": 80,
    "kernels/sampling/sample_tokens.h": 70,
}

# Ops that have no work on the CPU, which reads records and experts as they are stored.
GPU_OPS = {"lora_resolve", "pack_mxfp4"}

# Folder -> folders (or single files) that its files may include; the folder itself is always allowed. Longest
# matching key decides.
LAYERS = {
    "include": [],
    "samples": ["include"],
    "samples/cli": ["include"],
    "runtime/api": ["include", "runtime", "kernels/base"],
    "runtime/engine": ["runtime/model", "runtime/adapter", "runtime/memory", "runtime/text", "runtime/io", "kernels"],
    "runtime/model": ["runtime/adapter", "runtime/memory", "runtime/io", "kernels"],
    "runtime/adapter": ["runtime/memory", "runtime/io", "runtime/model/config.h", "kernels"],
    "runtime/memory": ["kernels"],
    "runtime/text": ["runtime/io", "kernels/base"],
    "runtime/io": ["kernels/base"],
    "kernels": ["kernels"],
    "kernels/base": [],
    "kernels/cuda": ["kernels/base"],
    "kernels/simd": ["kernels/base"],
    "kernels/dense": ["kernels/base", "kernels/simd", "kernels/cuda", "kernels/lora"],
    "kernels/attention": ["kernels/base", "kernels/simd", "kernels/cuda", "kernels/lora"],
    "kernels/moe": ["kernels/base", "kernels/simd", "kernels/cuda", "kernels/lora", "kernels/dense"],
    "kernels/lora": ["kernels/base", "kernels/simd", "kernels/cuda", "kernels/moe/moe_sort.h"],
    "kernels/sampling": ["kernels/base", "kernels/simd", "kernels/cuda"],
    "kernels/memory": ["kernels/base", "kernels/simd", "kernels/cuda"],
}

# A guest never ends its host's process, writes to its output or reads its environment.
BANNED = [
    (re.compile(r"(?<![\w.>])(?:std::)?(printf|fprintf|vprintf|puts|fputs|putchar|perror)\s*\("), "output"),
    (re.compile(r"(?<![\w.>])(?:std::)?(exit|_exit|_Exit|quick_exit|abort|terminate)\s*\("), "ends the process"),
    (re.compile(r"(?<![\w.>])(?:std::)?(secure_getenv|getenv|setenv|putenv)\s*\("), "environment"),
    (re.compile(r"std::(cout|cerr|clog)\b"), "output"),
    (re.compile(r"\bfmt::print\s*\("), "output"),
    (re.compile(r"(?<![\w.>])assert\s*\("), "ends the process"),
    (re.compile(r"\bcuda(DeviceReset|DeviceSynchronize|SetDeviceFlags)\b"), "the host's device state"),
    (re.compile(r"\b(sigaction|setlocale|chdir)\s*\(|\bsignal\s*\(\s*SIG|(?<!\w)(std)?::(signal|fork)\s*\("),
     "the host's process"),
]
MARKERS = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
OTHERS_IN_QUOTES = ("hwy/",)  # Highway includes a file again and again, by its quoted name
CUDA_HEADER = re.compile(r"^(cuda|cublas|cooperative_groups|nvtx|nccl|mma\.h|cub/|cute/)")

faults = []


def fault(path, line, text):
    faults.append(f"{path}:{line}: {text}")


def tree():
    """Paths relative to the root, with / between, of all files that the rules are about."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = sorted(name for name in folders
                            if name not in SKIPPED_FOLDERS and (name[0] != "." or name == ".ci"))
        for name in sorted(files):
            yield (Path(folder) / name).relative_to(ROOT).as_posix()


def blank(match):
    return re.sub(r"[^\n]", " ", match.group(0))


def without_comments(text):
    """Code with comments and the contents of literals blanked; lines and columns stay."""
    text = re.sub(r'R"(\w*)\((?:.|\n)*?\)\1"', blank, text)
    pattern = r'//[^\n]*|/\*(?:.|\n)*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\''
    return re.sub(pattern, blank, text)


def layer_of(path):
    folder = path.rsplit("/", 1)[0] if "/" in path else ""
    while folder and folder not in LAYERS:
        folder = folder.rsplit("/", 1)[0] if "/" in folder else ""
    return folder or None


def included_path(path, name):
    if name in ("moelora.h", "moelora_experimental.h"):
        return "include/" + name
    beside = path.rsplit("/", 1)[0] + "/" + name
    return beside if (ROOT / beside).exists() and not (ROOT / name).exists() else name


def check_includes(path, lines):
    layer = layer_of(path)
    may_cuda = path.endswith((".cu", ".cuh", "_cuda.cc"))
    for number, line in enumerate(lines, 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        name = match.group(2)
        if CUDA_HEADER.match(name) and not may_cuda:
            fault(path, number, f"CUDA header <{name}> outside .cu, .cuh and *_cuda.cc files")
        if layer is None:
            continue
        if match.group(1) == "<" or name.startswith(OTHERS_IN_QUOTES):
            if name.startswith(("kernels/", "runtime/")):
                fault(path, number, f"project header <{name}> in angle brackets")
            continue
        target = included_path(path, name)
        if not (ROOT / target).exists():
            fault(path, number, f'"{name}" is no file of the project (paths start at its root)')
            continue
        own = target.rsplit("/", 1)[0]
        allowed = own == layer or any(target == rule or target.startswith(rule + "/") for rule in LAYERS[layer])
        if not allowed:
            fault(path, number, f"{layer} may not include {target}")
        if target.startswith("kernels/cuda/") and not path.endswith((".cu", ".cuh")):
            fault(path, number, "kernels/cuda is for .cu files")


def function_bodies(code):
    """(first line, last line, name) of each outermost function body, by its braces."""
    stack, start, line, found = [], 0, 1, []
    for index, char in enumerate(code):
        if char == "\n":
            line += 1
        elif char == "{":
            head = code[start:index].strip()
            outside = all(kind == "scope" for kind, _, _ in stack)
            words = re.sub(r"<[^<>]*>", "", head)
            if re.match(r"(inline\s+)?namespace\b|extern\b\s*$", words) or re.match(r"extern\s+ *$", words):
                kind = "scope"
            elif re.search(r"\b(class|struct|union|enum)\b", words) and not words.rstrip().endswith(")"):
                kind = "scope"
            elif outside and re.search(r"\)\s*(const|noexcept|override|final|->.*|:.*|\s)*$", words, re.S):
                kind = "function"
            else:
                kind = "block"
            name = re.findall(r"([\w:~]+)\s*\(", head)
            stack.append((kind if outside or kind == "scope" else "block", line, name[0] if name else "?"))
            start = index + 1
        elif char == "}":
            if stack:
                kind, first, name = stack.pop()
                if kind == "function":
                    found.append((first, line, name))
            start = index + 1
        elif char == ";":
            start = index + 1
        elif char == "#" and code[:index].rsplit("\n", 1)[-1].strip() == "":
            end = code.find("\n", index)
            start = end if end > 0 else index
    return found


def check_lengths(path, text, lines):
    suffix = Path(path).suffix
    limit = FILE_LINES.get(path, MAX_FILE_LINES.get(suffix, MAX_FILE_LINES_DEFAULT))
    if len(lines) > limit:
        fault(path, len(lines), f"{len(lines)} lines; at most {limit}")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            fault(path, number, f"{len(line)} columns; at most {MAX_COLUMNS}")
        if line != line.rstrip():
            fault(path, number, "white space at the end of the line")
    if suffix in CODE and not path.startswith("tests/"):
        for first, last, name in function_bodies(without_comments(text)):
            if last - first + 1 > MAX_FUNCTION_LINES:
                fault(path, first, f"{name} has {last - first + 1} lines; at most {MAX_FUNCTION_LINES}")


def check_text(path, text, lines):
    if MARKERS.search(text):
        for number, line in enumerate(lines, 1):
            if MARKERS.search(line):
                fault(path, number, "leftover marker")
    if path.endswith(("CMakeLists.txt", ".cmake")):
        for number, line in enumerate(lines, 1):
            if re.search(r"\bGLOB(_RECURSE)?\b", line):
                fault(path, number, "sources are listed, not globbed")
    if path.startswith(("include/", "runtime/", "kernels/")) and Path(path).suffix in CODE:
        for number, line in enumerate(without_comments(text).split("\n"), 1):
            for pattern, why in BANNED:
                match = pattern.search(line)
                if match:
                    fault(path, number, f"{match.group(0).strip()} ({why}) has no place in the library")


def check_licence(path, lines):
    head = lines[:2] if lines and lines[0].startswith("#!") else lines[:1]
    if not any("SPDX-License-Identifier: Apache-2.0" in line for line in head):
        fault(path, 1, "no SPDX-License-Identifier: Apache-2.0 on the first line")


def check_ops(files):
    """Each entry of struct Kernels has a contract, a reference and a test of one base name."""
    table = ROOT / "kernels/kernels.h"
    entries = re.findall(r"\(\*(\w+)\)\(const (\w+)&", table.read_text())
    if not entries:
        fault("kernels/kernels.h", 1, "no entries found in struct Kernels")
    headers = [path for path in files if path.startswith("kernels/") and path.endswith(".h")]
    for op, arguments in entries:
        contract = [path for path in headers if re.search(rf"struct {arguments}\b\s*\{{", (ROOT / path).read_text())]
        if len(contract) != 1:
            fault("kernels/kernels.h", 1, f"{op}: {len(contract)} headers define struct {arguments}, not one")
            continue
        base = Path(contract[0]).stem
        kind = ("_cuda.cu", "_test_cuda.cc") if op in GPU_OPS else ("_cpu.cc", "_test.cc")
        for needed in (contract[0][:-2] + kind[0], f"tests/kernels/{base}{kind[1]}"):
            if needed not in files:
                fault(contract[0], 1, f"op {op} has no {needed}")


def check_spine():
    for path, budget in SPINE.items():
        if not (ROOT / path).exists():
            fault("tools/tidy.py", 1, f"{path} of the reading path does not exist")
            continue
        length = len((ROOT / path).read_text().split("\n")) - 1
        if length > budget:
            fault(path, length, f"{length} lines; the reading path has {budget} for it")


def check_folders(files):
    """A folder with more than one source has its purpose written down: in its own README.md, in a line of the one
    above, or in ARCHITECTURE.md. A folder of tests that mirrors one of the runtime shares its purpose."""
    texts = {path: (ROOT / path).read_text() for path in files if path.endswith(("README.md", "ARCHITECTURE.md"))}
    sources = {}
    for path in files:
        if "/" in path and Path(path).suffix in CODE | {".py"}:
            sources.setdefault(path.rsplit("/", 1)[0], []).append(path)
    for folder, paths in sorted(sources.items()):
        if len(paths) < 2 or folder + "/README.md" in files:
            continue
        above, _, name = folder.rpartition("/")
        if above == "tests" and f"runtime/{name}" in sources:
            continue
        nearest = texts.get(f"{above}/README.md" if above else "README.md", "")
        if f"`{name}/`" not in nearest and f"{folder}/" not in texts.get("ARCHITECTURE.md", ""):
            fault(folder, 1, "what is it for? A README.md, a line in the one above, or ARCHITECTURE.md says so")


def main():
    files = list(tree())
    for path in files:
        suffix = Path(path).suffix
        if path.endswith((".log", ".orig", ".rej")):
            fault(path, 1, "does not belong in the tree")
        listed = path.endswith("CMakeLists.txt")
        if suffix not in CODE | SCRIPTS and not listed:
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        lines = text.split("\n")
        if lines and lines[-1] == "":
            lines.pop()
        else:
            fault(path, len(lines), "no newline at the end of the file")
        check_licence(path, lines)
        check_lengths(path, text, lines)
        check_text(path, text, lines)
        if suffix in CODE:
            check_includes(path, lines)
    check_ops(set(files))
    check_spine()
    check_folders(set(files))
    for line in faults:
        print(line)
    print(f"tidy: {len(files)} files, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
