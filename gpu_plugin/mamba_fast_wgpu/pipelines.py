"""Kernels: WGSL files of this package, made into pipelines on first use and kept.

A kernel is named "file" or "file:entry": the file `shaders/FILE.wgsl`, whose entry point is `main` unless
named. Before it comes `shaders/common.wgsl`, then the file is changed in these ways:

* `override NAME: T = value;` becomes a constant, of the value given in `constants` where there is one, so
  that loops unroll and arrays in workgroup memory can be sized by it;
* lines between `//#if NAME` (or `//#if !NAME`), `//#else` and `//#endif` are kept or left out, by whether the
  constant of that name is given and true;
* lines between `//#repeat NAME COUNT` and `//#endrepeat` are repeated, with ${NAME} as 0, 1 and so on:
  compilers of shaders keep loops, and with them the arithmetic of their indices;
* a line `//#include FILE` becomes the text of `shaders/FILE.wgsl`.

Storage buffers are `@group(0)`; an entry point's bindings are those that it uses, in ascending order.
Parameters are `@group(1) @binding(0) var<uniform>`, a struct of 32-bit scalars of up to 256 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from mamba_fast_wgpu.device import Device

__all__ = ["Kernel", "Pipelines", "assemble", "bindings_of"]

Constants = Mapping[str, int | float | bool]

_STORAGE = re.compile(r"@group\(0\)\s*@binding\((\d+)\)\s*var<storage,\s*(read_write|read)>\s*(\w+)\s*:")
_FUNCTION = re.compile(r"\bfn\s+(\w+)\s*\(")
_WORD = re.compile(r"(?<![.\w])[A-Za-z_]\w*")
_PARAMETER = re.compile(r"(\w+)\s*:")
_LOCAL = re.compile(r"\b(?:let|var|const)\s+(\w+)")
_OVERRIDE = re.compile(r"^override\s+(\w+)\s*:\s*(\w+)\s*=\s*([^;]+);", re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*")


def read_shader(name: str) -> str:
    """The text of `shaders/NAME.wgsl`."""
    return resources.files(__package__).joinpath("shaders", f"{name}.wgsl").read_text("utf-8")


_INCLUDE = re.compile(r"^//#include (\w+)$", re.MULTILINE)


_REPEAT = re.compile(r"^//#repeat (\w+) (\d+)\n(.*?)^//#endrepeat$", re.MULTILINE | re.DOTALL)


def _repeat(match: re.Match[str]) -> str:
    name, count, body = match.groups()
    return "".join(body.replace(f"${{{name}}}", str(i)) for i in range(int(count)))


def _choose_lines(code: str, constants: Constants) -> str:
    kept, stack = [], []
    for line in code.splitlines():
        word, _, name = line.strip().partition(" ")
        if word == "//#if":
            wanted = bool(constants.get(name.removeprefix("!"), False))
            stack.append(wanted != name.startswith("!"))
        elif word == "//#else":
            stack[-1] = not stack[-1]
        elif word == "//#endif":
            stack.pop()
        elif all(stack):
            kept.append(line)
    return "\n".join(kept) + "\n"


def _literal(kind: str, value: int | float | bool) -> str:
    if kind == "bool":
        return "true" if value else "false"
    if kind == "u32":
        return f"{int(value)}u"
    return f"{int(value)}i" if kind == "i32" else f"{float(value)!r}f"


def assemble(name: str, constants: Constants) -> str:
    """The WGSL of a file with the common helpers before it and its constants in place."""
    text = _INCLUDE.sub(lambda match: read_shader(match.group(1)), read_shader(name))
    code = _REPEAT.sub(_repeat, _choose_lines(read_shader("common") + "\n" + text, constants))

    def fix(match: re.Match[str]) -> str:
        known, kind, default = match.groups()
        value = _literal(kind, constants[known]) if known in constants else default
        return f"const {known}: {kind} = {value};"

    return _OVERRIDE.sub(fix, code)


def _functions(code: str) -> dict[str, set[str]]:
    """The names that each function takes from outside: not members, not its own parameters and variables."""
    found = {}
    for match in _FUNCTION.finditer(code):
        start = at = code.index("{", match.end())
        depth = 1
        while depth:
            at += 1
            depth += {"{": 1, "}": -1}.get(code[at], 0)
        head, body = code[match.end() : start], code[start:at]
        own = set(_PARAMETER.findall(head)) | set(_LOCAL.findall(body))
        found[match.group(1)] = set(_WORD.findall(body)) - own
    return found


def bindings_of(code: str, entry: str) -> list[tuple[int, str, str]]:
    """(binding, access, variable) of the storage buffers that an entry point uses, ascending."""
    code = _COMMENT.sub("", code)
    functions = _functions(_STORAGE.sub("", code))
    words, queue, seen = set(), [entry], {entry}
    while queue:
        found = functions[queue.pop()]
        words |= found
        queue.extend(found & functions.keys() - seen)
        seen |= found & functions.keys()
    used = [
        (int(match.group(1)), match.group(2), match.group(3))
        for match in _STORAGE.finditer(code)
        if match.group(3) in words
    ]
    return sorted(used)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A pipeline and what is bound to it."""

    label: str
    access: str
    """One letter per storage buffer: "r" read, "w" written (or both)."""
    pipeline: Any
    layout: Any


class Pipelines:
    """The kernels of one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kernels: dict[Any, Kernel] = {}
        self._layouts: dict[str, Any] = {}
        self.uniform_layout = device.uniform_layout()

    def get(self, name: str, constants: Constants, shared: bool = False) -> Kernel:
        """The kernel of that name.

        Parameters
        ----------
        shared
            a buffer is both read and written, at different places: WebGPU wants one access for all bindings
            of a buffer in a dispatch, so here every binding is declared as written
        """
        key = (name, tuple(constants.items()) if constants else (), shared)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = self._make(name, constants, shared)
        return kernel

    def _make(self, name: str, constants: Constants, shared: bool) -> Kernel:
        file, _, entry = name.partition(":")
        entry = entry or "main"
        code = assemble(file, constants)
        used = bindings_of(code, entry)
        access = "".join("w" if shared or how == "read_write" else "r" for _, how, _ in used)
        code = _renumber(code, used, shared)
        limit = self._device.limits.storage_buffers
        if len(access) > limit:
            raise ValueError(f"kernel {name} binds {len(access)} buffers, this device allows {limit}")
        if access not in self._layouts:
            self._layouts[access] = self._device.storage_layout(access)
        layout = self._layouts[access]
        label = name + "".join(f" {key}={value}" for key, value in constants.items())
        pipeline = self._device.pipeline(label, code, entry, [layout, self.uniform_layout])
        return Kernel(label, access, pipeline, layout)


def _renumber(code: str, used: list[tuple[int, str, str]], shared: bool) -> str:
    """The code with the entry point's bindings numbered from 0, and all of them written if shared."""
    places = {variable: i for i, (_, _, variable) in enumerate(used)}

    def declare(match: re.Match[str]) -> str:
        number, access, variable = match.groups()
        if variable not in places:  # out of the way: other entry points of the file use it
            return f"@group(0) @binding({100 + int(number)}) var<storage, {access}> {variable}:"
        access = "read_write" if shared else access
        return f"@group(0) @binding({places[variable]}) var<storage, {access}> {variable}:"

    return _STORAGE.sub(declare, code)
